"""`FingerprintRecording` writes fingerprints of all tensors that a training computes, to compare two trainings.

Each rank records its own values. For a micro-batch, these are the inputs, weights, buffers and outputs of units and
the gradients of parameters. For a step, they are its shards of reduced gradients, the optimizer's options, new weights
and optimizer state. After an optimizer step, the ranks merge their records. Fingerprints of shards are added
(`optim_utils.fingerprint`), so a file does not depend on the number of ranks. Micro-batches have the numbers of
`fsdp.SameBits`.

The file has a JSON object in each line. The first line describes the recording and its environment. The other lines
either name entries ("keys"), or contain the 16 hexadecimal digits of each entry ("values") and the number of the
corresponding names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp.distributed.communicator import during
from fsdp.distributed.consensus import done_by_all, from_everyone, number_among, size_of
from fsdp.distributed.dtensor import local_part
from fsdp.engine.autograd import in_backward
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.names import named_modules
from fsdp.engine.observers import attached
from fsdp.engine.runtime import runtime_of_root
from fsdp.engine.trees import map_tensors
from fsdp.engine.unit import Unit, own_modules
from fsdp.layers.fingerprints import fingerprint_of_range
from fsdp.layers.verify import require_sharded
from fsdp.optim_utils.fingerprint import Part, merged, refuse_tensor_parallel, state_of, text_bits, weights_of
from fsdp.optim_utils.params import Parameters
from fsdp.optim_utils.state import groups_of, options_of

FORMAT = "fsdp_fingerprints"
VERSION = 1
# Directions, in the order in which they occur in a step.
INPUT, USED_WEIGHT, BUFFER, OUTPUT = "forward input", "weight in forward", "buffer", "forward output"
GRADIENT, REDUCED = "gradient", "reduced gradient"
OPTION, WEIGHT, STATE = "optimizer option", "new weight", "optimizer state"


class Key(NamedTuple):
    """The origin of a recorded number.

    Attributes:
        direction: one of the constants above.
        unit: the name of the unit; empty for options, and for values outside units.
        name: the name of the parameter, buffer or option; empty for inputs and outputs.
        call: the number of the unit's forward in the micro-batch.
    """

    direction: str
    unit: str
    name: str
    call: int = 0


class FingerprintRecording:
    """A recording of fingerprints, created by `fsdp.record_fingerprints`; a context manager."""

    def __init__(self, model: nn.Module, path: str | os.PathLike[str], first_step: int) -> None:
        self._root = require_sharded(model, "fsdp.record_fingerprints")
        self._runtime = runtime_of_root(self._root, "fsdp.record_fingerprints()")
        self._params = Parameters(model, self._root)
        refuse_tensor_parallel(self._params, "fsdp.record_fingerprints")
        self._names = {(one.handle, original.slot): original.name for one, original in self._params.by_number.values()}
        self._units = {
            original.name: "" if one.handle is None else self._unit_name(one.handle.unit_name)
            for one, original in self._params.by_number.values()
        }
        self._paths = {module: name for name, module in named_modules(model)}
        self._path, self._number = path, first_step
        self._micro_batches: dict[int, dict[Key, int]] = {}
        self._current: dict[Key, int] = {}
        self._calls: dict[Unit, int] = {}  # in the current micro-batch
        self._parts: dict[str, list[Part]] = {}  # of the step, by direction
        self._known: dict[tuple[Key, ...], int] = {}
        self._file: IO[str] | None = None
        self._undo = ExitStack()

    def __enter__(self) -> FingerprintRecording:
        with ExitStack() as undo:

            def begin() -> None:
                if number_among(self._root.everyone) == 0:
                    self._file = undo.enter_context(open(self._path, "w", encoding="utf-8"))

            self._together(f"open {self._path}", begin)
            about = {"ranks": size_of(self._root.everyone), "threads": torch.get_num_threads()}
            self._write({FORMAT: VERSION, **about, "torch": torch.__version__, "device": self._root.device.type})
            undo.enter_context(attached(self, self._runtime.units))
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def forward(self, unit: Unit, inputs: Any) -> None:
        """Record the inputs, weights and buffers of a unit when its forward begins."""
        if in_backward() or not torch.is_grad_enabled():
            return
        is_first = not self._calls
        call = self._calls[unit] = self._calls.get(unit, -1) + 1
        if is_first:
            self._current[Key(INPUT, self._unit_name(unit.name), "", call)] = _of_tree(inputs)
        for handle in unit.handles:
            for slot in range(len(handle.layout.slots)):
                key = Key(USED_WEIGHT, self._unit_name(unit.name), self._name(handle, slot), call)
                self._current[key] = fingerprint_of_range(local_part(handle.presentation.shown(slot)), 0)
        for module in dict.fromkeys(inner for each in unit.modules for inner in own_modules(each)):
            for name, buffer in module.named_buffers(recurse=False):
                path = ".".join(filter(None, (self._paths.get(module, ""), name)))
                self._current[Key(BUFFER, self._unit_name(unit.name), path, call)] = _of_tree(buffer)

    def forward_end(self, unit: Unit, output: Any, failed: bool) -> None:
        if not (failed or in_backward()) and unit in self._calls:
            self._current[Key(OUTPUT, self._unit_name(unit.name), "", self._calls[unit])] = _of_tree(output)

    def gradient(self, handle: FlatParamHandle, slot: int, gradient: Tensor) -> None:
        key = Key(GRADIENT, self._unit_name(handle.unit_name), self._name(handle, slot))
        self._current[key] = fingerprint_of_range(local_part(gradient), 0)

    def backward_end(self) -> None:
        everyone = self._root.everyone
        number = len(self._micro_batches) * size_of(everyone) + number_among(everyone)
        self._micro_batches[number] = self._current
        self._current, self._calls = {}, {}

    def _unit_name(self, name: str) -> str:
        """Return a unit's name; the root's name contains its class, which depends on the form of sharding."""
        return "root" if name == self._root.name else name

    def _name(self, handle: FlatParamHandle, slot: int) -> str:
        return self._names.get((handle, slot), handle.layout.slots[slot].name)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self._parts = {REDUCED: list(weights_of(self._params, of_gradients=True)), OPTION: list(_options(optimizer))}

    @torch.no_grad()
    def step_end(self, optimizer: torch.optim.Optimizer) -> None:
        """Record new weights and optimizer state, and write the step."""

        def look() -> None:
            self._parts |= {WEIGHT: list(weights_of(self._params)), STATE: list(state_of(self._params, optimizer))}

        self._together("record the fingerprints of a step", look)
        with during("fsdp.record_fingerprints()"):
            heard = from_everyone(self._root.everyone, (self._micro_batches, self._parts))
        self._together(f"write {self._path}", lambda: self._write_step(heard))
        self._number += 1
        self._micro_batches, self._parts = {}, {}

    def _write_step(self, heard: Sequence[tuple[dict[int, dict[Key, int]], dict[str, list[Part]]]]) -> None:
        micro_batches = {number: entries for own, _ in heard for number, entries in own.items()}
        for number, entries in sorted(micro_batches.items()):
            self._write_entries({"step": self._number, "micro_batch": number}, entries)
        places = {name: place for place, name in enumerate(self._units)}
        entries = {}
        for direction in self._parts:
            found = merged([parts.get(direction, []) for _, parts in heard])
            for (name, key), bits in sorted(found.items(), key=lambda one: (places.get(one[0][0], -1), one[0][1])):
                label = f"{name}: {key}" if key else name
                entries[Key(direction, self._units.get(name, ""), label)] = bits
        self._write_entries({"step": self._number}, entries)
        if self._file is not None:
            self._file.flush()

    @during("fsdp.record_fingerprints()")
    def _together(self, what: str, job: Callable[[], None]) -> None:
        """Collective. Call a function; if it raises on any rank, all ranks raise an error."""
        done_by_all([self._root.everyone], what, job)

    def _write_entries(self, where: dict[str, int], entries: dict[Key, int]) -> None:
        keys = tuple(entries)
        if keys not in self._known:
            self._known[keys] = len(self._known)
            self._write({"keys": keys})
        self._write(
            {**where, "keys": self._known[keys], "values": "".join(f"{bits:016x}" for bits in entries.values())}
        )

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")


def record_fingerprints(model: nn.Module, path: str | os.PathLike[str], first_step: int = 0) -> FingerprintRecording:
    """Collective. Record fingerprints of all tensors of a training, to find its first difference from another. ::

        with fsdp.record_fingerprints(model, "two_ranks.jsonl"):
            for batch in itertools.islice(batches, 3):
                train(batch)

    Then ``python -m fsdp compare two_ranks.jsonl four_ranks.jsonl`` prints the first step, unit, parameter and
    direction with a difference. With `fsdp.SameBits`, the two trainings may use different numbers of ranks. Without
    `SameBits`, use the same number of ranks, because otherwise reduced gradients differ in rounding.

    For each micro-batch (forward and backward), the recording contains the inputs of the model, the weights, buffers
    and outputs of each unit, and each parameter's gradient before reduction. For each optimizer step, it contains the
    reduced gradients, the optimizer's options, new weights, and optimizer state. The cost is equal to reading all
    these values a few times. Passes without gradients are not recorded. A step ends with an optimizer's step, which is
    collective during the recording.

    Args:
        model: the outermost wrapper, or module under `fully_shard`.
        path: the file that rank 0 writes, in lines of JSON; an existing file is replaced.
        first_step: the number of the first step, for a resumed training.

    Raises:
        TypeError: if the model is not sharded.
        RuntimeError: if the module is inside another sharded module that runs it.
        OSError: if rank 0 cannot write the file, when the recording begins or at the end of a step.
        ValueError: at the end of a step, for optimizer state that is neither a number nor of the shard's shape.
        OtherRankError: on the other ranks, if a rank raises an OSError or a ValueError.
    """
    return FingerprintRecording(model, path, first_step)


def _of_tree(tree: Any) -> int:
    """Return the fingerprint of all tensors in nested containers."""
    found: list[str] = []

    def note(tensor: Tensor) -> Tensor:
        local = local_part(tensor)
        found.append(f"{local.dtype} {tuple(local.shape)} {fingerprint_of_range(local, 0)}")
        return tensor

    map_tensors(note, tree)
    return text_bits("/".join(found))


def _options(optimizer: torch.optim.Optimizer) -> Iterator[Part]:
    """Yield the options of an optimizer's groups, as parts that all ranks have."""
    for number, group in enumerate(groups_of(optimizer)):
        for option, value in options_of(group).items():
            shown = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            yield Part(f"{option} of group {number}", "", text_bits(repr(shown)), is_copy=True)
