"""`clip_grad_norm_` and `clip_grad_value_` over parameters of all kinds at once: torch's on the unsharded model.

Frozen, unused, tied, 0-d and complex parameters, in several dtypes, in units of every form beside each other.
`test_pain_point_07_...` are about norms that were not the unsharded ones.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, get_fsdp_instances
from tests.helpers.models import Net, Wrap
from tests.helpers.module_kinds import FLAT, FORMS, ORIGINAL, UNFLATTENED, SideBySide, auto_wrapped, whole
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.parity import adam, adamw, fully_sharded, sgd_with_momentum

NORM_TYPES = [2.0, math.inf, 1.0]


class AllKinds(nn.Module):
    """Each kind in a layer of its own; in float64 and complex128, or with layers in narrower dtypes."""

    def __init__(self, narrow: bool) -> None:
        super().__init__()
        single, waves = (torch.float32, torch.complex64) if narrow else (torch.float64, torch.complex128)
        self.entry = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7, dtype=torch.bfloat16).requires_grad_(False)
        self.single = nn.Linear(7, 7, dtype=single)
        self.tied = nn.Linear(7, 7)
        self.tied.weight = nn.Parameter(torch.randn(7, 7) / 5)
        self.again = nn.Linear(7, 7, bias=False)
        self.again.weight = self.tied.weight
        self.waves = nn.Linear(7, 5, dtype=waves)
        self.unused = nn.Linear(7, 7)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.entry(inputs))
        hidden = hidden + self.frozen(hidden.detach().to(torch.bfloat16)).to(inputs.dtype)
        hidden = torch.tanh(self.single(hidden.to(self.single.weight.dtype))).to(inputs.dtype)
        hidden = self.again(torch.tanh(self.tied(hidden)))
        return self.waves(hidden.to(self.waves.weight.dtype)).abs().to(inputs.dtype) * self.scale


def all_kinds() -> nn.Module:
    return AllKinds(narrow=False)


def in_many_dtypes() -> nn.Module:
    return AllKinds(narrow=True)


def each_in_another_form(model: nn.Module, wrap: Wrap) -> nn.Module:
    """Units of all three forms in one model, and the given one for what is left."""
    forms = {"entry": ORIGINAL, "single": UNFLATTENED, "waves": ORIGINAL, "unused": FLAT}
    for name, options in forms.items():
        both = {"use_orig_params": False, "flatten_parameters": True, **options}
        model.set_submodule(name, partial(wrap, **both)(model.get_submodule(name)))
    return wrap(model)


def clip_both(pair: SideBySide, max_norm: float, norm_type: float) -> tuple[Tensor, Tensor]:
    """Collective. The norms that were found."""
    expected = nn.utils.clip_grad_norm_(pair.plain.parameters(), max_norm, norm_type)
    return pair.sharded.clip_grad_norm_(max_norm, norm_type), expected


@parametrize_cases(
    at_most=5,
    norm_type=NORM_TYPES,
    options=FORMS,
    units=[whole, auto_wrapped, each_in_another_form],
    world_size=[3, 2],
    make_optimizer=[sgd_with_momentum, adam],  # AdamW decays what is unused, for which a flat parameter has zeros
    max_norm=[0.05, 100.0],
)
@on_ranks("world_size")
def test_pain_point_07_clipped_steps_equal_the_unsharded_model(case: Case) -> None:
    pair = SideBySide(all_kinds, case.units, case.make_optimizer, apart=True, **case.options)
    for number in range(2):
        pair.backward(number)
        found, expected = clip_both(pair, case.max_norm, case.norm_type)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0.0)
        assert (expected.item() > case.max_norm) is (case.max_norm < 1)
        pair.optimize()
    pair.assert_close()


# Precision


def held_gradients(model: nn.Module) -> list[Tensor]:
    """What this rank has of the gradients."""
    return [param.grad for param in model.parameters() if param.grad is not None]


@parametrize_cases(norm_type=NORM_TYPES, options=FORMS, units=[whole, auto_wrapped, each_in_another_form])
@on_ranks(2)
def test_pain_point_07_no_dtype_is_narrowed_for_the_norm(case: Case) -> None:
    pair = SideBySide(in_many_dtypes, case.units, apart=True, **case.options)
    pair.sharded(torch.full((3, 5), 0.1 + dist.get_rank())).sum().backward()
    grads = [torch.view_as_real(g) if g.is_complex() else g for g in held_gradients(pair.sharded)]
    assert len({grad.dtype for grad in grads}) == 2
    sizes = torch.cat([g.abs().double().flatten() for g in held_gradients(pair.sharded) if not g.is_complex()])
    waves = torch.cat([g.to(torch.complex128).abs() for g in held_gradients(pair.sharded) if g.is_complex()])
    of_ranks = [torch.linalg.vector_norm(torch.cat([sizes, waves]), case.norm_type)]
    gathered = [torch.empty_like(of_ranks[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, of_ranks[0])
    expected = torch.linalg.vector_norm(torch.stack(gathered), case.norm_type)
    found = pair.sharded.clip_grad_norm_(1.0, case.norm_type)
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=0.0)


@on_ranks(2)
def test_pain_point_07_float64_beside_complex64_is_summed_in_float64() -> None:
    torch.set_default_dtype(torch.float64)
    for dtypes in ((torch.float64, torch.complex64), (torch.complex64, torch.float64)):
        model: Any = auto_wrapped(nn.Sequential(*(nn.Linear(5, 5, dtype=dtype) for dtype in dtypes)), fully_sharded())
        for wrapper in get_fsdp_instances(model, skip_empty=True):
            (param,) = wrapper.params
            if param.is_complex():
                param.grad = torch.zeros_like(param.detach())
                param.grad[0] = 3 + 4j  # of size 5, on each of two ranks
            else:
                param.grad = torch.full_like(param.detach(), 1 + 1e-12)  # float32 cannot tell it from 1
        found = model.clip_grad_norm_(1e9)
        assert found.item() == pytest.approx(math.sqrt(2 * 5**2 + 30 * (1 + 1e-12) ** 2), rel=1e-14)


# Not finite


@parametrize_cases(
    at_most=3,
    value=[math.nan, math.inf],
    norm_type=[2.0, math.inf],
    options=FORMS,
    units=[whole, each_in_another_form],
    world_size=[3, 2],
)
@on_ranks("world_size")
def test_pain_point_07_error_if_nonfinite_changes_nothing_on_any_rank(case: Case) -> None:
    pair = SideBySide(all_kinds, case.units, apart=True, **case.options)
    pair.backward(0)
    if dist.get_rank() == dist.get_world_size() - 1:  # in one element, on one rank
        grads = [param.grad for param in pair.sharded.parameters() if param.grad is not None]
        next(grad for grad in grads if grad.numel()).view(-1)[0] = case.value
    before = [grad.clone() for grad in held_gradients(pair.sharded)]
    with pytest.raises(RuntimeError, match=r"the norm of the gradients is (nan|inf) .*unchanged on every rank"):
        pair.sharded.clip_grad_norm_(0.01, case.norm_type, error_if_nonfinite=True)
    for found, expected in zip(held_gradients(pair.sharded), before, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)
    assert not pair.sharded.clip_grad_norm_(0.01, case.norm_type).isfinite()
    for optimizer in pair.optimizers:
        optimizer.zero_grad()
    pair.step(1)
    pair.assert_close()


@on_ranks(2)
def test_parameters_whose_gradients_are_not_finite_are_named_on_every_rank() -> None:
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    model(torch.ones(1, 3)).sum().backward()
    if dist.get_rank() == 1:
        (param,) = model.parameters()
        param.grad[-1] = math.nan
    with pytest.raises(RuntimeError) as error:
        model.clip_grad_norm_(1.0, error_if_nonfinite=True)
    error = str(error.value)
    assert " over all ranks (the gradient of 1.bias of unit 'root (Sequential)'), so they cannot" in error


# By value


def real_kinds() -> nn.Module:
    """What torch can clamp."""
    net = Net(lambda net, x: net.kinds(x), kinds=AllKinds(narrow=False))
    net.kinds.waves = nn.Linear(7, 5)
    return net


@parametrize_cases(
    at_most=3,
    options=FORMS,
    units=[whole, auto_wrapped],
    world_size=[3, 2],
    make_optimizer=[sgd_with_momentum, adamw],
    clip_value=[1e-3, 100.0],
)
@on_ranks("world_size")
def test_pain_point_07_clipping_by_value_equals_torchs(case: Case) -> None:
    pair = SideBySide(real_kinds, case.units, case.make_optimizer, apart=True, **case.options)
    for number in range(2):
        pair.backward(number)
        pair.sharded.clip_grad_value_(case.clip_value)
        nn.utils.clip_grad_value_(pair.plain.parameters(), case.clip_value)
        pair.optimize()
    pair.assert_close()
