"""Training on a rank: the loop, its step, and the measurements that it makes on the way."""
