"""Experiment trackers: each in a process of its own that reads the step log, so that none can hold up a run."""
