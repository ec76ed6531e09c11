"""A training that goes from this library to another one and back, by the lines of docs/leaving.md.

`cross` trains on one side, runs the lines of a section of the page, and compares both sides. The page has the lines
once: tests and the table run what readers see.
"""

from __future__ import annotations

import os
import re
import shlex
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp import optim_utils
from fsdp.checkpoint.cli import main
from fsdp.state_dict_utils import gather_state_dict
from tests.helpers.equality import assert_same
from tests.helpers.forms import sharded
from tests.helpers.hugging_face import made
from tests.helpers.models import Block, TinyTransformer, tiny_transformer
from tests.helpers.paths import ROOT

PAGE = ROOT / "docs" / "leaving.md"
# The sections of the page, with the libraries that each is for.
SECTIONS = {
    "In one program": ("plain torch", "DDP", "FSDP2", "transformers"),
    "A file of `torch.save`": ("plain torch", "DDP"),
    "A file of full state dicts": ("FSDP1", "FSDP2"),
    "A folder of `torch.distributed.checkpoint`": ("plain torch", "DDP", "FSDP1", "FSDP1, `use_orig_params`", "FSDP2"),
}
RANKS = [1, 2, 3, 4]
CLOSE = 1e-6  # of losses, whose gradients were summed in another order


class Way(NamedTuple):
    """A section of the page, for one library."""

    section: str
    library: str

    def __str__(self) -> str:
        return f"{self.section.replace('`', '')}, {self.library}"


WAYS = [Way(section, library) for section, libraries in SECTIONS.items() for library in libraries]


# The lines of the page


def fences(section: str, is_back: bool) -> list[tuple[str, str]]:
    """Return the blocks of a section for one direction, as languages ("" for commands) and code."""
    found = re.split(rf"\n## {re.escape(section)}\n", PAGE.read_text("utf-8"))[1].split("\n## ")[0]
    text = found.split("\n**Back:**")[is_back]
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def carry(section: str, is_back: bool, names: dict[str, Any]) -> None:
    """Collective. Run the blocks with these names in the current folder; rank 0 runs the commands."""
    for language, code in fences(section, is_back):
        if language == "python":
            exec(compile(code, PAGE, "exec"), names)
        elif dist.get_rank() == 0:
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
                program, option, package, *arguments = shlex.split(code)
                assert [program, option, package] == ["python", "-m", "fsdp"]
                assert main(arguments) == 0, said.getvalue()
        dist.barrier()


# The two sides


@dataclass
class Side:
    """A model with its optimizer. `called` is what trains, and `model` what the lines of the page take."""

    model: Any
    called: Any
    optimizer: torch.optim.Optimizer
    sees_all_batches: bool = False
    is_wrapped: bool = False  # by ours
    is_full: bool = True  # if torch's functions gather its state without mistakes

    def step(self, step: int) -> None:
        """Collective. Train on the batches of all ranks."""
        ranks = range(dist.get_world_size()) if self.sees_all_batches else [dist.get_rank()]
        self._loss(torch.cat([tokens_of(step, rank) for rank in ranks])).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, step: int) -> float:
        """Collective. Of this rank's batch."""
        return self._loss(tokens_of(step, dist.get_rank())).item()

    def _loss(self, tokens: Tensor) -> Tensor:
        output = self.called(tokens)
        logits = output if isinstance(output, Tensor) else output.logits  # of transformers
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def state(self) -> tuple[Any, Any]:
        """Collective. Full weights, and the optimizer's state, by names."""
        if self.is_wrapped:
            full = optim_utils.full_optim_state_dict(self.model, self.optimizer, recipient_rank=None)
            return dict(self.model.state_dict()), (full or {})["state"]
        options = StateDictOptions(full_state_dict=self.is_full)
        weights, moments = map(gather_state_dict, get_state_dict(self.called, self.optimizer, options=options))
        return weights, moments["state"]


def tokens_of(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(TinyTransformer.VOCABULARY, (2, TinyTransformer.CONTEXT), generator=generator)


def ours(form: str, seed: int, library: str = "") -> Side:
    """Collective. A model for the other library, in one of our forms."""
    of_transformers = library == "transformers"
    plain, layer = made("llama", seed) if of_transformers else (tiny_transformer(seed=seed), Block)
    model = sharded(plain, form, (layer,))
    return Side(model, model, adamw(model), is_wrapped=form != "rows")


def theirs(library: str, seed: int) -> Side:
    """Collective."""
    return _LIBRARIES[library](seed)


def _plain(seed: int) -> Side:
    model = tiny_transformer(seed=seed)
    return Side(model, model, adamw(model), sees_all_batches=True)


def _transformers(seed: int) -> Side:
    model, _ = made("llama", seed)
    return Side(model, model, adamw(model), sees_all_batches=True)


def _ddp(seed: int) -> Side:
    model = DistributedDataParallel(tiny_transformer(seed=seed))
    return Side(model.module, model, adamw(model))


def _fsdp1(seed: int) -> Side:
    model = tiny_transformer(lambda module: TorchFSDP1(module, device_id=torch.device("cpu")), seed=seed)
    return Side(model, model, adamw(model))


def _fsdp1_orig(seed: int) -> Side:
    how: dict[str, Any] = {"device_mesh": init_device_mesh("cpu", (dist.get_world_size(),)), "use_orig_params": True}
    model = tiny_transformer(lambda module: TorchFSDP1(module, device_id=torch.device("cpu"), **how), seed=seed)
    return Side(model, model, adamw(model), is_full=False)  # the mistake is in docs/checkpoints.md


def _fsdp2(seed: int) -> Side:
    model: Any = tiny_transformer(seed=seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        torchs_fully_shard(block, mesh=mesh)
    torchs_fully_shard(model, mesh=mesh)
    return Side(model, model, adamw(model))


_LIBRARIES: dict[str, Callable[[int], Side]] = {
    "plain torch": _plain,
    "DDP": _ddp,
    "FSDP1": _fsdp1,
    "FSDP1, `use_orig_params`": _fsdp1_orig,
    "FSDP2": _fsdp2,
    "transformers": _transformers,
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


# From one side to the other


def cross(way: Way, is_back: bool, form: str, folder: Path) -> float:
    """Collective. Train two steps on one side, carry model and optimizer over, compare, and train on both sides.

    Returns:
        The difference of the two sides' next losses on this rank's batch, after another step on each.

    Raises:
        AssertionError: if a bit of the weights or of the optimizer's state differs.
    """
    warnings.simplefilter("ignore")  # of torch, of FSDP1
    mine = ours(form, int(not is_back), way.library)
    other = theirs(way.library, int(is_back))
    source = other if is_back else mine
    for step in range(2):
        source.step(step)
    names = {"model": mine.model, "optimizer": mine.optimizer, "other": other.model, "other_optimizer": other.optimizer}
    with _inside(folder):
        carry(way.section, is_back, names)
    (weights, moments), (other_weights, other_moments) = mine.state(), other.state()
    assert_same(weights, other_weights, "weights")
    assert_same(moments, other_moments, "optimizer")
    for side in (mine, other):
        side.step(2)
    return abs(mine.loss(3) - other.loss(3))


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
