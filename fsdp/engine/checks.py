"""`Checks`: the seam between the runtime and the checks of its tree, which are a layer (`fsdp.layers.first_use`)."""

from __future__ import annotations

from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.unit import Unit


class Checks:
    """The checks that a runtime calls. This class checks nothing."""

    def before_forward(self, unit: Unit) -> None:
        """Collective. A forward begins, of a unit that is not called by another unit."""

    def trust_values(self, unit: Unit) -> None:
        """Collective. Raise RuntimeError if parameters have no values, or different values on other ranks."""

    def merge_written(self, handle: FlatParamHandle) -> None:
        """Collective. Store in the shards the values that a forward has written to unsharded parameters."""
