"""What a rank does: the loop, its step, and what is measured on the way."""
