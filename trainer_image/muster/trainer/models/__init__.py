"""What is trained: the decoder, its adapters, how it is sharded, and the memory that it takes."""
