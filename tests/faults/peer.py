"""The same jobs with torch's own FSDP2 and `torch.distributed.checkpoint`, as far as these have the like."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.faults.fault import Action
from tests.faults.job import Job, NotExpressible

# Our files, and what torch's checkpoints have for them.
FILES = {"model*.safetensors": "__0_0.distcp", "optim*.safetensors": "__1_0.distcp", "checkpoint.json": ".metadata"}
WHOLE = states.StateDictOptions(full_state_dict=True)


class TorchJob(Job):
    """A training with torch's `fully_shard`."""

    transport_error = ""  # any may leave collectives behind that do not fit the next ones

    def strike(self, action: Action) -> None:
        try:
            super().strike(action)
        except (AttributeError, KeyError) as error:  # of a method that only our models have
            if isinstance(error, KeyError) and error.args == ("weight",):
                raise
            raise NotExpressible(str(error)) from error

    def wrap(self) -> None:
        options = dict(self.options)
        if options.pop("mixed_precision", False):
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.float16)
        if "process_group" in options:
            options["mesh"] = options.pop("process_group")
        if not options.keys() <= {"reshard_after_forward", "mp_policy", "mesh"}:
            raise NotExpressible(f"options {options}")
        for block in itertools.islice(self.plain.blocks, self.units):
            fully_shard(block, **options)
        self.model = fully_shard(self.plain, **options)

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), **self.clipping)

    def clip_values(self) -> None:
        torch.nn.utils.clip_grad_value_(self.model.parameters(), 0.1)

    def accumulate(self) -> None:
        self.model.set_requires_gradient_sync(False)
        self.forward()
        self.backward()
        self.model.set_requires_gradient_sync(True)

    def state_dict(self) -> None:
        self.state = states.get_model_state_dict(self.model, options=WHOLE)

    def load_state_dict(self) -> None:
        states.set_model_state_dict(self.model, self.state, options=WHOLE)

    def optimizer_state(self) -> None:
        self.full = states.get_optimizer_state_dict(self.model, self.optimizer_, options=WHOLE)

    def load_optimizer_state(self) -> None:
        states.set_optimizer_state_dict(self.model, self.optimizer_, self.full, options=WHOLE)

    def sharded_state(self) -> None:
        self.sharded = self.model.state_dict()

    def load_sharded_state(self) -> None:
        self.model.load_state_dict(self.sharded)

    def stored(self) -> dict[str, Any]:
        parts = {"model": self.model.state_dict()}
        if not self.without_optimizer:
            parts["optimizer"] = states.get_optimizer_state_dict(self.model, self.optimizer_)
        return parts

    def save(self) -> None:
        self.only_generators(self.saving)
        dcp.save(self.stored(), checkpoint_id=self.path)

    def load(self) -> None:
        self.only_generators(self.loading)
        parts = self.stored()
        dcp.load(parts, checkpoint_id=self.path)
        self.model.load_state_dict(parts["model"])
        if "optimizer" in parts:
            states.set_optimizer_state_dict(self.model, self.optimizer_, parts["optimizer"])

    def only_generators(self, options: dict[str, Any]) -> None:
        if options.keys() - {"generators"}:
            raise NotExpressible(f"options {options}")

    def save_in_background(self) -> None:
        self.only_generators(self.saving)
        self.future = dcp.async_save(self.stored(), checkpoint_id=self.path)

    def wait(self) -> None:
        self.future.result()

    def save_step(self) -> None:
        dcp.save(self.stored(), checkpoint_id=self.folder / "run" / f"step-{self.steps:08d}")

    def newest(self) -> None:
        self.path = max((self.folder / "run").iterdir())

    def file(self, pattern: str) -> Path:
        return super().file(FILES[pattern])

    def through(self, number: int, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)

    def refuse(self) -> None:
        """Have nothing of the kind."""
        raise NotExpressible

    summon = local_state = load_local_state = register_hook = register_other_hook = wrap_another = refuse
    conditional = fit = on_disk = joined_training = forget_saver = refuse
