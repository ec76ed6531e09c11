"""A sharded policy, and an inference engine in a process of its own."""
