"""`QuantizedParameters`: unsharded parameters that are quantised for the all-gather.

Only the all-gathers of forward and backward use this class. State dicts, summoned parameters and files are created from
the exact shards, so errors do not accumulate over steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.block_codes import BlockCodes
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.layout import Layout
from fsdp.engine.unsharded_params import UnshardedParameters


class QuantizedParameters(UnshardedParameters):
    """Unsharded parameters with the same bits on all ranks, because each rank also quantises its own shard.

    Messages have the format `codes`. For other arguments see `UnshardedParameters`.
    """

    is_exact = False

    def __init__(
        self,
        flat_param: FlatParameter,
        layout: Layout,
        full: Tensor,
        *,
        codes: BlockCodes,
        **others: Any,
    ) -> None:
        self._codes, self._flat_param = codes, flat_param
        self._arriving: Tensor | None = None  # ``[ranks * bytes]``
        super().__init__(flat_param, layout, full, **others)

    def begin_gather(self, *, directly: bool = False) -> Tensor:
        if directly:  # post-forward shards contain quantised values already
            return super().begin_gather(directly=True)
        self.outgoing = self._encoded_shard().view(-1)
        self._arriving = self.outgoing.new_empty(self._layout.world_size * self.outgoing.numel())
        return self._arriving

    @torch.inference_mode(False)  # parameters gathered during inference may be used in training
    @torch.no_grad()
    def end_gather(self, *, is_wanted: bool = True) -> None:
        arriving, self._arriving, self.outgoing = self._arriving, None, None
        if arriving is not None:
            if not is_wanted:
                return
            rows = arriving.view(self._layout.world_size, -1)
            gathered = super().begin_gather().view(self._layout.world_size, -1)
            for row, place in zip(rows.split(1), gathered.split(1), strict=True):  # with float32 memory for one row
                place.copy_(self._codes.decoded(row, self._layout.shard_numel))
        super().end_gather(is_wanted=is_wanted)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _encoded_shard(self) -> Tensor:
        shard = self._flat_param.shard_storage.brought(self._flat_param, torch.float32)
        return self._codes.encoded(shard.detach().view(1, -1))

    def differ_from(self, shards: Sequence[Tensor], rank: int) -> Tensor:
        sent = self._codes.decoded(self._encoded_shard(), self._layout.shard_numel).view(-1)
        return super().differ_from(self._layout.local_shards(sent, rank), rank)

    def new_value(self, number: int) -> nn.Parameter:
        raise RuntimeError(
            f"{self._layout.slots[number].name} was written to while it was unsharded and quantised (QuantizedGather): "
            "its shard would lose its precision. Write to the sharded parameter between steps, inside "
            "`with model.summon_full_params():` for instance, or compress without `gather`."
        )


@dataclass(frozen=True)
class MakeQuantized:
    """A factory of `QuantizedParameters`. Copies and pickles of it create exact parameters."""

    codes: BlockCodes

    def __call__(self, *args: Any, **others: Any) -> UnshardedParameters:
        return QuantizedParameters(*args, codes=self.codes, **others)

    def __reduce__(self) -> Any:
        return partial, (UnshardedParameters,)
