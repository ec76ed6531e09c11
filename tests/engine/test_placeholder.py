"""What stands where values are not: it can be looked at, and every way to its values ends in the same clear error.

Each way is tried on a placeholder of its own, because a way that got through might give it values.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel
from fsdp.engine.placeholder import Placeholder, depart, is_model_under_way, sharded_weight, unreduced_gradient
from tests.helpers.parity import Alone

# What torch thinks of TypedStorage and of scalars that require a gradient is not the point here.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

Way = Callable[[Tensor], Any]

OTHER = torch.ones(3, 2)

READING: dict[str, Way] = {
    "add": lambda p: p + 1,
    "add from the right": lambda p: OTHER + p,
    "matmul": lambda p: OTHER.T @ p,
    "linear": lambda p: F.linear(OTHER, p),
    "embedding": lambda p: F.embedding(torch.tensor([0]), p),
    "sum": lambda p: p.sum(),
    "norm": lambda p: torch.linalg.vector_norm(p),
    "compare": lambda p: p == OTHER,
    "torch.equal": lambda p: torch.equal(p, OTHER),
    "torch.allclose": lambda p: torch.allclose(p, OTHER),
    "torch.isnan": torch.isnan,
    "index": lambda p: p[0],
    "iterate": list,
    "contains": lambda p: 1.0 in p,
    "transpose": lambda p: p.T,
    "view": lambda p: p.view(-1),
    "reshape": lambda p: p.reshape(-1),
    "flatten": lambda p: p.flatten(),
    "torch.cat": lambda p: torch.cat([OTHER, p]),
    "torch.stack": lambda p: torch.stack((OTHER, p)),
    "a list of tensors": lambda p: torch._foreach_add([OTHER, p], 1.0),
    "copy from": lambda p: torch.zeros(3, 2).copy_(p),
    "out of nothing": torch.zeros_like,
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "clone": lambda p: p.clone(),
    "cast": lambda p: p.double(),
    "move": lambda p: p.to("meta"),
    "a new parameter": nn.Parameter,
    "numpy": lambda p: p.numpy(),
    "np.asarray": np.asarray,
    "tolist": lambda p: p.tolist(),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]),
}
WRITING: dict[str, Way] = {
    "copy into": lambda p: p.copy_(OTHER),
    "add in place": lambda p: p.add_(1),
    "assign to an index": lambda p: p.__setitem__(0, 1.0),
    "nn.init": nn.init.zeros_,
    "out": lambda p: torch.add(OTHER, 1, out=p),
    "assign to data": lambda p: setattr(p, "data", OTHER),
    "resize": lambda p: p.resize_(1),
    "set": lambda p: p.set_(OTHER),
    "share": lambda p: p.share_memory_(),
}
MEMORY: dict[str, Way] = {
    "data_ptr": lambda p: p.data_ptr(),
    "untyped_storage": lambda p: p.untyped_storage(),
    "storage": lambda p: p.storage(),
    "np.from_dlpack": np.from_dlpack,
    "torch.from_dlpack": torch.from_dlpack,
    "copy.copy": copy.copy,
    "torch.multiprocessing": lambda p: torch.multiprocessing.reductions.reduce_tensor(p),
}
SCALAR: dict[str, Way] = {
    "item": lambda p: p.item(),
    "float": float,
    "int": int,
    "bool": bool,
    "complex": complex,
    "tolist": lambda p: p.tolist(),
    "numpy": np.asarray,
    "add": lambda p: p + 1,
}


def ways(table: dict[str, Way]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("touch", table.values(), ids=table)


@contextmanager
def refused(names: str = "layers.0.weight") -> Iterator[None]:
    with pytest.raises(RuntimeError) as caught:
        yield
    assert str(caught.value).startswith(f"{names} is sharded"), str(caught.value)
    assert "summon_full_params" in str(caught.value), "the way out"


def weight(*shape: int, trained: bool = True) -> Placeholder:
    return sharded_weight("layers.0.weight", nn.Parameter(torch.ones(shape), trained))


@pytest.mark.parametrize("trained", [True, False])
def test_a_copy_knows_and_refuses_the_same(trained: bool) -> None:
    original = weight(3, 2, trained=trained)
    copied = copy.deepcopy(original)
    assert isinstance(copied, Placeholder)
    assert (copied.shape, copied.dtype, copied.device) == (original.shape, original.dtype, original.device)
    assert copied.requires_grad is trained
    with refused():
        copied.sum()


def test_it_is_pickled_as_a_part_of_a_model_only() -> None:
    """By itself, its values would be found missing when it is too late."""
    with refused():
        pickle.dumps(weight(3, 2))
    with refused():
        torch.save({"weight": weight(3, 2)}, io.BytesIO())
    with refused():
        pickle.dumps([depart(), weight(3, 2)])
    with refused():
        pickle.loads(pickle.dumps([weight(3, 2), depart()]))[0].sum()
    assert not is_model_under_way()


@ways(READING)
def test_reading_values_is_refused(touch: Way) -> None:
    with refused():
        touch(weight(3, 2))
    with refused(), torch.no_grad():
        touch(weight(3, 2))
    with refused():
        touch(weight(3, 2, trained=False))


@ways(WRITING)
def test_writing_values_is_refused(touch: Way) -> None:
    with refused(), torch.no_grad():
        touch(weight(3, 2, trained=False))
    # With gradients on, a trained weight meets torch's own check of leaves first, as it would if it was there.
    with pytest.raises(RuntimeError, match=r"requires? grad|sharded"):
        touch(weight(3, 2))


@ways(MEMORY)
def test_reaching_for_the_memory_is_refused(touch: Way) -> None:
    with refused():
        touch(weight(3, 2, trained=False))
    with refused():
        touch(weight(3, 2))


@ways(SCALAR)
@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-d", "one element"])
def test_a_single_value_is_refused(touch: Way, shape: tuple[int, ...]) -> None:
    with refused():
        touch(weight(*shape))


def test_what_would_be_forgotten_with_the_placeholder_is_refused() -> None:
    """Freezing a weight or hooking its gradient acts on the stand-in, and would never reach the weight."""
    with refused():
        weight(3, 2).register_hook(print)
    for needs in (False, True):
        told = f"requires_grad={needs} .*would have no effect: .*before sharding"
        with pytest.raises(RuntimeError, match=f"layers.0.weight is sharded.*{told}"):
            weight(3, 2).requires_grad_(needs)
        with pytest.raises(RuntimeError, match=f"layers.0.weight is sharded.*{told}"):
            weight(3, 2).requires_grad = needs
    assert weight(3, 2).requires_grad


def test_the_gradient_is_that_of_the_parameter_in_its_place() -> None:
    absent, local = weight(3, 2), nn.Parameter(torch.ones(4))
    absent.listed = local
    assert absent.grad is None
    absent.grad = torch.arange(4.0)
    assert absent.grad is local.grad
    absent.grad = None
    assert local.grad is None


def test_setting_the_gradient_of_a_part_of_a_flat_parameter_is_refused() -> None:
    for value in (None, torch.ones(3, 2)):
        told = r"layers.0.weight is sharded.*has no effect: .*with_grads=True.*use_orig_params=True"
        with pytest.raises(RuntimeError, match=told):
            weight(3, 2).grad = value


def test_the_message_is_found_anywhere_among_the_arguments() -> None:
    with refused():
        torch.add(OTHER, other=weight(3, 2))
    with refused():
        torch.cat(tensors=(OTHER, weight(3, 2)))
    with refused():
        torch.where(OTHER > 0, OTHER, weight(3, 2))


# What is known without values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(3, 2), (), (0, 4)])
def test_shape_dtype_and_device_are_those_of_the_weight(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    like = nn.Parameter(torch.ones(shape, dtype=dtype))
    placeholder = sharded_weight("w", like)
    assert (placeholder.shape, placeholder.dtype, placeholder.device) == (like.shape, like.dtype, like.device)
    assert (placeholder.size(), placeholder.dim(), placeholder.numel()) == (like.size(), like.dim(), like.numel())
    assert placeholder.element_size() == like.element_size()
    assert placeholder.is_floating_point() == like.is_floating_point()
    assert placeholder.is_leaf
    assert placeholder.grad is None
    assert isinstance(placeholder, Tensor)


def test_it_has_a_length_and_can_be_told_apart() -> None:
    placeholder, other = weight(3, 2), weight(3, 2)
    assert len(placeholder) == 3
    names = {placeholder: "one", other: "other"}
    assert [names[each] for each in (other, placeholder)] == ["other", "one"]


def test_it_needs_no_memory_for_values() -> None:
    assert sharded_weight("w", torch.empty(1 << 40, device="meta")).numel() == 1 << 40


@pytest.mark.parametrize("show", [repr, str, "{}".format, lambda p: f"{p}"], ids=["repr", "str", "format", "f"])
def test_it_shows_itself_without_values(show: Callable[[Tensor], str]) -> None:
    assert show(weight(3, 2)) == "Placeholder(shape=(3, 2), dtype=torch.float32, device=cpu)"
    assert show(weight()) == "Placeholder(shape=(), dtype=torch.float32, device=cpu)"


# The gradient that is not there


def test_an_unreduced_gradient_says_why_and_what_to_do() -> None:
    gradient = unreduced_gradient("layers.0", nn.Parameter(torch.ones(5)))
    assert gradient.shape == (5,)
    assert not gradient.requires_grad
    message = r"gradients of layers\.0 were accumulated under no_sync\(\).*outside no_sync\(\).*zero_grad"
    for touch in (lambda: gradient.mul_(0.5), lambda: gradient.norm(), lambda: torch.zeros(5).add_(gradient)):
        with pytest.raises(RuntimeError, match=message):
            touch()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_no_optimizer_steps_with_it(make: Callable[..., torch.optim.Optimizer]) -> None:
    param = nn.Parameter(torch.ones(5))
    param.grad = unreduced_gradient("layers.0", param)
    optimizer = make([param], lr=0.1)
    with pytest.raises(RuntimeError, match="not reduced over the ranks yet"):
        optimizer.step()


def test_a_refused_step_has_changed_nothing() -> None:
    """AdamW decays weights before it looks at gradients, and steps one parameter after the other."""
    wrap = partial(FullyShardedDataParallel, process_group=Alone())
    model = wrap(nn.Sequential(wrap(nn.Linear(3, 3)), nn.Linear(3, 3)))
    inner, outer = model.module[0].params[0], model.params[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW([inner, outer], lr=0.1, foreach=False)
    with model.no_sync():
        model(torch.ones(2, 3)).sum().backward()
    inner.grad = torch.ones_like(inner)  # as if only the other one was not reduced
    with pytest.raises(RuntimeError, match=r"no_sync\(\).*not reduced over the ranks yet"):
        optimizer.step()
    assert not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroing_gradients_drops_it_or_says_how(set_to_none: bool) -> None:
    param = nn.Parameter(torch.ones(5))
    param.grad = unreduced_gradient("layers.0", param)
    optimizer = torch.optim.SGD([param], lr=0.1)
    if set_to_none:
        optimizer.zero_grad()
        assert param.grad is None
    else:
        with pytest.raises(RuntimeError, match=r"zero_grad\(set_to_none=True\)"):
            optimizer.zero_grad(set_to_none=False)
