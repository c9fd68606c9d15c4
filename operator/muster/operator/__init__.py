"""The operator: observe, decide, write or apply."""
