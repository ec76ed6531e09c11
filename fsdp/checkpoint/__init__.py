"""Checkpoints: folders of safetensors files, of which every rank writes and reads its ranges, without an all-gather.

`writer` writes checkpoints, optionally in the background, and `loader` loads them. Both use `model_tensors` and
`optim` to find the ranges that a rank holds of each tensor. `manifest` contains the description of a folder,
`safetensors` its files, `checksums` the checksums of their blocks, and `json_values` and `generators` all data other
than tensors. `folder` moves a folder to its path. `formats` contains readers and writers of other libraries'
checkpoints, which treat checkpoints of this library as another `Source`. All readers follow the rules of `untrusted`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp.layers.lazy import lazily

if TYPE_CHECKING:
    from fsdp.checkpoint.folder import newest as newest
    from fsdp.checkpoint.folder import steps as steps
    from fsdp.checkpoint.loader import Loaded as Loaded
    from fsdp.checkpoint.loader import load as load
    from fsdp.checkpoint.manifest import values as values
    from fsdp.checkpoint.manifest import verify as verify
    from fsdp.checkpoint.writer import Saved as Saved
    from fsdp.checkpoint.writer import Saver as Saver
    from fsdp.checkpoint.writer import save as save

_HOMES = {
    "fsdp.checkpoint.folder": "newest steps",
    "fsdp.checkpoint.loader": "Loaded load",
    "fsdp.checkpoint.manifest": "values verify",
    "fsdp.checkpoint.writer": "Saved Saver save",
}
__getattr__, __dir__ = lazily(__name__, _HOMES)
