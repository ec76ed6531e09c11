"""Layers around the engine: construction of units, checks, and optional capabilities.

The engine (`fsdp.engine`) imports nothing from here. A layer attaches to the engine in one of these ways: a subclass of
`Checks`, `Participation` or `ShardStorage`, observers of units, hooks of modules and optimizers, or a call from a front
door.
"""
