"""Layers around the engine: construction of units, checks, and optional capabilities.

The engine (`fsdp.engine`) does not import this package. A layer uses a subclass of `Checks`, `Participation` or
`ShardStorage`, observers of units, hooks of modules and optimizers, or a call from a front door.
"""
