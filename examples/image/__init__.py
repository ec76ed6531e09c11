"""A sharded image classifier."""
