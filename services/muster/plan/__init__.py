"""Plans for a training: memory, speed, price and advice. Pure."""
