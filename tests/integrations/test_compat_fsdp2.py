"""Code that is written for torch's FSDP2 and cannot be edited, and recipes of its users, on ours."""

from __future__ import annotations

import sys
import threading
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from tests.helpers.dtensor_twins import SgdOfParts, assert_at_rest, local, whole
from tests.helpers.equality import assert_close
from tests.helpers.fsdp2_clients import Decoder, installed
from tests.helpers.hugging_face import PATIENCE, TOKENS, made
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_ranks
from tests.helpers.traffic import Counting, Traffic

PRELOAD = ["transformers.models.llama.modeling_llama", "accelerate"]


def tokens(number: int) -> Tensor:
    return torch.randint(11, (2, 4), generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> tuple[float, float]:
    batch = tokens(number)
    loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), float(whole(norm))


# install


def test_names_that_were_imported_before_and_after_are_ours() -> None:
    import torch.distributed.fsdp as names

    holder = ModuleType("holder")
    holder.shard = names.fully_shard  # type: ignore[attr-defined]
    theirs = names.fully_shard
    sys.modules["holder"] = holder
    try:
        with installed():
            from torch.distributed._composable.fsdp import fully_shard
            from torch.distributed.pipelining import stage

            assert names.fully_shard is holder.shard is fully_shard is fsdp.fully_shard
            assert stage.FSDPModule is names.FSDPModule is fsdp.FSDPModule  # type: ignore[attr-defined]
        assert names.fully_shard is holder.shard is theirs
        assert stage.FSDPModule is names.FSDPModule is not fsdp.FSDPModule  # type: ignore[attr-defined]
        assert fsdp.fully_shard is not theirs
    finally:
        del sys.modules["holder"]


def test_other_threads_may_import_meanwhile() -> None:
    ended, patience = threading.Event(), sys.getswitchinterval()
    importing = threading.Thread(target=_import_until, args=(ended,))
    importing.start()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(3):
            with installed() as names:
                assert names.fully_shard is fsdp.fully_shard
    finally:
        sys.setswitchinterval(patience)
        ended.set()
        importing.join()


def _import_until(ended: threading.Event) -> None:
    names = [f"imported_by_a_thread_{number}" for number in range(1000)]
    while not ended.is_set():
        for name in names:
            sys.modules[name] = ModuleType(name)
        for name in names:
            del sys.modules[name]


# torchtitan's way


@on_ranks(2)
def test_a_model_is_sharded_as_torchtitan_does(tmp_path: Path) -> None:
    folder = str(tmp_path)
    import torch.distributed.checkpoint as dcp
    import torch.distributed.fsdp as names
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    expected = _shard_as_torchtitan(names, mesh)
    weights = {name: local(value).clone() for name, value in expected.state_dict().items()}
    with installed():
        model = _shard_as_torchtitan(names, mesh)
        assert isinstance(model, fsdp.FSDPModule)
        for name, value in model.state_dict().items():
            local(value).copy_(weights[name])
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=True) for each in (expected, model)]
        received = [Traffic(), Traffic()]
        for number in range(2):
            losses = []
            for each, own, traffic in zip((expected, model), optimizers, received, strict=True):
                with Counting(traffic):
                    losses.append(step(each, own, number))
            assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        norms = 2 * torch.float32.itemsize  # what torch communicates for them is not seen
        assert 0 < received[1].values <= received[0].values + norms
        assert_at_rest(model)
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizers[1])}
        dcp.save(state, checkpoint_id=folder)
        other = _shard_as_torchtitan(names, mesh)
        loaded = {"model": get_model_state_dict(other)}
        dcp.load(loaded, checkpoint_id=folder)
        other.load_state_dict(loaded["model"])
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(local(other.state_dict()[name]), local(value), rtol=1e-5, atol=1e-6)


def _shard_as_torchtitan(names: Any, mesh: Any) -> Any:
    with torch.device("meta"):
        model: Any = Decoder()
    config = {"mesh": mesh, "mp_policy": names.MixedPrecisionPolicy(torch.float32, torch.float32)}
    names.fully_shard(model.embed, **config, reshard_after_forward=True)
    for block in model.blocks:
        names.fully_shard(block, **config, reshard_after_forward=True)
    names.fully_shard([model.norm, model.head], **config, reshard_after_forward=False)
    names.fully_shard(model, **config)
    layers = [model.embed, *model.blocks, model.head]
    for one, following in pairwise(layers):
        one.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([one])
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    with torch.no_grad():
        model.init_weights()
    return model


# Optimizers over DTensors


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@on_ranks(2)
def test_muon_steps_matrices_and_adamw_the_rest() -> None:
    import torch.distributed.fsdp as names

    with Counting(most := Traffic()):
        expected = _trained_with_muon(names)
    with installed(), Counting(traffic := Traffic()):
        found = _trained_with_muon(names)
    assert 0 < traffic.values <= most.values
    for name, param in expected.named_parameters():
        assert local(param).equal(local(found.get_parameter(name))), name


def _trained_with_muon(names: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Decoder()
    for block in model.blocks:
        names.fully_shard(block)
    names.fully_shard(model)
    params = dict(model.named_parameters())
    matrices = [name for name, param in params.items() if param.dim() == 2 and "blocks" in name]
    optimizers = [
        torch.optim.Muon([params[name] for name in matrices], lr=1e-2),
        torch.optim.AdamW([param for name, param in params.items() if name not in matrices], lr=1e-3),
    ]
    for number in range(3):
        batch = tokens(number)
        nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model


# Pipelines


class Stage(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.norm(torch.tanh(self.first(inputs))))


# For each schedule, the numbers of the stages that each of two ranks has. The last three compute gradients of weights
# separately, and the last also mixes these with usual backwards of the same stage.
SCHEDULES = {
    "Schedule1F1B": [[0], [1]],
    "ScheduleGPipe": [[0], [1]],
    "ScheduleInterleaved1F1B": [[0, 2], [1, 3]],
    "ScheduleInterleavedZeroBubble": [[0, 2], [1, 3]],
    "ScheduleZBVZeroBubble": [[0, 3], [1, 2]],
    "ScheduleDualPipeV": [[0, 3], [1, 2]],
}


def skip_where_torch_sends_to_itself() -> None:
    if torch.__version__ < "2.13":
        pytest.skip("gloo cannot send from a rank to itself, as torch before 2.13 does between two stages of a rank")


# Each schedule with one of the values.
@pytest.mark.parametrize(("schedule", "reshard_after_forward"), [*zip(SCHEDULES, [False, True] * 3, strict=True)])
@on_ranks(4)
def test_stages_of_a_pipeline_are_sharded(schedule: str, reshard_after_forward: bool) -> None:
    from torch.distributed import pipelining

    if [1, 2] in SCHEDULES[schedule]:
        skip_where_torch_sends_to_itself()
    torch.set_default_dtype(torch.float64)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    numbers, total = SCHEDULES[schedule][mesh["pp"].get_local_rank()], sum(map(len, SCHEDULES[schedule]))
    generator = torch.Generator().manual_seed(5)
    data, targets = torch.randn(2, 8, 4, generator=generator).unbind(0)
    own = slice(mesh["dp"].get_local_rank() * 4, (mesh["dp"].get_local_rank() + 1) * 4)
    plain = nn.Sequential(*map(Stage, range(total)))
    modules: list[Any] = [Stage(number) for number in numbers]
    with installed() as names:
        stages = []
        for number, module in zip(numbers, modules, strict=True):
            for each in (module.first, module.norm, module.second, module):
                names.fully_shard(each, mesh=mesh["dp"], reshard_after_forward=reshard_after_forward)
            device, group = torch.device("cpu"), mesh["pp"].get_group()
            stages.append(pipelining.PipelineStage(module, number, total, device, group=group))
        make, given = getattr(pipelining.schedules, schedule), stages if len(stages) > 1 else stages[0]
        run = make(given, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        optimizers = [SgdOfParts(each.parameters()) for each in (nn.ModuleList(modules), plain)]
        for _ in range(2):
            inputs = [data[own]] if 0 in numbers else []
            run.step(*inputs, **({"target": targets[own]} if total - 1 in numbers else {}))
            nn.functional.mse_loss(plain(data), targets).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for number, module in zip(numbers, modules, strict=True):
        found = {name: whole(param.detach()) for name, param in module.named_parameters()}
        assert_close(found, {name: param.detach() for name, param in plain[number].named_parameters()})
        assert_at_rest(module)


@pytest.mark.parametrize("inside", [False, True], ids=["the module of a stage", "modules inside of it"])
@pytest.mark.parametrize("front_door", ["wrapper", "fully_shard"])
@on_ranks(1)
def test_a_pipeline_that_lists_shards_for_separate_backwards_is_an_error(front_door: str, inside: bool) -> None:
    from torch.distributed import pipelining

    skip_where_torch_sends_to_itself()
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp"))
    shard = fsdp.fully_shard if front_door == "fully_shard" else fsdp.FullyShardedDataParallel
    given = {"mesh": mesh["dp"]} if front_door == "fully_shard" else {"process_group": mesh["dp"].get_group()}
    device, group = torch.device("cpu"), mesh["pp"].get_group()
    modules: list[nn.Module] = [Stage(number) for number in range(2)]
    if inside:
        for module in modules:
            module.first = shard(module.first, **given)
    else:
        modules = [shard(module, **given) for module in modules]
    stages = [pipelining.PipelineStage(each, place, 2, device, group=group) for place, each in enumerate(modules)]
    run = pipelining.ScheduleInterleavedZeroBubble(stages, n_microbatches=2, loss_fn=nn.functional.mse_loss)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"root \(.*\): the pipeline schedule .* fsdp.compat.fsdp2.install\(\)"):
        run.step(torch.ones(2, 4), target=torch.ones(2, 4))


# accelerate


@needs("transformers", "accelerate")
@on_ranks(2, timeout=PATIENCE)
def test_accelerate_shards_a_model_as_for_torchs() -> None:
    """Accelerate itself has FSDP for accelerators only, and asks for a few things of one."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    model, layer = made("llama")  # modules that are imported inside the context would keep this library's names
    with installed():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[layer.__name__],
            cpu_ram_efficient_loading=False,
        )
        asked = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin), device=torch.device("cpu"), mixed_precision="no"
        )
        asked.is_main_process = dist.get_rank() == 0
        sharded: Any = fsdp2_prepare_model(asked, model)
    assert isinstance(sharded, fsdp.FSDPModule)
    assert all(isinstance(inner, fsdp.FSDPModule) for inner in sharded.modules() if isinstance(inner, layer))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = sharded(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert_at_rest(sharded)
