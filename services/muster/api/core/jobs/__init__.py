"""Jobs: they are submitted, listed, suspended, resumed and cancelled."""
