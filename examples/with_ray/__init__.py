"""A sharded model on workers that Ray starts."""
