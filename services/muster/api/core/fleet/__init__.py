"""The queue and the nodes: who waits for what, and who holds what."""
