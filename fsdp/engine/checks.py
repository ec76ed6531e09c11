"""`Checks`: the interface between the runtime and the checks of its tree (`fsdp.layers.first_use`)."""

from __future__ import annotations

from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.unit import Unit


class Checks:
    """The checks that a runtime calls. By default there are none."""

    def before_forward(self, unit: Unit) -> None:
        """Collective. Check a tree before the forward of a unit not called by another unit."""

    def trust_values(self, unit: Unit) -> None:
        """Collective. Raise RuntimeError if parameters have no values, or different values on other ranks."""

    def merge_written(self, handle: FlatParamHandle) -> None:
        """Collective. Store values written to unsharded parameters by a forward in the shards."""
