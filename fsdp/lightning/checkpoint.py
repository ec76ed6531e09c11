"""The Trainer's checkpoints: one file with unsharded tensors, or a folder to which every rank writes its shards.

[Note: in the background] With Lightning's `AsyncCheckpointIO`, folders are written by a `Saver` while training goes on.
Callbacks take a checkpoint for granted when `save` has returned, and remove the one that was there before. So removals
wait until a checkpoint that was begun before them is there.

[Note: numbers and names] In files, optimizers are unsharded, and numbered as that of the unsharded model, so that files
go from this strategy to others and back. Names are stored beside the numbers, in torch's own ``param_names``, and count
before them.
"""

from __future__ import annotations

import io
import os
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

import fsdp.checkpoint
from fsdp.optim_utils import full_optim_state_dict, load_full_optim_state_dict

_Result = TypeVar("_Result")
_FOLDER = "fsdp_folder"  # in what the Trainer is given: the tensors are there
_TRAINER = "lightning"  # in the values of a folder: a torch.save of what the Trainer wants
_NAMES = "param_names"


class Checkpoints:
    """The checkpoints of a strategy, which save the "full" or "sharded" state; `wrapper` returns the outermost one."""

    def __init__(self, strategy: DDPStrategy, wrapper: Callable[[], Any], kind: str) -> None:
        if kind not in ("full", "sharded"):
            raise ValueError(f"state_dict_type is 'full' or 'sharded', got {kind!r}")
        self._strategy, self._wrapper, self._is_full = strategy, wrapper, kind == "full"
        self._saver: fsdp.checkpoint.Saver | None = None
        self._removals: list[Callable[[], None]] = []  # that wait for what it writes

    # --- saving -----------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        """Collective. Return the full state on the first rank; an empty one elsewhere, and where shards are saved."""
        if not self._is_full:
            return {}
        return self._wrapper().state_dict(rank0_only=True)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Collective. Return the same for an optimizer."""
        return _numbered_state(self._wrapper(), _plain(optimizer)) if self._is_full else {}

    def save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any, write: Callable[..., None]) -> None:
        """Collective. Write what the Trainer has put together, with `write` if it is one file."""
        path = self._strategy.broadcast(filepath)
        if self._is_full:
            self._together(f"write {path}", lambda: write(checkpoint, _no_folder(path), storage_options))
        else:
            self._save_folder(checkpoint, path, storage_options)

    def remove(self, remove: Callable[[], None]) -> None:
        """Remove a checkpoint: now, or when the one that is being written is there."""
        if self._saver is None:
            remove()
        else:
            self._removals.append(remove)

    def close(self) -> None:
        """Wait for what this rank is writing. If that fails, it raises an error, or prints it beside one on its way."""
        if self._saver is None:
            return
        try:
            self._saver.__exit__(*sys.exc_info())
            self._finish()
        finally:
            self._saver, self._removals = None, []

    def _finish(self) -> None:
        if self._saver is not None and self._saver.wait() is not None:
            while self._removals:
                self._removals.pop(0)()

    def _save_folder(self, checkpoint: dict[str, Any], path: Any, storage_options: Any) -> None:
        if storage_options is not None or not self._is_stock():
            raise ValueError(
                "state_dict_type='sharded' writes folders by itself, without storage_options and CheckpointIO plugins "
                "other than AsyncCheckpointIO: leave them out, or choose state_dict_type='full'"
            )
        if "://" in os.fspath(path):
            raise ValueError(f"{path}: sharded checkpoints are written to file systems; choose a path")
        # The model's and the optimizers' state in it are empty.

        def packed() -> bytes:
            content = io.BytesIO()
            if self._strategy.is_global_zero:
                torch.save(checkpoint, content)
            return content.getvalue()

        content = self._together(f"write {path}", packed)
        self._together("save the last checkpoint", self._finish)
        save: Callable[..., Any] = fsdp.save
        module = self._strategy.lightning_module
        # Only then will the Trainer wait in its end for what is being written.
        is_running = module is not None and module.trainer.state.status == TrainerStatus.RUNNING
        if isinstance(self._strategy.checkpoint_io, AsyncCheckpointIO) and is_running:
            self._saver = self._saver or fsdp.checkpoint.Saver()
            save = self._saver.save
        optimizers = self._optimizers() if "optimizer_states" in checkpoint else None
        save(path, self._wrapper(), optimizers, values={_TRAINER: content}, generators=False)

    # --- loading ----------------------------------------------------------------------------------------------------

    def open(
        self, checkpoint_path: Any, weights_only: bool | None, read: Callable[..., dict[str, Any]]
    ) -> dict[str, Any]:
        """Collective. Return the content of a checkpoint, by `read` if it is a file that a plugin must read."""
        path = self._strategy.broadcast(checkpoint_path)
        self._together("save the last checkpoint", self._finish)

        def look() -> dict[str, Any]:
            if os.path.isdir(path):
                return _open_folder(path, weights_only)
            if self._is_stock() and zipfile.is_zipfile(path):
                # Mapped: a machine's ranks share its pages, and each touches those of its part.
                return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
            return read(path, weights_only=weights_only)

        return self._together(f"read {path}", look)

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Collective. Load the model, and from a folder the optimizers too if the Trainer fits and it has them."""
        wrapper, folder = self._wrapper(), checkpoint.get(_FOLDER)
        if folder is None:
            wrapper.load_state_dict(checkpoint["state_dict"], strict=strict)
            return
        module = self._strategy.lightning_module
        is_fitting = module is not None and module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self._optimizers() if is_fitting and "optimizer_states" in checkpoint else None
        fsdp.load(folder, wrapper, optimizers, strict=strict, generators=False)

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Collective. Load the optimizers from one file; from a folder they were loaded with the model."""
        if _FOLDER in checkpoint:
            return
        saved, optimizers = checkpoint["optimizer_states"], self._strategy.optimizers
        if len(saved) != len(optimizers):
            raise ValueError(
                f"the checkpoint has {len(saved)} optimizers, and configure_optimizers returned {len(optimizers)}"
            )
        for optimizer, state in zip(optimizers, saved, strict=True):
            _load_numbered_state(self._wrapper(), _plain(optimizer), state)

    # ----------------------------------------------------------------------------------------------------------------

    def _is_stock(self) -> bool:
        """Return whether files are written and read as Lightning itself does it."""
        return type(self._strategy.checkpoint_io) in (TorchCheckpointIO, AsyncCheckpointIO)

    def _optimizers(self) -> Any:
        """Return the optimizers as `fsdp.save` and `fsdp.load` take them: one, or several, or None."""
        found = [_plain(each) for each in self._strategy.optimizers]
        return found[0] if len(found) == 1 else found or None

    def _together(self, what: str, do: Callable[[], _Result]) -> _Result:
        """Collective. Do it on each rank; if one fails all raise an error, instead of waiting for it."""
        try:
            result = do()
        except Exception:
            self._strategy.reduce_boolean_decision(False)
            raise
        if not self._strategy.reduce_boolean_decision(True):
            raise RuntimeError(f"another rank could not {what}: its error says why")
        return result


def _open_folder(path: Any, weights_only: bool | None) -> dict[str, Any]:
    values = fsdp.checkpoint.values(path)
    if not isinstance(values, dict) or _TRAINER not in values:
        raise ValueError(
            f"{path} is a checkpoint, but not of a Trainer: load it into the model with fsdp.load(path, trainer.model)"
        )
    rest: dict[str, Any] = torch.load(io.BytesIO(values[_TRAINER]), map_location="cpu", weights_only=weights_only)
    return {**rest, _FOLDER: os.fspath(path)}


def _no_folder(path: Any) -> Path:
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} is a folder, and state_dict_type='full' writes a file: choose another path")
    return path


def _plain(optimizer: Any) -> Any:
    """Return an optimizer without the one that Lightning has around it."""
    return getattr(optimizer, "optimizer", optimizer)


# --- optimizers in files ----------------------------------------------------------------------------------------------


def _numbered_state(model: fsdp.FullyShardedDataParallel, optimizer: Any) -> dict[str, Any]:
    """Collective. Return an optimizer's full state, as of the unsharded model's; empty but on the first rank."""
    named = full_optim_state_dict(model, optimizer, recipient_rank=0)
    if named is None:
        return {}
    numbers: dict[str, int] = {}
    groups = []
    for group in named["param_groups"]:
        names = list(group["params"])
        numbers |= {name: number for number, name in enumerate(names, start=len(numbers))}
        groups.append({**group, "params": [numbers[name] for name in names], _NAMES: names})
    state = {numbers[name]: each for name, each in named["state"].items()}
    return {**named, "state": state, "param_groups": groups}


def _load_numbered_state(model: fsdp.FullyShardedDataParallel, optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Collective. Have each rank's optimizer go on with its shards of a full state, from this strategy or another."""
    if all(_NAMES in group for group in saved["param_groups"]):
        names = [name for group in saved["param_groups"] for name in group[_NAMES]]
    else:
        names = _names_in(model, optimizer)
    listed = [number for group in saved["param_groups"] for number in group["params"]]
    if len(names) != len(listed):
        raise ValueError(
            f"the optimizer state in the checkpoint is of {len(listed)} parameters, and this "
            f"{type(optimizer).__name__} has {len(names)}: make it of the same parameters, in the same groups"
        )
    by_number = dict(zip(listed, names, strict=True))
    groups = [
        {key: value for key, value in group.items() if key != _NAMES}
        | {"params": [by_number[n] for n in group["params"]]}
        for group in saved["param_groups"]
    ]
    state = {by_number[number]: each for number, each in saved["state"].items()}
    load_full_optim_state_dict(model, optimizer, {**saved, "state": state, "param_groups": groups})


def _names_in(model: fsdp.FullyShardedDataParallel, optimizer: Any) -> list[str]:
    """Collective. Return the names of an optimizer's parameters, in its order."""
    full = full_optim_state_dict(model, optimizer, recipient_rank=None) or {}
    names = [name for group in full["param_groups"] for name in group["params"]]
    if len(names) != sum(len(group["params"]) for group in optimizer.param_groups):
        raise ValueError(
            "the checkpoint's optimizer state goes by the numbers of an unsharded model's parameters, and this "
            "optimizer has flat ones. Load it with FullyShardedStrategy(use_orig_params=True), the default, and save "
            "it anew: then it goes by names."
        )
    return names
