"""What is learnt: an objective per file."""
