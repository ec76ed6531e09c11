"""`FlattenParamsWrapper`: a module whose parameters are stored in one or more flat vectors."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fsdp.engine.call_stack import is_called_from
from fsdp.engine.flat_param import FlatParameter, ParamInfo
from fsdp.engine.names import FLATTEN_PART, clean_name, clean_text
from fsdp.engine.originals import take_over
from fsdp.engine.unit import unit_of
from fsdp.engine.user_attributes import attributes_of, give_attributes
from fsdp.layers.managed_params import collect, names_of
from fsdp.layers.wrapper import Wrapper

# The wrapped module also keeps the views in a list, as in FairScale.
_VIEWS = "_unflattened_param_views"


class FlattenParamsWrapper(Wrapper):
    """Store a module's parameters in flat parameters, and compute with views of them.

    The module's attributes become differentiable views of the flat parameters and are no longer parameters; state
    dicts keep the module's plain names. Parameters with multiple uses are stored once.
    `FullyShardedDataParallel` uses this class for its module.

    Args:
        module: the module to wrap; its parameters are replaced in place.
        param_list: None flattens all parameters into a single flat parameter; a list flattens these parameters; a list
            of lists creates a flat parameter for each. Without parameters the module does not change.
        flat_param_names: suffixes of the flat parameters' names, ``flat_param_<suffix>``; by default their
            numbers.

    Raises:
        ValueError: if the names are not unique or their number differs from the number of groups; if a group mixes
            dtypes or `requires_grad`, or contains a parameter of another module.
    """

    def __init__(
        self,
        module: nn.Module,
        param_list: Sequence[nn.Parameter] | Sequence[Sequence[nn.Parameter]] | None = None,
        flat_param_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self._fpw_module = module
        found = collect(module) if param_list is None or len(param_list) else {}
        groups = _as_groups(list(found) if param_list is None else param_list)
        self._check_groups(groups, found, type(module).__name__)
        suffixes = free_suffixes(module, len(groups)) if flat_param_names is None else flat_param_names
        if len(suffixes) != len(groups) or len(set(suffixes)) != len(suffixes):
            raise ValueError(
                f"flat_param_names must be unique and one per group of parameters: got {list(suffixes)} for "
                f"{len(groups)} groups"
            )
        flat_params = [FlatParameter(group, group[0].requires_grad, names_of(group, found)) for group in groups]
        taken = {param: found[param] for group in groups for param in group}
        take_over(taken, flat_params, type(module).__name__)
        self.hold(flat_params, [[found[param] for param in group] for group in groups], suffixes)
        self._unflattened: list[nn.Parameter] = []
        self._flatten_after_load = False
        self._load_errors: list[str] = []
        self._show_views()
        self.register_load_state_dict_pre_hook(self._before_load)
        self.register_load_state_dict_post_hook(self._after_load)

    def hold(
        self,
        flat_params: list[FlatParameter],
        places: list[list[list[ParamInfo]]],
        suffixes: Sequence[str],
        *,
        is_listed: bool = True,
    ) -> None:
        """Hold flat parameters, with the places of their parameters, and optionally list them as parameters."""
        self.flat_params, self.param_infos = flat_params, places
        self.flat_param_names = [f"flat_param_{suffix}" for suffix in suffixes]
        for name, flat_param in zip(self.flat_param_names, flat_params, strict=True):
            if is_listed:
                self._parameters[name] = flat_param

    def _wrapped(self) -> nn.Module | None:
        return self._fpw_module if "flat_param_names" in self.__dict__ else None

    @staticmethod
    def _check_groups(
        groups: Sequence[Sequence[nn.Parameter]], found: dict[nn.Parameter, list[ParamInfo]], owner: str
    ) -> None:
        seen: set[nn.Parameter] = set()
        for group in groups:
            for param in group:
                if param not in found or param in seen:
                    raise ValueError(
                        f"param_list has a parameter in two groups, or one that is not a plain parameter of the {owner}"
                    )
                seen.add(param)
            for what, values in (
                ("dtypes", {str(param.dtype) for param in group}),
                ("requires_grad", {str(param.requires_grad) for param in group}),
            ):
                if len(values) > 1:
                    names = ", ".join(found[param][0].fqn for param in group)
                    raise ValueError(
                        f"the parameters of a flat parameter must agree, got {what} {sorted(values)} in ({names}). Put "
                        "them into separate groups: param_list=[[...], [...]]."
                    )

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fpw_module

    @property
    def flat_param(self) -> FlatParameter:
        """The only flat parameter.

        Raises:
            RuntimeError: if there is none, or more than one.
        """
        if len(self.flat_params) != 1:
            raise RuntimeError(f"there are {len(self.flat_params)} flat parameters; use flat_params")
        return self.flat_params[0]

    @property
    def num_params_managed(self) -> int:
        """The number of original parameters in the flat parameters."""
        return sum(map(len, self.param_infos))

    @property
    def is_flattened(self) -> bool:
        """Return whether parameters are stored flat now; False without parameters, and inside `unflatten_params`."""
        return bool(self.flat_params) and not self._unflattened

    def metadata(self, index: int = 0) -> tuple[tuple[str, ...], tuple[torch.Size, ...], tuple[int, ...]]:
        """Return names, shapes and numbers of elements of the parameters in flat parameter `index`."""
        return self.flat_params[index].metadata()

    def get_param_views(self, external_data_list: Sequence[Tensor | None] | None = None) -> Iterator[Tensor]:
        """Yield views of all original parameters in the flat parameters, or in external data of the same sizes.

        Raises:
            ValueError: if the data does not fit the flat parameters.
        """
        data = external_data_list if external_data_list is not None else [None] * len(self.flat_params)
        if len(data) != len(self.flat_params):
            raise ValueError(f"expected data for {len(self.flat_params)} flat parameters, got {len(data)}")
        for flat_param, external in zip(self.flat_params, data, strict=True):
            yield from flat_param.get_param_views(external)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == FLATTEN_PART:
                raise
            return getattr(self._fpw_module, name)

    def __getitem__(self, key: Any) -> Any:
        return self._fpw_module.__getitem__(key)  # type: ignore[operator]

    def _places(self) -> Iterator[list[ParamInfo]]:
        for infos in self.param_infos:
            yield from infos

    def _show_views(self) -> None:
        with torch.enable_grad():
            views = list(self.get_param_views())
        self._fpw_module.__dict__[_VIEWS] = views
        for view, places in zip(views, self._places(), strict=True):
            for place in places:
                place.module.__dict__[place.name] = view
                if isinstance(place.module, nn.RNNBase):
                    place.module._flat_weights = [
                        getattr(place.module, name, None) for name in place.module._flat_weights_names
                    ]

    def _unflatten(self, flat_params: Sequence[Tensor] | None = None) -> None:
        views = list(self.get_param_views(flat_params))
        for name in self.flat_param_names:
            del self._parameters[name]
        requires_grad = [flat.requires_grad for flat in self.flat_params for _ in flat.metadata()[0]]
        for view, needs, places in zip(views, requires_grad, self._places(), strict=True):
            param = nn.Parameter(view.detach().clone(), needs)
            give_attributes(param, attributes_of(view))
            self._unflattened.append(param)
            for place in places:
                place.module.__dict__.pop(place.name, None)
                place.module._parameters[place.name] = param

    @torch.no_grad()
    def _flatten_again(self, keep_changes: bool) -> None:
        self._unflattened = []
        values: list[tuple[str, Tensor | None]] = []
        for places in self._places():
            found = [place.module._parameters.pop(place.name, None) for place in places]
            values.append((places[0].fqn, found[0]))
        for name, flat_param in zip(self.flat_param_names, self.flat_params, strict=True):
            self._parameters[name] = flat_param
        self._show_views()
        if keep_changes:
            # Only different values: autograd would treat other writes as changes of saved weights, too.
            views = self.get_param_views([flat.detach() for flat in self.flat_params])
            for view, (fqn, value) in zip(views, values, strict=True):
                self._keep(view, fqn, value)

    @staticmethod
    def _keep(view: Tensor, fqn: str, value: Tensor | None) -> None:
        if value is None or value.shape != view.shape:
            found = "was removed" if value is None else f"has shape {tuple(value.shape)} now"
            raise ValueError(f"{fqn} of shape {tuple(view.shape)} {found}: only its values can be changed")
        if not torch.equal(view, value):
            view.copy_(value)

    @contextmanager
    def unflatten_params(self, flat_params: Sequence[Tensor] | None = None) -> Iterator[None]:
        """List ordinary parameters inside the context; changes are kept, unless `flat_params` provided the values."""
        if self._unflattened or not self.flat_params:
            yield
            return
        is_unflattened = False
        try:
            self._unflatten(flat_params)
            is_unflattened = True
            yield
        finally:
            self._flatten_again(keep_changes=is_unflattened and flat_params is None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module's forward, with its parameters as views of the flat parameters."""
        if self.is_flattened:
            self._show_views()
        return self._modules[FLATTEN_PART](*args, **kwargs)  # type: ignore[misc]  # see the wrapper's `forward`

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the wrapped module's state under its plain names."""
        if not self.is_flattened:
            return self._fpw_module.state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        try:
            self._unflatten()
            return self._fpw_module.state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        finally:
            self._flatten_again(keep_changes=False)

    def flat_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state with flat parameters, under the names ``flat_param_<suffix>``."""
        state = super().state_dict(*args, **kwargs)
        for key in list(state):
            state[clean_name(key)] = state.pop(key)
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load plain or flat names (``flat_param`` counts as ``flat_param_0``)."""
        already_unflattened = bool(self._unflattened)
        try:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        finally:
            if self._unflattened and not already_unflattened:
                self._flatten_again(keep_changes=True)

    def _before_load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self._load_errors = rest[-1]
        if prefix + "flat_param" in state_dict:
            state_dict[prefix + "flat_param_0"] = state_dict.pop(prefix + "flat_param")
        own = {prefix + name for name in self.flat_param_names}
        is_flat = any(key in own for key in state_dict)
        for key in [key for key in state_dict if key.startswith(prefix) and key not in own]:
            if not key.startswith(prefix + FLATTEN_PART):
                state_dict[f"{prefix}{FLATTEN_PART}.{key[len(prefix) :]}"] = state_dict.pop(key)
        if not is_flat and self.is_flattened:
            self._unflatten()
            self._flatten_after_load = True

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
            keys[:] = [clean_name(key) for key in keys]
        self._load_errors[:] = [clean_text(message) for message in self._load_errors]
        if self._flatten_after_load:
            self._flatten_after_load = False
            self._flatten_again(keep_changes=True)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FlattenParamsWrapper:
        super()._apply(fn, recurse)
        if self.is_flattened:
            self._show_views()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FlattenParamsWrapper:
        # torch does not copy views of the flat parameters, because they are not leaves; the copy creates new views.
        for view in self._fpw_module.__dict__.get(_VIEWS, ()):
            memo[id(view)] = view.detach()
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        if copied.is_flattened and _VIEWS in copied._fpw_module.__dict__:
            copied._show_views()
        return copied


def free_suffixes(module: nn.Module, count: int) -> list[str]:
    """Return the first numbers for the names of flat parameters, without those of attributes of the module."""
    # Not `hasattr` of the module, which may pass attributes of another module on.
    classes = map(vars, type(module).__mro__)
    held = [vars(module), module._parameters, module._buffers, module._modules, *classes]
    numbers = (str(number) for number in itertools.count() if not any(f"flat_param_{number}" in each for each in held))
    return list(itertools.islice(numbers, count))


def _as_groups(param_list: Sequence[Any]) -> list[list[nn.Parameter]]:
    """Return groups of parameters, from a list of parameters or of lists of them; empty groups are left out."""
    if all(isinstance(item, Tensor) for item in param_list):
        param_list = [param_list]
    return [list(dict.fromkeys(group)) for group in param_list if len(group)]


class ShardedParamsWrapper(FlattenParamsWrapper):
    """The inner wrapper of `FullyShardedDataParallel` around its module. Only lists this rank's shards."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self._fpw_module = module
        self._unflattened = []
        self.hold([], [], [])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module's forward; the unit sets the module's parameters."""
        return self._modules[FLATTEN_PART](*args, **kwargs)  # type: ignore[misc]  # see the wrapper's `forward`

    def unflatten_params(self, flat_params: Sequence[Tensor] | None = None) -> NoReturn:
        """Raise RuntimeError, which names the method of the wrapper."""
        raise _sharded("unflatten_params", "summon_full_params")

    def flat_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeError, which names the method of the wrapper."""
        raise _sharded("flat_state_dict", "local_state_dict")

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules; for `peft`, only modules in the wrapped module, with the names of its state dict."""
        if not prefix and "peft.utils" in sys.modules and is_called_from("peft.utils.save_and_load"):
            return self._fpw_module.named_modules(memo, prefix, remove_duplicate)
        return super().named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the wrapped module, or raise its error."""
        return self._fpw_module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load into the wrapped module."""
        return self._fpw_module.load_state_dict(state_dict, strict=strict, assign=assign)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedParamsWrapper:
        self._fpw_module._apply(fn, recurse)  # its `Conversions` also converts the flat parameters
        return self

    def extra_repr(self) -> str:
        from fsdp.layers.summary import summary  # not required for training

        return summary(unit_of(self._fpw_module))


def _sharded(what: str, instead: str) -> RuntimeError:
    return RuntimeError(
        f"{what}: these parameters are sharded; use {instead}() of the FullyShardedDataParallel around it, on every "
        "rank"
    )
