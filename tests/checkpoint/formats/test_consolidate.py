"""Consolidating: all ranks' shards, out of files and without any process group, are the plain model's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, MixedPrecision
from tests.helpers.equality import assert_same
from tests.helpers.local_shards import awkward, consolidated, different, through_files
from tests.helpers.models import nested_mlp, tiny_transformer
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.parity import fully_sharded
from tests.helpers.ranks import RankPool

FORMS: dict[str, dict[str, Any]] = {
    "flat": {},
    "orig": {"use_orig_params": True},
    "unflattened": {"flatten_parameters": False},
    "grouped": {"group_by": lambda name, param: name.endswith("bias")},
}
HOMES = ["memory", "cpu", "disk"]
PRECISIONS: dict[str, Any] = {
    "own": False,
    "mixed": MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16),
}
MODELS = {"awkward": awkward, "mlp": nested_mlp}


def options_of(form: str, home: str, precision: str, folder: Path) -> dict[str, Any]:
    offload = {} if home == "memory" else {"offload": home}
    where = {"offload_folder": folder} if home == "disk" else {}
    return {**FORMS[form], **offload, **where, "mixed_precision": PRECISIONS[precision]}


# Round trips


@parametrize_cases(
    world_size=[3, 1, 2, 4], form=list(FORMS), home=HOMES, precision=list(PRECISIONS), model=list(MODELS)
)
@on_ranks("world_size")
def test_every_form_of_state_becomes_every_other_bit_for_bit(tmp_path: Path, case: Case) -> None:
    make: Any = MODELS[case.model]
    options = options_of(case.form, case.home, case.precision, tmp_path)
    plain = make().state_dict()
    model = make(fully_sharded(**options))
    shards = through_files(model, tmp_path)
    # local -> plain, and into an unsharded model
    assert_same(consolidated(shards), plain)
    unsharded = make(seed=1)
    unsharded.load_state_dict(consolidated(shards))
    assert_same(unsharded.state_dict(), plain)
    # local -> local -> full
    other: Any = different(make, **options)
    other.load_local_state_dict(shards[0][dist.get_rank()])
    assert_same(other.state_dict(), plain)
    # plain -> full -> local
    third: Any = different(make, **options)
    third.load_state_dict(consolidated(shards))
    assert_same(third.local_state_dict(), shards[0][dist.get_rank()])


def test_shards_of_three_ranks_become_those_of_two(ranks: RankPool, tmp_path: Path) -> None:
    ranks(3).run(_save_awkward, tmp_path)
    ranks(2).run(_load_consolidated, tmp_path)


def _save_awkward(folder: Path) -> None:
    through_files(awkward(fully_sharded()), folder)


def _load_consolidated(folder: Path) -> None:
    read = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(3)]
    model: Any = different(awkward, use_orig_params=True)
    model.load_state_dict(consolidated(([one[0] for one in read], [one[1] for one in read])))
    assert_same(model.state_dict(), awkward().state_dict())


def test_the_only_rank_s_parameters_may_have_their_shapes() -> None:
    """As FairScale leaves them if there is nothing to cut."""
    value = torch.arange(6.0).view(2, 3)
    described = {"names": ["weight"], "shapes": [value.shape], "numels": [6], "padding": 0}
    entry = {
        "fsdp_path": "a",
        "params": {"weight": described},
        "no_broadcast_optim_state": False,
        "shared_param_info": [],
    }
    metadata = {"param_metadata": [entry], "buffer_names": []}
    assert_same(consolidated(([{"a.weight": value}], [metadata])), {"a.weight": value})


# Ties


class Paths(nn.Module):
    """A unit in two places, and a module in two places of a unit."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.one = wrap(nn.Linear(3, 2))
        self.other = self.one
        self.left = nn.Linear(2, 2)
        self.right = self.left


@pytest.mark.parametrize("form", ["flat", "orig", "unflattened"])
@on_ranks(2)
def test_a_module_in_several_places_is_under_each_name(tmp_path: Path, form: str) -> None:
    torch.manual_seed(0)
    plain = Paths(lambda module: module).state_dict()
    torch.manual_seed(0)
    wrap = fully_sharded(**FORMS[form])
    weights, metadata = through_files(wrap(Paths(wrap)), tmp_path)
    copies = [{key: value.clone() for key, value in one.items()} for one in weights]  # no names share memory
    for shards in ((weights, metadata), (copies, metadata)):
        whole = consolidated(shards)
        assert_same(whole, plain)
        assert whole["one.weight"] is whole["other.weight"]


def test_ties_of_an_inner_unit_keep_its_path(ranks: RankPool, tmp_path: Path) -> None:
    """FairScale's reader loses them."""
    metadata, whole = ranks(2).run(_inner_ties, tmp_path)[0]
    assert metadata["param_metadata"][1]["fsdp_path"] == "inner"
    assert metadata["param_metadata"][1]["shared_param_info"] == [("first.weight", "second.weight")]
    assert torch.equal(whole["inner.first.weight"], whole["inner.second.weight"])


def _inner_ties(folder: Path) -> Any:
    shards = through_files(awkward(fully_sharded()), folder)
    whole = consolidated(shards)
    assert whole["inner.first.weight"] is whole["inner.second.weight"]
    assert whole["entry.weight"] is whole["exit.weight"]
    return shards[1][0], {key: value for key, value in whole.items() if isinstance(value, Tensor)}


@on_ranks(2)
def test_a_parameter_that_wrappers_share_is_one_tensor(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    expected = nn.Sequential(first, second, nn.Linear(3, 3))
    plain = {key: value.clone() for key, value in expected.state_dict().items()}
    wrap = fully_sharded(flatten_parameters=False)
    one: Any = wrap(first)
    two: Any = wrap(second)
    two.append_shared_param(one.module.weight)
    whole = consolidated(through_files(wrap(nn.Sequential(one, two, expected[2])), tmp_path))
    assert_same(whole, plain)
    assert whole["0.weight"] is whole["1.weight"]


# Metadata


def test_pieces_have_an_entry_each_and_no_padding(ranks: RankPool) -> None:
    (metadata, *_) = ranks(3).run(_metadata_of_pieces)
    entry = metadata["param_metadata"][0]["params"]["entry.weight"]
    assert entry == {"names": ["entry.weight"], "shapes": [torch.Size([7, 5])], "numels": [35], "padding": 0}


def _metadata_of_pieces() -> Any:
    return nested_mlp(fully_sharded(use_orig_params=True)).local_metadata_dict()  # type: ignore[operator]


def test_whatever_is_saved_and_not_sharded_counts_as_a_buffer(ranks: RankPool) -> None:
    buffers, ignored = ranks(2).run(_beside_shards)[0]
    norm = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert sorted(buffers) == sorted([*norm, "table", "exit.same", "inner.second.steps", "_extra_state"])
    assert ignored == ["1.weight", "1.bias"]


def _beside_shards() -> Any:
    layers = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    ignoring = FullyShardedDataParallel(layers, ignored_modules=[layers[1]])
    buffers = awkward(fully_sharded()).local_metadata_dict()["buffer_names"]  # type: ignore[operator]
    return buffers, ignoring.local_metadata_dict()["buffer_names"]


# What is made of them


@on_ranks(2)
def test_nothing_given_is_changed_or_shared_with_the_result(tmp_path: Path) -> None:
    weights, metadata = through_files(awkward(fully_sharded()), tmp_path)
    given = {id(value.untyped_storage()) for one in weights for value in one.values() if isinstance(value, Tensor)}
    before = repr((weights, metadata))
    for value in consolidated((weights, metadata)).values():
        if isinstance(value, Tensor):
            value.zero_()
            assert id(value.untyped_storage()) not in given
    assert repr((weights, metadata)) == before


@on_ranks(2)
def test_each_parameter_has_memory_of_its_own(tmp_path: Path) -> None:
    whole = consolidated(through_files(tiny_transformer(fully_sharded()), tmp_path))
    for name, value in whole.items():
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), name


@on_ranks(2)
def test_buffers_are_left_out_if_asked(tmp_path: Path) -> None:
    shards = through_files(awkward(fully_sharded()), tmp_path)
    assert set(consolidated(shards, with_module_buffers=False)) == {name for name, _ in _named_everywhere(awkward())}


def _named_everywhere(model: nn.Module) -> Any:
    return model.named_parameters(remove_duplicate=False)


@on_ranks(2)
def test_shards_in_another_order_are_refused(tmp_path: Path) -> None:
    weights, metadata = through_files(nested_mlp(fully_sharded()), tmp_path)
    with pytest.raises(ValueError, match="'flat_param_0': rank 1 is shard 0 of 2, after shard 1 of 2"):
        consolidated((weights[::-1], metadata))
