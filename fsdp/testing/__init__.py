"""Tools with which users test sharded training, on one machine and without accelerators."""

from fsdp.testing.world import Fault, World, WorldError, die

__all__ = ["Fault", "World", "WorldError", "die"]
