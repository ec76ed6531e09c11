"""`Passes` records the forwards and backwards of a root: for the tags of all-gathers, and for reports of hangs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fsdp.distributed import paths
from fsdp.engine.grad_buffer import GradientSync
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.unit import Unit


class Passes:
    """The passes of a root, which all ranks run alike.

    Attributes:
        stage: the pass that all ranks are in, or were in last: its direction and mode; empty before the first one, and
            where ranks may differ.
    """

    def __init__(self) -> None:
        self.stage = ""
        self._is_stopped = False
        self._current = self._around = paths.Pass("", "", "", ())  # the last forward around a backward

    def stop(self) -> None:
        """Record nothing from now on, because ranks may run different modules."""
        self._is_stopped, self.stage = True, ""

    def begin_forward(self, unit: Unit) -> None:
        """Record a forward of the outermost unit that is called."""
        if self._is_stopped:
            return
        has_graph = torch.is_grad_enabled()
        mode = "" if unit.mode == "train()" else f" in {unit.mode}"
        self.stage = f"forward{mode}{'' if has_graph else ' without gradients'}"
        modes = (f"in {unit.mode}", "with gradients" if has_graph else "without gradients")
        self._current = paths.path.begin("forward", unit.name, unit.ranks, modes)

    def begin_backward(self, unit: Unit, reduced: Sequence[FlatParamHandle]) -> None:
        """Record a backward, which reduces gradients of these handles, of the unit that was called last."""
        if self._is_stopped:
            return
        accumulates = " under no_sync()" if unit.policy.sync is GradientSync.NONE else ""
        divisor, usual = unit.predivide * unit.postdivide, unit.comm.world_size * unit.replicas.world_size
        divided = f" with gradients divided by {divisor:g}" if divisor != usual else ""
        self.stage = f"backward{accumulates}{divided}"
        modes = (accumulates.strip() or "with reduction", f"with gradients divided by {divisor:g}")
        self._around = self._current
        self._current = paths.path.begin("backward", unit.name, unit.ranks, modes, list(_trained(reduced)))

    def reach(self, unit: Unit) -> None:
        """Record that the pass has come to a unit."""
        self._current.come_to(unit.name)

    def end_forward(self) -> None:
        """Record that the forward of the outermost unit has ended."""
        self._current.is_over = True

    def end_backward(self) -> None:
        """Record that a backward has ended; a forward around it goes on."""
        self._current.is_over, self._current = True, self._around


def _trained(handles: Sequence[FlatParamHandle]) -> Iterator[str]:
    """Yield the names of the handles that get gradients, with the parameters that do not."""
    for handle in handles:
        if not handle.has_frozen:
            yield handle.name
            continue
        each = zip(handle.layout.slots, handle.requires_grad_each, strict=True)
        frozen = [slot.name for slot, is_trained in each if not is_trained]
        if len(frozen) < len(handle.layout.slots):
            yield f"{handle.name} without {', '.join(frozen)}"
