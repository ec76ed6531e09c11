"""Two machines on one: what crosses a cable between network namespaces, and what happens when one end is gone.

`test_pain_point_22_...` are about survivors that hang, or fail without a name. `benchmarks/two_machines.py` has the
same under torchrun, with a restart, and on a slow link.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stderr
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from benchmarks import _machines
from benchmarks._machines import Machine, NotAllowedError, two_machines
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import assert_parity, fully_sharded, nested_mlp, sgd_with_momentum
from tests.helpers.ranks import RankError, RankPool
from tests.helpers.standing import watched
from tests.helpers.workers import Ending

pytestmark = pytest.mark.waiting

Machines = tuple[Machine, Machine]


@pytest.fixture
def machines() -> Iterator[Machines]:
    try:
        with two_machines() as pair:
            yield pair
    except NotAllowedError as reason:
        pytest.skip(f"this system makes no two machines: {reason}")


def _join(machines: Machines, folder: Path, timeout: float = 100.0) -> int:
    """Collective. Take this rank's place on its machine, in a group of both."""
    rank = int(os.environ["RANK"])
    machines[rank].enter()
    store = dist.FileStore(str(folder / "store"), len(machines))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=timeout))
    return rank


# --- training


@on_ranks(2, backend=None)
def test_training_across_two_machines_equals_one_process(machines: Machines, tmp_path: Path) -> None:
    rank = _join(machines, tmp_path)
    before = _sent(machines[rank])
    assert_parity(nested_mlp, sgd_with_momentum, wrap=fully_sharded())
    assert _sent(machines[rank]) - before > 10_000, "the ranks have not used the cable"


def _sent(machine: Machine) -> int:
    path = f"/sys/class/net/{_machines.INTERFACE}/statistics/tx_bytes"
    return int(subprocess.run(machine.command(["cat", path]), capture_output=True, text=True, check=True).stdout)


def test_a_late_rank_on_the_other_machine_is_reported_with_its_place(ranks: RankPool, machines: Machines) -> None:
    report, _ = ranks(2, backend=None).run(_be_late, machines)
    assert re.search(r"  rank 1: in no collective, at .*test_two_machines\.py:\d+ in _be_late > ", report), report


def _be_late(machines: Machines) -> str:
    for name in ("LOCAL_WORLD_SIZE", "MASTER_ADDR"):  # without torchrun nobody sets them
        os.environ.pop(name, None)
    rank = int(os.environ["RANK"])
    machines[rank].enter()
    dist.init_process_group("gloo", f"tcp://{machines[0].address}:29500", rank=rank, world_size=2)
    model = fsdp.FullyShardedDataParallel(nn.Linear(2, 2))
    with watched() as standing, redirect_stderr(StringIO()) as printed:
        if rank == 1:
            standing.until("report")
        model(torch.ones(1, 2))
    return printed.getvalue()


# --- a death


@pytest.mark.parametrize("moment", ["before forward", "in forward", "in backward"])
def test_pain_point_22_the_survivor_of_a_death_names_itself_and_the_unit(
    ranks: RankPool, machines: Machines, tmp_path: Path, moment: str
) -> None:
    with pytest.raises(RankError) as error:
        ranks(2, backend=None, grace=60).run(_outlive_the_other, machines, tmp_path, moment)
    survivor, dead = error.value.outcomes
    assert (survivor.ending, dead.ending) == (Ending.RETURNED, Ending.DIED)
    waits = r"((all-)?gather|reduce-scatter) of (layers\.\d|root).*|an exchange of messages in state_dict\(\)"
    waits += r"|exchange of which parameters get a gradient in the backward of root.*"  # gathered before it died
    for message in survivor.value:
        assert re.match(rf"rank 0: ({waits}) did not complete", message)


def _outlive_the_other(machines: Machines, folder: Path, moment: str) -> tuple[str, str]:
    rank = _join(machines, folder)
    model = _units()
    _train(model, steps=2)
    dist.barrier()
    if rank == 1:
        _arrange_death(model, moment)
    with pytest.raises(RuntimeError) as first:
        _train(model, steps=3)
    with pytest.raises(RuntimeError) as again:  # to save what it has, say: now torch refuses to send at all
        model.state_dict()
    return str(first.value), str(again.value)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        self.last = nn.Linear(64, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(inputs))


def _units() -> nn.Module:
    wrap, net = fully_sharded(), _Net()
    for index, layer in enumerate(net.layers):
        net.layers[index] = wrap(layer)
    return wrap(net)


def _train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 64)).sum().backward()


def _arrange_death(model: Any, moment: str) -> None:
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "before forward":
        die()
    inner = model.module.layers[1].module
    if moment == "in forward":
        inner.register_forward_pre_hook(die)
    else:
        inner.register_full_backward_pre_hook(die)


def test_pain_point_22_a_cut_cable_ends_in_a_named_error_when_the_group_times_out(
    ranks: RankPool, machines: Machines, tmp_path: Path
) -> None:
    messages = ranks(2, backend=None).run(_lose_the_cable, machines, tmp_path)
    for rank, message in enumerate(messages):
        assert message.startswith(f"rank {rank}: all-gather of "), message
        assert "did not complete" in message


def _lose_the_cable(machines: Machines, folder: Path) -> str:
    rank = _join(machines, folder, timeout=10)
    model = _units()
    _train(model, steps=1)
    dist.barrier()
    machines[rank].unplug()
    with pytest.raises(RuntimeError) as error:
        _train(model, steps=1)
    return str(error.value)


# --- what is left behind


def test_nothing_is_left_of_machines_or_of_what_ran_on_them() -> None:
    started: list[subprocess.Popen[bytes]] = []
    try:
        _fail_on_machines(started)
    except NotAllowedError as reason:
        pytest.skip(f"this system makes no two machines: {reason}")
    except KeyError:
        pass
    assert started[0].wait(60) == -signal.SIGKILL
    assert not [name for name in os.listdir("/run/netns") if name.startswith(f"fsdp-{os.getpid()}-")]


def _fail_on_machines(started: list[subprocess.Popen[bytes]]) -> None:
    with two_machines() as machines:
        started.append(subprocess.Popen(machines[1].command(["sleep", "600"])))
        raise KeyError("in the middle")


def test_who_may_not_make_machines_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machines.shutil, "which", lambda *_, **__: None)
    with pytest.raises(NotAllowedError, match="no program `ip`"), two_machines():
        pass
