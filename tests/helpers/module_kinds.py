"""One kind of model beside its plain twin: some steps, every loss, the state there and back.

In float64, so that rounding hides nothing. The plain twin sees the global batch at once, as one process would; so
modules that count their forwards (spectral norm) are as far as on every rank. What rounds to 16 bits on its way sees
the ranks' rows apart: how it rounds depends on the number of rows, and on what gradients are divided by before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import auto_wrap, default_auto_wrap_policy, enable_wrap
from tests.helpers.equality import assert_close
from tests.helpers.models import Wrap
from tests.helpers.parity import MakeOptimizer, fully_sharded, sgd_with_momentum
from tests.helpers.twins import Twins, batch, score

Make = Callable[[], nn.Module]  # a plain model that takes [rows, 5]; rows do not see each other

FLAT: dict[str, Any] = {}
ORIGINAL: dict[str, Any] = {"use_orig_params": True}
UNFLATTENED: dict[str, Any] = {"flatten_parameters": False}
FORMS = [FLAT, ORIGINAL, UNFLATTENED]

SMALL = 20  # parameters: what is smaller is no unit of `auto_wrapped`


def whole(model: nn.Module, wrap: Wrap) -> nn.Module:
    """One unit."""
    return wrap(model)


def auto_wrapped(model: nn.Module, wrap: Wrap) -> nn.Module:
    """A unit for every module of at least `SMALL` parameters, and the root."""
    assert isinstance(wrap, partial)
    policy = partial(default_auto_wrap_policy, min_num_params=SMALL, skip_params_check_for_root=True)
    with enable_wrap(wrapper_cls=wrap.func, auto_wrap_policy=policy, **wrap.keywords):
        return auto_wrap(model)


def wrapped_parts(model: nn.Module, wrap: Wrap, *, parts: Sequence[str]) -> nn.Module:
    """By hand: a unit for each of these submodules, inner ones first, and the root."""
    for name in parts:
        model.set_submodule(name, wrap(model.get_submodule(name)))
    return wrap(model)


Units = Callable[[nn.Module, Wrap], nn.Module]
UNITS: list[Units] = [whole, auto_wrapped]


class SideBySide(Twins):
    """Twins of one kind of module, in units of a kind.

    Args:
        make: the model; it is made twice from the same seed.
        units: what becomes a unit.
        make_optimizer: for each.
        apart: the plain twin computes with the rows of one rank after the other.
        options: of every wrapper.
    """

    def __init__(
        self,
        make: Make,
        units: Units = whole,
        make_optimizer: MakeOptimizer = sgd_with_momentum,
        *,
        apart: bool = False,
        **options: Any,
    ) -> None:
        torch.set_default_dtype(torch.float64)
        self._apart = apart
        self._make, self._units, self._wrap = make, units, fully_sharded(**options)
        models = self._new(), seeded(make)
        super().__init__(*models, [make_optimizer(model.parameters()) for model in models])
        self.tolerance = {}

    def _new(self, seed: int = 0) -> nn.Module:
        return self._units(seeded(self._make, seed), self._wrap)

    def backward(self, number: int | None = None, *, sync: bool = True) -> None:
        """Collective. The rank's loss is that of its rows on the plain twin."""
        assert sync, "these twins do not accumulate"
        self.number = self.number + 1 if number is None else number
        parts = [batch(self.number, rank) for rank in range(dist.get_world_size())]
        loss = score(self.sharded(parts[dist.get_rank()]))
        loss.backward()
        losses = self._losses_apart(parts) if self._apart else self._losses_together(parts)
        assert_close(loss, losses[dist.get_rank()], f"loss of step {self.number}")

    def _losses_together(self, parts: list[Tensor]) -> list[Tensor]:
        outputs = self.plain(torch.cat(parts))
        score(outputs).backward()
        return [score(output) for output in outputs.chunk(len(parts))]

    def _losses_apart(self, parts: list[Tensor]) -> list[Tensor]:
        losses = [score(self.plain(part)) for part in parts]
        for loss in losses:
            loss.backward()
        for param in self.plain.parameters():
            if param.grad is not None:
                param.grad /= len(parts)
        return losses

    def on_both(self, change: Callable[[Any], Any]) -> None:
        for model in self.models:
            change(model)

    def assert_close_gradients(self) -> None:
        """Collective. As a step of size one shows them, which it takes."""
        before = self.plain.state_dict()
        before = {name: value.clone() for name, value in before.items()}
        for model in self.models:
            torch.optim.SGD(model.parameters(), lr=1.0).step()
        found, expected = self.sharded.state_dict(), self.plain.state_dict()
        for name, value in before.items():
            assert_close(found[name] - value, expected[name] - value, f"gradient of {name}")

    def assert_loads_back(self) -> None:
        """Collective. The state fills another wrapped model and a plain one, which then compute the same."""
        state = self.sharded.state_dict()
        models = [self._new(seed=1), seeded(self._make, seed=1)]
        for model in models:
            assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
        loaded = models[0].state_dict()
        assert list(loaded) == list(state)
        assert all(torch.equal(loaded[name], value) for name, value in state.items())
        with torch.no_grad():
            outputs = [model.eval()(batch(99, 0)) for model in models]
        assert_close(outputs[0], outputs[1], "what the loaded model computes")


def assert_kind_trains(
    make: Make,
    units: Units = whole,
    make_optimizer: MakeOptimizer = sgd_with_momentum,
    options: dict[str, Any] | None = None,
    *,
    steps: int = 2,
    apart: bool = False,
) -> None:
    """Collective. Losses of each step, weights at the end, and the state loaded back."""
    pair = SideBySide(make, units, make_optimizer, apart=apart, **(options or {}))
    before = {name: value.clone() for name, value in pair.plain.state_dict().items()}
    for number in range(steps):
        pair.step(number)
    pair.assert_close()
    trained = {name for name, param in pair.plain.named_parameters() if param.requires_grad and param.numel()}
    assert trained
    after = pair.plain.state_dict()
    assert all(not torch.equal(after[name], before[name]) for name in trained), "something was not trained at all"
    pair.assert_loads_back()


def seeded(make: Make, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
