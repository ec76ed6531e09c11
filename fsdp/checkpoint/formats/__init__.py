"""Checkpoints of other libraries, and ours as one format among them."""
