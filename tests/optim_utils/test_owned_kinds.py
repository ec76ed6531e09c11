"""Ten and more optimizers by owners have the bits of the unsharded ones; on plain shards most are wrong."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.on_ranks import on_ranks
from tests.helpers.owned import (
    FORMS,
    Twin,
    backward,
    gradients_of,
    is_matrix,
    muon_and_adamw,
    owned,
    talk,
    train_both,
    values_of,
)
from tests.helpers.pairs import parametrize_pairs

PRELOAD = ["pytorch_optimizer", "torchao.optim", "torchao.quantization"]

# By name: its class as a path, its options, and whether it looks at more than one element at a time.
KINDS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "Muon": ("torch.optim.Muon", {"lr": 0.02}, True),
    "Adafactor": ("torch.optim.Adafactor", {"lr": 0.05}, True),
    "AdamW": ("torch.optim.AdamW", {"lr": 1e-2}, False),
    "Shampoo": ("pytorch_optimizer.Shampoo", {"lr": 1e-2}, True),
    "SOAP": ("pytorch_optimizer.SOAP", {"lr": 1e-2, "precondition_frequency": 2}, True),
    "LAMB": ("pytorch_optimizer.Lamb", {"lr": 1e-2}, True),
    "LARS": ("pytorch_optimizer.LARS", {"lr": 1e-2}, True),
    "CAME": ("pytorch_optimizer.CAME", {"lr": 1e-2}, True),
    "NovoGrad": ("pytorch_optimizer.NovoGrad", {"lr": 1e-2}, True),
    "SM3": ("pytorch_optimizer.SM3", {"lr": 1e-2}, True),
    "Lion": ("pytorch_optimizer.Lion", {"lr": 1e-3}, False),
    "Adan": ("pytorch_optimizer.Adan", {"lr": 1e-2}, False),
    "ScheduleFreeAdamW": ("pytorch_optimizer.ScheduleFreeAdamW", {"lr": 1e-2}, False),
    "AdamW8bit": ("torchao.optim.AdamW8bit", {"lr": 1e-2}, True),
}


def width_for(kind: str) -> int:
    """Return the width of a model in which there is what makes the optimizer different: of blocks, 4096 elements."""
    return 64 if "8bit" in kind else 6


def groups_with(kind: str) -> list[dict[str, Any]]:
    path, options, _ = KINDS[kind]
    package, _, name = path.rpartition(".")
    make = getattr(pytest.importorskip(package), name)
    if kind == "Muon":
        return muon_and_adamw()
    return [{"params": is_matrix, "optimizer": make, **options}, {"optimizer": make, **options}]


@parametrize_pairs(at_most=14, kind=list(KINDS), world_size=[3, 2, 1, 4], form=list(FORMS))
@on_ranks("world_size")
def test_the_bits_are_those_of_the_unsharded_optimizer(kind: str, form: str) -> None:
    groups = groups_with(kind)
    model = talk(FORMS[form], width=width_for(kind))
    optimizer = owned(model, groups)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step of one parameter
        train_both(model, optimizer, Twin(groups, width=width_for(kind)), range(2), what=kind)


@pytest.mark.parametrize("kind", [kind for kind, (*_, needs_all) in KINDS.items() if needs_all])
@on_ranks(3)
def test_on_plain_shards_it_is_wrong(kind: str) -> None:
    """Or it raises an error. So the test above can fail."""
    groups, model = groups_with(kind), talk(FORMS["orig_params"], width=width_for(kind))
    twin = Twin(groups, width=width_for(kind))
    options = {key: value for key, value in groups[0].items() if key not in ("params", "optimizer")}
    named = dict(twin.model.named_parameters())
    chosen = [p for n, p in model.named_parameters() if is_matrix(name := n.replace("module.", ""), named[name].shape)]
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        if any_rank(optimizer := attempt(groups[0]["optimizer"], chosen, **options), Exception):
            return
        for step in range(3):
            model.zero_grad()
            backward(model, step)
            twin.step(gradients_of(model))
            if any_rank(attempt(optimizer.step), Exception):
                return
    values = values_of(model)
    assert any(
        not torch.allclose(values[name], param.detach(), rtol=1e-4, atol=1e-6)
        for name, param in named.items()
        if is_matrix(name, param.shape)
    )


def attempt(call: Any, *args: Any, **options: Any) -> Any:
    """Return what a call returns, or the error that it raises."""
    try:
        return call(*args, **options)
    except Exception as error:  # noqa: BLE001 (each optimizer has its own)
        return error


def any_rank(found: Any, kind: type[Exception]) -> bool:
    """Collective. Return whether any rank has found an error."""
    every: list[bool | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, isinstance(found, kind))
    return any(every)
