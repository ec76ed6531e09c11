"""Offload to disk and its files: reading ahead, keeping them, whole states, and disks that are full or fail."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import ShardedGradScaler, get_fsdp_instances
from fsdp.layers.offload import DiskStorage
from tests.helpers.memory import mappings
from tests.helpers.models import Net, Wrap, nested_mlp
from tests.helpers.offload import on
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import adamw, alone, fully_sharded, sgd_with_momentum
from tests.helpers.programs import printed_by_program
from tests.helpers.ranks import RankPool

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="reads Linux's /proc")


def on_disk(folder: Path, **options: Any) -> Wrap:
    return fully_sharded(offload="disk", offload_folder=folder, **options)


def backward(model: nn.Module) -> None:
    model(torch.ones(3, 5)).sum().backward()


def file_of(tensor: Any) -> str:
    """The path of the file in which a tensor lies, empty if in none."""
    address = tensor.data_ptr()
    return next((path for start, stop, path in mappings() if start <= address < stop), "")


# Reading ahead

UNITS = 5


@contextmanager
def logged_tower(folder: Path) -> Iterator[tuple[nn.Module, list[str]]]:
    """Units that run one after the other, and a log of their calls and of what is read ahead."""
    log: list[str] = []
    units = [on_disk(folder)(nn.Linear(5, 5)) for _ in range(UNITS)]
    numbers = {id(unit.params[0].shard_storage): number for number, unit in enumerate(units)}  # type: ignore[index, union-attr]
    for number, unit in enumerate(units):
        unit.register_forward_pre_hook(lambda *_, number=number: log.append(f"call {number}"))
    read_ahead = DiskStorage.read_ahead

    def logged(home: DiskStorage) -> None:
        log.append(f"read {numbers[id(home)]}")
        read_ahead(home)

    with mock.patch.object(DiskStorage, "read_ahead", logged):
        yield on_disk(folder)(nn.Sequential(*units)), log


@pytest.mark.parametrize("machine", ["accelerated", "of CPUs only"])
@on_ranks(2)
def test_each_unit_is_read_while_the_second_before_it_computes(tmp_path: Path, machine: str) -> None:
    alone = mock.patch("fsdp.engine.runtime.SMALL_BYTES", 0)  # so that units are not gathered together
    with on(machine), alone, logged_tower(tmp_path) as (model, log):
        backward(model)
        assert log == [f"call {number}" for number in range(UNITS)]  # no order is known yet
        for _ in range(2):
            log.clear()
            output = model(torch.ones(3, 5))
            # The root comes before all of them, and has nothing to read itself.
            expected = "read 1, call 0, read 2, call 1, read 3, call 2, read 4, call 3, call 4"
            assert ", ".join(log) == expected
            log.clear()
            output.sum().backward()
            assert ", ".join(log) == "read 3, read 2, read 1, read 0"


@on_ranks(1)
def test_a_world_of_one_reads_ahead_too(tmp_path: Path) -> None:
    with logged_tower(tmp_path) as (model, log):
        backward(model)
        log.clear()
        model(torch.ones(3, 5))
        for number in range(1, UNITS):
            called = log.index(f"call {number}")
            assert {f"read {number}", f"read {min(number + 1, UNITS - 1)}"} <= set(log[:called])


# Keeping files


@needs_proc
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("flatten_parameters", [True, False])
def test_kept_files_hold_the_shards(ranks: RankPool, tmp_path: Path, world_size: int, flatten_parameters: bool) -> None:
    shards = [pair for shown in ranks(world_size).run(_train_and_keep, tmp_path, flatten_parameters) for pair in shown]
    assert {path for path, _ in shards} == {str(path) for path in tmp_path.rglob("*-shard.bin")}
    for path, shard in shards:
        content = bytearray(Path(path).read_bytes())
        assert torch.equal(torch.frombuffer(content, dtype=torch.float32, count=len(shard)), shard)


def _train_and_keep(folder: Path, flatten_parameters: bool) -> list[tuple[str, Tensor]]:
    model = nested_mlp(on_disk(folder, keep_offload_files=True, flatten_parameters=flatten_parameters))
    optimizer = adamw(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    return [(file_of(param), param.detach().clone().view(-1)) for param in model.parameters()]


@on_ranks(2)
def test_files_that_are_not_kept_go_with_the_model(tmp_path: Path) -> None:
    tmp_path = tmp_path / str(dist.get_rank())
    model = nested_mlp(on_disk(tmp_path))
    optimizer = adamw(model.parameters())
    backward(model)
    optimizer.step()
    assert len(list(tmp_path.iterdir())) == 1
    assert not [name for _, _, names in os.walk(tmp_path) for name in names]
    del model, optimizer
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def with_empty() -> nn.Module:
    """A layer, and a parameter without elements."""
    return Net(lambda net, x: net.layer(x) + net.empty.sum(), layer=nn.Linear(5, 3), empty=nn.Parameter(torch.zeros(0)))


@needs_proc
@pytest.mark.parametrize("make_optimizer", [sgd_with_momentum, adamw])
@pytest.mark.parametrize("keep_files", [True, False])
def test_steps_after_the_first_make_no_new_files(tmp_path: Path, make_optimizer: Any, keep_files: bool) -> None:
    wrap = partial(
        alone, offload="disk", offload_folder=tmp_path, keep_offload_files=keep_files, flatten_parameters=False
    )
    model: Any = wrap(with_empty())
    optimizer = make_optimizer(model.parameters())
    gc.collect()  # or files of models of earlier tests would be closed meanwhile
    made = []
    for _ in range(4):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        files = model.params[0].shard_storage.files
        made.append((files._count, files._shared_used, len(os.listdir("/proc/self/fd"))))
    assert len(set(made)) == 1


# Whole states


@on_ranks(1, 2)
def test_states_go_out_and_in_again_and_shards_stay_in_files(tmp_path: Path) -> None:
    model, plain = nested_mlp(on_disk(tmp_path)), nested_mlp(seed=1)
    files = [file_of(param) for param in model.parameters()]
    backward(model)
    sgd_with_momentum(model.parameters()).step()
    model.load_state_dict(plain.state_dict())
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name
        assert str(tmp_path) not in file_of(state[name])  # it outlives the model
    torch.testing.assert_close(model(torch.ones(3, 5)), plain(torch.ones(3, 5)))
    assert [file_of(param) for param in model.parameters()] == files
    assert all(str(tmp_path) in path for path in files)


@parametrize_pairs(world_size=[1, 2], machine=["accelerated", "of CPUs only"])
@on_ranks("world_size")
def test_what_is_changed_while_summoned_is_written_to_files(tmp_path: Path, machine: str) -> None:
    with on(machine):
        model: Any = nested_mlp(on_disk(tmp_path))
        plain = nested_mlp()
        model(torch.ones(3, 5))
        with model.summon_full_params():
            _change(model)
        _change(plain)
        with model.summon_full_params(volatile=True):
            _change(model)
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name
        torch.testing.assert_close(model(torch.ones(3, 5)), plain(torch.ones(3, 5)))
        assert all(str(tmp_path) in file_of(param) for param in model.parameters())


def _change(module: Any) -> None:
    with torch.no_grad():
        module.entry.weight.mul_(2)
    module.exit.weight = nn.Parameter(torch.full((1, 3), 0.5))


@on_ranks(2)
def test_units_may_lie_in_different_folders_or_none(tmp_path: Path) -> None:
    places = {"Linear": tmp_path / "a", "Sequential": tmp_path / "b"}

    def wrap(module: nn.Module) -> nn.Module:
        place = places.get(type(module).__name__)
        return on_disk(place)(module) if place else fully_sharded()(module)

    states = []
    for wraps in (wrap, fully_sharded()):
        model = nested_mlp(wraps)
        optimizer = adamw(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
        if wraps is wrap:
            for each in get_fsdp_instances(model):
                place = places.get(type(each.module.module).__name__)
                for tensor in (each.params[0], each.params[0].grad, optimizer.state[each.params[0]]["exp_avg"]):
                    assert (str(place) in file_of(tensor)) if place else (str(tmp_path) not in file_of(tensor))
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


# A disk that is full


@contextmanager
def full_disk() -> Iterator[None]:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(os, "posix_fallocate", mock.Mock(side_effect=full)):
        yield


NO_ROOM = r"offload='disk': cannot make a file of \d+ bytes for .*No space left.* \d+ bytes free. Free space"


def test_a_disk_that_is_too_small_for_the_shards_is_an_error(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(RuntimeError, match=NO_ROOM):
        alone(nn.Linear(5, 3), offload="disk", offload_folder=tmp_path)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@on_ranks(2)
def test_a_disk_that_is_full_in_a_backward_is_an_error_and_training_can_go_on(tmp_path: Path) -> None:
    model, plain = nested_mlp(on_disk(tmp_path, keep_offload_files=True)), nested_mlp(fully_sharded())
    output = model(torch.ones(3, 5))
    with full_disk(), pytest.raises(RuntimeError, match=NO_ROOM.replace("for ", "for gradient")):
        output.sum().backward()
    model.zero_grad()
    for each in (model, plain):
        backward(each)
        adamw(each.parameters()).step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name


def test_a_disk_that_is_full_at_the_first_step_is_an_error(tmp_path: Path) -> None:
    model = alone(nn.Linear(5, 3), offload="disk", offload_folder=tmp_path, keep_offload_files=True)
    for optimizer in (sgd_with_momentum(model.parameters()), adamw(model.parameters())):
        backward(model)
        with full_disk(), pytest.raises(RuntimeError, match=NO_ROOM.replace("for ", "for optimizer state")):
            optimizer.step()


# A file that was cut off


def truncate(tensor: Any) -> str:
    path = file_of(tensor)
    os.truncate(path, 0)
    return path


def clip(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.clip_grad_norm_(1.0)


def unscale(model: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler = ShardedGradScaler()
    scaler.scale(torch.ones(()))  # it makes its scale at first use
    scaler.unscale_(optimizer)


def take_state(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.state_dict()


def summon(model: Any, optimizer: torch.optim.Optimizer) -> None:
    with model.summon_full_params():
        pass


def load(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(nested_mlp().state_dict())


def infer(model: Any, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model(torch.ones(3, 5))


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


ACTS = {"shard": (infer, step, take_state, summon, load), "gradient": (step, clip, unscale), "optimizer state": (step,)}
READS = {f"{act.__name__} {kind}": (act, kind) for kind, acts in ACTS.items() for act in acts}


@needs_proc
@parametrize_pairs(world_size=[2, 1], read=list(READS))
@on_ranks("world_size")
def test_a_truncated_file_is_an_error_that_names_it_and_not_the_end_of_the_process(tmp_path: Path, read: str) -> None:
    act, kind = READS[read]
    model = nested_mlp(on_disk(tmp_path, keep_offload_files=True))
    optimizer = adamw(model.parameters())
    for _ in range(2):
        backward(model)
        optimizer.step()
    backward(model)
    core = get_fsdp_instances(model)[2].params[0]
    kinds: dict[str, Any] = {"shard": core, "gradient": core.grad, "optimizer state": optimizer.state[core]["exp_avg"]}
    path = truncate(kinds[kind])
    assert kind.replace(" ", "-") in path
    # Optimizers and scalers know flat parameters, not units.
    name = r"flat parameter with 0\.weight" if act in (step, unscale) else r"trunk\.2"
    with pytest.raises(RuntimeError, match=rf"{name}: its file {path} was truncated to 0 bytes"):
        act(model, optimizer)


@needs_proc
@on_ranks(1, 2)
def test_a_gradient_s_file_that_is_truncated_before_backward_is_an_error(tmp_path: Path) -> None:
    model = nested_mlp(on_disk(tmp_path, keep_offload_files=True))
    backward(model)
    path = file_of(get_fsdp_instances(model)[0].params[0].grad)  # the root's, which is not gathered for backward
    model.zero_grad()
    output = model(torch.ones(3, 5))
    os.truncate(path, 0)
    with pytest.raises(RuntimeError, match=rf"its file {path} was truncated to 0 bytes"):
        output.sum().backward()


# All of it together


@needs_proc
def test_a_model_on_disk_takes_a_fraction_of_its_size_in_memory(ranks: RankPool, tmp_path: Path) -> None:
    script = f"""
        import ctypes, re, torch
        from torch import nn
        from tests.helpers.parity import alone

        torch.set_num_threads(1)  # others have stacks and buffers of their own

        def anonymous():
            return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

        def growth(width, **options):
            before = anonymous()
            model = alone(nn.Sequential(*(alone(nn.Linear(width, width), **options) for _ in range(16))))
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                model(torch.ones(4, width)).sum().backward()
                optimizer.step()
            taken = anonymous() - before
            ctypes.CDLL(None).malloc_trim(0)
            return taken, anonymous() - before

        growth(8)  # what is imported at first use is not the model's
        print(*growth(640, offload="disk", offload_folder={str(tmp_path)!r}), *growth(640))
        """
    disk_with_free_lists, disk, _, in_memory = map(float, printed_by_program(ranks, script).split())
    whole = 4 * 16 * 640 * 640 * 4 / 2**20  # MiB of parameters, gradients and two moments, in sixteen layers
    assert in_memory > 0.9 * whole
    assert disk < 0.1 * whole
    assert disk_with_free_lists < 0.5 * whole  # what the C library keeps of freed buffers counts as well
