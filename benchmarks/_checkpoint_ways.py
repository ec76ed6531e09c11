"""How each library saves model and Adam's state as files, and loads them, for `benchmarks.checkpoint`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import fsdp
from benchmarks._contestants import FSDP1_FLAT, FSDP2, OURS
from benchmarks.optim_state import ways as full_ways
from fsdp.checkpoint import Saver
from fsdp.checkpoint.safetensors import store_at

BACKGROUND = "ours-background"
DCP, DCP_MERGED, DCP_ASYNC = "dcp", "dcp-merged", "dcp-async"
FSDP1_FULL, FSDP2_FULL = "fsdp1-full", "fsdp2-full"
DISK = "disk"
_BLOCK = 4 << 20
_FILE = "full.pt"


@dataclass(frozen=True)
class FileWay:
    """How a library saves to a folder.

    Args:
        model: the contestant whose model is saved; the disk does not use it.
        save: returns when training can continue, with a function that waits until all data is on disk.
        load: loads such a folder.
    """

    model: str
    save: Callable[[Path, Any, Any], Callable[[], Any]]
    load: Callable[[Path, Any, Any], Any]


def _done() -> None:
    """No wait is needed."""


# --- ours


_saver: list[Saver] = []  # made at first use, and then its memory is used again


def _save_ours(folder: Path, model: Any, optimizer: Any) -> Callable[[], Any]:
    fsdp.save(folder, model, optimizer)
    return _done


def _save_in_background(folder: Path, model: Any, optimizer: Any) -> Callable[[], Any]:
    if not _saver:
        _saver.append(Saver())
    _saver[0].save(folder, model, optimizer)
    return _saver[0].wait


def _load_ours(folder: Path, model: Any, optimizer: Any) -> None:
    fsdp.load(folder, model, optimizer)


# --- full states on the first rank


def _full(name: str) -> FileWay:
    """torch's gather on the first rank, which saves with `torch.save`; and back."""
    way = full_ways(with_model=True)[name]

    def save(folder: Path, model: Any, optimizer: Any) -> Callable[[], Any]:
        state = way.save(model, optimizer)
        if dist.get_rank() == 0:
            folder.mkdir()
            with open(folder / _FILE, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        return _done

    def load(folder: Path, model: Any, optimizer: Any) -> None:
        state = torch.load(folder / _FILE, weights_only=False) if dist.get_rank() == 0 else ({}, {})
        way.load(model, optimizer, state)

    return FileWay(name, save, load)


# --- torch.distributed.checkpoint


def _sharded(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def _save_dcp(folder: Path, model: Any, optimizer: Any) -> Callable[[], Any]:
    dcp.save(_sharded(model, optimizer), checkpoint_id=folder)
    return _done


def _save_merged(folder: Path, model: Any, optimizer: Any) -> Callable[[], Any]:
    _save_dcp(folder, model, optimizer)
    return lambda: _merge(folder) if dist.get_rank() == 0 else None


def _merge(folder: Path) -> None:
    dcp_to_torch_save(folder, folder / _FILE)
    with open(folder / _FILE, "rb") as file:
        os.fsync(file.fileno())


def _save_async(folder: Path, model: Any, optimizer: Any) -> Callable[[], Any]:
    found: Any = dcp.async_save(_sharded(model, optimizer), checkpoint_id=folder)
    return lambda: found.result()


def _load_dcp(folder: Path, model: Any, optimizer: Any) -> None:
    state = _sharded(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])


# --- the disk itself


def disk_way(nbytes: int) -> FileWay:
    """Each rank writes as many bytes as its part of the state has to a separate file, and reads them."""
    share = nbytes // dist.get_world_size()
    memory = torch.ones(share, dtype=torch.uint8).numpy().data

    def save(folder: Path, model: Any, optimizer: Any) -> Callable[[], Any]:
        folder.mkdir(exist_ok=True)
        with open(folder / f"rank{dist.get_rank()}", "wb", buffering=0) as file:
            for start in range(0, share, _BLOCK):
                store_at(file.fileno(), memory[start : start + _BLOCK], start)
            os.fsync(file.fileno())
        return _done

    def load(folder: Path, model: Any, optimizer: Any) -> None:
        with open(folder / f"rank{dist.get_rank()}", "rb", buffering=0) as file:
            for start in range(0, share, _BLOCK):
                file.readinto(memory[start : start + _BLOCK])

    return FileWay(OURS, save, load)


WAYS: dict[str, FileWay] = {
    OURS: FileWay(OURS, _save_ours, _load_ours),
    BACKGROUND: FileWay(OURS, _save_in_background, _load_ours),
    FSDP1_FULL: _full(FSDP1_FLAT),
    FSDP2_FULL: _full(FSDP2),
    DCP: FileWay(FSDP2, _save_dcp, _load_dcp),
    DCP_MERGED: FileWay(FSDP2, _save_merged, _load_dcp),
    DCP_ASYNC: FileWay(FSDP2, _save_async, _load_dcp),
}
NAMES = (*WAYS, DISK)
