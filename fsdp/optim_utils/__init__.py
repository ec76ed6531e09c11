"""The state of optimizers of wrapped models: streamed, whole under plain names, cut for any number of ranks, rekeyed.

A *full* optimizer state is what an optimizer of the unsharded model would have: ``state`` by parameter and
``param_groups``, with tensors in the parameters' shapes. Parameters go by their names in the module from before
wrapping, or by FairScale's numbers (`FullyShardedDataParallel.gather_full_optim_state_dict`). Functions here leave the
dictionaries that they are given alone, but for `flatten_optim_state_dict`, which is FairScale's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.collectives import during
from fsdp.engine.names import clean_name
from fsdp.engine.unit import unit_of_wrapper
from fsdp.optim_utils.full import check_form, goes_by_names, numbers_of_module, rekeyed
from fsdp.optim_utils.gather import named_dictionary, optim_stream
from fsdp.optim_utils.params import parameters_of
from fsdp.optim_utils.scatter import load_full, shard_for


def stream_optim_state(
    model: nn.Module, optim: Any, recipient_rank: int | None = 0
) -> Iterator[tuple[str, str, Tensor]]:
    """Collective. A full optimizer state, one whole tensor at a time. Numbers and values are not in it.

    Go through it on every rank. A rank that gets the tensors needs memory for the one at hand and those on their way
    (32 MiB, or one tensor); others need none. The optimizer may be stepped when it is done. If every rank leaves it
    early, what is left is received and dropped.

    Args:
        model: the outermost wrapper.
        optim: an optimizer of its parameters, or anything with a ``state_dict()`` like one.
        recipient_rank: the number of the rank that gets the tensors; None for all of them.

    Yields:
        The parameter's name, the key of the state (``exp_avg``), and the tensor in the parameter's shape: on the host,
        in memory of its own; on ranks that do not get it, on the meta device.

    Raises:
        As `FullyShardedDataParallel.gather_full_optim_state_dict`, before the first tensor.
    """
    stream = optim_stream(model, optim, recipient_rank)
    return ((original.name, key, tensor) for original, key, tensor in stream.tensors())


@during("full_optim_state_dict()")
def full_optim_state_dict(model: nn.Module, optim: Any, recipient_rank: int | None = 0) -> dict[str, Any] | None:
    """Collective. A full optimizer state under the parameters' names.

    As `FullyShardedDataParallel.gather_full_optim_state_dict`, but for names instead of numbers, without the two keys
    that FairScale adds, and with 0-d tensors as the optimizer has them (as a list of all ranks' where these differ).

    Args:
        model: the outermost wrapper.
        optim: an optimizer of its parameters, or anything with a ``state_dict()`` like one.
        recipient_rank: the number of the rank that gets it; None for all of them.

    Returns:
        The dictionary; None on ranks that do not get it.

    Raises:
        As `FullyShardedDataParallel.gather_full_optim_state_dict`.
    """
    return named_dictionary(optim_stream(model, optim, recipient_rank))


def shard_full_optim_state_dict(model: nn.Module, full: Mapping[str, Any], optim: Any) -> dict[str, Any]:
    """This rank's part of a full optimizer state, for ``optim.load_state_dict``. No rank needs another for it.

    As `FullyShardedDataParallel.get_shard_from_optim_state_dict`, but it leaves `full` alone, takes names as well as
    numbers, and has groups and numbers as `optim` has them.

    Args:
        model: the outermost wrapper.
        full: the whole state, by names, or by FairScale's numbers.
        optim: an optimizer of the model's parameters, into which it will be loaded.

    Raises:
        RuntimeError: inside a forward, backward or `summon_full_params`.
        TypeError: for what is no such dictionary.
        ValueError: for another model's, or other groups; for state that cannot be cut.
    """
    return shard_for(model, full, optim)


@during("load_full_optim_state_dict()")
def load_full_optim_state_dict(model: nn.Module, optim: Any, full: Any, *, rank0_only: bool = False) -> None:
    """Collective. Load a full optimizer state, each rank keeping its part.

    If there is an error on any rank, all raise one, and no optimizer has changed.

    Args:
        model: the outermost wrapper.
        optim: an optimizer of its parameters.
        full: the whole state, by names, or by FairScale's numbers. It is left alone.
        rank0_only: take the first rank's; others pass None, and are sent their parts. What the optimizer has already
            is written in place, so that they need memory for what is new to it only. With tensor
            parallelism, the first of every data-parallel group has it.

    Raises:
        RuntimeError: inside a forward, backward or `summon_full_params`; if another rank could not load it.
        TypeError, ValueError: as `shard_full_optim_state_dict`.
    """
    load_full(model, optim, full, rank0_only)


def rekey_optim_state_dict(full: Mapping[str, Any], model: nn.Module, to: str, optim: Any = None) -> dict[str, Any]:
    """The same full optimizer state with its parameters under names instead of numbers, or the other way round.

    For a wrapped model, numbers are FairScale's, and ``param_id_map`` and ``uncollected_local_ids`` are made. For a
    plain one, they are those of torch's optimizers. So a state goes from one to the other by names.

    Args:
        full: the state. It is left alone; its tensors are shared with the result.
        model: that it is of: the outermost wrapper, or a plain module.
        to: "names" or "numbers".
        optim: for a plain module, an optimizer of its parameters whose numbers count; None for one of
            ``model.parameters()``.

    Raises:
        TypeError: for what is no such dictionary.
        ValueError: for another `to`; for parameters that the model does not have.
    """
    if to not in ("names", "numbers"):
        raise ValueError(f"to must be 'names' or 'numbers', got {to!r}")
    check_form(full)
    by_names, id_map = goes_by_names(full), None
    if unit_of_wrapper(model) is not None:
        params = parameters_of(model, "rekey an optimizer state")
        numbers = {name: params.numbers[original] for name, (_, original) in params.by_name.items()}
        first = {number: original.name for number, (_, original) in params.by_number.items()}
        local = {one: number for number, one in enumerate(params.listed)}
        id_map = {number: local[one] for number, (one, _) in params.by_number.items()} if to == "numbers" else None
        order: dict[Any, Any] = {number: (local[one], number) for number, (one, _) in params.by_number.items()}
    else:
        numbers = numbers_of_module(model, optim)
        first = {number: name for name, number in numbers.items()}
        order = {number: number for number in first}
    table: dict[Any, Any] = dict(numbers) if by_names else dict(first)
    if by_names is (to == "names"):
        table = {key: key for key in table}
    if by_names:
        table |= {key: table[clean_name(key)] for key in full["state"] if clean_name(key) in table}
    return rekeyed(full, table, order if by_names and to == "numbers" else None, id_map)


# --- FairScale's helpers --------------------------------------------------------------------------------------------


def is_singleton_tensor(x: Any) -> bool:
    """Whether it is a tensor without dimensions."""
    return isinstance(x, Tensor) and x.dim() == 0


def check_param_counts_before_sharding(full_optim_state_dict: Mapping[str, Any], n_instances: int) -> None:
    """Make sure that a state of FairScale's format is of a model with as many wrappers; one without state always is.

    Raises:
        ValueError: if not.
    """
    found = len(set(full_optim_state_dict["param_id_map"].values()))
    if full_optim_state_dict["state"] and found != n_instances:
        raise ValueError(
            f"this model has {n_instances} wrappers with parameters, itself included, and the model that the optimizer "
            f"state was saved of had {found}: wrap the same modules as then"
        )


def flatten_optim_state_dict(sd: dict[str, Any]) -> dict[str, Any]:
    """A state of FairScale's format with one whole vector for each flat parameter. Changes `sd`, and returns it.

    Tensors of what has one number in ``param_id_map`` follow one another; 0-d tensors, lists and values are those of
    the last one. The two keys that FairScale adds are dropped.
    """
    id_map: dict[int, int | None] = sd["param_id_map"]
    flat: dict[int | None, dict[str, Any]] = {}
    for number, state in sd["state"].items():
        local = id_map[number]
        for key, value in state.items():
            entry = flat.setdefault(local, {})
            if isinstance(value, Tensor) and not is_singleton_tensor(value):
                entry.setdefault(key, []).append(value.reshape(-1))
            else:
                entry[key] = value
    vectors = {
        local: {key: torch.cat(value) if _are_vectors(value) else value for key, value in entry.items()}
        for local, entry in flat.items()
    }
    seen = [local for local, _ in groupby(id_map.values())]
    groups = [{**group, "params": list(range(len(seen)))} for group in sd["param_groups"]]
    sd |= {"state": vectors, "param_groups": groups}
    del sd["uncollected_local_ids"], sd["param_id_map"]
    return sd


def _are_vectors(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Tensor) and v.dim() == 1 for v in value)


def build_unflat_state_dict(
    instance_list: Sequence[Any],
    world_pad_info: Sequence[Sequence[Sequence[int]]],
    state: dict[int, dict[str, list[Any]]],
    singleton_state: dict[int, dict[str, list[Tensor]]],
    uncollected_opt_state: Mapping[int, Mapping[str, Any]],
    original_sd: dict[str, Any],
) -> dict[str, Any]:
    """FairScale's full state from all ranks' parts of flat parameters. Changes `original_sd`, and returns it.

    Args:
        instance_list: the wrappers with parameters, in the order of ``modules()``, each with one flat parameter.
        world_pad_info: by rank and wrapper, how many elements at the end of its flat parameter's part are padding, in a
            list of one.
        state: by wrapper and key, each rank's vector; a list of one for what is no tensor.
        singleton_state: the same for 0-d tensors.
        uncollected_opt_state: by wrapper and key, what one rank has all of.
        original_sd: the optimizer's own dictionary, with its groups and other keys.
    """
    alone = {local: {key: [value] for key, value in entry.items()} for local, entry in uncollected_opt_state.items()}
    whole: dict[int, dict[str, Any]] = {}
    id_map: dict[int, int | None] = {}
    for local, instance in enumerate(instance_list):
        (shard,) = instance.non_shared_params()
        layout = shard.make_layout()
        entry = {**state.get(local, {}), **singleton_state.get(local, {}), **alone.get(local, {})}
        numbers = range(len(id_map), len(id_map) + len(layout.slots))
        id_map |= dict.fromkeys(numbers, local if entry else None)
        for key, parts in entry.items():
            is_whole = local in alone or not _are_vectors(parts)
            padding = [0 if is_whole else pads[local][0] for pads in world_pad_info]
            cut = (
                [part[: len(part) - pad] for part, pad in zip(parts, padding, strict=False)]
                if _are_vectors(parts)
                else []
            )
            values = layout.unpack(torch.cat(cut)) if cut else [_single(parts)] * len(numbers)
            for number, value in zip(numbers, values, strict=True):
                whole.setdefault(number, {})[key] = value
    groups = [dict(group) for group in original_sd["param_groups"]]
    groups[0]["params"] = list(id_map)
    added = {"param_id_map": id_map, "uncollected_local_ids": list(uncollected_opt_state)}
    original_sd |= {"state": whole, "param_groups": groups, **added}
    return original_sd


def _single(parts: list[Any]) -> Any:
    """0-d tensors stay one for each rank."""
    return parts if is_singleton_tensor(parts[0]) else parts[0]
