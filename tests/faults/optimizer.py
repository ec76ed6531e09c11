"""Faults at the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.faults.fault import GATHER, Fault, also, skip, usual
from tests.faults.job import Job

OPTIMIZER = r"SGD|optimizer"


def group(**options: Any) -> Callable[[Job], None]:
    return lambda job: job.optimizer_.param_groups[0].update(options)


def other_class(job: Job) -> None:
    job.optimizer_ = torch.optim.AdamW(job.model.parameters(), lr=0.05)


def without_gradient(job: Job) -> None:
    next(job.model.parameters()).grad = None


def double_gradient(job: Job) -> None:
    next(job.model.parameters()).grad.mul_(2)  # type: ignore[union-attr]


def write(value: float) -> Callable[[Job], None]:
    def do(job: Job) -> None:
        with torch.no_grad():
            next(job.model.parameters()).fill_(value)

    return do


def two_groups(job: Job) -> None:
    first, *others = job.model.parameters()
    job.optimizer_ = torch.optim.SGD([{"params": [first]}, {"params": others}], lr=0.05, momentum=0.9)


def reordered(job: Job) -> None:
    job.optimizer_ = torch.optim.SGD(list(job.model.parameters())[::-1], lr=0.05, momentum=0.9)


def step_hook_fails(job: Job) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a hook of the optimizer")

    job.optimizer_.register_step_pre_hook(fail)


def _compared(name: str, at: str, do: Callable[[Job], None], unit: str, **how: Any) -> Fault:
    """Return a fault that ranks find when they compare their steps, while the training goes on."""
    usually = {"remedy": "Take the same steps on every rank", "program": "setup train train train pause train"}
    return Fault(name, how.pop("kind", "optimizer"), do, at, unit=unit, **usually | how)


def _changed(name: str, at: str, do: Callable[[Job], None], unit: str) -> Fault:
    """Return a fault that ranks find when they compare what was written between their steps."""
    return _compared(name, at, do, unit, kind="values", remedy="Change parameters and gradients on every rank")


# fmt: off
FAULTS = {
    "step": [
        *usual("step 2", unit=GATHER),
        _compared("a step is left out", "step 2", skip, OPTIMIZER),
        _compared("two steps", "step 2", also("step_again"), OPTIMIZER),
        _compared("another learning rate", "step 2", group(lr=0.1), "lr"),
        _compared("other momentum", "step 2", group(momentum=0.5), "momentum"),
        _compared("weight decay", "step 2", group(weight_decay=0.1), "weight_decay"),
        _compared("another optimizer", "batch", other_class, "AdamW"),
        _compared("other groups of parameters", "batch", two_groups, "group"),
        _compared("parameters in another order", "batch", reordered, "order|parameters"),
        _changed("a gradient is dropped before the step", "step 2", without_gradient, "no gradient of head.weight"),
        _changed("a gradient is changed before the step", "step 2", double_gradient, "gradients were written"),
        _changed("a shard is written between steps", "batch 2", write(0.0), "the shard of root"),
        _changed("a shard is not finite", "batch 2", write(float("nan")), "the shard of root"),
        Fault("an error in a hook of the step, which all catch", "exceptions", step_hook_fails, at="step 2",
            victim=None, rank="a hook of the optimizer", after="kept"),
    ],
}
# fmt: on
