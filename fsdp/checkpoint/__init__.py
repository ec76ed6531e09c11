"""Checkpoints: folders of safetensors files. Every rank writes and reads its own ranges, without an all-gather.

`writer` writes checkpoints, optionally in the background, and `loader` loads them. Both use `model_tensors` and
`optim` to find the ranges of each tensor on a rank. `manifest` describes a folder, `safetensors` reads and writes files
of tensors, and `checksums` computes the checksums of blocks. `json_values` and `generators` handle all data other than
tensors. `folder` renames a complete folder to the final path. `formats` reads and writes checkpoints of multiple
libraries, each as a `Source`, including this library's. All readers follow the rules of `untrusted`.
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
