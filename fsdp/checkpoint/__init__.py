"""Checkpoints: folders of safetensors files, of which every rank writes and reads its ranges, without an all-gather.

`writer` writes them, while training goes on if it should, and `loader` loads them. Both know from
`model_tensors` and `optim` which ranges a rank has of which tensors. Of a folder, `manifest` has the description,
`safetensors` the files, `checksums` those of their blocks, `json_values` and `generators` what is no tensor; `folder`
brings it to its place. `formats` has readers and writers of other libraries' checkpoints, for which ours are one more
`Source`. Whatever reads a file keeps to the rules of `untrusted`.
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
    """Return the `values` that a checkpoint was saved with. In one process, and without reading a tensor.

    Args:
        path: its folder.

    Raises:
        FileNotFoundError: if there is no complete checkpoint.
        ValueError: if what describes it is damaged.
    """
    return decoded(Manifest.read(complete(path)).values)


def verify(path: str | os.PathLike[str]) -> int:
    """Read a checkpoint from end to end and compare its checksums. In one process, which needs 4 MiB of memory.

    Args:
        path: its folder.

    Returns:
        The number of bytes of its tensors.

    Raises:
        FileNotFoundError: if there is no complete checkpoint.
        ValueError: if it is damaged; it names all files and tensors that are.
    """
    problems: list[str] = []
    nbytes, _ = examine_ours(path, lambda nbytes: lambda done: None, problems)
    if problems:
        raise ValueError(f"{complete(path)} is damaged:\n\t" + "\n\t".join(problems))
    return nbytes
