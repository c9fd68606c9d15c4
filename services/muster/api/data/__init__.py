"""Data that go into jobs and models that come out of them."""
