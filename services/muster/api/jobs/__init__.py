"""Jobs: submitted, listed, told to stop or to go on."""
