"""`sync_module_states=True`: whatever the ranks have built, the model is that of the group's rank 0."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, MixedPrecision, auto_wrap, enable_wrap, module_wrap_policy
from fsdp.distributed.collectives import DirectExchange, communicator
from fsdp.distributed.communicator import LoneRank
from fsdp.engine.flat_param import ParamInfo
from fsdp.engine.ignored import Ignored
from fsdp.layers.module_states import take_states_of_first
from tests.helpers.equality import assert_same_state
from tests.helpers.models import Wrap, keep, nested_mlp, tiny_transformer
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import TOKENS, Alone, assert_parity, fully_sharded, sgd_with_momentum
from tests.helpers.ranks import RankPool
from tests.helpers.tensor_parallel import gpt, mesh_of, over_data

OPTIONS: list[dict[str, Any]] = [
    {},
    {"flatten_parameters": False},
    {"use_orig_params": True},
    {"offload": "cpu"},
    {"mixed_precision": True, "compute_dtype": torch.bfloat16},
]


@parametrize_pairs(at_most=7, world_size=[3, 1, 2], options=OPTIONS, nested=[True, False])
@on_ranks("world_size")
def test_pain_point_19_ranks_begin_with_the_values_of_rank_0(options: dict[str, Any], nested: bool) -> None:
    model = nested_mlp(fully_sharded(sync_module_states=True, **options), nested=nested, seed=dist.get_rank())
    model(torch.ones(2, 5))
    assert_same_state(model.state_dict(), nested_mlp(seed=0).state_dict())


def _tied(wrap: Wrap) -> nn.Module:
    """A model that every rank builds otherwise, if it is wrapped."""
    return tiny_transformer(wrap, tied=True, seed=0 if wrap is keep else dist.get_rank())


def test_tied_parameters_are_sent_once_and_stay_tied(ranks: RankPool) -> None:
    ranks(2).run(assert_parity, _tied, sgd_with_momentum, wrap=fully_sharded(sync_module_states=True), task=TOKENS)


@on_ranks(2)
def test_auto_wrap_passes_it_on() -> None:
    model = nested_mlp(seed=dist.get_rank())
    policy = module_wrap_policy({nn.Linear})
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, sync_module_states=True):
        model = FullyShardedDataParallel(auto_wrap(model, auto_wrap_policy=policy), sync_module_states=True)
    assert_same_state(model.state_dict(), nested_mlp(seed=0).state_dict())


# Frozen ones, buffers, and what is left alone


class Parts(nn.Module):
    """Frozen and trained parameters, buffers of several kinds, and a part to ignore; all of a rank's own values."""

    def __init__(self) -> None:
        super().__init__()
        own = float(dist.get_rank() + 1)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.apart = nn.BatchNorm1d(3)
        self.inner = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.zeros(4, 3).t())
        self.register_buffer("again", self.table)
        self.register_buffer("unsaved", torch.ones(2, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("flags", torch.tensor([own == 1, own == 2]))
        self.register_buffer("nothing", torch.empty(0))
        for tensor in (*self.parameters(), *self.buffers()):
            if tensor.dtype != torch.bool:
                tensor.data.fill_(own)


def values(module: nn.Module) -> dict[str, float]:
    """What each parameter and buffer is filled with."""
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: tensor.flatten()[0].item() for name, tensor in state.items() if tensor.numel() and name != "flags"}


@pytest.mark.parametrize("options", [{}, {"mixed_precision": MixedPrecision(buffer_dtype=torch.bfloat16)}], ids=str)
@on_ranks(2)
def test_buffers_and_frozen_parameters_are_sent_too(options: dict[str, Any]) -> None:
    module = Parts()
    model = FullyShardedDataParallel(module, sync_module_states=True, **options)
    with model.summon_full_params():
        assert set(values(module).values()) == {1.0}
        assert module.flags.tolist() == [True, False]
        assert module.again is module.table


@on_ranks(2)
def test_buffers_whose_elements_share_memory_or_are_conjugated() -> None:
    own = dist.get_rank() + 1
    module = nn.Linear(3, 3)
    module.register_buffer("expanded", torch.full((3, 1), float(own)).expand(2, 3, 4))
    module.register_buffer("conjugated", torch.full((2,), complex(own, own)).conj())
    module.register_buffer("negated", torch.full((1,), complex(own, own)).conj().imag)
    FullyShardedDataParallel(module, sync_module_states=True)
    buffers: Any = dict(module.named_buffers())
    assert buffers["expanded"].unique().tolist() == [1]
    assert buffers["expanded"].stride() == (0, 1, 0)
    assert buffers["conjugated"].tolist() == 2 * [1 - 1j]
    assert buffers["negated"].tolist() == [-1]


@on_ranks(2)
def test_a_sparse_buffer_is_named_before_anything_is_sent() -> None:
    module = nn.Linear(3, 3)
    module.register_buffer("adjacency", torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match=r"sync_module_states=True: adjacency is a torch\.sparse_coo tensor, .*indices"):
        FullyShardedDataParallel(module, sync_module_states=True)
    module.adjacency = torch.eye(3) if dist.get_rank() else module.adjacency
    with pytest.raises(RuntimeError, match=r"adjacency\[3, 3\] torch\.float32 torch\.sparse_coo"):  # on every rank
        FullyShardedDataParallel(module, sync_module_states=True)
    module.adjacency = torch.eye(3)
    FullyShardedDataParallel(module, sync_module_states=True)


@on_ranks(2)
def test_what_is_ignored_is_left_alone() -> None:
    module = Parts()
    model = FullyShardedDataParallel(
        module, sync_module_states=True, ignored_modules=[module.apart], ignored_parameters=[module.norm.weight]
    )
    with model.summon_full_params():
        own = {name for name in values(module) if name.startswith("apart.") or name == "norm.weight"}
        assert {name for name, value in values(module).items() if value == dist.get_rank() + 1} >= own
        assert {value for name, value in values(module).items() if name not in own} == {1.0}


@on_ranks(2)
def test_inner_wrappers_have_an_argument_of_their_own() -> None:
    module = Parts()
    module.inner = FullyShardedDataParallel(module.inner, Alone())  # of a group of one, so values may differ
    model = FullyShardedDataParallel(module, sync_module_states=True)
    with model.summon_full_params():
        own = {name for name in values(module) if name.startswith("inner.")}
        assert {value for name, value in values(module).items() if name in own} == {dist.get_rank() + 1.0}
        assert {value for name, value in values(module).items() if name not in own} == {1.0}


@on_ranks(2)
def test_without_it_nothing_is_sent() -> None:
    module = Parts()
    FullyShardedDataParallel(module)
    assert module.norm.running_mean[0].item() == dist.get_rank() + 1


# Groups


@on_ranks(4)
def test_values_are_those_of_the_groups_rank_0() -> None:
    groups = [dist.new_group([1, 3]), dist.new_group([2, 0])]
    mine = dist.get_rank() % 2 == 0
    model = nested_mlp(fully_sharded(process_group=groups[mine], sync_module_states=True), seed=dist.get_rank())
    assert_same_state(model.state_dict(), nested_mlp(seed=0 if mine else 1).state_dict())


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
@on_ranks(4)
def test_parts_of_dtensors_come_from_ranks_that_have_the_same_parts(options: dict[str, Any]) -> None:
    mesh = mesh_of(2, 2)
    first = mesh["dp"].get_local_rank() == 0
    model = gpt(over_data(mesh, sync_module_states=True, **options), mesh=mesh, seed=0 if first else 1)
    assert_same_state(model.state_dict(), gpt().state_dict())


# Memory, and what goes wrong


@on_ranks(2)
def test_a_rank_needs_no_more_than_it_has() -> None:
    sent: list[int] = []

    def broadcast(comm: DirectExchange, tensor: Tensor, do: Any = DirectExchange.broadcast) -> Any:
        sent.append(tensor.data_ptr())
        return do(comm, tensor)

    plain = nested_mlp(seed=dist.get_rank())
    places = [param.data_ptr() for param in plain.parameters()]
    with mock.patch.object(DirectExchange, "broadcast", broadcast):
        FullyShardedDataParallel(plain, sync_module_states=True)
    assert sorted(sent) == sorted(places)


@on_ranks(2)
def test_what_has_no_memory_on_other_ranks_gets_some() -> None:
    module = nn.BatchNorm1d(3, device="cpu" if dist.get_rank() == 0 else "meta")
    module.running_mean = torch.full((3,), 5.0, device=module.weight.device)
    found = {param: [ParamInfo(module, name, name)] for name, param in module.named_parameters()}
    comms = [communicator(dist.group.WORLD, torch.device("cpu"))]
    changed = take_states_of_first(module, found, Ignored(), comms, torch.device("cpu"))
    assert list(changed) == list(module.parameters())
    expected = {"weight": 1, "bias": 0, "running_mean": 5, "running_var": 1, "num_batches_tracked": 0}
    assert {name: value.unique().item() for name, value in module.state_dict().items()} == expected


@pytest.mark.parametrize("options", [{"use_orig_params": True}, {"flatten_parameters": False}], ids=str)
@on_ranks(2)
def test_parameters_without_memory_keep_what_users_have_set_on_them(options: dict[str, Any]) -> None:
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        module: Any = nn.Linear(3, 3, dtype=torch.bfloat16)
    module.bias.is_norm = True
    module.weight.grad_dtype = module.bias.grad_dtype = torch.float32
    model = FullyShardedDataParallel(module, sync_module_states=True, **options)
    assert [getattr(param, "is_norm", False) for param in model.parameters()] == [False, True]
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {torch.float32}


@on_ranks(2)
def test_rank_0_needs_values() -> None:
    module = nn.BatchNorm1d(3)
    if dist.get_rank() == 0:
        module.running_mean = torch.empty(3, device="meta")
    with pytest.raises(RuntimeError, match="running_mean is on the meta device on rank 0"):
        FullyShardedDataParallel(module, sync_module_states=True)


@on_ranks(3)
def test_a_rank_that_has_built_another_model_is_named() -> None:
    module = nn.Linear(5, 4 if dist.get_rank() == 2 else 3)
    with pytest.raises(
        RuntimeError, match=r"Unit 'Linear' has .*weight\[3, 5\].* on rank 0 and .*weight\[4, 5\].*rank 2"
    ):
        FullyShardedDataParallel(module, sync_module_states=True)


def test_in_a_world_of_one_there_is_nobody_to_ask() -> None:
    with mock.patch.object(LoneRank, "broadcast") as broadcast:
        FullyShardedDataParallel(nested_mlp(), Alone(), sync_module_states=True)
    assert not broadcast.called
