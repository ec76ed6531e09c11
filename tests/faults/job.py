"""A `Job` is a short training on one rank, whose operations are called by name, and which a `Fault` disturbs."""

from __future__ import annotations

import contextlib
import gc
import shutil
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.faults.fault import Action, Fault, Skip
from tests.helpers.hybrid import mesh_of

WIDTH = 6
STANDS_FOR = {"setup": "build wrap optimizer", "train": "batch forward backward step"}


class NotExpressible(Exception):  # noqa: N818 - it is no error
    """The library that the job trains with has nothing of the kind."""


class Block(nn.Module):
    """A linear layer with an activation: a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("a bad block")
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """Two blocks and a head, with a place between the blocks where faults strike."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("calls", torch.zeros(1))
        self.__dict__["job"] = job  # which is no part of it

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        for number in self.job.order:
            if number == 1:
                self.job.between_blocks(x)
            x = self.job.through(number, self.blocks[number], x)
        return self.head(x)


class Job:
    """A training with this library.

    Attributes that an action of a fault may change, each before what it is about:
        options: of all units, for the front door.
        plain, model, optimizer_, x, loss: what the operations have made so far.
    """

    transport_error = "CollectiveError"  # after which processes are not in step any more

    def __init__(self, fault: Fault, folder: Path) -> None:
        self.fault, self.folder = fault, folder
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.options: dict[str, Any] = {}
        self.units = 2  # so many blocks are
        self.order: Sequence[int] = (0, 1)  # in which the blocks are run
        self.seed, self.rate, self.steps = 0, 0.05, 0
        self.clipping: dict[str, Any] = {"max_norm": 1.0}
        self.hook_fails = False
        self.in_forward: Action | None = None
        self.in_backward: Action | None = None
        self.struck: float | None = None  # when the fault struck this rank
        self.shards: list[Tensor] = []  # as they were before the last operation
        self.summoning: dict[str, Any] = {}
        self.inside: Action = lambda job: None  # of the next contexts
        self.path = folder / "saved"
        self.saving: dict[str, Any] = {"generators": False}
        self.loading: dict[str, Any] = {}
        self.is_conditional = self.runs_directly = False
        self.asks_for = 1
        self.joins, self.joins_twice = True, False
        self.batches = 4  # of a Trainer
        self.trainer: Any = None
        self.without_optimizer = False
        self.stack = contextlib.ExitStack()  # what is undone in the end

    @property
    def is_victim(self) -> bool:
        return self.fault.victim in (None, self.rank)

    # --- running ----------------------------------------------------------------------------------------------------

    def run(self, program: str) -> None:
        """Perform operations one after the other, and have the fault strike where it is to."""
        done: Counter[str] = Counter()
        for operation in " ".join(STANDS_FOR.get(name, name) for name in program.split()).split():
            done[operation] += 1
            self.remember()
            try:
                is_here = self.fault.at in (operation, f"{operation} {done[operation]}")
                if is_here and self.is_victim and self.struck is None:
                    self.strike(self.fault.do)
                getattr(self, operation)()
            except Skip:
                pass

    def strike(self, action: Action) -> None:
        """Let something happen, and note when. The note outlives this process."""
        self.struck = time.monotonic()
        (self.folder / f"struck {self.rank}").write_text(str(self.struck))
        action(self)

    def between_blocks(self, x: Tensor) -> None:
        if self.in_forward is not None:
            action, self.in_forward = self.in_forward, None
            self.strike(action)
        if self.in_backward is not None and x.requires_grad:
            action, self.in_backward = self.in_backward, None
            x.register_hook(lambda _: self.strike(action))

    def through(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        """Compute a block; the second one is left out now and then by `fsdp.cond`, if the job is a conditional one."""
        import fsdp

        if number == 0 or not self.is_conditional or self.runs_directly:
            return block(x)
        out = fsdp.cond(self.plain.blocks[self.asks_for], self.runs_here, x)
        return x if out is None else out

    @property
    def runs_here(self) -> bool:
        """Every other step the odd ranks leave the second block out."""
        return self.rank % 2 == 1 or self.steps % 2 == 0

    def remember(self) -> None:
        model = getattr(self, "model", None)
        if isinstance(model, nn.Module):
            self.shards = [param.detach().clone() for param in model.parameters()]

    def conditional(self) -> None:
        self.is_conditional = True

    def mesh(self) -> None:
        self.options["process_group"] = mesh_of(2, self.world_size // 2)

    def compare_replicas(self) -> None:
        from fsdp import set_watchdog

        set_watchdog(2.0, raises=True, replicas_every=1)

    def on_disk(self) -> None:
        self.options |= {"offload": "disk", "offload_folder": self.folder / "offload"}

    # --- making a model ---------------------------------------------------------------------------------------------

    def build(self) -> None:
        torch.manual_seed(self.seed)
        self.plain = Net(self)

    def wrap(self) -> None:
        from fsdp import FullyShardedDataParallel, fully_shard

        if self.fault.door == "fully_shard":
            for block in self.plain.blocks[: self.units]:
                fully_shard(block, **self.options)
            self.model: Any = fully_shard(self.plain, **self.options)
        else:
            for number, block in enumerate(self.plain.blocks[: self.units]):
                self.plain.blocks[number] = FullyShardedDataParallel(block, **self.options)
            self.model = FullyShardedDataParallel(self.plain, **self.options)

    def wrap_another(self) -> None:
        from fsdp import FullyShardedDataParallel

        FullyShardedDataParallel(Block())

    def optimizer(self) -> None:
        self.optimizer_ = torch.optim.SGD(self.model.parameters(), lr=self.rate, momentum=0.9)

    # --- training ---------------------------------------------------------------------------------------------------

    def batch(self) -> None:
        self.x = self.batch_of(self.steps, self.rank)

    def batch_of(self, step: int, rank: int) -> Tensor:
        return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))

    def forward(self) -> None:
        self.loss = self.model(self.x).square().mean()

    def backward(self) -> None:
        self.loss.backward()

    def clip(self) -> None:
        self.model.clip_grad_norm_(**self.clipping)

    def step(self) -> None:
        self.optimizer_.step()
        self.optimizer_.zero_grad()
        self.steps += 1

    def pause(self) -> None:
        """As long as ranks take to compare the steps of the last seconds, outside of all collectives."""
        time.sleep(2.5)

    def check_messages(self) -> None:
        import fsdp

        fsdp.check_messages()
        self.stack.callback(fsdp.check_messages, False)

    def detect(self) -> None:
        import fsdp

        self.stack.enter_context(fsdp.detect_nonfinite(self.model))

    def step_again(self) -> None:
        self.optimizer_.step()

    def step_zero(self) -> None:
        self.optimizer_.zero_grad()

    def register_hook(self) -> None:
        self.model.register_comm_hook(self, _reduce)

    def register_other_hook(self) -> None:
        self.model.register_comm_hook(self, _reduce_otherwise)

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(self.batch_of(9, self.rank))
        self.model.train()

    def clip_to_one(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def clip_values(self) -> None:
        self.model.clip_grad_value_(0.1)

    def accumulate(self) -> None:
        with self.model.no_sync():
            self.forward()
            self.backward()

    def joined_training(self) -> None:
        import fsdp

        joined = fsdp.join(self.model, self.optimizer_, *[self.optimizer_] * self.joins_twice)
        with joined if self.joins else contextlib.nullcontext():
            for number in range(2 + self.rank):
                self.batch()
                if number == 1:
                    self.inside(self)
                self.forward()
                self.backward()
                self.step()

    def fit(self) -> None:
        from tests.faults.lightning import fit

        fit(self)

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> None:
        self.state = self.model.state_dict()

    def load_state_dict(self) -> None:
        self.model.load_state_dict(self.state)

    def optimizer_state(self) -> None:
        from fsdp import optim_utils

        self.full = optim_utils.full_optim_state_dict(self.model, self.optimizer_, recipient_rank=None)

    def load_optimizer_state(self) -> None:
        from fsdp import optim_utils

        optim_utils.load_full_optim_state_dict(self.model, self.optimizer_, self.full)

    def sharded_state(self) -> None:
        self.sharded = self.model.sharded_state_dict()

    def load_sharded_state(self) -> None:
        self.model.load_sharded_state_dict(self.sharded)

    def local_state(self) -> None:
        self.local = self.model.local_state_dict()

    def load_local_state(self) -> None:
        self.model.load_local_state_dict(self.local)

    def summon(self) -> None:
        with self.model.summon_full_params(**self.summoning):
            self.inside(self)

    def save(self) -> None:
        import fsdp

        fsdp.save(self.path, self.model, *self.saved_optimizers(), **self.saving)

    def load(self) -> None:
        import fsdp

        fsdp.load(self.path, self.model, *self.saved_optimizers(), **self.loading)

    def file(self, pattern: str) -> Path:
        """Return the first file of the checkpoint whose name is like this."""
        return min(self.path.glob(pattern))

    def saved_optimizers(self) -> list[torch.optim.Optimizer]:
        return [] if self.without_optimizer else [self.optimizer_]

    def let_wait(self) -> None:
        if self.rank == 1:
            time.sleep(4)

    def copy_saved(self) -> None:
        shutil.copytree(self.path, self.folder / f"first {self.rank}")

    def save_step(self) -> None:
        import fsdp

        fsdp.save(self.folder / "run", self.model, self.optimizer_, step=self.steps, generators=False)

    def newest(self) -> None:
        import fsdp

        found = fsdp.checkpoint.newest(self.folder / "run")
        if found is None:
            raise FileNotFoundError(f"{self.folder / 'run'} has no checkpoint")
        self.path = found

    def lose_newest(self) -> None:
        self.path = self.folder / "lost"

    def forget_saver(self) -> None:
        jobs, reported = list(self.saver._jobs), threading.Event()
        del self.saver
        gc.collect()
        for job in jobs:  # the error is printed when the save ends, before this
            job.add_done_callback(lambda _: reported.set())
            reported.wait()

    def save_in_background(self) -> None:
        from fsdp.checkpoint import Saver

        if not hasattr(self, "saver"):
            self.saver = Saver()
        self.saver.save(self.path, self.model, *self.saved_optimizers(), **self.saving)

    def wait(self) -> None:
        self.saver.wait()

    # --- afterwards -------------------------------------------------------------------------------------------------

    def kept(self) -> None:
        """The shards are those from before the operation that failed."""
        for name_param, before in zip(self.model.named_parameters(), self.shards, strict=True):
            name, param = name_param
            if not torch.equal(_local(param), _local(before)):
                raise AssertionError(f"{name} has changed")

    def trained(self) -> None:
        """The model has been trained by so many steps as there were, as without shards."""
        reference = self.reference()
        for name, value in self.model.state_dict().items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            if name != "calls" and not torch.allclose(value, reference[name], atol=1e-6):
                raise AssertionError(f"{name} is not as after {self.steps} steps")

    def reference(self) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Net(self)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(self.steps):
            losses = [model(self.batch_of(step, rank)).square().mean() for rank in range(self.world_size)]
            torch.stack(losses).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()


def _reduce(job: Job, gradient: Tensor, shard: Tensor) -> None:
    from fsdp.distributed.comm_hooks import reduce_scatter

    if job.hook_fails:
        raise ValueError("this hook has failed")
    shard.copy_(reduce_scatter(gradient / job.world_size))


def _reduce_otherwise(job: Job, gradient: Tensor, shard: Tensor) -> None:
    _reduce(job, gradient, shard)


def _local(param: Any) -> Tensor:
    return param.to_local() if hasattr(param, "to_local") else param.detach()
