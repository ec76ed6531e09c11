"""Small things of FairScale's that clients import and that this library itself has no use for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fsdp.distributed.collectives import Communicator, communicator
from fsdp.distributed.communicator import Group, default_group

Callback = Callable[[Tensor], None]


class DummyProcessGroup:
    """A group that knows its size and this rank, and communicates nothing.

    With ``size=1`` it is enough for a wrapper, without `torch.distributed`.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def apply_to_type(type_fn: Callable[[Any], bool], fn: Callable[[Any], Any], container: Any) -> Any:
    """Return a copy of a nest of containers with `fn` applied to whatever `type_fn` is true of."""
    if type_fn(container):
        return fn(container)
    if isinstance(container, PackedSequence):
        return container._replace(data=apply_to_type(type_fn, fn, container.data))
    if isinstance(container, dict):
        copied = type(container)() if isinstance(container, OrderedDict) else {}
        copied.update((key, apply_to_type(type_fn, fn, value)) for key, value in container.items())
        return copied
    if isinstance(container, tuple) and hasattr(container, "_fields"):
        return type(container)(*(apply_to_type(type_fn, fn, item) for item in container))
    if isinstance(container, (list, tuple, set)):
        kind = next(kind for kind in (list, tuple, set) if isinstance(container, kind))
        return kind(apply_to_type(type_fn, fn, item) for item in container)
    return container


def apply_to_tensors(fn: Callable[[Tensor], Any], container: Any) -> Any:
    """Return a copy of a nest of containers with `fn` applied to its tensors."""
    return apply_to_type(torch.is_tensor, fn, container)


def pack_kwargs(*args: Any, **kwargs: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return the names of keyword arguments, and all values in one tuple, which ends with theirs."""
    return tuple(kwargs), (*args, *kwargs.values())


def unpack_kwargs(kwarg_keys: Sequence[str], flat_args: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return what `pack_kwargs` was given.

    Raises:
        ValueError: for more names than values.
    """
    if len(kwarg_keys) > len(flat_args):
        raise ValueError(f"unpack_kwargs got {len(kwarg_keys)} names and only {len(flat_args)} values")
    first = len(flat_args) - len(kwarg_keys)
    return flat_args[:first], dict(zip(kwarg_keys, flat_args[first:], strict=True))


def split_non_tensors(mixed: Any) -> tuple[tuple[Tensor, ...], dict[str, list[Any]] | None]:
    """Return the tensors of a tuple, and the rest for `unpack_non_tensors`; None in its place for a single tensor."""
    if isinstance(mixed, Tensor):
        return (mixed,), None
    rest = {
        "is_tensor": [isinstance(each, Tensor) for each in mixed],
        "objects": [each for each in mixed if not isinstance(each, Tensor)],
    }
    return tuple(each for each in mixed if isinstance(each, Tensor)), rest


def unpack_non_tensors(tensors: Sequence[Tensor], packed_non_tensors: dict[str, list[Any]] | None) -> Any:
    """Return what `split_non_tensors` was given, with these tensors.

    Raises:
        ValueError: for another number of tensors.
    """
    if packed_non_tensors is None:
        return tensors
    is_tensor, objects = packed_non_tensors["is_tensor"], packed_non_tensors["objects"]
    if len(tensors) + len(objects) != len(is_tensor):
        raise ValueError(f"unpack_non_tensors needs {len(is_tensor) - len(objects)} tensors, got {len(tensors)}")
    left, right = iter(tensors), iter(objects)
    return tuple(next(left if each else right) for each in is_tensor)


class _Refused:
    """A class of FairScale's that can be imported and not made: files of clients name it at the top."""

    instead: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"fsdp.compat.fairscale has no {type(self).__name__}: {self.instead}")


class ShardedDataParallel(_Refused):
    """Stands in for FairScale's, which shards gradients by whole parameters."""

    instead = "wrap with FullyShardedDataParallel(reshard_after_forward=False), which needs no optimizer of its own"


class OSS(_Refused):
    """Stands in for FairScale's optimizer, which shards its state by whole parameters."""

    instead = "wrap with FullyShardedDataParallel, after which any optimizer of its parameters() is sharded"


# A bucketer of its own; training here has the buckets of `engine.reduction`


class _Bucket:
    """The tensors that wait for one reduction over the ranks of `comm`."""

    def __init__(self, comm: Communicator) -> None:
        self.waiting: list[tuple[Sequence[Tensor], Callback | None]] = []
        self.offset = 0  # elements for each rank that wait
        self._comm, self._tag = comm, comm.new_tag()

    def flush(self) -> None:
        waiting, self.waiting, self.offset = self.waiting, [], 0
        if waiting:
            self.reduce(waiting)

    def reduce(self, waiting: Sequence[tuple[Sequence[Tensor], Callback | None]]) -> None:
        ranks = range(self._comm.world_size)
        full = torch.cat([inputs[rank].reshape(-1) for rank in ranks for inputs, _ in waiting])
        reduced = self._comm.reduce_scatter(full, "a bucket of reductions", self._tag).wait()
        self._comm.settle()
        parts = reduced.split([inputs[0].numel() for inputs, _ in waiting])
        for part, (inputs, callback) in zip(parts, waiting, strict=True):
            if callback is not None:
                callback(part.view_as(inputs[0]))


class ReduceScatterBucketer:
    """Sum lists of tensors over ranks, each rank getting its own; small ones wait for each other.

    Args:
        bucket_cap_mb: MiB that wait at most for one reduction, over all ranks; with 0 or less nothing waits.
    """

    def __init__(self, bucket_cap_mb: float = 25) -> None:
        self.bucket_cap_mb = bucket_cap_mb
        self.buckets: dict[tuple[torch.dtype, torch.device, Any], _Bucket] = {}

    @torch.no_grad()
    def reduce_scatter_async(
        self, input_list: Sequence[Tensor], group: Group | None, callback_fn: Callback | None = None
    ) -> None:
        """Collective. Sum over ranks what each has for this one, now or at a later call.

        Args:
            input_list: a tensor for each rank of `group`, alike in shape, dtype and device.
            group: the ranks.
            callback_fn: called with this rank's sum, as soon as there is one.

        Raises:
            ValueError: for another number of tensors, or different ones.
        """
        group = default_group(group)
        first = input_list[0] if input_list else None
        if first is None or len(input_list) != group.size():
            raise ValueError(f"reduce_scatter_async needs a tensor for each of {group.size()}, got {len(input_list)}")
        if {(each.shape, each.dtype, each.device) for each in input_list} != {(first.shape, first.dtype, first.device)}:
            raise ValueError("reduce_scatter_async needs tensors of one shape, dtype and device for all ranks")
        key = (first.dtype, first.device, group)
        capacity = int(max(self.bucket_cap_mb, 0) * 2**20) // first.element_size() // group.size()
        if key not in self.buckets:
            self.buckets[key] = _Bucket(communicator(group, first.device))
        bucket = self.buckets[key]
        if first.numel() > capacity:
            bucket.reduce([(input_list, callback_fn)])
            return
        if bucket.offset + first.numel() > capacity:
            bucket.flush()
        # Copies, because callers free their gradients as soon as they have handed them over.
        bucket.waiting.append(([each.clone() for each in input_list], callback_fn))
        bucket.offset += first.numel()

    @torch.no_grad()
    def flush(self) -> None:
        """Collective. Reduce what waits, and call the callbacks."""
        for bucket in self.buckets.values():
            bucket.flush()

    def teardown(self) -> None:
        """Let go of all memory, after `flush`.

        Raises:
            RuntimeError: if something waits.
        """
        for (dtype, _, _), bucket in self.buckets.items():
            if bucket.waiting:
                raise RuntimeError(f"teardown: {len(bucket.waiting)} reductions of {dtype} wait; call flush() first")
        self.buckets.clear()


# Of `fsdp_optim_utils`: functions of state dictionaries


def is_singleton_tensor(x: Any) -> bool:
    """Return whether it is a tensor without dimensions."""
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
    """Change a state of FairScale's format to one unsharded vector for each flat parameter, and return it.

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
    """Make FairScale's full state of all ranks' shards of flat parameters, in `original_sd`, and return it.

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
            if _are_vectors(parts):
                padding = [0 if local in alone else pads[local][0] for pads in world_pad_info]
                cut = [part[: len(part) - pad] for part, pad in zip(parts, padding, strict=False)]
                values = layout.unpack(torch.cat(cut))
            else:  # one value, but 0-d tensors as one for each rank
                values = [parts if is_singleton_tensor(parts[0]) else parts[0]] * len(numbers)
            for number, value in zip(numbers, values, strict=True):
                whole.setdefault(number, {})[key] = value
    groups = [dict(group) for group in original_sd["param_groups"]]
    groups[0]["params"] = list(id_map)
    added = {"param_id_map": id_map, "uncollected_local_ids": list(uncollected_opt_state)}
    original_sd |= {"state": whole, "param_groups": groups, **added}
    return original_sd
