"""Checkpoints: folders of safetensors files, of which every rank writes and reads its ranges, without an all-gather.

`writer` writes them, while training goes on if it should, and `loader` loads them. Both know from
`model_tensors` and `optim` which ranges a rank has of which tensors. Of a folder, `manifest` has the description,
`safetensors` the files, `checksums` those of their blocks, `json_values` and `generators` what is no tensor; `folder`
brings it to its place. `formats` has readers and writers of other libraries' checkpoints, for which ours are one more
`Source`. Whatever reads a file keeps to the rules of `untrusted`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp.engine.lazy import lazily

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
