"""`OwnedOptimizer` with all that goes with a step: sharded groups, accumulation, clipping, changed values."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

import fsdp
from fsdp import FullyShardedDataParallel, OwnedOptimizer
from fsdp.optim_utils.ownership import Ownership
from tests.helpers.equality import assert_same
from tests.helpers.forms import full_state, sharded
from tests.helpers.hybrid import assert_replicas_agree, group_option, mesh_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.owned import (
    FORMS,
    Twin,
    backward,
    gradients_of,
    is_matrix,
    is_matrix_key,
    muon_and_adamw,
    owned,
    plain_name,
    talk,
    train_both,
    under_fully_shard,
    values_of,
)
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.traffic import Counting, Traffic

# Ways to train


@on_ranks(2)
def test_units_may_have_process_groups_of_the_same_ranks() -> None:
    inner = FullyShardedDataParallel(nn.Linear(4, 3), process_group=dist.new_group([0, 1]), use_orig_params=True)
    model = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(3, 2, bias=False)), use_orig_params=True)
    optimizer = owned(model, [{"optimizer": torch.optim.AdamW}])
    assert sorted(optimizer.plan.owner_of) == ["0.bias", "0.weight", "1.weight"]
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@on_ranks(3)
def test_one_flat_parameter_of_all() -> None:
    groups: list[dict[str, Any]] = [{"optimizer": torch.optim.Adafactor, "lr": 0.05}]
    model, twin = talk(FullyShardedDataParallel), Twin(groups)
    optimizer = owned(model, groups)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        # What is used nowhere shares a flat parameter with others, so that it has a gradient of zeros.
        gradients = {name: grad for name, grad in gradients_of(model).items() if "frozen" not in name}
        assert gradients["unused.weight"] is not None
        optimizer.step()
        twin.step(gradients | {"frozen.weight": None, "frozen.bias": None})
        twin.assert_has(values_of(model))


@pytest.mark.parametrize("how", ["wrapper", "fully_shard", "replicas only"])
@on_ranks(4)
def test_hybrid_sharding(how: str) -> None:
    """Owners are within the ranks that share a parameter; replicas do the same work."""
    if how == "fully_shard":
        wrap: Any = partial(_on_two_dimensions, mesh=mesh_of(2, 2))
    elif how == "wrapper":
        options = {"process_group": group_option("mesh", 2, 2), "sharding_strategy": fsdp.ShardingStrategy.HYBRID_SHARD}
        wrap = partial(FullyShardedDataParallel, use_orig_params=True, **options)
    else:
        strategy = fsdp.ShardingStrategy.NO_SHARD
        wrap = partial(FullyShardedDataParallel, use_orig_params=True, sharding_strategy=strategy)
    model = talk(wrap)
    train_both(model, owned(model, muon_and_adamw()), Twin(muon_and_adamw()), range(2))
    if how != "fully_shard":
        assert_replicas_agree(model)


def _on_two_dimensions(module: Any, mesh: Any) -> nn.Module:
    """Without the scalar, which has no rows to shard."""
    ignored = {module.scale.requires_grad_(False)} if hasattr(module, "scale") else None
    return under_fully_shard(module, mesh=mesh, ignored_params=ignored)


@pytest.mark.parametrize("form", ["orig_params", "fully_shard"])
@on_ranks(2)
def test_parameters_are_left_to_another_optimizer(form: str, tmp_path: Path) -> None:
    model, twin = talk(FORMS[form]), Twin(muon_and_adamw())
    optimizers = _muon_and_another(model)
    for step in range(4):
        if step == 2:
            fsdp.save(tmp_path / "run", model, optimizers)
            model = talk(FORMS[form], seed=1)
            optimizers = _muon_and_another(model)
            fsdp.load(tmp_path / "run", model, optimizers)
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(model, step)
        gradients = gradients_of(model)
        for optimizer in optimizers:
            optimizer.step()
        twin.step(gradients)
        twin.assert_has(values_of(model), f"step {step}:")


def _muon_and_another(model: nn.Module) -> list[torch.optim.Optimizer]:
    muon, adamw = muon_and_adamw()
    matrices = [name for name, param in talk().named_parameters() if is_matrix(name, param.shape)]
    others = [param for name, param in model.named_parameters() if plain_name(name) not in matrices]
    left = {"params": lambda name, shape: name not in matrices, "optimizer": None}
    return [owned(model, [left, muon]), torch.optim.AdamW(others, lr=adamw["lr"])]


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_accumulation_clipping_and_schedule(form: str) -> None:
    model, twin = talk(FORMS[form]), Twin(muon_and_adamw())
    optimizer = owned(model, muon_and_adamw())
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, *twin.optimizers)]
    for step in range(3):
        optimizer.zero_grad()
        if isinstance(model, FullyShardedDataParallel):
            with model.no_sync():
                backward(model, 10 + step)
        backward(model, 20 + step)
        backward(model, step)
        clip: Any = getattr(model, "clip_grad_norm_", partial(nn.utils.clip_grad_norm_, list(model.parameters())))
        clip(0.1)
        gradients = gradients_of(model)
        assert sum(float(g.square().sum()) for g in gradients.values() if g is not None) <= 0.0101
        optimizer.step()
        twin.step(gradients)
        for schedule in schedules:
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.02 * 0.5 ** (step + 1)
        twin.assert_has(values_of(model), f"step {step}")


@on_ranks(1)
def test_schedules_of_momentum_need_its_name_in_all_groups() -> None:
    optimizer = owned(talk(FORMS["orig_params"]), muon_and_adamw())
    for cycle in (torch.optim.lr_scheduler.OneCycleLR, torch.optim.lr_scheduler.CyclicLR):
        options = {"max_lr": 0.1, **({"total_steps": 9} if "One" in cycle.__name__ else {"base_lr": 0.01})}
        with pytest.raises(ValueError, match="must support momentum or beta1 with `cycle_momentum`"):
            cycle(optimizer, **options)
        cycle(optimizer, cycle_momentum=False, **options)
    common = owned(talk(FORMS["orig_params"]), [{"optimizer": torch.optim.AdamW}])
    torch.optim.lr_scheduler.OneCycleLR(common, max_lr=0.1, total_steps=9)
    assert common.param_groups[0]["betas"][0] == 0.95


@on_ranks(2)
def test_scaler_and_closure() -> None:
    model, twin = talk(FORMS["orig_params"]), Twin(muon_and_adamw())
    optimizer, scaler = owned(model, muon_and_adamw()), fsdp.ShardedGradScaler(init_scale=8.0)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(8.0)
        if step == 1 and dist.get_rank() == 1:
            param = next(param for param in model.parameters() if param.grad is not None and param.numel())
            param.grad[0] = math.inf  # on one rank: all leave the step out
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        gradients = gradients_of(model)
        scaler.step(optimizer)
        if step != 1:
            twin.step(gradients)
        scaler.update()
        twin.assert_has(values_of(model), f"step {step}")

    def closure() -> float:
        optimizer.zero_grad()
        backward(model, 7)
        kept.append(gradients_of(model))
        return 0.25

    kept: list[Any] = []
    assert optimizer.step(closure) == 0.25
    twin.step(kept[0])
    twin.assert_has(values_of(model), "with a closure")


@pytest.mark.parametrize("how", ["wrapper", "fully_shard"])
@on_ranks(2)
def test_offload_to_the_host(how: str) -> None:
    wrap: Any = partial(FullyShardedDataParallel, use_orig_params=True, move_params_to_cpu=True)
    if how == "fully_shard":
        wrap = partial(under_fully_shard, offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False))
    model = talk(wrap)
    train_both(model, owned(model, muon_and_adamw()), Twin(muon_and_adamw()), range(2))


@pytest.mark.parametrize("form", ["orig_params", "fully_shard"])
@on_ranks(3)
def test_gradients_that_are_missing_in_some_steps_or_on_some_ranks(form: str) -> None:
    model, twin = talk(FORMS[form]), Twin(muon_and_adamw())
    optimizer = owned(model, muon_and_adamw())
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        for name, param in model.named_parameters():
            if step == 1 and name.endswith("mix.weight"):
                param.grad = None
            if step == 2 and dist.get_rank() == 0 and name.endswith("0.2.weight"):
                param.grad.zero_()  # the same, said in two ways
        gradients = gradients_of(model)
        for name, param in model.named_parameters():
            if step == 2 and dist.get_rank() == 0 and name.endswith("0.2.weight"):
                param.grad = None
        optimizer.step()
        assert gradients["unused.weight"] is None
        assert (gradients["mix.weight"] is None) == (step == 1)
        twin.step(gradients)
        twin.assert_has(values_of(model), f"step {step}")


@pytest.mark.parametrize("form", ["flat", "orig", "rows"])
@on_ranks(2)
def test_frozen_parameters_take_no_memory_of_owners_until_they_are_trained(form: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 9, bias=False), nn.Linear(9, 8, bias=False))
    plain[0].requires_grad_(False)
    model = sharded(copy.deepcopy(plain), form)
    optimizer = owned(model, [{"optimizer": torch.optim.Adagrad, "lr": 0.1}])
    expected = torch.optim.Adagrad([*plain.parameters()], lr=0.1)
    held = [param for each in optimizer.optimizers for param in each.param_groups[0]["params"] if not param.is_meta]
    assert all(param.untyped_storage().nbytes() <= 4 for param in held if not param.requires_grad)
    for _ in range(2):
        for each, stepping in ((plain, expected), (model, optimizer)):
            each(torch.ones(2, 8)).square().sum().backward()
            stepping.step()
            stepping.zero_grad()
            for param in each.parameters():
                param.requires_grad_()
    for name, value in full_state(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name])


@pytest.mark.parametrize("form", ["orig_params", "fully_shard"])
@on_ranks(2)
def test_values_that_were_changed_while_they_were_frozen_are_stepped(form: str) -> None:
    model, twin = talk(FORMS[form]), Twin(muon_and_adamw())
    optimizer = owned(model, muon_and_adamw())
    for step, trained in enumerate([True, False, True]):
        for each in (model, twin.model):
            for name, param in each.named_parameters():
                if name.endswith("mix.weight"):
                    param.requires_grad_(trained)
        if not trained:
            model.load_state_dict(talk(FORMS[form], seed=5).state_dict())
            twin.model.load_state_dict(talk(seed=5).state_dict())
        train_both(model, optimizer, twin, range(step, step + 1), what="thawed" if step == 2 else "")


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_values_that_were_changed_are_stepped(form: str) -> None:
    model, twin = talk(FORMS[form]), Twin(muon_and_adamw())
    optimizer = owned(model, muon_and_adamw())
    train_both(model, optimizer, twin, range(2))
    other = talk(seed=5).state_dict()
    twin.model.load_state_dict(other)
    model.load_state_dict(talk(FORMS[form], seed=5).state_dict())
    train_both(model, optimizer, twin, range(2, 4), what="loaded")
    with torch.no_grad():
        twin.model.mix.weight.mul_(0.5)
        if isinstance(model, FullyShardedDataParallel):
            with model.summon_full_params():
                model.module.mix.weight.mul_(0.5)
        else:
            model.mix.weight.mul_(0.5)
    train_both(model, optimizer, twin, range(4, 6), what="halved")


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_writes_that_raise_no_version_counter_are_stepped(form: str) -> None:
    """Those of `torch._foreach_*` on `DTensor`s, and of NumPy, which changes only the order of elements here."""
    model, twin = talk(FORMS[form]), Twin(muon_and_adamw())
    optimizer = owned(model, muon_and_adamw())
    train_both(model, optimizer, twin, range(2))
    with torch.no_grad():
        for each in (model, twin.model):
            torch._foreach_mul_(list(each.parameters()), 0.5)
    train_both(model, optimizer, twin, range(2, 4), what="halved")
    for param in model.parameters():
        local = (param.to_local() if isinstance(param, DTensor) else param).detach().numpy()
        if local.ndim:
            local[...] = local[::-1].copy()
    values = values_of(model)
    twin.model.load_state_dict(values | {"head.weight": values["entry.weight"]})
    train_both(model, optimizer, twin, range(4, 6), what="reversed")


@on_ranks(2)
def test_values_that_a_hook_after_the_step_writes_are_stepped() -> None:
    """As a hook that limits the weights."""
    model, twin = talk(FORMS["flat"]), Twin(muon_and_adamw())
    optimizer = owned(model, muon_and_adamw())

    def limit(params: Any) -> None:
        with torch.no_grad():
            for param in params:
                param.data.clamp_(-0.2, 0.2)

    optimizer.register_step_post_hook(lambda *_: limit(model.parameters()))
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        gradients = gradients_of(model)
        optimizer.step()
        twin.step(gradients)
        limit(twin.model.parameters())
        twin.assert_has(values_of(model), f"step {step}")


@on_ranks(2, timeout=60)
def test_gradients_with_other_strides_are_stepped() -> None:
    """As a program may assign them."""
    options: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 1.0}
    stepped = []
    for transposes in (False, True):
        torch.manual_seed(0)
        model = fsdp.fully_shard(nn.Linear(4, 6))
        optimizer = OwnedOptimizer(model, [options])
        model(torch.randn(2, 4)).square().sum().backward()
        grad = model.weight.grad
        local = grad.to_local().t().contiguous().t() if transposes else grad.to_local()
        model.weight.grad = DTensor.from_local(
            local, grad.device_mesh, grad.placements, shape=grad.shape, stride=grad.stride()
        )
        optimizer.step()
        stepped.append(model.weight.full_tensor())
    assert torch.equal(*stepped)


@on_ranks(2)
def test_copies_and_pickles_are_refused_with_a_remedy() -> None:
    model = talk(FORMS["fully_shard"])
    optimizer = owned(model, muon_and_adamw())
    for use in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(NotImplementedError, match=r"cannot be copied or pickled.*Make another OwnedOptimizer"):
            use(optimizer)
    backward(model, 0)
    optimizer.step()
    copied = copy.deepcopy(model)
    another = owned(copied, muon_and_adamw())
    another.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, own in ((model, optimizer), (copied, another)):
        own.zero_grad()
        backward(each, 1)
        own.step()
    assert_same(values_of(copied), values_of(model))


@on_ranks(2)
def test_ranks_with_other_numbers_of_batches() -> None:
    """In `fsdp.join`, owners that have no more batches step what the others bring gradients for."""
    found = []
    for make in (lambda model: owned(model, [{"optimizer": torch.optim.AdamW}]), _adamw):
        model = talk(FORMS["orig_params"])
        optimizer = make(model)
        with fsdp.join(model, optimizer):
            for step in range(1 + 2 * dist.get_rank()):
                backward(model, step)
                optimizer.step()
                optimizer.zero_grad()
        found.append(values_of(model))
    assert_same(*found)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


@on_ranks(2)
def test_parameters_without_values_are_refused() -> None:
    with torch.device("meta"):
        model = under_fully_shard(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="weight has no values yet"):
        owned(model, [{"optimizer": torch.optim.AdamW}])


@on_ranks(2)
def test_schedule_free() -> None:
    """Its values of training and of evaluation are others."""
    make = pytest.importorskip("pytorch_optimizer").ScheduleFreeAdamW
    groups: list[dict[str, Any]] = [{"params": is_matrix, "optimizer": make}, {"optimizer": make, "sharded": True}]
    model, twin = talk(FORMS["fully_shard"]), Twin(groups)
    optimizer = owned(model, groups)
    for mode in ("train", "eval", "train"):
        for each in (optimizer, *twin.optimizers):
            getattr(each, mode)()
        twin.assert_has(values_of(model), mode)
        if mode == "train":
            train_both(model, optimizer, twin, range(2))
    assert optimizer.param_groups[0]["step"] == twin.optimizers[0].param_groups[0]["step"] == 4


# Bytes and memory


@parametrize_pairs(form=["orig_params", "fully_shard"], world_size=[3, 2, 1])
@on_ranks("world_size")
def test_bytes_are_as_planned(form: str) -> None:
    """For units that are divided equally that is ``2 (W - 1) / W**2`` of the owned bytes for each rank."""
    model = talk(FORMS[form])
    optimizer = owned(model, muon_and_adamw())
    frozen = "frozen.weight"
    trained = sum(shape.numel() for shape in _owned_shapes(optimizer)) * 4
    counts = []
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        with Counting(traffic := Traffic()):
            optimizer.step()
        counts.append(traffic.values)
    assert frozen in optimizer.plan.owner_of
    planned = optimizer.plan.received(dist.get_rank()) - _received_for(optimizer, frozen)
    assert counts[1:] == [planned, planned], (counts, planned)
    assert counts[0] >= planned  # with the values
    total = torch.tensor(float(planned))
    dist.all_reduce(total)
    world_size = dist.get_world_size()
    if form == "orig_params":  # of rows that are divided unequally, an owner may have fewer than others
        assert total <= 2 * (world_size - 1) / world_size * trained


def _owned_shapes(optimizer: OwnedOptimizer) -> list[torch.Size]:
    return [one.item.shape for one in optimizer.plan.owned if one.item.name != "frozen.weight"]


def _received_for(optimizer: OwnedOptimizer, name: str) -> int:
    """The bytes that the plan has for one parameter, which is frozen and does not travel."""
    return Ownership([one for one in optimizer.plan.owned if one.item.name == name]).received(dist.get_rank())


@on_ranks(2)
def test_state_is_divided_as_planned() -> None:
    groups = [{"optimizer": torch.optim.AdamW, "lr": 1e-3, "cost": math.prod}]
    model = talk(FORMS["fully_shard"])
    optimizer = owned(model, groups)
    backward(model, 0)
    optimizer.step()
    moments = sum(state[key].numel() for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
    unused = {"unused.weight", "unused.bias", "frozen.weight", "frozen.bias"}
    own = {name for name, owner in optimizer.plan.owner_of.items() if owner == dist.get_rank()} - unused
    shapes = {name: param.shape for name, param in talk().named_parameters()}
    expected = 2 * sum(math.prod(shapes[name]) for name in own)
    assert moments == expected
    counts = torch.zeros(2)
    counts[dist.get_rank()] = expected
    dist.all_reduce(counts)
    assert counts.max() <= 1.1 * counts.mean()


# Mistakes

PARAMETERS = [name for name, _ in talk().named_parameters()]


@on_ranks(1)
def test_mistakes_in_groups(tmp_path: Path) -> None:
    model, muon, adamw = talk(FORMS["orig_params"]), torch.optim.Muon, torch.optim.AdamW

    def refuse(kind: type[Exception], text: str, *groups: Any, of: Any = model) -> None:
        with pytest.raises(kind, match=text):
            OwnedOptimizer(of, list(groups))

    refuse(
        ValueError,
        "blocks.0.0.weight is in groups 0 and 1",
        {"params": is_matrix, "optimizer": muon},
        {"params": ["blocks.0.0.weight"], "optimizer": adamw},
    )
    refuse(ValueError, "no group has scale, entry.weight", {"params": is_matrix, "optimizer": muon})
    refuse(ValueError, "no parameter of this name", {"params": ["blocks.7"], "optimizer": adamw})
    refuse(ValueError, "not of this model", {"params": talk(FORMS["orig_params"]).parameters(), "optimizer": adamw})
    refuse(ValueError, "only one group may omit", {"optimizer": adamw}, {"optimizer": adamw})
    refuse(
        ValueError,
        "group 1 of the OwnedOptimizer has no parameters",
        {"optimizer": adamw},
        {"params": [], "optimizer": adamw},
    )
    refuse(ValueError, "the cost of scale", {"optimizer": adamw, "cost": lambda shape: math.nan})
    refuse(TypeError, "group 0 needs under 'optimizer'", {"params": is_matrix})
    refuse(TypeError, "None, with nothing but 'params'", {"params": is_matrix, "optimizer": None, "lr": 0.1})
    refuse(ValueError, "no group has an optimizer", {"params": list(PARAMETERS), "optimizer": None})
    refuse(TypeError, "returned a object", {"optimizer": lambda params: object()})
    refuse(TypeError, "a list of dictionaries")
    refuse(TypeError, "outermost FullyShardedDataParallel", {"optimizer": adamw}, of=talk())
    refuse(NotImplementedError, "LBFGS", {"optimizer": torch.optim.LBFGS})
    refuse(NotImplementedError, "Prodigy estimates its step size", {"optimizer": type("Prodigy", (adamw,), {})})
    refuse(NotImplementedError, "Adai computes means or norms", {"optimizer": type("Adai", (adamw,), {})})
    refuse(NotImplementedError, "LoRARite steps pairs", {"optimizer": type("LoRARite", (adamw,), {})})
    refuse(NotImplementedError, "SophiaH needs second derivatives", {"optimizer": type("SophiaH", (adamw,), {})})
    flat = talk(FullyShardedDataParallel)
    refuse(ValueError, "use_orig_params=True", {"params": is_matrix, "optimizer": muon}, {"optimizer": adamw}, of=flat)
    disk = talk(partial(FullyShardedDataParallel, offload="disk", offload_folder=str(tmp_path)))
    refuse(NotImplementedError, "on disk", {"optimizer": adamw}, of=disk)
    made = OwnedOptimizer(model, [{"optimizer": adamw}])
    with pytest.raises(NotImplementedError, match="groups cannot be added"):
        made.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with model.summon_full_params():
        refuse(RuntimeError, "inside summon_full_params", {"optimizer": adamw})
    grouped = talk(partial(FullyShardedDataParallel, group_by=is_matrix_key))
    assert "stepped where they are sharded: " in str(OwnedOptimizer(grouped, muon_and_adamw()).plan)


@on_ranks(2)
def test_other_groups_on_another_rank_are_refused_by_all() -> None:
    model = talk(FORMS["orig_params"])
    cost = math.prod if dist.get_rank() else (lambda shape: 1.0)
    with pytest.raises(RuntimeError, match="different groups in an OwnedOptimizer"):
        owned(model, [{"optimizer": torch.optim.AdamW, "cost": cost}])
    only_here = [{"optimizer": torch.optim.AdamW, "params": ["typo"] if dist.get_rank() else list(PARAMETERS)}]
    with pytest.raises((ValueError, RuntimeError), match="no parameter of this name"):
        owned(model, only_here)


@on_ranks(3)
def test_a_step_that_fails_on_its_owner_is_told_to_those_that_wait_for_its_values() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if fails:
                raise ArithmeticError("no inverse")
            return super().step(closure)

    model = talk(FORMS["fully_shard"])
    optimizer = owned(model, [{"optimizer": Failing, "lr": 0.1}])
    fails = dist.get_rank() == 1
    backward(model, 0)
    told = "no inverse" if fails else "rank 1 has raised .* ArithmeticError: .*no inverse"
    with pytest.raises(ArithmeticError if fails else RuntimeError, match=told):
        optimizer.step()
    fails = False
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.step()


@on_ranks(2)
def test_torchs_functions_for_optimizer_state_are_refused() -> None:
    model = talk(FORMS["fully_shard"])
    optimizer = owned(model, muon_and_adamw())
    backward(model, 0)
    optimizer.step()
    with pytest.raises(NotImplementedError, match="does not support state of owners"):
        get_optimizer_state_dict(model, optimizer)


@on_ranks(2)
def test_tensor_parallel_parameters_are_refused() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh_of(1, 2)["shard"], [Shard(0)]))
    model = FullyShardedDataParallel(module, use_orig_params=True, process_group=mesh_of(1, 2)["replicate"].get_group())
    with pytest.raises(NotImplementedError, match="weight is a DTensor already"):
        owned(model, [{"optimizer": torch.optim.AdamW}])
    left = {"params": ["weight"], "optimizer": None}
    assert [len(group["params"]) for group in owned(model, [left, {"optimizer": torch.optim.AdamW}]).param_groups] == [
        1
    ]


@on_ranks(2)
def test_ignored_parameters_that_are_not_contiguous_are_refused() -> None:
    ignored = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    module = nn.Sequential(ignored, nn.Flatten(), nn.Linear(12, 2))
    model = FullyShardedDataParallel(module, ignored_modules=[ignored])
    groups: list[dict[str, Any]] = [{"optimizer": torch.optim.AdamW}]
    with pytest.raises(NotImplementedError, match=r"0\.weight is ignored and not contiguous.*\.contiguous\(\)"):
        owned(model, groups)
    ignored.weight.data = ignored.weight.data.contiguous()
    optimizer, before = owned(model, groups), ignored.weight.detach().clone()
    model(torch.ones(1, 2, 4, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(ignored.weight, before)
