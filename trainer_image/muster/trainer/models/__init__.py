"""Models that are trained: the decoder, its adapters, their sharding, and the memory that they take."""
