"""Lightning's Trainer with `FullyShardedStrategy`: it trains as one process does, in all of the Trainer's ways."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import get_fsdp_instances
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_lit_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs

pytestmark = needs("lightning")
PRELOAD = ["fsdp.lightning"]

NORM, VALUE = 0.05, 0.002
CLIPPING = {None: None, "norm": NORM, "value": VALUE}


@parametrize_pairs(
    at_most=6,
    world_size=[2, 1],  # each rank imports Lightning first, which takes seconds
    kind=["Regression", "OfTheTrainersModel", "WithLayers", "WithAutoWrap"],
    options=[
        {},
        {"min_num_params": 10},
        {"auto_wrap_policy": {nn.Linear}},
        {"flatten_parameters": False},
        {"use_orig_params": False},
        {"cpu_offload": True, "reshard_after_forward": False},
    ],
    clips=list(CLIPPING),
    accumulate=[1, 2],
)
@on_lit_ranks("world_size")
def test_a_trainer_fits_as_one_process(kind: str, options: dict[str, Any], clips: str | None, accumulate: int) -> None:
    from tests.helpers import lightning as lit

    expected = _alone(clips, accumulate)
    trainer = lit.trainer(
        strategy=lit.fsdp.lightning.FullyShardedStrategy(**options),
        accumulate_grad_batches=accumulate,
        gradient_clip_val=CLIPPING[clips],
        gradient_clip_algorithm=clips,
        max_epochs=2,
    )
    lit.fitted(getattr(lit, kind)(), trainer)
    torch.testing.assert_close(lit.state_of(trainer), expected, rtol=1e-4, atol=1e-6)
    with lit.quiet():
        (validated,) = trainer.validate(trainer.lightning_module, lit.batches(range(90, 92)), verbose=False)
    reference = lit.Regression()
    reference.load_state_dict(expected)
    losses = [reference.loss(lit.global_batch(step)).item() for step in range(90, 92)]
    assert validated["val"] == pytest.approx(sum(losses) / 2, rel=1e-4)


def _alone(clips: str | None = None, accumulate: int = 1) -> dict[str, Tensor]:
    from tests.helpers import lightning as lit

    how = {
        None: None,
        "norm": partial(nn.utils.clip_grad_norm_, max_norm=NORM),
        "value": partial(nn.utils.clip_grad_value_, clip_value=VALUE),
    }
    # A Trainer's scheduler steps once in an epoch, which `trained_alone` does as well.
    return lit.trained_alone(lit.Regression(), epochs=2, accumulate=accumulate, clip=how[clips])


@on_lit_ranks(2)
def test_the_norm_that_clips_is_that_of_all_ranks() -> None:
    from tests.helpers import lightning as lit

    class Seen(lit.Regression):
        def configure_gradient_clipping(self, optimizer: Any, **arguments: Any) -> None:
            before = self.trainer.model.clip_grad_norm_(float("inf"))
            self.clip_gradients(optimizer, **arguments)
            self.norms = before, self.trainer.model.clip_grad_norm_(float("inf"))

    module = Seen()
    lit.fitted(module, lit.trainer(gradient_clip_val=NORM), range(1))
    alone = lit.Regression()
    alone.loss(lit.global_batch(0)).backward()
    expected = torch.cat([param.grad.view(-1) for param in alone.parameters() if param.grad is not None]).norm()
    assert expected > NORM
    torch.testing.assert_close(module.norms, (expected, torch.tensor(NORM)), rtol=1e-4, atol=0)


@pytest.mark.parametrize("options", [{}, {"auto_wrap_policy": {nn.Linear}}], ids=["one unit", "units"])
@on_lit_ranks(2)
def test_all_four_entry_points_give_what_the_whole_model_gives(options: dict[str, Any]) -> None:
    from tests.helpers import lightning as lit

    module = lit.Regression()
    trainer = lit.trainer(strategy=lit.fsdp.lightning.FullyShardedStrategy(**options))
    with lit.quiet():
        before = trainer.validate(module, lit.batches(), verbose=False)  # wraps, without an optimizer
        lit.fitted(module, trainer)
        tested = trainer.test(module, lit.batches(), verbose=False)
        predicted: Any = trainer.predict(module, lit.batches())
    alone = lit.Regression()
    expected = [_mean_loss(alone)]
    alone.load_state_dict(lit.trained_alone(alone))
    expected.append(_mean_loss(alone))
    assert [before[0]["val"], tested[0]["test"]] == pytest.approx(expected, rel=1e-4)
    for step, outputs in enumerate(predicted):
        rows = lit.global_batch(step)[0].chunk(2)[dist.get_rank()]
        torch.testing.assert_close(outputs, alone(rows), rtol=1e-4, atol=1e-6)


def _mean_loss(module: Any) -> float:
    from tests.helpers import lightning as lit

    with torch.no_grad():
        return sum(module.loss(lit.global_batch(step)).item() for step in range(lit.STEPS)) / lit.STEPS


@on_lit_ranks(2)
def test_options_reach_every_wrapper() -> None:
    from tests.helpers import lightning as lit

    strategy = lit.fsdp.lightning.FullyShardedStrategy(
        reshard_after_forward=False, gradient_predivide_factor=2.0, auto_wrap_policy=[nn.Linear]
    )
    trainer = lit.fitted(lit.WithLayers(), lit.trainer(strategy=strategy))
    units = get_fsdp_instances(trainer.model)
    assert len(units) == 4
    assert [unit.gradient_predivide_factor for unit in units] == [2.0] * 4
    assert not any(unit.reshard_after_forward for unit in units)


@on_lit_ranks(2)
def test_ranks_that_draw_other_values_begin_with_the_first_ones() -> None:
    from tests.helpers import lightning as lit

    expected = lit.trained_alone(lit.Regression())
    for kind in (lit.Regression, lit.WithLayers):
        trainer = lit.fitted(kind(seed=dist.get_rank()), lit.trainer())
        torch.testing.assert_close(lit.state_of(trainer), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["Regression", "WithLayers"])
@on_lit_ranks(2)
def test_a_module_without_values_gets_those_of_a_checkpoint_or_of_a_function(tmp_path: Path, kind: str) -> None:
    from tests.helpers import lightning as lit

    lit.fitted(lit.Regression(), lit.trainer(tmp_path)).save_checkpoint(tmp_path / "last.ckpt")
    trainer = lit.trainer(tmp_path, max_epochs=2)
    with trainer.init_module(empty_init=True):
        module = getattr(lit, kind)()
    assert module.head.weight.is_meta
    lit.fitted(module, trainer, ckpt_path=tmp_path / "last.ckpt")
    expected = lit.trained_alone(lit.Regression(), epochs=2)
    torch.testing.assert_close(lit.state_of(trainer), expected, rtol=1e-4, atol=1e-6)

    strategy = lit.fsdp.lightning.FullyShardedStrategy(param_init_fn=_set_to_halves)
    trainer = lit.trainer(tmp_path, strategy=strategy)
    with trainer.init_module(empty_init=True):
        module = getattr(lit, kind)()
    lit.fitted(module, trainer)
    alone = lit.Regression()
    alone.apply(_set_to_halves)
    torch.testing.assert_close(lit.state_of(trainer), lit.trained_alone(alone), rtol=1e-4, atol=1e-6)


def _set_to_halves(module: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(0.5)


@on_lit_ranks(2)
def test_a_module_goes_on_with_another_trainer() -> None:
    from tests.helpers import lightning as lit

    module = lit.Regression()
    first = lit.fitted(module, lit.trainer())
    second = lit.trainer()
    with lit.quiet():
        (validated,) = second.validate(module, lit.batches(range(90, 92)), verbose=False)
    assert second.model is first.model
    assert validated["val"] == pytest.approx(float(first.callback_metrics["val"]), rel=1e-5)
    lit.fitted(module, second)
    alone = lit.Regression()
    lit.trained_alone(alone)
    torch.testing.assert_close(lit.state_of(second), lit.trained_alone(alone), rtol=1e-4, atol=1e-6)


# Manual optimization


@parametrize_cases(
    at_most=6,
    options=[
        {},
        {"use_orig_params": False},
        {"flatten_parameters": False},
        {"min_num_params": 1},
        {"auto_wrap_policy": {nn.Linear}},
    ],
    clips=["norm", None],
    accumulate=[1, 2],
)
@on_lit_ranks(2)
def test_two_optimizers_take_turns_and_are_clipped_apart(case: Case) -> None:
    from tests.helpers import lightning as lit
    from tests.helpers.lightning_manual import Adversaries, turns_alone

    module = Adversaries(case.clips, case.accumulate)
    trainer = lit.trainer(strategy=lit.fsdp.lightning.FullyShardedStrategy(**case.options))
    with lit.quiet():
        trainer.fit(module, lit.batches())
    own = [param for param in trainer.model.params if param.numel()]
    assert not own, "the outermost unit, whose forward is not run"
    expected = turns_alone(Adversaries(case.clips, case.accumulate))
    torch.testing.assert_close(lit.state_of(trainer), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"flatten_parameters": False}])
@on_lit_ranks(3)
def test_a_callback_freezes_and_thaws_modules(options: dict[str, Any], tmp_path: Path) -> None:
    """Also where ranks hold no elements of several parameters, which are equal then."""
    from tests.helpers import lightning as lit

    expected = lit.Regression()
    optimizer = torch.optim.SGD(expected.head.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        if epoch:
            optimizer.add_param_group({"params": [*expected.net.parameters()], "lr": 0.05})
        for step in range(lit.STEPS):
            expected.loss(lit.global_batch(step)).backward()
            optimizer.step()
            expected.zero_grad()
    trainer = lit.trainer(
        strategy=lit.fsdp.lightning.FullyShardedStrategy(**options), max_epochs=2, callbacks=[lit.Thaw()]
    )
    lit.fitted(lit.FineTuned(), trainer)
    torch.testing.assert_close(lit.state_of(trainer), dict(expected.state_dict()), rtol=1e-4, atol=1e-6)
    assert len(trainer.optimizers[0].param_groups[1]["params"]) == len(list(expected.net.parameters()))
    trainer.save_checkpoint(tmp_path / "thawed.ckpt")


@on_lit_ranks(2)
def test_a_callback_that_thaws_modules_without_parameters_is_refused() -> None:
    from tests.helpers import lightning as lit

    trainer = lit.trainer(
        strategy=lit.fsdp.lightning.FullyShardedStrategy(use_orig_params=False), max_epochs=2, callbacks=[lit.Thaw()]
    )
    with pytest.raises(RuntimeError, match="has thawed modules without parameters: with use_orig_params=False"):
        lit.fitted(lit.FineTuned(), trainer)
