"""Waits in the queue: the live jobs, who of them holds which nodes, and when the others are expected to start."""
