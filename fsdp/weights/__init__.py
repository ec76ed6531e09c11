"""Sending the weights of a sharded model to other processes: all in buckets, changes only, or requested ranges.

`stream` sends all weights of a model to a sink. `plan` computes the content of its buckets, and `assembly` exchanges
their parts among the ranks. `sinks` contains the protocol of sinks, `files` the sink for safetensors files, `links` the
sinks for sockets and shared memory, and `receiver` the receiving process. `changes` compares weights with the weights
that were sent before. `loading` loads a stream into a sharded model, and `serving` answers requests for ranges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp.layers.lazy import lazily

if TYPE_CHECKING:
    from fsdp.weights.changes import Snapshot as Snapshot
    from fsdp.weights.files import SafetensorsSink as SafetensorsSink
    from fsdp.weights.links import SharedMemorySink as SharedMemorySink
    from fsdp.weights.links import SocketSink as SocketSink
    from fsdp.weights.loading import ModelSink as ModelSink
    from fsdp.weights.loading import load_stream as load_stream
    from fsdp.weights.plan import Piece as Piece
    from fsdp.weights.plan import PlannedTensor as PlannedTensor
    from fsdp.weights.plan import WeightPlan as WeightPlan
    from fsdp.weights.receiver import Receiver as Receiver
    from fsdp.weights.receiver import Update as Update
    from fsdp.weights.receiver import receive as receive
    from fsdp.weights.serving import WeightReader as WeightReader
    from fsdp.weights.serving import WeightRequest as WeightRequest
    from fsdp.weights.serving import WeightServer as WeightServer
    from fsdp.weights.serving import serve_weights as serve_weights
    from fsdp.weights.sinks import Sink as Sink
    from fsdp.weights.stream import stream_weights as stream_weights

_HOMES = {
    "fsdp.weights.changes": "Snapshot",
    "fsdp.weights.files": "SafetensorsSink",
    "fsdp.weights.links": "SharedMemorySink SocketSink",
    "fsdp.weights.loading": "ModelSink load_stream",
    "fsdp.weights.plan": "Piece PlannedTensor WeightPlan",
    "fsdp.weights.receiver": "Receiver Update receive",
    "fsdp.weights.serving": "WeightReader WeightRequest WeightServer serve_weights",
    "fsdp.weights.sinks": "Sink",
    "fsdp.weights.stream": "stream_weights",
}
__getattr__, __dir__ = lazily(__name__, _HOMES)
