"""FairScale's import paths for this library: after `install`, code written for FairScale runs as it is.

import fsdp.compat.fairscale

fsdp.compat.fairscale.install()  # before anything imports fairscale

from fairscale.nn import FullyShardedDataParallel
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.serialization import add_safe_globals

from fsdp.compat.fairscale.parts import (
    OSS,
    DummyProcessGroup,
    ReduceScatterBucketer,
    ShardedDataParallel,
    apply_to_tensors,
    apply_to_type,
    build_unflat_state_dict,
    check_param_counts_before_sharding,
    flatten_optim_state_dict,
    is_singleton_tensor,
    pack_kwargs,
    split_non_tensors,
    unpack_kwargs,
    unpack_non_tensors,
)
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.flatten_params_wrapper import FlattenParamsWrapper
from fsdp.engine.unit import TrainingState
from fsdp.fully_sharded_data_parallel import FullyShardedDataParallel, ProcessGroupName, get_fsdp_instances
from fsdp.optim_utils.grad_scaler import ShardedGradScaler
from fsdp.state_dict.full import no_pre_load_state_dict_hook
from fsdp.wrap import (
    ConfigAutoWrap,
    auto_wrap,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    wrap,
)
from fsdp.wrap.batch_norm import auto_wrap_bn
from fsdp.wrap.checkpoint_wrapper import (
    checkpoint_wrapper,
    disable_checkpointing,
    is_checkpointing,
    is_recomputing,
    patch_batchnorm,
)

_ROOT = "fairscale"

# The last one that FairScale had. Clients compare it with those from which on they use something.
VERSION = "0.4.13"


def _named(*objects: Any) -> dict[str, Any]:
    return {each.__name__: each for each in objects}


_WRAP = _named(auto_wrap, config_auto_wrap_policy, default_auto_wrap_policy, enable_wrap, wrap)
_DATA_PARALLEL = _named(
    FullyShardedDataParallel, TrainingState, auto_wrap_bn, get_fsdp_instances, no_pre_load_state_dict_hook
)
_CHECKPOINT = _named(checkpoint_wrapper, is_checkpointing, is_recomputing)
_CHECKPOINT_FILE = {**_CHECKPOINT, **_named(disable_checkpointing)}
_FLATTEN = _named(FlattenParamsWrapper, FlatParameter)
# torch's own scaler would let ranks take different steps, so both names stand for the one that does not.
_SCALERS: dict[str, Any] = {"GradScaler": ShardedGradScaler, "ShardedGradScaler": ShardedGradScaler}
_TESTING = _named(DummyProcessGroup)
_CONTAINERS = _named(apply_to_tensors, apply_to_type, pack_kwargs, unpack_kwargs, split_non_tensors, unpack_non_tensors)
_BUCKETER, _PARALLEL = _named(ReduceScatterBucketer), _named(ProcessGroupName)
_OSS, _SHARDED_DDP = _named(OSS), _named(ShardedDataParallel)

# Old paths and new ones: `fairscale.utils` became `fairscale.internal` and `fairscale.fair_dev`.
PROVIDED: dict[str, dict[str, Any]] = {
    "fairscale": {"__version__": VERSION, "__version_tuple__": tuple(map(int, VERSION.split(".")))},
    "fairscale.version": {"__version_tuple__": tuple(map(int, VERSION.split("."))), "__version__": VERSION},
    "fairscale.nn": {
        **_WRAP,
        **_named(FullyShardedDataParallel, FlattenParamsWrapper, ShardedDataParallel, checkpoint_wrapper),
    },
    "fairscale.nn.data_parallel": {**_DATA_PARALLEL, **_SHARDED_DDP},
    "fairscale.nn.data_parallel.fully_sharded_data_parallel": {**_DATA_PARALLEL, **_FLATTEN, **_BUCKETER, **_PARALLEL},
    "fairscale.nn.data_parallel.fsdp_optim_utils": _named(
        flatten_optim_state_dict, build_unflat_state_dict, check_param_counts_before_sharding, is_singleton_tensor
    ),
    "fairscale.nn.data_parallel.sharded_ddp": _SHARDED_DDP,
    "fairscale.nn.wrap": _WRAP,
    "fairscale.nn.wrap.auto_wrap": {**_WRAP, **_named(ConfigAutoWrap)},
    "fairscale.nn.misc": _named(FlattenParamsWrapper, checkpoint_wrapper),
    "fairscale.nn.misc.flatten_params_wrapper": _FLATTEN,
    "fairscale.nn.misc.checkpoint_activations": _CHECKPOINT_FILE,
    "fairscale.nn.checkpoint": _CHECKPOINT,
    "fairscale.nn.checkpoint.checkpoint_activations": _CHECKPOINT_FILE,
    "fairscale.nn.checkpoint.checkpoint_utils": _named(patch_batchnorm),
    "fairscale.optim": {"GradScaler": ShardedGradScaler, **_OSS},
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

# By a name in the path, a module's or an object's.
INSTEAD = {
    name: instead
    for names, instead in (
        ("pipe Pipe PipeRPCWrapper", "pipelines are not part of this library; torch.distributed.pipelining has them"),
        (
            "model_parallel",
            "use DTensors (torch.distributed.tensor.parallel) and wrap them, see docs/tensor_parallel.md",
        ),
        ("moe MOELayer Top2Gate", "write the layer yourself and give its wrapper a process_group of its own"),
        (
            "adam Adam Precision",
            "torch.optim has optimizers; wrapped by FullyShardedDataParallel, all of them are sharded",
        ),
        ("adascale AdaScale AdaScaleWrapper", "scale the learning rate in your own code; nothing here does so"),
        ("layerwise_gradient_scaler", "ShardedGradScaler has one scale for all layers"),
        (
            "param_bucket GradBucket ParamBucket Bucket",
            "these belong to ShardedDataParallel; ReduceScatterBucketer is what FullyShardedDataParallel has",
        ),
        ("get_process_group_cached", "make the group with torch.distributed.new_group, once"),
        ("validate_process_group", "FullyShardedDataParallel checks its groups by itself"),
        ("chunk_and_pad", "torch.chunk, and torch.nn.functional.pad for the last piece"),
        ("enable_pytorch_sync_bn", "current versions of torch need no such patch"),
        ("OffloadConfig ssd_offload", 'pass offload="disk" and offload_folder to FullyShardedDataParallel'),
        ("to_np from_np", "apply_to_tensors(lambda tensor: tensor.cpu().numpy(), container), or the other way round"),
        ("experimental", "what FairScale called experimental is not part of this library"),
    )
    for name in names.split()
}


def install(force: bool = False) -> None:
    """Have ``import fairscale...`` find this library from now on. Doing it twice changes nothing.

    For the process; call it at the top of the program, in every process that imports `fairscale` or unpickles what
    names it. `docs/fairscale.md` has the table of what is found where. Everything else below `fairscale` is an error
    that names what to use instead.

    Args:
        force: also where FairScale is installed, whose place this library then takes.

    Raises:
        RuntimeError: if FairScale is installed, unless forced; or if it was imported before, in any case: what has its
            classes already would not notice.
    """
    if _FINDER in sys.meta_path:
        return
    loaded = [name for name in sys.modules if _is_below(name)]
    if loaded:
        where = getattr(sys.modules[loaded[0]], "__file__", None) or "somewhere else"
        raise RuntimeError(
            f"{loaded[0]} was imported already, from {where}. Call fsdp.compat.fairscale.install() before the first "
            "import of fairscale, and of packages that import it."
        )
    found = None if force else find_spec(_ROOT)
    if found is not None:
        raise RuntimeError(
            f"FairScale is installed ({found.origin}) and would be hidden. Uninstall it, or say that this is meant: "
            "fsdp.compat.fairscale.install(force=True)."
        )
    sys.meta_path.insert(0, _FINDER)
    # For `torch.load` with its default, ``weights_only=True``, of what names these classes of FairScale's.
    wrapper = "fairscale.nn.data_parallel.fully_sharded_data_parallel"
    flat_parameter = "fairscale.nn.misc.flatten_params_wrapper.FlatParameter"
    add_safe_globals([(FlatParameter, flat_parameter), (TrainingState, f"{wrapper}.TrainingState")])


def uninstall() -> None:
    """Take back `install`. What was imported meanwhile goes on working; new imports find FairScale, or nothing."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    for name in [name for name in sys.modules if _is_below(name)]:
        if getattr(sys.modules[name], "__loader__", None) is _FINDER:
            del sys.modules[name]


def _is_below(name: str) -> bool:
    return name == _ROOT or name.startswith(f"{_ROOT}.")


class _Finder(MetaPathFinder, Loader):
    """Serves the modules of the table, and knows nothing of others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _is_below(fullname):
            return None
        if fullname not in PROVIDED:
            # Without `name`, or `from fairscale.nn import X` would put its own message in the place of this one.
            raise ModuleNotFoundError(_missing(fullname))
        return ModuleSpec(fullname, self, origin="fsdp.compat.fairscale", is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        # Modules below first: some have the name of a function that their package exports, and that one counts.
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
        """Answer those who ask for the version of the installed package."""
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
        instead or "it covers FullyShardedDataParallel and what belongs to it; docs/fairscale.md lists all names"
    )
