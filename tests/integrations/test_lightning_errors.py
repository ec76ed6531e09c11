"""What cannot work under `FullyShardedStrategy`, and is told before it goes wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_lit_ranks

pytestmark = needs("lightning")
PRELOAD = ["fsdp.lightning"]


@on_lit_ranks(1)
def test_arguments_are_looked_at_when_they_are_given() -> None:
    from tests.helpers import lightning as lit

    make = lit.fsdp.lightning.FullyShardedStrategy
    for arguments, error, message in (
        ({"reshard": True}, TypeError, "'reshard', which is neither an argument of its own nor one of Fully"),
        ({"device_mesh": (1, 1)}, TypeError, "no device_mesh, which Lightning's FSDPStrategy has: pass process_group"),
        ({"activation_checkpointing_policy": {nn.Linear}}, TypeError, r"call fsdp\.checkpoint_wrapper"),
        ({"compute_device": "cpu"}, ValueError, "sets compute_device of the wrappers itself: it is the Trainer's"),
        ({"move_params_to_cpu": True}, ValueError, "say cpu_offload"),
        ({"min_num_params": 3, "auto_wrap_policy": {nn.Linear}}, ValueError, "min_num_params and auto_wrap_policy"),
        ({"auto_wrap_policy": "Linear"}, TypeError, "a policy or a set of module classes, got 'Linear'"),
        ({"auto_wrap_policy": {nn.ModuleList}}, ValueError, "can not wrap ModuleList"),
        ({"state_dict_type": "whole"}, ValueError, "'full' or 'sharded', got 'whole'"),
    ):
        with pytest.raises(error, match=message):
            make(**arguments)


@on_lit_ranks(2)
def test_optimizers_of_other_parameters_are_refused() -> None:
    from tests.helpers import lightning as lit

    class Early(lit.Regression):
        def __init__(self) -> None:
            super().__init__()
            self.optimizer = torch.optim.AdamW(self.parameters())

        def configure_optimizers(self) -> Any:
            return self.optimizer

    class Steep(lit.Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    class Nothing(lit.Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.head.parameters())

    class Outside(lit.WithLayers):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.parameters())  # without what lies outside of the layers, which is flat

    class Elsewhere(lit.Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([*self.parameters(), *nn.Linear(2, 2).parameters()])

    flat = {"use_orig_params": False}
    for kind, options, message in (
        (Early, {}, "parameter 0 of group 0, of shape .*before the model was wrapped.*configure_optimizers"),
        (Early, flat, "parameter 0 of group 0, of shape .*taken before the model was wrapped"),
        (Elsewhere, {}, r"of shape \[2, 2\], is not of the sharded model. Either its layer is not a submodule"),
        (Nothing, flat, "no parameters of the sharded model.*self.trainer.model.parameters()"),
        (Outside, flat, r"no optimizer steps .*flat_param.*self\.trainer\.model\.parameters\(\)"),
    ):
        trainer = lit.trainer(strategy=lit.fsdp.lightning.FullyShardedStrategy(**options))
        with pytest.raises(ValueError, match=message):
            lit.fitted(kind(), trainer)
    with pytest.raises(
        RuntimeError, match="LBFGS needs inner products over all parameters"
    ):  # by its step, as anywhere
        lit.fitted(Steep(), lit.trainer())


@on_lit_ranks(2)
def test_what_would_change_a_sharded_model_is_refused() -> None:
    from lightning.pytorch import callbacks

    from fsdp import wrap
    from tests.helpers import lightning as lit

    averages = [callbacks.StochasticWeightAveraging(0.1)]
    if hasattr(callbacks, "EMAWeightAveraging"):
        averages.append(callbacks.EMAWeightAveraging())
    for average in averages:
        with pytest.raises(ValueError, match=f"{type(average).__name__} copies the whole model"):
            lit.fitted(lit.Regression(), lit.trainer(callbacks=[average]))
    compiled: Any = torch.compile(lit.Regression(), backend="eager")
    with pytest.raises(ValueError, match="compile the blocks inside of it, in configure_model"):
        lit.fitted(compiled, lit.trainer())

    class Normed(lit.Regression):
        def configure_model(self) -> None:
            self.norm = wrap(nn.BatchNorm1d(5))

    with pytest.raises(ValueError, match=r"sync_batchnorm=True would change batch norms.*before you wrap"):
        lit.fitted(Normed(), lit.trainer(sync_batchnorm=True))


@on_lit_ranks(2)
def test_a_configure_model_that_builds_twice_is_refused() -> None:
    from fsdp import wrap
    from tests.helpers import lightning as lit

    class Careless(lit.Regression):
        def configure_model(self) -> None:
            self.head = wrap(nn.Linear(5, 1))

    module = Careless()
    trainer = lit.fitted(module, lit.trainer())
    with pytest.raises(RuntimeError, match=r"head is a different module now.*return immediately"), lit.quiet():
        trainer.validate(module, lit.batches(), verbose=False)


@on_lit_ranks(2)
def test_manual_optimization_needs_modules_to_call() -> None:
    from tests.helpers import lightning as lit
    from tests.helpers.lightning_manual import Adversaries

    class Bare(Adversaries):
        def __init__(self) -> None:
            super().__init__(None, 1)
            self.factor = nn.Parameter(torch.ones(3))

    with pytest.raises(ValueError, match=r"factor of shape \[3\] must be in a module that training_step calls"):
        lit.fitted(Bare(), lit.trainer())


@on_lit_ranks(2)
def test_a_module_outside_of_the_trainer_says_what_it_is() -> None:
    from tests.helpers import lightning as lit

    module = lit.Regression()
    trainer = lit.fitted(module, lit.trainer())
    with pytest.raises(RuntimeError, match=r"Call state_dict\(\) of the wrapper"):
        module.state_dict()
    assert set(trainer.model.state_dict(rank0_only=False)) == set(lit.Regression().state_dict())
    inputs: Tensor = lit.global_batch(0)[0]
    with torch.no_grad():
        torch.testing.assert_close(trainer.model(inputs), module(inputs))
    unwrapped = lit.fsdp.lightning.FullyShardedStrategy()
    with pytest.raises(RuntimeError, match="the model is not wrapped yet"), unwrapped.block_backward_sync():
        pass
