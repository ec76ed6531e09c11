"""Tools with which users test sharded training, on one machine and without accelerators."""

from fsdp.testing.stream_order import Report, StreamOrderError
from fsdp.testing.streams import check_streams

__all__ = ["check_streams", "Report", "StreamOrderError"]
