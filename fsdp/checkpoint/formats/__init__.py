"""Checkpoints of any format: what each is read from, and what one is converted to."""
