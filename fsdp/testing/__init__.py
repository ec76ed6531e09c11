"""Tools for testing sharded training on a single machine without accelerators."""

from fsdp.testing.stream_order import Report, StreamOrderError
from fsdp.testing.streams import check_streams
from fsdp.testing.world import Fault, World, WorldError, die

__all__ = ["Fault", "Report", "StreamOrderError", "World", "WorldError", "check_streams", "die"]
