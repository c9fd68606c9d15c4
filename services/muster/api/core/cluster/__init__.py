"""Clusters that carry TrainingJobs: the interface, and the implementations of it."""
