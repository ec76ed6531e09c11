"""`fsdp.fingerprint`: equal for equal values however they are sharded, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp
from fsdp.layers.fingerprints import fingerprint_of_range, fingerprint_of_rows
from tests.helpers.forms import trained_rows
from tests.helpers.hybrid import group_option
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import RankPool
from tests.helpers.same_bits import FORMS, OPTIMIZERS, adamw, loss_of, tokens_of, writer

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
DTYPES += [torch.complex128]


@given(st.sampled_from(DTYPES), st.integers(0, 40), st.sampled_from([0, 65530, 131072]), st.data())
def test_fingerprints_of_ranges_add_up(dtype: torch.dtype, numel: int, start: int, data: st.DataObject) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).mul_(100).to(dtype)
    cut = data.draw(st.integers(0, numel))
    parts = fingerprint_of_range(values[:cut], start) + fingerprint_of_range(values[cut:], start + cut)
    assert parts % (1 << 64) == fingerprint_of_range(values, start)


@given(st.sampled_from(DTYPES), st.sampled_from([(3, 4, 2), (3, 30000), (0, 3), (2, 3, 12000)]), st.data())
def test_fingerprints_of_rows_add_up(dtype: torch.dtype, shape: tuple[int, ...], data: st.DataObject) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(100).to(dtype)
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[dim]))
    first, rest = values.tensor_split([cut], dim)
    parts = fingerprint_of_rows(first, dim, 0, shape[dim]) + fingerprint_of_rows(rest, dim, cut, shape[dim])
    assert parts % (1 << 64) == fingerprint_of_range(values, 0)


@given(st.integers(0, 31), st.integers(0, 3), st.integers(1, 3))
def test_every_bit_and_every_place_counts(bit: int, place: int, by: int) -> None:
    values = torch.tensor([1.0, -2.0, 3.0, 0.0])
    changed = values.clone()
    changed.view(torch.int32)[place] ^= -(1 << 31) if bit == 31 else 1 << bit
    assert fingerprint_of_range(changed, 0) != fingerprint_of_range(values, 0)
    assert fingerprint_of_range(values.roll(by), 0) != fingerprint_of_range(values, 0)
    assert fingerprint_of_range(values, by) != fingerprint_of_range(values, 0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_depends_neither_on_ranks_nor_on_forms(ranks: RankPool, optimizer: str) -> None:
    """Of weights that were stepped with the same gradients, which no rank's order of additions has touched."""
    forms = [form for form in FORMS if (form, optimizer) != ("flat", "Muon")]
    found = {one for world_size in (1, 3) for one in ranks(world_size).run(_stepped, forms, optimizer)}
    assert len(found) == 1


def _stepped(forms: list[str], optimizer: str) -> str:
    found = set()
    for form in forms:
        model = writer(FORMS[form]).eval()
        optim = OPTIMIZERS[optimizer](model)
        loss_of(model, tokens_of(0, 0)).backward()
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.25)
        optim.step()
        found.add(fsdp.fingerprint(model, optim))
    (one,) = found
    return one


def test_it_does_not_depend_on_the_dimension_that_is_sharded(ranks: RankPool) -> None:
    found = {one for world_size in (1, 3) for one in ranks(world_size).run(_along_dimensions)}
    assert len(found) == 1


def _along_dimensions() -> str:
    found = set()
    for dim in (None, 0, 1, -1):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(5, 300), nn.Conv2d(4, 3, (2, 5)), nn.Linear(2, 3, dtype=torch.complex64))
        model[0].counts = nn.Parameter(torch.arange(33).view(3, 11), requires_grad=False)
        model[1].mask = nn.Parameter(torch.arange(14).view(2, 7) % 3 > 0, requires_grad=False)
        if dim is None:
            model = fsdp.FullyShardedDataParallel(model, use_orig_params=True)
        else:
            fsdp.fully_shard(model, shard_placement_fn=partial(_placed, dim))
        whole = {"params": _is_first, "optimizer": torch.optim.SGD, "momentum": 0.5}
        optimizer = fsdp.OwnedOptimizer(
            model, [whole, {"optimizer": torch.optim.SGD, "momentum": 0.5, "sharded": True}]
        )
        for param in filter(lambda param: param.requires_grad, model.parameters()):
            param.grad = torch.ones_like(param)
        optimizer.step()
        found.add(fsdp.fingerprint(model, optimizer))
    (one,) = found
    return one


def _is_first(name: str, shape: torch.Size) -> bool:
    return name.startswith("0")


def _placed(dim: int, param: nn.Parameter) -> Shard:
    return Shard(dim if param.dim() > 1 else 0)


def test_it_changes_with_each_weight_buffer_and_state_wherever_that_is(ranks: RankPool) -> None:
    every = ranks(2).run(_change)
    assert every[0] == every[1]


def _change() -> list[str]:
    model = writer(FORMS["orig_params"])
    optim = adamw(model)
    loss_of(model, tokens_of(0, 0)).backward()
    optim.step()
    shards = [param for param in model.parameters() if param.numel()]
    state = optim.state[next(param for param in shards if param in optim.state)]
    changes: list[Callable[[], Any]] = [
        lambda: _flip(shards[0].data),
        lambda: _flip(shards[-1].data),
        lambda: _flip(state["exp_avg_sq"]),
        lambda: state["step"].add_(1),
        lambda: _flip(dict(model.named_buffers()).popitem()[1]),
    ]
    found = [fsdp.fingerprint(model, optim)]
    for change in changes:
        if dist.get_rank() == 1:
            change()
        found.append(fsdp.fingerprint(model, optim))
    assert len(set(found)) == len(found)
    assert fsdp.fingerprint(model) not in found  # without the optimizer
    return found


def _flip(tensor: Tensor) -> None:
    tensor.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


def test_replicas_count_once(ranks: RankPool) -> None:
    assert len({ranks(4).run(_of_hybrid)[0], ranks(2).run(_of_plain)[0]}) == 1


def _of_hybrid() -> str:
    return fsdp.fingerprint(writer(partial(FORMS["flat"], process_group=group_option("pair", 2, 2))))


def _of_plain() -> str:
    return fsdp.fingerprint(writer(FORMS["flat"]))


@on_ranks(2)
def test_it_does_not_depend_on_units() -> None:
    wrapper, found = fsdp.FullyShardedDataParallel, set[str]()
    for shard in (wrapper, lambda model: wrapper(wrapper(model)), _shard_as_group):
        torch.manual_seed(0)
        found.add(fsdp.fingerprint(shard(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2)))))
    assert len(found) == 1


def _shard_as_group(model: Any) -> nn.Module:
    fsdp.fully_shard([model[0], model[1]])
    return fsdp.fully_shard(model)


@on_ranks(2)
def test_it_is_of_shards_while_a_module_of_fully_shard_is_unsharded() -> None:
    """As after a forward without a backward, when ``parameters()`` lists unsharded ones."""
    model, optimizer = trained_rows(lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    expected = fsdp.fingerprint(model, optimizer)
    model(torch.ones(1, 4))
    assert {type(param) for param in model.parameters()} != {DTensor}
    assert fsdp.fingerprint(model, optimizer) == expected
    with torch.no_grad():  # which the unsharded ones do not follow
        for param, state in optimizer.state.items():
            param.add_(state["momentum_buffer"])
    changed = fsdp.fingerprint(model, optimizer)
    model(torch.ones(1, 4)).sum().backward()
    assert fsdp.fingerprint(model, optimizer) == changed != expected


@on_ranks(2)
def test_an_optimizer_on_one_rank_only_is_an_error_on_every_rank() -> None:
    model = fsdp.FullyShardedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters()) if dist.get_rank() == 1 else None
    with pytest.raises(RuntimeError, match="rank 0 has no optimizer and rank 1 has AdamW"):
        fsdp.fingerprint(model, optimizer)


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(TypeError, match="needs the outermost FullyShardedDataParallel"):
        fsdp.fingerprint(nn.Linear(2, 2))


@on_ranks(2)
def test_a_buffer_of_another_class_is_refused_by_its_name() -> None:
    mesh, module = init_device_mesh("cpu", (2,)), nn.Linear(2, 2)
    module.register_buffer("scale", distribute_tensor(torch.ones(2), mesh, [Replicate()]))
    with pytest.raises(NotImplementedError, match="the buffer scale is a DTensor"):
        fsdp.fingerprint(fsdp.fully_shard(module, mesh=mesh))
    module = nn.Linear(2, 2)
    module.register_buffer("scale", torch.ones(2).to_sparse())
    with pytest.raises(NotImplementedError, match=r"the buffer scale is a torch\.sparse_coo tensor"):
        fsdp.fingerprint(fsdp.fully_shard(module, mesh=mesh))
