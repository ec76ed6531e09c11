"""State dicts of sharded models: full, local, sharded; summoning and loading parameters."""
