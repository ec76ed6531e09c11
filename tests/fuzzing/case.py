"""A case of the fuzzer: all that a seed decides, but for values."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.02, weight_decay=0.05, eps=1e-3),  # not so small that noise is scaled up
}

OPERATIONS = (
    "train",
    "train",
    "train_some",
    "evaluate",
    "forward_only",
    "two_forwards",
    "toggle",
    "toggle",
    "backward_again",
    "write_memory",
    "write_memory",
    "write_rows",
    "average",
    "wrap_otherwise",
    "load",
    "summon",
    "scale_data",
    "copy_models",
    "freeze",
    "fail",
    "optimizer_state",
    "save_and_load",
    "local_state",
    "discard",
    "change_settings",
)
FURTHER = (
    "input_gradient",
    "gradient_penalty",
    "evaluate_between",
    "infer",
    "clip_otherwise",
    "hook_gradients",
    "fail_backward",
    "assign",
    "restart",
    "unshard_early",
    "park",
    "own_average",
    "torch_state",
    "pickle_model",
)
LATEST = ("add_unit", "remove_unit", "replace_unit", "follow")


@dataclass(frozen=True)
class Case:
    """All that a seed decides, but for values."""

    seed: int
    world_size: int
    door: str  # "wrapper" or "fully_shard"
    options: dict[str, Any]  # of the wrapper or `fully_shard`, by names of things that are made on the ranks
    wrapped: float  # the share of blocks that are units
    flags: str  # "always", "alike" on all ranks, or "apart"
    optimizer: str
    frozen: bool  # some parameters are, from the beginning
    mixed: bool  # some parameters are float32
    operations: list[str]
    recomputed: float  # the share of blocks that keep their inputs only
    device: str = "cpu"

    @classmethod
    def of_seed(cls, seed: int, world_size: int, device: str = "cpu") -> Case:
        rng = random.Random(f"case {seed}")
        door = rng.choice(("wrapper", "wrapper", "fully_shard"))
        options = _wrapper_options(rng, world_size) if door == "wrapper" else _shard_options(rng, world_size)
        operations = [rng.choice(OPERATIONS) for _ in range(rng.randint(2, 6))]
        more = random.Random(f"more of case {seed}")  # does not change what was drawn before it was added
        options |= _more_wrapper_options(more, options, world_size) if door == "wrapper" else _more_shard_options(more)
        for _ in range(more.randint(0, 3)):
            operations.insert(more.randint(0, len(operations)), more.choice(FURTHER))
        latest = random.Random(f"latest of case {seed}")
        for _ in range(latest.choice((0, 0, 1, 2))):
            operations.insert(latest.randint(0, len(operations)), latest.choice(LATEST))
        if door == "wrapper" and latest.random() < 0.15:
            options["cpu_offload"] = True
        return cls(
            seed,
            world_size,
            door,
            options,
            wrapped=rng.choice((0.0, 0.4, 0.8)),
            flags=rng.choice(("always", "alike", "apart")),
            optimizer=rng.choice(tuple(OPTIMIZERS)),
            frozen=rng.random() < 0.3,
            mixed=rng.random() < 0.2,
            operations=["train", *operations, "train"],
            recomputed=latest.choice((0.0, 0.0, 0.0, 0.4)),
            device=device,
        )

    @property
    def tolerance(self) -> float:
        """The largest difference that is allowed, relative to the largest element."""
        return 2e-3 if self.options.get("computes_in_float32") or self.mixed else 1e-9


def _wrapper_options(rng: random.Random, world_size: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "reshard_after_forward": _reshards(rng.random()),
        "disable_reshard_on_root": rng.random() < 0.6,
        "bucket_cap_mb": rng.choice((25, 25, 0, 1e-3)),
        "gradient_predivide_factor": rng.choice((None, None, 1.0, float(world_size))),
        "sync_module_states": rng.random() < 0.2,
    }
    shape = rng.choice(("flat", "flat", "original", "original", "one by one", "grouped"))
    if shape == "original":
        options["use_orig_params"] = True
    elif shape == "one by one":
        options["flatten_parameters"] = False
    elif shape == "grouped":
        options["group_by"] = rng.choice(("dimensions", "name"))
        options["use_orig_params"] = rng.random() < 0.3
    if rng.random() < 0.2:
        options["sharding"] = rng.choice(("replicated", "hybrid") if world_size == 4 else ("replicated",))
    if rng.random() < 0.15:
        options["computes_in_float32"] = True
    return options


def _reshards(drawn: float) -> bool | str:
    return "host" if drawn < 0.1 else drawn < 0.6


def _shard_options(rng: random.Random, world_size: int) -> dict[str, Any]:
    options: dict[str, Any] = {"reshard_after_forward": _reshards(rng.random())}
    if world_size == 4 and rng.random() < 0.3:
        options["sharding"] = "hybrid"
    if rng.random() < 0.15:
        options["computes_in_float32"] = True
    return options


def _more_wrapper_options(rng: random.Random, options: dict[str, Any], world_size: int) -> dict[str, Any]:
    if "sharding" in options or rng.random() > 0.35:
        return {}
    sharding = rng.choice(("SHARD_OPTIM", "SHARD_OPTIM_GRADS", *["HYBRID_SHARD_OPTIM"] * 2 * (world_size == 4)))
    return {"sharding": sharding, "reshard_after_forward": True}


def _more_shard_options(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options |= {"sharding": rng.choice(("SHARD_OPTIM", "SHARD_OPTIM_GRADS")), "reshard_after_forward": None}
    if rng.random() < 0.3:
        options["columns"] = True
    if rng.random() < 0.15:
        options["offload"] = True
    return options
