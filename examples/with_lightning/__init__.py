"""A sharded model in Lightning's Trainer."""
