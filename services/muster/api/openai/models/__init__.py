"""`/v1/models`: base models that an administrator has mapped, and what was fine-tuned from them."""
