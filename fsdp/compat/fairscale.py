"""FairScale's import paths for this library: after `install`, code written for FairScale runs unchanged.

import fsdp.compat.fairscale

fsdp.compat.fairscale.install()  # before anything imports fairscale

from fairscale.nn import FullyShardedDataParallel
"""

from __future__ import annotations

import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.serialization import add_safe_globals

import fsdp
from fsdp.distributed.collectives import communicator
from fsdp.distributed.communicator import Group, default_group
from fsdp.optim_utils.full import ADDED

Callback = Callable[[Tensor], None]
_Input = tuple[Sequence[Tensor], Callback | None]  # a tensor for each rank


class DummyProcessGroup:
    """A process group with a size and a rank, but without communication.

    With ``size=1``, a wrapper can use this group without `torch.distributed`.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def apply_to_type(type_fn: Callable[[Any], bool], fn: Callable[[Any], Any], container: Any) -> Any:
    """Return a copy of nested containers, with `fn` applied to all objects for which `type_fn` returns True."""
    if type_fn(container):
        return fn(container)
    if isinstance(container, PackedSequence):
        data = apply_to_type(type_fn, fn, container.data)
        return container if data is None else container._replace(data=data)  # None: `fn` changed it in place
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
    """Return a copy of nested containers, with `fn` applied to all tensors."""
    return apply_to_type(torch.is_tensor, fn, container)


def pack_kwargs(*args: Any, **kwargs: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return the names of keyword arguments, and a tuple of all values, with keyword arguments at the end."""
    return tuple(kwargs), (*args, *kwargs.values())


def unpack_kwargs(kwarg_keys: Sequence[str], flat_args: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the positional and keyword arguments from the results of `pack_kwargs`.

    Raises:
        ValueError: if there are more names than values.
    """
    if len(kwarg_keys) > len(flat_args):
        raise ValueError(f"unpack_kwargs got {len(kwarg_keys)} names and only {len(flat_args)} values")
    first = len(flat_args) - len(kwarg_keys)
    return flat_args[:first], dict(zip(kwarg_keys, flat_args[first:], strict=True))


def split_non_tensors(mixed: Any) -> tuple[tuple[Tensor, ...], dict[str, list[Any]] | None]:
    """Return the tensors of a tuple, and other values for `unpack_non_tensors`; None instead for a single tensor."""
    if isinstance(mixed, Tensor):
        return (mixed,), None
    rest = {
        "is_tensor": [isinstance(each, Tensor) for each in mixed],
        "objects": [each for each in mixed if not isinstance(each, Tensor)],
    }
    return tuple(each for each in mixed if isinstance(each, Tensor)), rest


def unpack_non_tensors(tensors: Sequence[Tensor], packed_non_tensors: dict[str, list[Any]] | None) -> Any:
    """Return the argument of `split_non_tensors`, with `tensors` instead of the original tensors.

    Raises:
        ValueError: if the number of tensors differs.
    """
    if packed_non_tensors is None:
        return tensors
    is_tensor, objects = packed_non_tensors["is_tensor"], packed_non_tensors["objects"]
    if len(tensors) + len(objects) != len(is_tensor):
        raise ValueError(f"unpack_non_tensors needs {len(is_tensor) - len(objects)} tensors, got {len(tensors)}")
    left, right = iter(tensors), iter(objects)
    return tuple(next(left if each else right) for each in is_tensor)


class _Refused:
    """A FairScale class that can be imported, as client modules require, but not instantiated."""

    instead: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"fsdp.compat.fairscale has no {type(self).__name__}: {self.instead}")


class ShardedDataParallel(_Refused):
    """Replaces FairScale's class, which shards gradients by whole parameters; creating one raises an error."""

    instead = "wrap with FullyShardedDataParallel(reshard_after_forward=False), which needs no optimizer of its own"


class OSS(_Refused):
    """Replaces FairScale's optimizer, which shards its state by whole parameters; creating one raises an error."""

    instead = "wrap with FullyShardedDataParallel, after which any optimizer of its parameters() is sharded"


class ReduceScatterBucketer:
    """Sums lists of tensors over ranks, for each rank one tensor of a list; small tensors are reduced together.

    This library does not use this class in training, but the buckets of `engine.reduction`.

    Args:
        bucket_cap_mb: the maximum size of a bucket in MiB, over all ranks; 0 or less reduces each tensor immediately.
    """

    def __init__(self, bucket_cap_mb: float = 25) -> None:
        self.bucket_cap_mb = bucket_cap_mb
        # The tensors that wait for a reduction, by dtype, device and group.
        self.buckets: dict[tuple[torch.dtype, torch.device, Any], list[_Input]] = {}

    @torch.no_grad()
    def reduce_scatter_async(
        self, input_list: Sequence[Tensor], group: Group | None, callback_fn: Callback | None = None
    ) -> None:
        """Collective. Sum the tensors of all ranks for this rank, immediately or in a later call.

        Args:
            input_list: a tensor for each rank of `group`, with equal shape, dtype and device.
            group: the process group; None means the default group.
            callback_fn: an optional function, called with this rank's sum after the reduction.

        Raises:
            ValueError: if the number of tensors differs from the world size, or if the tensors differ.
        """
        group = default_group(group)
        first = input_list[0] if input_list else None
        if first is None or len(input_list) != group.size():
            raise ValueError(f"reduce_scatter_async needs a tensor for each of {group.size()}, got {len(input_list)}")
        if {(each.shape, each.dtype, each.device) for each in input_list} != {(first.shape, first.dtype, first.device)}:
            raise ValueError("reduce_scatter_async needs tensors of one shape, dtype and device for all ranks")
        key = (first.dtype, first.device, group)
        capacity = int(max(self.bucket_cap_mb, 0) * 2**20) // first.element_size() // group.size()
        if first.numel() > capacity:
            _reduce(group, [(input_list, callback_fn)])
            return
        bucket = self.buckets.setdefault(key, [])
        if sum(inputs[0].numel() for inputs, _ in bucket) + first.numel() > capacity:
            _reduce(group, bucket)
        # Copies, because callers free their gradients after this call.
        bucket.append(([each.clone() for each in input_list], callback_fn))

    @torch.no_grad()
    def flush(self) -> None:
        """Collective. Reduce all waiting tensors, and call the callbacks."""
        for (_, _, group), bucket in self.buckets.items():
            _reduce(group, bucket)

    def teardown(self) -> None:
        """Release all memory, after `flush`.

        Raises:
            RuntimeError: if a tensor still waits for a reduction.
        """
        for (dtype, _, _), bucket in self.buckets.items():
            if bucket:
                raise RuntimeError(f"teardown: {len(bucket)} reductions of {dtype} are pending: call flush() first")
        self.buckets.clear()


def _reduce(group: Group, bucket: list[_Input]) -> None:
    """Reduce all tensors of a bucket, and clear the bucket."""
    waiting = bucket.copy()
    bucket.clear()
    if not waiting:
        return
    full = torch.cat([inputs[rank].reshape(-1) for rank in range(group.size()) for inputs, _ in waiting])
    comm = communicator(group, full.device)
    reduced = comm.reduce_scatter(full, "a bucket of reductions", "bucket of reductions").wait()
    parts = reduced.split([inputs[0].numel() for inputs, _ in waiting])
    for part, (inputs, callback) in zip(parts, waiting, strict=True):
        if callback is not None:
            callback(part.view_as(inputs[0]))


# Functions for state dicts, from `fsdp_optim_utils`


def is_singleton_tensor(x: Any) -> bool:
    """Return whether `x` is a tensor without dimensions."""
    return isinstance(x, Tensor) and x.dim() == 0


def check_param_counts_before_sharding(full_optim_state_dict: Mapping[str, Any], n_instances: int) -> None:
    """Check that a state in FairScale's format belongs to a model with `n_instances` wrappers.

    Raises:
        ValueError: if the number differs, unless the state is empty.
    """
    found = len(set(full_optim_state_dict["param_id_map"].values()))
    if full_optim_state_dict["state"] and found != n_instances:
        raise ValueError(
            f"this model has {n_instances} wrappers with parameters, itself included, and the model that the optimizer "
            f"state was saved of had {found}: wrap the same modules as that model"
        )


def flatten_optim_state_dict(sd: dict[str, Any]) -> dict[str, Any]:
    """Convert a state in FairScale's format in place to an unsharded vector for each flat parameter, and return it.

    Tensors of parameters with the same number in ``param_id_map`` are concatenated; 0-d tensors, lists and values are
    taken from the last parameter. The additional keys of full states are removed.
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
    for key in ADDED:
        sd.pop(key, None)
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
    """Build FairScale's full state from all ranks' shards of flat parameters, in `original_sd`, and return it.

    Args:
        instance_list: the wrappers with parameters, in the order of ``modules()``, each with a single flat parameter.
        world_pad_info: by rank and wrapper, a list with the number of padding elements at the end of the rank's shard.
        state: by wrapper and key, each rank's vector; a list with a single value if the state is not a tensor.
        singleton_state: the same for 0-d tensors.
        uncollected_opt_state: by wrapper and key, the state of which a single rank has the complete values.
        original_sd: the optimizer's dictionary, with its groups and other keys.
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
            else:  # a single value, but for 0-d tensors a list with the values of all ranks
                values = [parts if is_singleton_tensor(parts[0]) else parts[0]] * len(numbers)
            for number, value in zip(numbers, values, strict=True):
                whole.setdefault(number, {})[key] = value
    groups = [dict(group) for group in original_sd["param_groups"]]
    groups[0]["params"] = list(id_map)
    added = {"param_id_map": id_map, "uncollected_local_ids": list(uncollected_opt_state)}
    original_sd |= {"state": whole, "param_groups": groups, **added}
    return original_sd


_ROOT = "fairscale"

# FairScale's last version, which clients compare with the minimum versions of features.
VERSION = "0.4.13"


def _named(names: str, *objects: Any) -> dict[str, Any]:
    """Return public objects of this package, from names separated by spaces, and other objects, all by name."""
    return {name: getattr(fsdp, name) for name in names.split()} | {each.__name__: each for each in objects}


_WRAP = _named("auto_wrap config_auto_wrap_policy default_auto_wrap_policy enable_wrap wrap")
_DATA_PARALLEL = _named(
    "FullyShardedDataParallel TrainingState auto_wrap_bn get_fsdp_instances no_pre_load_state_dict_hook"
)
_CHECKPOINT = _named("checkpoint_wrapper is_checkpointing is_recomputing")
_CHECKPOINT_FILE = {**_CHECKPOINT, **_named("disable_checkpointing")}
_FLATTEN = _named("FlattenParamsWrapper FlatParameter")
# With torch's scaler, ranks could skip different steps, so both names refer to the sharded scaler.
_SCALERS: dict[str, Any] = {"GradScaler": fsdp.ShardedGradScaler, "ShardedGradScaler": fsdp.ShardedGradScaler}
_TESTING = _named("", DummyProcessGroup)
_CONTAINERS = _named(
    "", apply_to_tensors, apply_to_type, pack_kwargs, unpack_kwargs, split_non_tensors, unpack_non_tensors
)
_BUCKETER, _PARALLEL = _named("", ReduceScatterBucketer), _named("ProcessGroupName")
_OSS, _SHARDED_DDP = _named("", OSS), _named("", ShardedDataParallel)

# Old paths and new ones: `fairscale.utils` became `fairscale.internal` and `fairscale.fair_dev`.
PROVIDED: dict[str, dict[str, Any]] = {
    "fairscale": {"__version__": VERSION, "__version_tuple__": tuple(map(int, VERSION.split(".")))},
    "fairscale.version": {"__version_tuple__": tuple(map(int, VERSION.split("."))), "__version__": VERSION},
    "fairscale.nn": {
        **_WRAP,
        **_named("FullyShardedDataParallel FlattenParamsWrapper checkpoint_wrapper", ShardedDataParallel),
    },
    "fairscale.nn.data_parallel": {**_DATA_PARALLEL, **_SHARDED_DDP},
    "fairscale.nn.data_parallel.fully_sharded_data_parallel": {**_DATA_PARALLEL, **_FLATTEN, **_BUCKETER, **_PARALLEL},
    "fairscale.nn.data_parallel.fsdp_optim_utils": _named(
        "", flatten_optim_state_dict, build_unflat_state_dict, check_param_counts_before_sharding, is_singleton_tensor
    ),
    "fairscale.nn.data_parallel.sharded_ddp": _SHARDED_DDP,
    "fairscale.nn.wrap": _WRAP,
    "fairscale.nn.wrap.auto_wrap": {**_WRAP, **_named("ConfigAutoWrap")},
    "fairscale.nn.misc": _named("FlattenParamsWrapper checkpoint_wrapper"),
    "fairscale.nn.misc.flatten_params_wrapper": _FLATTEN,
    "fairscale.nn.misc.checkpoint_activations": _CHECKPOINT_FILE,
    "fairscale.nn.checkpoint": _CHECKPOINT,
    "fairscale.nn.checkpoint.checkpoint_activations": _CHECKPOINT_FILE,
    "fairscale.nn.checkpoint.checkpoint_utils": _named("patch_batchnorm"),
    "fairscale.optim": {"GradScaler": fsdp.ShardedGradScaler, **_OSS},
    "fairscale.optim.oss": _OSS,
    "fairscale.optim.grad_scaler": _SCALERS,
    "fairscale.utils": {},
    "fairscale.utils.testing": _TESTING,
    "fairscale.utils.containers": _CONTAINERS,
    "fairscale.utils.parallel": _PARALLEL,
    "fairscale.utils.reduce_scatter_bucketer": _BUCKETER,
    "fairscale.internal": {},
    "fairscale.internal.containers": _CONTAINERS,
    "fairscale.internal.parallel": _PARALLEL,
    "fairscale.internal.reduce_scatter_bucketer": _BUCKETER,
    "fairscale.fair_dev": {},
    "fairscale.fair_dev.testing": {},
    "fairscale.fair_dev.testing.testing": _TESTING,
}

# Replacements for missing modules and objects, by a name in their path.
INSTEAD = {
    name: instead
    for names, instead in (
        ("pipe Pipe PipeRPCWrapper", "pipelines are not part of this library; torch.distributed.pipelining has them"),
        (
            "model_parallel",
            "use DTensors (torch.distributed.tensor.parallel) and wrap them, see docs/sharding.md",
        ),
        ("moe MOELayer Top2Gate", "write the layer yourself and pass its wrapper a separate process_group"),
        (
            "adam Adam Precision",
            "torch.optim has optimizers; wrapped by FullyShardedDataParallel, all of them are sharded",
        ),
        ("adascale AdaScale AdaScaleWrapper", "scale the learning rate in your own code"),
        ("layerwise_gradient_scaler", "ShardedGradScaler has one scale for all layers"),
        (
            "param_bucket GradBucket ParamBucket Bucket",
            "these belong to ShardedDataParallel; FullyShardedDataParallel has ReduceScatterBucketer",
        ),
        ("get_process_group_cached", "create the group with torch.distributed.new_group, once"),
        ("validate_process_group", "FullyShardedDataParallel checks its groups automatically"),
        ("chunk_and_pad", "torch.chunk, and torch.nn.functional.pad for the last piece"),
        ("enable_pytorch_sync_bn", "current versions of torch need no such patch"),
        ("OffloadConfig ssd_offload", 'pass offload="disk" and offload_folder to FullyShardedDataParallel'),
        ("to_np from_np", "apply_to_tensors(lambda tensor: tensor.cpu().numpy(), container), or the other way round"),
        ("experimental", "FairScale's experimental features are not part of this library"),
    )
    for name in names.split()
}


def install(force: bool = False) -> None:
    """Make ``import fairscale...`` import this library from now on. Repeated calls have no effect.

    The effect is limited to this process. Call this function at the start of the program, in every process that imports
    `fairscale` or unpickles its classes. `docs/migration.md` contains a table of the supported names. All other names
    below `fairscale` raise an error that contains the replacement.

    Args:
        force: if True, replace FairScale even if it is installed.

    Raises:
        RuntimeError: if FairScale is installed, unless `force` is True; always if `fairscale` was already imported,
            because modules would continue to use the imported classes.
    """
    if _FINDER in sys.meta_path:
        return
    loaded = [name for name in list(sys.modules) if _is_below(name)]
    if loaded:
        where = getattr(sys.modules[loaded[0]], "__file__", None) or "somewhere else"
        raise RuntimeError(
            f"{loaded[0]} was imported already, from {where}. Call fsdp.compat.fairscale.install() before the first "
            "import of fairscale, and of packages that import it."
        )
    found = None if force else find_spec(_ROOT)
    if found is not None:
        raise RuntimeError(
            f"FairScale is installed ({found.origin}) and would be hidden. Uninstall it, or confirm that it is to be "
            "hidden: fsdp.compat.fairscale.install(force=True)."
        )
    sys.meta_path.insert(0, _FINDER)
    # For `torch.load` with its default, ``weights_only=True``, of files that refer to these FairScale classes.
    wrapper = "fairscale.nn.data_parallel.fully_sharded_data_parallel"
    flat_parameter = "fairscale.nn.misc.flatten_params_wrapper.FlatParameter"
    add_safe_globals([(fsdp.FlatParameter, flat_parameter), (fsdp.TrainingState, f"{wrapper}.TrainingState")])


def uninstall() -> None:
    """Undo `install`. Imported names continue to work; new imports use FairScale, or fail if it is not installed."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    for name in [name for name in list(sys.modules) if _is_below(name)]:
        if getattr(sys.modules[name], "__loader__", None) is _FINDER:
            del sys.modules[name]


def _is_below(name: str) -> bool:
    return name == _ROOT or name.startswith(f"{_ROOT}.")


class _Finder(MetaPathFinder, Loader):
    """Finds and loads only the modules in `PROVIDED`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _is_below(fullname):
            return None
        if fullname not in PROVIDED:
            # Without `name`, because `from fairscale.nn import X` would replace this message otherwise.
            raise ModuleNotFoundError(_missing(fullname))
        return ModuleSpec(fullname, self, origin="fsdp.compat.fairscale", is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        # Submodules first: if a package exports a function with the name of a submodule, the function must remain.
        for name in PROVIDED:
            if name.rpartition(".")[0] == module.__name__:
                importlib.import_module(name)
        names = PROVIDED[module.__name__]
        module.__dict__.update(names, __all__=[name for name in names if not name.startswith("_")])
        module.__doc__ = f"Stands in for {module.__name__}; see `fsdp.compat.fairscale`."

        def missing(name: str) -> Any:
            raise AttributeError(_missing(f"{module.__name__}.{name}"))

        module.__dict__["__getattr__"] = missing

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        """Return the metadata of the package, for callers that query the installed version."""
        return [_AsInstalled()] if context.name in (None, _ROOT) else []


class _AsInstalled(Distribution):
    def read_text(self, filename: str) -> str | None:
        text = f"Metadata-Version: 2.1\nName: {_ROOT}\nVersion: {VERSION}\nSummary: stands in for it, of fsdp\n"
        return text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / path


_FINDER = _Finder()


def _missing(fullname: str) -> str:
    instead = next((INSTEAD[part] for part in fullname.split(".") if part in INSTEAD), None)
    return f"fsdp.compat.fairscale has no {fullname}: " + (
        instead or "it covers FullyShardedDataParallel and related names only; docs/migration.md lists all names"
    )
