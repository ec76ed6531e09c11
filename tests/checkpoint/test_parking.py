"""A model that is parked gives its memory away, and has the same bits again afterwards."""

from __future__ import annotations

import copy
import gc
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel, OwnedOptimizer, ShardingStrategy, fully_shard
from fsdp.engine.placeholder import Placeholder
from tests.helpers.equality import assert_same, assert_same_state
from tests.helpers.forms import full_state
from tests.helpers.hybrid import mesh_of
from tests.helpers.models import Wrap, keep, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.owned import backward, is_matrix, talk, under_fully_shard
from tests.helpers.parity import adamw, fully_sharded
from tests.helpers.ranks import RankError, RankPool

flat = FullyShardedDataParallel


def mixed(module: nn.Module) -> nn.Module:
    """Flat units inside of a unit that lists original parameters."""
    return flat(module, use_orig_params=not isinstance(module, nn.Sequential))


def owned(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": is_matrix, "optimizer": torch.optim.Muon, "lr": 0.02},
        {"optimizer": torch.optim.AdamW, "sharded": True},
    ]
    return OwnedOptimizer(model, groups)


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model.parameters())


KINDS: dict[str, tuple[Wrap, Callable[[nn.Module], torch.optim.Optimizer]]] = {
    "flat": (flat, stepped),
    "orig": (partial(flat, use_orig_params=True), stepped),
    "rows": (under_fully_shard, stepped),
    "mixed": (mixed, stepped),
    "kept": (partial(flat, reshard_after_forward=False), stepped),
    "offloaded": (partial(flat, offload="cpu"), stepped),
    "zero 1": (partial(flat, sharding_strategy=ShardingStrategy.SHARD_OPTIM), stepped),
    "replicated": (partial(flat, sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True), stepped),
    "owned, flat": (partial(flat, use_orig_params=True), owned),
    "owned, rows": (under_fully_shard, owned),
}


def nbytes_of(tensors: Any) -> int:
    """The bytes that tensors, found in the memory of this process, take together."""
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors if each is not None}
    return sum(storages.values())


def local(tensor: Any) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


@pytest.mark.parametrize("kind", list(KINDS))
@on_ranks(2)
def test_training_with_rounds_of_parking_has_the_bits_of_training_without(kind: str, tmp_path: Path) -> None:
    _train_with_rounds_of_parking(*KINDS[kind], tmp_path)


@pytest.mark.parametrize("strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_OPTIM])
@on_ranks(4)
def test_replicas_of_shards_are_parked(strategy: ShardingStrategy, tmp_path: Path) -> None:
    wrap = partial(flat, process_group=mesh_of(2, 2), sharding_strategy=strategy)
    _train_with_rounds_of_parking(wrap, stepped, tmp_path)


def _train_with_rounds_of_parking(
    wrap: Wrap, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], folder: Path
) -> None:
    torch.set_default_dtype(torch.float64)

    def train(round_trip: Callable[[nn.Module, torch.optim.Optimizer], None]) -> tuple[dict[str, Tensor], Any]:
        model = talk(wrap)
        optimizer = make_optimizer(model)
        for step in range(2):
            round_trip(model, optimizer)
            backward(model, step)
            round_trip(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()(torch.zeros(1, 2, dtype=torch.int64))  # where some units stay unsharded
        round_trip(model, optimizer)
        return full_state(model), optimizer.state_dict()["state"]

    def parked(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        grads = [param.grad for param in params]
        shown = [grad for grad in grads if not isinstance(grad, Placeholder)]
        with fsdp.parked(model, optimizer, to=folder) as nbytes:
            assert nbytes > 0
            states = [value for state in optimizer.state.values() for value in state.values()]
            left = nbytes_of(map(local, (*params, *shown, *states)))
            assert left == 0
        assert {id(param) for param in model.parameters()} <= {id(param) for param in params}
        assert all(param.grad is grad for param, grad in zip(params, grads, strict=True))

    found, expected = train(parked), train(lambda model, optimizer: None)
    assert_same_state(found[0], expected[0])
    assert_same(found[1], expected[1])
    assert not list(folder.glob(f"parked-rank-{dist.get_rank()}-*"))


@pytest.mark.parametrize("form", ["flat", "orig", "rows"])
@on_ranks(2)
def test_accumulated_gradients_are_parked_and_a_refused_forward_keeps_them(form: str, tmp_path: Path) -> None:
    def train(*, is_parked: bool) -> dict[str, Tensor]:
        model = talk(KINDS[form][0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            if form == "rows":
                model.set_requires_gradient_sync(step == 2)
                backward(model, step)
            elif step < 2:
                with model.no_sync():
                    backward(model, step)
            else:
                backward(model, step)
            if is_parked:
                with fsdp.parked(model, optimizer, to=tmp_path), pytest.raises(RuntimeError, match="unpark"):
                    backward(model, step)
        optimizer.step()
        return full_state(model)

    assert_same_state(train(is_parked=True), train(is_parked=False))


@pytest.mark.parametrize("kind", ["flat", "orig", "rows"])
@on_ranks(2)
def test_all_uses_of_a_parked_model_are_errors_that_name_the_remedy(kind: str, tmp_path: Path) -> None:
    model = talk(KINDS[kind][0])
    optimizer = stepped(model)
    backward(model, 0)
    optimizer.step()
    before = full_state(model)
    loss = model(torch.zeros(1, 2, dtype=torch.int64)).sum()
    param = max(model.parameters(), key=lambda each: local(each).numel())
    state = optimizer.state[param]["exp_avg"]
    uses: list[Callable[[], Any]] = [
        partial(backward, model, 1),
        loss.backward,
        optimizer.step,
        partial(model.load_state_dict, before),
        partial(nn.utils.clip_grad_norm_, model.parameters(), 1.0),
        lambda: param + 1,
        lambda: param.data,
        lambda: param.grad.sum(),  # type: ignore[union-attr]
        lambda: state.mul_(2),
        lambda: torch._foreach_mul_([state], 2),
        lambda: copy.deepcopy(model),
        model.half,
    ]
    fsdp.park(model, optimizer, to=tmp_path)
    for use in uses:
        with pytest.raises(RuntimeError, match=r"call fsdp\.unpark\(model\)"):
            use()
    assert "parked" in repr(param)
    assert "parked" in repr(state)
    assert param.dtype is torch.float32
    fsdp.unpark(model)
    assert_same_state(full_state(model), before)
    backward(model, 1)
    optimizer.step()


@pytest.mark.parametrize("kind", ["flat", "orig", "rows"])
@on_ranks(2)
def test_a_parked_average_is_neither_updated_nor_applied(kind: str, tmp_path: Path) -> None:
    model = talk(KINDS[kind][0])
    ema = fsdp.EMA(model, 0.5)
    ema.update_parameters(model)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    own, average = full_state(model), full_state(ema.module)
    for parked in (ema.module, model):
        with fsdp.parked(parked, to=tmp_path):
            with pytest.raises(RuntimeError, match=r"EMA.update_parameters\(\): the parameters of .* are parked"):
                ema.update_parameters(model)
            with pytest.raises(RuntimeError, match=r"EMA.applied_to\(\): the .* parked"), ema.applied_to(model):
                pass
        assert_same_state(full_state(model), own)
        assert_same_state(full_state(ema.module), average)
    assert int(ema.n_averaged) == 1


@on_ranks(2)
def test_parts_are_parked_alone(tmp_path: Path) -> None:
    model = talk(flat)
    optimizer = stepped(model)
    backward(model, 0)
    optimizer.step()
    with fsdp.parked(model, optimizer, to=tmp_path, parts=["optimizer"]):
        backward(model, 1)
        model.state_dict()
        optimizer.step()
        other = torch.optim.SGD(model.parameters(), lr=0.0)
        other.step()  # whose state is not parked
    optimizer.step()
    with fsdp.parked(model, to=tmp_path, parts="gradients"), torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="parts must be some of parameters, gradients, optimizer; got moments"):
        fsdp.park(model, parts=["moments"])
    with pytest.raises(ValueError, match="needs the argument `optimizer`"):
        fsdp.park(model, parts=["optimizer"])
    with pytest.raises(TypeError, match=r"fsdp.park needs the outermost"):
        fsdp.park(nn.Linear(1, 1))


@pytest.mark.parametrize("kind", ["flat", "orig", "rows", "kept", "replicated"])
@on_ranks(2)
def test_the_graph_of_a_forward_before_is_refused_on_all_ranks(kind: str, tmp_path: Path) -> None:
    """Also where a rank gets memory at the same addresses again, as it does if nothing was freed on the host."""
    model = talk(KINDS[kind][0])
    for place in ("host", tmp_path):
        loss = model(torch.zeros(1, 2, dtype=torch.int64)).sum()
        with fsdp.parked(model, to=place):
            pass
        with pytest.raises(RuntimeError, match=r"between forward and backward|modified by an inplace operation"):
            loss.backward()
    backward(model, 0)


@on_ranks(2)
def test_parking_twice_changes_nothing_and_contexts_bring_back_only_their_own(tmp_path: Path) -> None:
    model = talk(flat)
    optimizer = stepped(model)
    backward(model, 0)
    optimizer.step()
    before = full_state(model)
    assert fsdp.park(model, to=tmp_path) > 0
    assert fsdp.park(model, to=tmp_path) == 0
    with fsdp.parked(model, optimizer, to=tmp_path) as nbytes:
        assert nbytes == sum(each.nbytes for state in optimizer.state.values() for each in state.values())
        assert_same_state(full_state(model), before)
    assert optimizer.state_dict()["state"][0]["exp_avg"].sum() is not None
    with pytest.raises(RuntimeError, match=r"parameters of root .* are parked"):
        backward(model, 1)
    fsdp.unpark(model)
    fsdp.unpark(model)
    assert_same_state(full_state(model), before)
    with fsdp.parked(model, optimizer, to=tmp_path):
        fsdp.unpark(model)
        assert_same_state(full_state(model), before)
    assert_same_state(full_state(model), before)


@pytest.mark.parametrize("kind", ["flat", "rows", "owned, rows"])
@on_ranks(2)
def test_an_optimizer_that_was_loaded_while_it_was_parked_is_parked_again(kind: str, tmp_path: Path) -> None:
    """From memory that cannot be freed: of torch.load, and of the file of the parked state itself."""
    wrap, new_optimizer = KINDS[kind]
    model = talk(wrap)
    optimizer = new_optimizer(model)
    backward(model, 0)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / f"{dist.get_rank()}.pt")
    expected = fsdp.fingerprint(model, optimizer)
    for source in "file", "itself":
        with fsdp.parked(model, optimizer, to=tmp_path / "parked"):
            loaded = torch.load(tmp_path / f"{dist.get_rank()}.pt") if source == "file" else optimizer.state_dict()
            optimizer.load_state_dict(loaded)
            fsdp.park(model, optimizer, to=tmp_path / "parked")
            assert fsdp.fingerprint(model, optimizer) == expected
        fsdp.unpark(model)
        assert fsdp.fingerprint(model, optimizer) == expected
    assert not list((tmp_path / "parked").iterdir())


@on_ranks(2)
def test_ranks_may_have_parked_different_tensors(tmp_path: Path) -> None:
    model = FullyShardedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp.park(model, optimizer, to=tmp_path)
    if dist.get_rank():
        optimizer.state[next(iter(model.parameters()))]["average"] = torch.ones(2)
    with fsdp.parked(model, optimizer, to=tmp_path) as nbytes:
        assert nbytes == 8 * dist.get_rank()
    fsdp.unpark(model)
    optimizer.step()


@on_ranks(2)
def test_after_an_exception_inside_the_model_is_usable(tmp_path: Path) -> None:
    model = talk(flat)
    optimizer = stepped(model)
    backward(model, 0)
    optimizer.step()
    before = full_state(model)
    with pytest.raises(KeyError), fsdp.parked(model, optimizer, to=tmp_path):
        raise KeyError("rollout")
    assert_same_state(full_state(model), before)
    backward(model, 1)
    optimizer.step()


@on_ranks(2)
def test_an_error_on_one_rank_leaves_all_ranks_as_they_were(tmp_path: Path) -> None:
    model = talk(flat)
    optimizer = stepped(model)
    backward(model, 0)
    optimizer.step()
    before, rank = full_state(model), dist.get_rank()
    for call in (fsdp.park, fsdp.unpark):
        with pytest.raises((ValueError, fsdp.OtherRankError), match="got moments"):
            call(model, parts=["moments"] if rank else None)
    (tmp_path / "file").touch()
    with pytest.raises((OSError, RuntimeError), match="rank 1 could not park the model" if rank == 0 else "file"):
        fsdp.park(model, optimizer, to=tmp_path / ("file" if rank else "folder"))
    assert not list(tmp_path.glob(f"folder/parked-rank-{rank}-*"))
    assert_same_state(full_state(model), before)
    if rank:
        seen = next(iter(optimizer.state.values()))["exp_avg"].numpy()  # noqa: F841
    with pytest.raises((ValueError, RuntimeError), match=r"optimizer\.0\.exp_avg cannot be parked, because its memory"):
        fsdp.park(model, optimizer, to=tmp_path)
    assert fsdp.park(model, to=tmp_path / "folder") > 0
    mine = next(each for each in (tmp_path / "folder").iterdir() if each.name.startswith(f"parked-rank-{rank}-"))
    if rank:
        mine.rename(tmp_path / "away")
    with pytest.raises((OSError, RuntimeError), match="rank 1 could not unpark" if rank == 0 else "No such file"):
        fsdp.unpark(model)
    with pytest.raises(RuntimeError, match="are parked"):
        backward(model, 1)
    if rank:
        (tmp_path / "away").rename(mine)
    fsdp.unpark(model)
    assert_same_state(full_state(model), before)


@dataclass
class _Nested:
    """State of an optimizer as users may have it."""

    factors: list[Any]


class _Unusual(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"scales": torch.tensor([0.5, 0.5])})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["nested"] = _Nested([(param.detach() * 2,), {"a": param.detach()[:3].clone()}])
                state["alias"] = state["nested"].factors[0][0][1:]
            state["alias"].add_(1)
            param.add_(state["nested"].factors[0][0], alpha=-0.1)


@on_ranks(2)
def test_state_is_found_wherever_it_is_nested_and_keeps_its_aliases(tmp_path: Path) -> None:
    def train(*, is_parked: bool) -> dict[str, Tensor]:
        model = nested_mlp(fully_sharded())
        optimizer = _Unusual(model.parameters())
        for _ in range(3):
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            if is_parked:
                with fsdp.parked(model, optimizer, to=tmp_path, parts=["optimizer"]):
                    nested = [state["nested"].factors for state in optimizer.state.values()]
                    assert nbytes_of([*(each[0][0] for each in nested), *(each[1]["a"] for each in nested)]) == 0
                    assert nbytes_of([optimizer.param_groups[0]["scales"]]) == 0
        return full_state(model)

    assert_same_state(train(is_parked=True), train(is_parked=False))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from Linux's /proc")
@on_ranks(2)
def test_a_folder_frees_resident_memory_and_nothing_grows_over_many_rounds(tmp_path: Path) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    gc.collect()
    before = resident_bytes()
    with fsdp.parked(model, optimizer, to=tmp_path) as nbytes:
        assert nbytes >= 4 * 2048 * 2048 * 4  # weights, gradients and two moments of half of two layers
        assert before - resident_bytes() > 0.9 * nbytes
    rounds = nested_mlp(fully_sharded())
    for number in range(40):
        with fsdp.parked(rounds, to=tmp_path):
            pass
        if number == 5:
            kept = resident_bytes(), _open_files(), _storages()
    assert resident_bytes() - kept[0] < 1 << 20
    assert (_open_files(), _storages()) == kept[1:]
    assert not list(tmp_path.glob(f"parked-rank-{dist.get_rank()}-*"))


def _open_files() -> int:
    """The number of open files, without the sockets of other threads."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(name.startswith("/") for name in found)


def _storages() -> int:
    gc.collect()
    return sum(isinstance(each, Tensor) for each in gc.get_objects())


def _die_while_it_comes_back(folder: Path) -> None:
    model = nested_mlp(fully_sharded())
    optimizer = adamw(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    rank = dist.get_rank()
    shards = {one.name: one.flat_param.detach().clone() for one in fsdp.flat_param_handles(model)}
    torch.save((shards, [state["exp_avg"] for state in optimizer.state.values()]), folder / f"expected-{rank}.pt")
    fsdp.park(model, optimizer, to=folder / "parked")
    done: list[Any] = []
    from fsdp.checkpoint.safetensors import SafetensorsFiles

    read = SafetensorsFiles.read

    def read_until_killed(self: Any, *args: Any) -> None:
        read(self, *args)
        done.append(args)
        if len(done) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    SafetensorsFiles.read = read_until_killed  # type: ignore[method-assign]
    dist.barrier()
    fsdp.unpark(model)


def _recover(folder: Path) -> None:
    """Load what a killed training has left, as docs/memory.md says."""
    rank = dist.get_rank()
    shards, moments = torch.load(folder / f"expected-{rank}.pt")
    model = nested_mlp(fully_sharded())
    model(torch.ones(2, 5))
    kept: dict[str, Tensor] = {}
    for file in (folder / "parked").glob(f"parked-rank-{rank}-*.safetensors"):
        kept |= load_file(file)
    for handle in fsdp.flat_param_handles(model):
        with torch.no_grad():
            handle.flat_param.copy_(kept[f"parameters.{handle.name}"])
        assert_same(handle.flat_param.detach(), shards[handle.name])
    assert_same([kept[f"optimizer.{number}.exp_avg"] for number in range(len(moments))], moments)


def test_a_process_that_is_killed_while_it_comes_back_loses_nothing(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError):
        ranks(2, grace=1).run(_die_while_it_comes_back, tmp_path)
    ranks(2).run(_recover, tmp_path)


@on_ranks(2)
def test_a_checkpoint_leaves_the_memory_of_shards_freeable(tmp_path: Path) -> None:
    model = nested_mlp(fully_sharded())
    optimizer = adamw(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    fsdp.save(tmp_path / "saved", model, optimizer)
    fsdp.load(tmp_path / "saved", model, optimizer)
    expected = full_state(model)
    with fsdp.parked(model, optimizer, to=tmp_path / "parked"):
        pass
    assert_same_state(full_state(model), expected)


@on_ranks(2)
def test_shards_on_disk_stay_there(tmp_path: Path) -> None:
    model: Any = fully_sharded(offload="disk", offload_folder=tmp_path / "offload")(nested_mlp(keep))
    optimizer = adamw(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    before = full_state(model)
    with fsdp.parked(model, optimizer, to=tmp_path / "parked") as nbytes:
        assert nbytes < sum(param.nbytes for param in model.parameters())
        with pytest.raises(RuntimeError, match="unpark"):
            model(torch.ones(2, 5))
        fsdp.park(model, optimizer, to=tmp_path / "parked")
    assert_same_state(full_state(model), before)


@on_ranks(2)
def test_a_model_is_parked_between_forwards_of_resident_units(tmp_path: Path) -> None:
    model = talk(flat)
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    with torch.no_grad(), fsdp.resident(model):
        expected = model(tokens)
        with fsdp.parked(model, to=tmp_path):
            assert nbytes_of(handle.unsharded.full for handle in fsdp.flat_param_handles(model)) == 0
        assert torch.equal(model(tokens), expected)


class Quantised(nn.Module):
    """A weight in integers with a scale, neither of which is trained, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(-7, 8, dtype=torch.int8).view(3, 5), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor([0.5]), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, self.codes * self.scale, self.bias)


@pytest.mark.parametrize("form", ["flat", "orig", "rows"])
@on_ranks(1, 2)
def test_parameters_of_bytes_are_parked(form: str, tmp_path: Path) -> None:
    model = KINDS[form][0](nn.Sequential(KINDS[form][0](Quantised()), nn.Linear(3, 1)))
    inputs = torch.ones(2, 5)
    expected, before = model(inputs), full_state(model)
    with fsdp.parked(model, to=tmp_path):
        assert_same_state(full_state(model), before)
        with pytest.raises(RuntimeError, match="unpark"):
            model(inputs)
    assert torch.equal(model(inputs), expected)
    assert_same_state(full_state(model), before)
    with torch.no_grad(), fsdp.resident(model):
        assert torch.equal(model(inputs), expected)
