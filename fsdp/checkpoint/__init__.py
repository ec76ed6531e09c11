"""Checkpoints: folders of safetensors files, of which every rank writes and reads its ranges, without an all-gather.

`writer` writes checkpoints, optionally in the background, and `loader` loads them. Both use `model_tensors` and
`optim` to find the ranges that a rank holds of each tensor. `manifest` contains the description of a folder,
`safetensors` its files, `checksums` the checksums of their blocks, and `json_values` and `generators` all data other
than tensors. `folder` moves a folder to its path. `formats` contains readers and writers of other libraries'
checkpoints, which treat checkpoints of this library as another `Source`. All readers follow the rules of `untrusted`.
"""

from __future__ import annotations

import os
from typing import Any

from fsdp.checkpoint.folder import newest as newest
from fsdp.checkpoint.folder import steps as steps
from fsdp.checkpoint.json_values import decoded
from fsdp.checkpoint.loader import Loaded as Loaded
from fsdp.checkpoint.loader import load as load
from fsdp.checkpoint.manifest import Manifest, complete, examine_ours
from fsdp.checkpoint.writer import Saved as Saved
from fsdp.checkpoint.writer import Saver as Saver
from fsdp.checkpoint.writer import save as save


def values(path: str | os.PathLike[str]) -> Any:
    """Return the `values` that a checkpoint was saved with, in a single process and without reading a tensor.

    Args:
        path: its folder.

    Raises:
        FileNotFoundError: if there is no complete checkpoint.
        ValueError: if its manifest is damaged.
    """
    return decoded(Manifest.read(complete(path)).values)


def verify(path: str | os.PathLike[str]) -> int:
    """Read a whole checkpoint and compare its checksums, in a single process with 4 MiB of memory.

    Args:
        path: its folder.

    Returns:
        The number of bytes of its tensors.

    Raises:
        FileNotFoundError: if there is no complete checkpoint.
        ValueError: if the checkpoint is damaged; the message names all damaged files and tensors.
    """
    problems: list[str] = []
    nbytes, _ = examine_ours(path, lambda nbytes: lambda done: None, problems)
    if problems:
        raise ValueError(f"{complete(path)} is damaged:\n\t" + "\n\t".join(problems))
    return nbytes
