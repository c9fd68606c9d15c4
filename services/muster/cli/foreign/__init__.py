"""Documents and command lines of other launchers, read as jobs."""
