"""The protocol of sinks, and a sink that calls a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from fsdp.weights.plan import WeightPlan

# A function that a stream accepts as a sink: called with the tensors of each bucket, by name.
Consumer = Callable[[dict[str, Tensor]], Any]


class Sink:
    """The destination of a stream. Subclasses implement three methods, which are called in this order.

    If a method raises an exception, the stream ends on all ranks with an error that contains the rank and the message.

    Attributes:
        receives: "buckets" for a sink of complete buckets; any number of ranks may pass such a sink, and the other
            ranks pass None. "parts" for a sink of this rank's part of each bucket, without communication among the
            ranks; all ranks must pass such a sink.
        takes_changes: True if the sink supports streams of changes, whose buckets are encoded.
    """

    receives: Literal["buckets", "parts"] = "buckets"
    takes_changes = False

    def open(self, plan: WeightPlan) -> None:
        """Begin a stream. `plan` describes all buckets; this rank's number among its `parts` is `plan.rank`."""

    def bucket(self, number: int, tensor: Tensor) -> None:
        """Consume a bucket.

        Args:
            number: the number of the bucket; buckets arrive in the order of the plan.
            tensor: bytes ``[n]`` (uint8) on the device of the model. The memory is reused for the next bucket after
                this method returns, so copy values that are needed later. A sink of parts receives this rank's packed
                part, see `WeightPlan.runs`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method bucket(number, tensor)")

    def close(self, error: BaseException | None) -> None:
        """End the stream, after all ranks have sent their buckets.

        Args:
            error: the exception that ended the stream on this rank; None if all ranks have succeeded.
        """


class FunctionSink(Sink):
    """Calls a function with the tensors of each bucket."""

    def __init__(self, function: Consumer) -> None:
        self._function = function

    def open(self, plan: WeightPlan) -> None:
        if not plan.is_whole:
            largest = max(plan.tensors, key=lambda tensor: tensor.nbytes)
            raise ValueError(
                f"a function receives complete tensors, and {largest.name} is larger than a bucket, with "
                f"{largest.nbytes} bytes. Use larger buckets, or an object with the methods of fsdp.weights.Sink, "
                "which receives rows"
            )
        self._plan = plan

    def bucket(self, number: int, tensor: Tensor) -> None:
        self._function(self._plan.named(number, tensor))


def sink_of(given: Any) -> Sink | None:
    """Return the sink for an argument of `stream_weights`; raise TypeError for unsupported objects."""
    if given is None or isinstance(given, Sink):
        return given
    if all(callable(getattr(given, name, None)) for name in ("open", "bucket", "close")):
        return given
    if callable(given):
        return FunctionSink(given)
    raise TypeError(
        f"sink must be a function of the tensors of a bucket, an object with the methods of fsdp.weights.Sink, or None "
        f"on ranks that receive nothing, got {given!r}"
    )
