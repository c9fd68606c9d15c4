"""Parallelism: the groups of ranks, their meshes and collectives, and the parts of tensors that a rank holds."""
