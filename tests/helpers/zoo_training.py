"""A model of the zoo, sharded in one of three forms, trains as the unsharded one. Import it on ranks only.

Ranks have batches of their own. The unsharded model is trained beside the sharded one by averaging its gradients over
the ranks. Both draw the same random numbers, so dropout stays on.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from fsdp import FullyShardedDataParallel, auto_wrap, enable_wrap, fully_shard, register_fsdp_forward_method, wrap
from fsdp.optim_utils import full_optim_state_dict, load_full_optim_state_dict
from fsdp.state_dict_utils import gather_state_dict
from fsdp.wrap import lambda_wrap_policy
from tests.helpers import zoo
from tests.helpers.equality import assert_close, assert_close_state, assert_same_state

MAX_NORM = 0.5
ROUNDING = {"rtol": 1e-4, "atol": 1e-5}


def assert_trains_as_unsharded(name: str, form: str, *, thorough: bool = True) -> None:
    """Collective. Losses, norms and weights of some steps, a strict load of the full state, and a step after that.

    Unless it is thorough, there is only one step before the load, and an optimizer of rows keeps its sharded state.
    """
    steps = 2 if thorough else 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the models, about configurations
        plain, model = Trained(zoo.made(name), name), Sharded(name, form)
        for step in range(steps):
            _assert_same_step(plain, model, step)
        state = model.state()
        assert_close_state(state, plain.model.state_dict(), **ROUNDING)
        of_optimizer = model.optimizer_state(whole=thorough)
        resumed = Sharded(name, form, seed=1)
        resumed.load(state, of_optimizer, whole=thorough)
        assert_same_state(resumed.state(), state)
        _assert_same_step(plain, resumed, steps)
        assert_close_state(resumed.state(), plain.model.state_dict(), **ROUNDING)


def _assert_same_step(plain: Trained, model: Sharded, step: int) -> None:
    assert_close(model.step(step), plain.step(step), f"loss and norm of step {step}", **ROUNDING)


class Trained:
    """An unsharded model and its optimizer."""

    def __init__(self, model: Any, name: str) -> None:
        self.name, self.model = name, model
        self.inner = model  # which knows the configuration
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
        model.train()

    def step(self, number: int) -> tuple[Tensor, Tensor]:
        """Collective. Return the loss, and the norm of the gradients before they are clipped."""
        inputs = zoo.batch(self.name, self.inner, seed=100 * number + dist.get_rank())
        torch.manual_seed(number)
        numpy.random.seed(number)  # which masks inputs of models of sound
        loss = zoo.score(self.model(**inputs))
        loss.backward()
        norm = self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), torch.as_tensor(norm)

    def clip(self) -> Tensor:
        """Collective. Average the gradients over the ranks and clip them."""
        params = list(self.model.parameters())
        has = torch.tensor([float(param.grad is not None) for param in params])
        grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
        both = torch.cat([has, *(grad.flatten() for grad in grads)])
        dist.all_reduce(both)
        parts = both[len(params) :].split([param.numel() for param in params])
        for count, param, part in zip(both[: len(params)].tolist(), params, parts, strict=True):
            param.grad = part.view_as(param) / dist.get_world_size() if count else None
        return nn.utils.clip_grad_norm_(params, MAX_NORM)


class Sharded(Trained):
    """The same, with a unit for each layer and one for what is left."""

    def __init__(self, name: str, form: str, seed: int = 0) -> None:
        plain = zoo.made(name, seed)
        self.form, layers = form, zoo.layers(plain)
        if form == "rows":
            for layer in reversed(layers):
                fully_shard(layer)
            model = fully_shard(plain)
        else:
            chosen = {id(layer) for layer in layers}
            with enable_wrap(wrapper_cls=FullyShardedDataParallel, use_orig_params=form == "orig"):
                model = wrap(auto_wrap(plain, lambda_wrap_policy(lambda module: id(module) in chosen)))
        for layer in layers:
            for method in zoo.methods(name):
                register_fsdp_forward_method(layer, method)
        super().__init__(model, name)
        self.inner = plain

    def clip(self) -> Tensor:
        if self.form == "rows":
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return self.model.clip_grad_norm_(MAX_NORM)  # type: ignore[no-any-return]

    def state(self) -> dict[str, Tensor]:
        """Collective. The whole state, on every rank."""
        return gather_state_dict(self.model.state_dict())  # type: ignore[no-any-return]

    def optimizer_state(self, whole: bool) -> Any:
        """Collective. The state of the optimizer, whole on every rank; of rows, only if asked for."""
        if self.form == "rows":
            return (
                get_optimizer_state_dict(self.model, self.optimizer, options=WHOLE)
                if whole
                else self.optimizer.state_dict()
            )
        return full_optim_state_dict(self.model, self.optimizer, recipient_rank=None)

    def load(self, model: dict[str, Tensor], optimizer: Any, whole: bool) -> None:
        """Collective."""
        assert str(self.model.load_state_dict(model, strict=True)) == "<All keys matched successfully>"
        if self.form == "rows" and whole:
            set_optimizer_state_dict(self.model, self.optimizer, optimizer, options=WHOLE)
        elif self.form == "rows":
            self.optimizer.load_state_dict(optimizer)
        else:
            load_full_optim_state_dict(self.model, self.optimizer, optimizer)


# Parameters without gradients have no state, which torch takes for a difference.
WHOLE = StateDictOptions(full_state_dict=True, strict=False)
