"""Ranks that do not do the same, or not in the way that a model can be used in, are told so instead of going on."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel, optim_utils
from fsdp.layers.fingerprints import sampled
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import RankPool
from tests.helpers.twins import assert_at_rest


class Net(nn.Module):
    """Does what it is told to in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = FullyShardedDataParallel(nn.Linear(4, 4))
        self.inside = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.inside()
        return self.inner(x)

    def encode(self, x: Tensor) -> Tensor:
        return self.inner(x)


def trained_model() -> FullyShardedDataParallel:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(Net())
    model(torch.ones(1, 4)).sum().backward()
    return model


def test_a_forked_child_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    for rank, said in enumerate(ranks(2).run(_fork, tmp_path)):
        assert f"this process was forked from rank {rank}, whose connections to other ranks are not inherited" in said


def _fork(folder: Path) -> str:
    model, place = trained_model(), folder / f"said {dist.get_rank()}"
    child = os.fork()
    if not child:
        try:
            model(torch.ones(1, 4))
        except RuntimeError as error:
            place.write_text(str(error))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    model(torch.ones(1, 4)).sum().backward()  # the parent goes on
    return place.read_text()


@pytest.mark.parametrize("first", ["outermost", "inner"])
@on_ranks(2)
def test_a_second_thread_is_refused(first: str) -> None:
    unit = FullyShardedDataParallel(net := Net())
    fsdp.register_fsdp_forward_method(unit, "encode")
    model = FullyShardedDataParallel(nn.Sequential(unit, nn.Linear(4, 4)))
    model(torch.ones(1, 4)).sum().backward()
    errors: list[str] = []

    def call() -> None:
        for each in (model, unit, unit.encode):
            with pytest.raises(RuntimeError) as error:
                each(torch.ones(1, 4))
            errors.append(str(error.value))

    def call_in_thread() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    net.inside = call_in_thread
    with torch.no_grad():
        (model if first == "outermost" else unit)(torch.ones(1, 4))  # whose call goes on
    assert_at_rest(model)
    net.inside = lambda: None
    names = ["root (Sequential)" if first == "outermost" else "0", "0", "0"]
    for name, told in zip(names, errors, strict=True):
        assert f"rank {dist.get_rank()}: {name} is called while another thread is in its forward." in told
    model(torch.ones(1, 4)).sum().backward()


@on_ranks(2)
def test_different_states_are_refused_and_change_nothing() -> None:
    model = trained_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = {name: value + dist.get_rank() * (name == "inner.bias") for name, value in before.items()}
    with pytest.raises(
        RuntimeError, match=r"loading a state dict, rank 1 has other values than rank 0 of inner\.bias\."
    ):
        model.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    del state["inner.bias"]
    model.load_state_dict(state, strict=False)


@on_ranks(2)
def test_different_changes_of_summoned_parameters_are_refused_and_dropped() -> None:
    model = trained_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inner = model.module.module.inner
    problem = r"leaving summon_full_params\(\), rank 1 has other values than rank 0 of weight\. "
    for writers in ((1,), (0, 1)):
        with pytest.raises(RuntimeError, match=problem), model.summon_full_params(), torch.no_grad():
            inner.module.weight.fill_(dist.get_rank()) if dist.get_rank() in writers else None
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with model.summon_full_params(), torch.no_grad():
        inner.module.weight.fill_(3)
    assert model.state_dict()["inner.weight"].unique().tolist() == [3]


@pytest.mark.parametrize("value", [0.0, 3.0])
@pytest.mark.parametrize("writer", [0, 1])
@on_ranks(2)
def test_values_that_one_rank_loads_or_writes_alone_are_refused(value: float, writer: int) -> None:
    model = trained_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    is_writer = dist.get_rank() == writer
    state = {"inner.weight": torch.full_like(before["inner.weight"], value)} if is_writer else {}
    problem = r"rank 1 has other values than rank 0 of {}\. .*nothing was changed"
    with pytest.raises(RuntimeError, match=problem.format(r"inner\.weight") + r".*pass rank0_only=True"):
        model.load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match=problem.format("weight")), model.summon_full_params(), torch.no_grad():
        model.module.module.inner.module.weight.fill_(value) if is_writer else None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@on_ranks(2)
def test_different_settings_in_states_of_optimizers_are_refused() -> None:
    model = trained_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    full = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    full["param_groups"][0]["lr"] = 0.1 + dist.get_rank()
    with pytest.raises(RuntimeError, match="the ranks have different parameter groups in the optimizer state to load"):
        optim_utils.load_full_optim_state_dict(model, optimizer, full)


def test_a_sample_has_the_first_and_the_last_element() -> None:
    values = torch.arange(1000.0).view(10, 100).t()
    sample = sampled(values)
    assert len(sample) == 64
    assert (sample[0], sample[-1]) == (0, 999)
    assert torch.equal(sampled(torch.ones(3)), torch.ones(3))
