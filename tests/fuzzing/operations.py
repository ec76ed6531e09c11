"""The operations of a case: each does the same with both models of a pair."""

from __future__ import annotations

import copy
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsdp
from fsdp import FSDPModule, FullyShardedDataParallel, optim_utils
from fsdp.distributed.dtensor import full_tensor
from tests.fuzzing.case import OPTIMIZERS
from tests.fuzzing.models import Leaf, plain_model, recomputes
from tests.fuzzing.pair import Chosen, Pair, pairs_of
from tests.fuzzing.sharding import front_door, shard


def train(pair: Pair) -> None:
    """A step of one or two batches, accumulated with or without communication, perhaps clipped."""
    turns, silent = pair.rng.choice((1, 1, 2)), pair.rng.random() < 0.5
    for turn in range(turns):
        with pair.no_sync() if silent and turn < turns - 1 else nullcontext():
            pair.backward(turn, 1 / turns)
    pair.end_step(clip=pair.rng.choice((None, 0.1, 100.0)))


def train_some(pair: Pair) -> None:
    """A step on the gradients of some parameters, which backward is told."""
    trained = [(one, twins) for one, twins in pairs_of(pair.sharded, pair.plain) if one.requires_grad]
    # Where ranks use different parameters, backward to some of them would come through other units on other ranks.
    chosen, share = Chosen(), pair.rng.choice((0.5, 1.0)) if pair.case.flags != "apart" else 1.0
    for one, twins in trained:
        if pair.rng.random() < share:
            chosen.sharded.append(one)
            chosen.plain += twins
    if chosen.sharded:
        pair.backward(6, 1.0, chosen)
        pair.end_step()


def evaluate(pair: Pair) -> None:
    pair.sharded.eval(), pair.plain.eval()
    with torch.no_grad():
        inputs, flags = pair.batch(dist.get_rank(), 7)
        pair.same("evaluation", pair.sharded(inputs, flags), pair.plain(inputs, flags))
    pair.sharded.train(), pair.plain.train()


def forward_only(pair: Pair) -> None:
    """A forward whose backward never comes."""
    inputs, flags = pair.batch(dist.get_rank(), 8)
    pair.sharded(inputs, flags), pair.plain(inputs, flags)


def two_forwards(pair: Pair) -> None:
    """Two forwards before the backward of both."""
    batches = [pair.batch(dist.get_rank(), turn) for turn in (3, 4)]
    sum(pair.sharded(*batch).square().mean() for batch in batches).backward()
    for turn in (3, 4):
        for twin in pair.twins(turn):
            (twin / pair.case.world_size).backward()
    pair.end_step()


def toggle(pair: Pair) -> None:
    """Parameters are frozen while a graph exists: for a second forward, or for backward."""
    pair.fill_unused(False)  # it would depend on when they are frozen
    listed = [each for each in pairs_of(pair.sharded, pair.plain) if pair.rng.random() < 0.5]
    frozen = {pair.sharded: [one for one, _ in listed], pair.plain: [twin for _, twins in listed for twin in twins]}
    order, reference = pair.rng.choice(("together", "first", "second", "backward")), pair.rng.random() < 0.3
    if recomputes(pair.plain) or not pair.is_trained:
        return  # torch refuses to compute again what saves other tensors than before, as what is frozen does

    def run(model: Any, rank: int, share: float) -> Tensor:
        first, before = model(*pair.batch(rank, 10)).square().mean(), [one.requires_grad for one in frozen[model]]
        for param in frozen[model]:
            param.requires_grad_(False)
        losses = [first]
        if order == "backward":
            (first * share).backward()
        else:
            with torch.set_grad_enabled(not reference):
                losses.append(model(*pair.batch(rank, 11)).square().mean())
        for param, needs in zip(frozen[model], before, strict=True):
            param.requires_grad_(needs)
        if order == "together":
            (sum(losses) * share).backward()
        elif order != "backward":
            for loss in losses if order == "first" else reversed(losses):
                if loss.requires_grad:
                    (loss * share).backward()
        return sum(losses).detach()

    _step_by(pair, run)


def backward_again(pair: Pair) -> None:
    """A graph is kept, and backward runs through it twice."""
    if not pair.is_trained:
        return
    loss = pair.sharded(*pair.batch(dist.get_rank(), 12)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    for twin in pair.twins(12):
        (twin / pair.case.world_size).backward(retain_graph=True)
        (twin / pair.case.world_size).backward()
    pair.end_step()


def write_memory(pair: Pair) -> None:
    """Parameters are written in ways that raise no version counter, after a forward that may have left them whole."""
    evaluate(pair)
    how = pair.rng.choice(("foreach", "assigned", "swapped"))
    for model, optimizer in zip((pair.sharded, pair.plain), pair.optimizers, strict=True):
        params = optimizer.param_groups[0]["params"]
        kept = [param.data for param in params]
        if how == "foreach":
            torch._foreach_mul_(kept, 0.9)
        else:
            for param in params:
                param.data = param.data * 0.9
        if how == "swapped":
            with torch.no_grad():
                model(*pair.batch(0, 13) if pair.case.flags != "apart" else pair.batch(dist.get_rank(), 13))
            for param, data in zip(params, kept, strict=True):
                param.data = data
    evaluate(pair)


def write_rows(pair: Pair) -> None:
    """A part of a parameter along the sharded dimension is written."""
    if pair.is_wrapper or torch.__version__ < "2.13":  # see `fsdp.distributed.gathered_part`
        return
    pair.reshard()
    params = dict(pair.sharded.named_parameters())
    name = pair.rng.choice([name for name, param in pair.plain.named_parameters() if param.dim()])
    start = pair.rng.randrange(params[name].shape[0])
    with torch.no_grad():
        for param in (params[name], dict(pair.plain.named_parameters())[name]):
            param[start:].mul_(0.5)
            param[start].add_(0.25)


def average(pair: Pair) -> None:
    """An average of the weights is kept by torch, and evaluated before and after an update."""
    pair.reshard()
    averages = [AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for each in (pair.sharded, pair.plain)]
    for _ in range(2):
        inputs = pair.batch(dist.get_rank(), 14)
        with torch.no_grad():
            pair.same("average", *(each.eval()(*inputs) for each in averages))
        train(pair)
        pair.reshard()
        for each, model in zip(averages, (pair.sharded, pair.plain), strict=True):
            each.update_parameters(model)


def wrap_otherwise(pair: Pair) -> None:
    """Training goes on with other units, which get the optimizer's state."""
    options = pair.case.options
    originals = options.get("use_orig_params") or not options.get("flatten_parameters", True)
    if not originals or pair.case.optimizer == "sgd":  # of a flat parameter, parts with and without a state are refused
        return
    by_numbers = pair.rng.random() < 0.5  # as FairScale's methods do, of which the first rank has the state
    if by_numbers:
        told = [pair.sharded.gather_full_optim_state_dict(pair.optimizers[0])]
        dist.broadcast_object_list(told)
    else:
        told = [optim_utils.full_optim_state_dict(pair.sharded, pair.optimizers[0], recipient_rank=None)]
    pair.sharded = shard(pair.case, copy.deepcopy(pair.plain), again=pair.step + 1)
    new = OPTIMIZERS[pair.case.optimizer](list(pair.sharded.parameters()))
    if by_numbers:
        new.load_state_dict(pair.sharded.get_shard_from_optim_state_dict(told[0]))
    else:
        optim_utils.load_full_optim_state_dict(pair.sharded, new, told[0])
    pair.optimizers = new, pair.optimizers[1]


def load(pair: Pair) -> None:
    """Other values, through `load_state_dict`."""
    torch.manual_seed(pair.step)
    state = {name: value + 0.1 * torch.randn_like(value) for name, value in pair.plain.state_dict().items()}
    for names in tied(pair.plain):
        for name in names[1:]:
            state[name] = state[names[0]]
    pair.plain.load_state_dict(state)
    pair.sharded.load_state_dict({name: value.clone() for name, value in state.items()})


def summon(pair: Pair) -> None:
    """Whole parameters are changed in place."""
    if not pair.is_wrapper:
        return
    on_first, by_data = pair.rng.random() < 0.3, pair.rng.random() < 0.5
    with pair.sharded.summon_full_params(rank0_only=on_first), torch.no_grad():
        if dist.get_rank() == 0 or not on_first:
            for param in pair.sharded.parameters():
                (param.data if by_data else param).mul_(0.9)
    with torch.no_grad():
        for param in pair.plain.parameters():
            param.mul_(0.9)


def scale_data(pair: Pair) -> None:
    """Shards are changed between steps: through ``.data``, but of `DTensor`s, where nobody can see that."""
    pair.reshard()
    with torch.no_grad():
        for param in pair.sharded.parameters():
            (param.data if pair.is_wrapper else param).mul_(0.8)
        for param in pair.plain.parameters():
            param.mul_(0.8)


def copy_models(pair: Pair) -> None:
    """Training goes on with copies."""
    pair.sharded, pair.plain = copy.deepcopy(pair.sharded), copy.deepcopy(pair.plain)
    pair.renew_optimizers()


def freeze(pair: Pair) -> None:
    """A parameter is frozen, or thawed, by its name."""
    if not pair.lists_originals:
        return
    params = dict(pair.sharded.named_parameters())
    names = [name for name in dict(pair.plain.named_parameters()) if name in params]
    if len(names) < 2:
        return
    name = pair.rng.choice(names)
    for param in (params[name], dict(pair.plain.named_parameters())[name]):
        param.requires_grad_(not param.requires_grad)
    pair.renew_optimizers()


def fail(pair: Pair) -> None:
    """A forward that raises, on every rank, and leaves everything as it was."""
    hook = pair.inner.exit.register_forward_pre_hook(raise_on_purpose)
    try:
        pair.sharded(*pair.batch(dist.get_rank(), 9))
    except KeyError as error:
        if "on purpose" not in str(error):
            raise
    hook.remove()
    hook = pair.plain.exit.register_forward_pre_hook(raise_on_purpose)
    with suppress(KeyError):
        pair.plain(*pair.batch(dist.get_rank(), 9))
    hook.remove()


def raise_on_purpose(*args: Any) -> None:
    raise KeyError("on purpose")


def optimizer_state(pair: Pair) -> None:
    """The optimizer's state is the twin's, and goes to a new optimizer."""
    if not pair.is_wrapper:
        return
    full = optim_utils.full_optim_state_dict(pair.sharded, pair.optimizers[0], recipient_rank=None)
    names = {param: name for name, param in pair.plain.named_parameters()}
    state = {names[param]: value for param, value in pair.optimizers[1].state.items()}
    for name, values in state.items():
        for key, value in values.items():
            if torch.is_tensor(value) and value.dim():
                pair.same(f"{key} of {name}", full["state"][name][key], value)
    new = OPTIMIZERS[pair.case.optimizer](list(pair.sharded.parameters()))
    optim_utils.load_full_optim_state_dict(pair.sharded, new, full)
    pair.optimizers = new, pair.optimizers[1]


def save_and_load(pair: Pair) -> None:
    """Through files, to a model whose values were changed in between."""
    with _folder() as folder:
        fsdp.save(f"{folder}/saved", pair.sharded, pair.optimizers[0], generators=False)
        with torch.no_grad():
            for param in pair.sharded.parameters():
                param.add_(1.0)
        fsdp.load(f"{folder}/saved", pair.sharded, pair.optimizers[0])


def local_state(pair: Pair) -> None:
    """Shards, as each rank saves its own."""
    if not pair.is_wrapper:
        return
    saved = {name: value.clone() for name, value in pair.sharded.local_state_dict().items()}
    with torch.no_grad():
        for param in pair.sharded.parameters():
            param.add_(1.0)
    pair.sharded.load_local_state_dict(saved)


def change_settings(pair: Pair) -> None:
    """Settings of `fully_shard`'s modules, which change when they communicate, and what unused parameters get."""
    if pair.is_wrapper:
        return
    units: list[Any] = [module for module in pair.sharded.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(pair.rng.random() < 0.5, recurse=False)
        unit.set_reshard_after_backward(pair.rng.random() < 0.5, recurse=False)
    pair.rng.choice(units).set_modules_to_forward_prefetch(pair.rng.sample(units, 1))
    pair.rng.choice(units).set_modules_to_backward_prefetch(pair.rng.sample(units, 1))
    pair.sharded.set_keep_unsharded_storage(pair.rng.random() < 0.5)
    pair.sharded.set_reduce_scatter_max_input_buffers(pair.rng.choice((1, 3)))
    pair.fill_unused(pair.rng.random() < 0.5)


def discard(pair: Pair) -> None:
    """Gradients are accumulated and thrown away."""
    with pair.no_sync():
        pair.backward(5, 1.0)
    pair.optimizers[0].zero_grad(), pair.optimizers[1].zero_grad()


def input_gradient(pair: Pair) -> None:
    """The gradient of a batch, beside those of parameters."""
    if not pair.is_trained:
        return
    (inputs, flags), found = pair.batch(dist.get_rank(), 15), []
    ours = inputs.clone().requires_grad_()
    pair.sharded(ours, flags).square().mean().backward()
    for rank in range(pair.case.world_size):
        pair.plain.train(rank == dist.get_rank())
        inputs, flags = pair.batch(rank, 15)
        theirs = inputs.clone().requires_grad_()
        (pair.plain(theirs, flags).square().mean() / pair.case.world_size).backward()
        found.append(theirs.grad)
    pair.plain.train()
    pair.same("input gradient", ours.grad, found[dist.get_rank()] * pair.case.world_size)
    pair.end_step()


def gradient_penalty(pair: Pair) -> None:
    """The loss has the gradient for the inputs in it."""
    if not pair.is_trained:
        return

    def run(model: Any, rank: int, share: float) -> Tensor:
        inputs, flags = pair.batch(rank, 16)
        inputs = inputs.clone().requires_grad_()
        outputs = model(inputs, flags)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        loss = outputs.square().mean() + slope.square().mean()
        (loss * share).backward()
        return loss.detach()

    _step_by(pair, run)


def evaluate_between(pair: Pair) -> None:
    """An evaluation between a forward and its backward."""
    if not pair.is_trained:
        return
    mode = pair.rng.choice((torch.no_grad, torch.inference_mode))

    def evaluated(model: Any) -> Tensor:
        model.eval()
        with mode():
            outputs = model(*pair.batch(dist.get_rank(), 18)).clone()
        model.train()
        return outputs

    loss = pair.sharded(*pair.batch(dist.get_rank(), 17)).square().mean()
    found = evaluated(pair.sharded)
    loss.backward()
    pair.same("evaluation", found, evaluated(pair.plain))
    for twin in pair.twins(17):
        (twin / pair.case.world_size).backward()
    pair.end_step()


def infer(pair: Pair) -> None:
    """An evaluation in inference mode."""
    pair.sharded.eval(), pair.plain.eval()
    with torch.inference_mode():
        batch = pair.batch(dist.get_rank(), 19)
        pair.same("inference", pair.sharded(*batch), pair.plain(*batch))
    pair.sharded.train(), pair.plain.train()


def clip_otherwise(pair: Pair) -> None:
    """torch's functions clip, by several norms or by value."""
    kind = pair.rng.choice((1.0, 2.0, 3.0, float("inf"), "value"))
    pair.backward(20, 1.0)
    pair.complete_gradients()
    if kind == "value":
        if pair.case.options.get("sharding") == "SHARD_OPTIM":
            fsdp.reduce_gradients(pair.sharded)
        for model in (pair.sharded, pair.plain):
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
    else:
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.05, kind) for each in (pair.sharded, pair.plain)]
        pair.same(f"norm of order {kind}", full_tensor(norms[0]), norms[1])
    pair.end_step()


def hook_gradients(pair: Pair) -> None:
    """Hooks of listed parameters scale their gradients."""
    if not pair.lists_originals:
        return
    pair.reshard()
    params, twins = dict(pair.sharded.named_parameters()), dict(pair.plain.named_parameters())
    trained = [name for name, twin in twins.items() if name in params and twin.requires_grad]
    chosen = pair.rng.sample(trained, pair.rng.randint(0, len(trained)))
    hooks = [each[name].register_hook(lambda grad: 0.5 * grad) for name in chosen for each in (params, twins)]
    pair.backward(21, 1.0)
    pair.end_step()
    for hook in hooks:
        hook.remove()


def fail_backward(pair: Pair) -> None:
    """A backward that raises, on every rank, at its end or in the middle; its gradients are dropped."""
    if not pair.is_trained:
        return
    at_end = pair.rng.random() < 0.5
    for model, inner in ((pair.sharded, pair.inner), (pair.plain, pair.plain)):
        inputs, flags = pair.batch(dist.get_rank(), 22)
        inputs = inputs.clone().requires_grad_()
        if at_end:
            inputs.register_hook(raise_on_purpose)
        hook = inner.chain.register_forward_hook(
            lambda module, args, output: None if at_end else (output.register_hook(raise_on_purpose), None)[1]
        )
        with suppress(KeyError):
            model(inputs, flags).square().mean().backward()
        hook.remove()
    for optimizer in pair.optimizers:
        optimizer.zero_grad()


def assign(pair: Pair) -> None:
    """A module gets another parameter."""
    shared = {name for names in tied(pair.plain) for name in names}
    name = pair.rng.choice([name for name, _ in pair.plain.named_parameters() if name not in shared])
    path, _, key = name.rpartition(".")
    before = pair.plain.get_parameter(name)
    torch.manual_seed(pair.step + 77)
    value = before.detach() + 0.1 * torch.randn_like(before)
    pair.reshard()
    for module in (pair.inner.get_submodule(path), pair.plain.get_submodule(path)):
        setattr(module, key, nn.Parameter(value.clone(), before.requires_grad))
    pair.compare("after the assignment")
    pair.renew_optimizers()


def restart(pair: Pair) -> None:
    """Training goes on from files, with a model that was made on the meta device, perhaps with other units."""
    with torch.device("meta"):
        plain = plain_model(pair.case)
        for change in pair.changes:
            change(plain.chain.blocks, Leaf(nn.Linear(*pair.plain.exit.weight.shape[1:] * 2)))
    params, twins = list(plain.parameters()), list(pair.plain.parameters())
    if len(params) < len(twins):
        return  # the twin's move to the simulated device has made two parameters of one
    for param, twin in zip(params, twins, strict=True):
        param.requires_grad_(twin.requires_grad)
    with _folder() as folder:
        pair.reshard()
        fsdp.save(f"{folder}/saved", pair.sharded, pair.optimizers[0], generators=False)
        pair.sharded = shard(pair.case, plain, again=pair.rng.choice((0, pair.step + 1)))
        new = OPTIMIZERS[pair.case.optimizer](list(pair.sharded.parameters()))
        fsdp.load(f"{folder}/saved", pair.sharded, new)
    pair.optimizers = new, pair.optimizers[1]
    pair.fill_unused(pair.fills_unused)


def unshard_early(pair: Pair) -> None:
    """Units are unsharded by hand before a step, and waited for or not."""
    if pair.is_wrapper:
        return
    units = [module for module in pair.sharded.modules() if isinstance(module, FSDPModule)]
    chosen = pair.rng.sample(units, pair.rng.randint(1, len(units)))
    started = [unit.unshard(async_op=pair.rng.random() < 0.5) for unit in chosen]
    if pair.rng.random() < 0.5:
        for one in started:
            if one is not None:
                one.wait()
    train(pair)


def park(pair: Pair) -> None:
    """Model and optimizer are parked, and back."""
    with _folder() as folder:
        pair.reshard()
        with fsdp.parked(pair.sharded, pair.optimizers[0], to=pair.rng.choice(("host", folder))):
            pass


def own_average(pair: Pair) -> None:
    """An average by `fsdp.EMA`, which is swapped in."""
    pair.reshard()
    ours = fsdp.EMA(pair.sharded, 0.5)
    theirs = AveragedModel(pair.plain, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(2):
        train(pair)
        pair.reshard()
        ours.update_parameters(pair.sharded)
        theirs.update_parameters(pair.plain)
    with ours.applied_to(pair.sharded), torch.no_grad():
        batch = pair.batch(dist.get_rank(), 23)
        pair.same("average", pair.sharded(*batch), theirs.module(*batch))


def torch_state(pair: Pair) -> None:
    """The state that torch's function returns, loaded by torch's function."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    pair.reshard()
    is_full = pair.lists_originals and not pair.case.mixed and pair.rng.random() < 0.5
    devices = {one.device for one in (*pair.sharded.parameters(), *pair.sharded.buffers()) if one.dim()}
    options = StateDictOptions(full_state_dict=is_full and len(devices) == 1)  # torch loads it to a single device
    state = {name: value.clone() for name, value in get_model_state_dict(pair.sharded, options=options).items()}
    for name, value in pair.plain.state_dict().items():
        pair.same(f"torch's {name}", full_tensor(state[name]), value)
    with torch.no_grad():
        for param in pair.sharded.parameters():
            param.add_(1.0)
    set_model_state_dict(pair.sharded, state, options=options)


def pickle_model(pair: Pair) -> None:
    """Training goes on with a pickled model."""
    is_hybrid = pair.case.options.get("sharding") in ("hybrid", "HYBRID_SHARD_OPTIM")  # whose groups are not one
    if not pair.is_wrapper or is_hybrid or pair.case.device != "cpu":  # the simulated device pickles nothing
        return
    pair.sharded = pickle.loads(pickle.dumps(pair.sharded))
    for wrapper in fsdp.get_fsdp_instances(pair.sharded):
        wrapper.process_group = dist.group.WORLD
    pair.plain = copy.deepcopy(pair.plain)
    pair.renew_optimizers()


def add_unit(pair: Pair) -> None:
    """The model grows by a unit."""
    _change_tree(pair, lambda blocks, block: blocks.append(block))


def remove_unit(pair: Pair) -> None:
    """A unit is taken out of the model."""
    last, units = len(pair.plain.chain.blocks) - 1, _units_among(pair.inner.chain.blocks)
    # `metadata()`, by which a flat parameter is compared, has the names of when its module was wrapped.
    units = [number for number in units if set(range(number, last + 1)) <= set(units)]
    if last > 0 and units:
        number = pair.rng.choice(units)
        _change_tree(pair, lambda blocks, block: blocks.pop(number))


def replace_unit(pair: Pair) -> None:
    """A unit is replaced by another one."""
    if units := _units_among(pair.inner.chain.blocks):
        number = pair.rng.choice(units)
        _change_tree(pair, lambda blocks, block: blocks.__setitem__(number, block))


def _units_among(blocks: nn.ModuleList) -> list[int]:
    return [number for number, block in enumerate(blocks) if isinstance(block, (FSDPModule, FullyShardedDataParallel))]


def _change_tree(pair: Pair, change: Callable[[nn.ModuleList, nn.Module], Any]) -> None:
    width = pair.plain.exit.weight.shape[1]
    torch.manual_seed(pair.step + 99)
    block = Leaf(nn.Linear(width, width)).to(pair.case.device)
    change(pair.inner.chain.blocks, front_door(pair.case)(copy.deepcopy(block)))
    change(pair.plain.chain.blocks, block)
    pair.changes.append(change)
    pair.renew_optimizers()
    pair.fill_unused(pair.fills_unused)


def follow(pair: Pair) -> None:
    """A step that is traced."""
    with _folder() as folder, fsdp.trace(pair.sharded, f"{folder}/trace.json"):
        train(pair)


def _step_by(pair: Pair, run: Callable[[Any, int, float], Tensor]) -> None:
    """A step with the gradients of both models by `run`, which gets a model, a rank and the share of its loss."""
    found = run(pair.sharded, dist.get_rank(), 1.0)
    for rank in range(pair.case.world_size):
        pair.plain.train(rank == dist.get_rank())
        expected = run(pair.plain, rank, 1.0 / pair.case.world_size)
        if rank == dist.get_rank():
            pair.same("loss", found, expected)
    pair.plain.train()
    pair.end_step()


@contextmanager
def _folder() -> Iterator[str]:
    """A folder of all ranks, for as long as all of them use it."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    try:
        yield str(made[0])
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(str(made[0]))


def tied(model: nn.Module) -> list[list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return [each for each in names.values() if len(each) > 1]
