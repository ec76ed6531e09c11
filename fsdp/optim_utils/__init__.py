"""The state of a wrapped model's optimizer is gathered under plain names, sharded for any number of ranks, rekeyed.

A *full* optimizer state is what an optimizer of the unsharded model would have: ``state`` by parameter and
``param_groups``, with tensors in the parameters' shapes. Parameters go by their names in the module from before
wrapping, or by FairScale's numbers (`FullyShardedDataParallel.gather_full_optim_state_dict`). Functions here leave the
dictionaries that they are given alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
    """Collective. Yield a full optimizer state, one unsharded tensor at a time. Numbers and values are not in it.

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
    """Collective. Return a full optimizer state under the parameters' names.

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
    """Return this rank's shard of a full optimizer state, for ``optim.load_state_dict``. No rank needs another for it.

    As `FullyShardedDataParallel.get_shard_from_optim_state_dict`, but it leaves `full` alone, takes names as well as
    numbers, and has groups and numbers as `optim` has them.

    Args:
        model: the outermost wrapper.
        full: the state, by names, or by FairScale's numbers.
        optim: an optimizer of the model's parameters, into which it will be loaded.

    Raises:
        RuntimeError: inside a forward, backward or `summon_full_params`.
        TypeError: for what is no such dictionary.
        ValueError: for another model's, or other groups; for state that cannot be sharded.
    """
    return shard_for(model, full, optim)


@during("load_full_optim_state_dict()")
def load_full_optim_state_dict(model: nn.Module, optim: Any, full: Any, *, rank0_only: bool = False) -> None:
    """Collective. Load a full optimizer state, each rank keeping its shard.

    If there is an error on any rank, all raise one, and no optimizer has changed.

    Args:
        model: the outermost wrapper.
        optim: an optimizer of its parameters.
        full: the state, by names, or by FairScale's numbers. It is left alone.
        rank0_only: take the first rank's; others pass None, and are sent their shards. What the optimizer has already
            is written in place, so that they need memory for what is new to it only. With tensor
            parallelism, the first of every data-parallel group has it.

    Raises:
        RuntimeError: inside a forward, backward or `summon_full_params`; if another rank could not load it.
        TypeError, ValueError: as `shard_full_optim_state_dict`.
    """
    load_full(model, optim, full, rank0_only)


def rekey_optim_state_dict(full: Mapping[str, Any], model: nn.Module, to: str, optim: Any = None) -> dict[str, Any]:
    """Return a full optimizer state with its parameters under names instead of numbers, or the other way round.

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
