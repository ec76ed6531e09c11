"""The settings of `FullyShardedStrategy`: attributes, names of Lightning 1.9, and Trainers that want others."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp import module_wrap_policy
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_lit_ranks

pytestmark = needs("lightning")
PRELOAD = ["fsdp.lightning"]

# The arguments of Lightning 1.9's strategy for FairScale in its order, with values that are not the defaults.
FAIRSCALE_ERA: dict[str, Any] = {
    "cpu_offload": True,
    "flatten_parameters": False,
    "reshard_after_forward": False,
    "move_grads_to_cpu": True,
    "fp32_reduce_scatter": True,
    "compute_dtype": torch.float16,
    "bucket_cap_mb": 3,
    "min_num_params": 7,
}


@on_lit_ranks(2)
def test_settings_are_attributes() -> None:
    from tests.helpers import lightning as lit

    make = lit.fsdp.lightning.FullyShardedStrategy
    strategy = make(None, *FAIRSCALE_ERA.values(), False)  # by position, after the accelerator
    assert {name: getattr(strategy, name) for name in FAIRSCALE_ERA} == FAIRSCALE_ERA
    assert strategy.state_dict_device is None
    strategy = make()
    expected = {
        "cpu_offload": False,
        "flatten_parameters": True,
        "reshard_after_forward": True,
        "move_grads_to_cpu": None,
        "fp32_reduce_scatter": None,
        "compute_dtype": None,
        "bucket_cap_mb": 25,
        "min_num_params": 100_000_000,
        "state_dict_device": torch.device("cpu"),
        "auto_wrap_policy": None,
        "state_dict_type": "full",
        "options": {},
    }
    assert {name: getattr(strategy, name) for name in expected} == expected
    policy = {nn.Linear}
    strategy = make(auto_wrap_policy=policy, state_dict_type="sharded", gradient_predivide_factor=2.0)
    found = (strategy.auto_wrap_policy, strategy.min_num_params, strategy.state_dict_type, strategy.options)
    assert found == (policy, None, "sharded", {"gradient_predivide_factor": 2.0})


@on_lit_ranks(2)
def test_settings_that_are_assigned_before_the_trainer_runs_are_used() -> None:
    from tests.helpers import lightning as lit

    class Mine(lit.fsdp.lightning.FullyShardedStrategy):
        def __init__(self) -> None:
            super().__init__()
            self.flatten_parameters, self.bucket_cap_mb, self.auto_wrap_policy = False, 2, {nn.Linear}

    trainer = lit.fitted(lit.Regression(), lit.trainer(strategy=Mine()))
    units = fsdp.get_fsdp_instances(trainer.model)
    assert len(units) == 4
    assert {(unit.flatten_parameters, unit.bucket_cap_mb) for unit in units} == {(False, 2)}
    torch.testing.assert_close(lit.state_of(trainer), lit.trained_alone(lit.Regression()), rtol=1e-4, atol=1e-6)


@on_lit_ranks(2)
def test_names_are_registered() -> None:
    from tests.helpers import lightning as lit

    trainers = [lit.trainer(strategy=name) for name in ("fsdp_flat", "ddp_fully_sharded")]
    assert all(isinstance(each.strategy, lit.fsdp.lightning.FullyShardedStrategy) for each in trainers)
    trainer = lit.fitted(lit.Regression(), trainers[1])
    assert isinstance(trainer.model, fsdp.FullyShardedDataParallel)
    torch.testing.assert_close(lit.state_of(trainer), lit.trained_alone(lit.Regression()), rtol=1e-4, atol=1e-6)


@on_lit_ranks(2)
def test_the_process_group_is_the_wrappers() -> None:
    from tests.helpers import lightning as lit

    seen = []

    class ByHand(lit.Regression):
        def configure_model(self) -> None:
            if not fsdp.get_fsdp_instances(self):
                seen.append(self.trainer.strategy.process_group)
                self.head = fsdp.FullyShardedDataParallel(self.head, process_group=seen[0], use_orig_params=True)

    own = dist.new_group()
    for options, group in (({}, dist.group.WORLD), ({"process_group": own}, own)):
        seen.clear()
        trainer = lit.trainer(strategy=lit.fsdp.lightning.FullyShardedStrategy(**options))
        lit.fitted(ByHand(), trainer)
        assert seen == [group]
        assert trainer.strategy.process_group is group
        assert all(unit.process_group is group for unit in fsdp.get_fsdp_instances(trainer.model))


# Another Trainer for a model that is sharded


@on_lit_ranks(2)
def test_another_trainer_that_wants_other_settings_is_refused() -> None:
    from tests.helpers import lightning as lit

    make = lit.fsdp.lightning.FullyShardedStrategy
    module = lit.Regression()
    lit.fitted(module, lit.trainer())
    for options, message in (
        ({"cpu_offload": True}, "cpu_offload=False, not True"),
        ({"min_num_params": 10}, "min_num_params=100000000, not 10"),
        ({"use_orig_params": False}, "use_orig_params=True, not False"),
        ({"reshard_after_forward": False}, "reshard_after_forward=True, not False"),
        ({"move_grads_to_cpu": True}, "move_grads_to_cpu=None, not True"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=25, not 0"),
        ({"offload": "cpu"}, "offload=None, not 'cpu'"),
        ({"gradient_predivide_factor": 4.0}, "gradient_predivide_factor=None, not 4.0"),
        ({"flatten_parameters": False}, "flatten_parameters=True, not False; use_orig_params=True, not False"),
        ({"auto_wrap_policy": {nn.Linear}}, "auto_wrap_policy=None, not .*Linear.*; min_num_params="),
        ({"state_dict_to_cpu": False}, r"state_dict_device=device\(type='cpu'\), not None"),
        ({"ignored_modules": [module.head]}, "ignored_modules=None, not .*Linear"),
    ):
        with pytest.raises(ValueError, match=f"earlier Trainer has sharded .* with {message}.*new LightningModule"):
            lit.fitted(module, lit.trainer(strategy=make(**options)))
    with pytest.raises(ValueError, match="precision='32-true', not 'bf16-mixed'"):
        lit.fitted(module, lit.trainer(precision="bf16-mixed"))
    with pytest.raises(ValueError, match="precision='32-true', not '64-true'"), lit.quiet():
        lit.trainer(precision="64-true").validate(module, lit.batches(), verbose=False)
    mixed = lit.Regression()
    lit.fitted(mixed, lit.trainer(precision="bf16-mixed"))
    with pytest.raises(ValueError, match="fp32_reduce_scatter=False, not True"):
        lit.fitted(mixed, lit.trainer(strategy=make(fp32_reduce_scatter=True), precision="bf16-mixed"))


@on_lit_ranks(2)
def test_settings_that_change_between_stages_of_one_trainer_are_refused() -> None:
    from tests.helpers import lightning as lit

    trainer = lit.fitted(lit.Regression(), lit.trainer())
    trainer.strategy.reshard_after_forward = False  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="reshard_after_forward=True, not False"), lit.quiet():
        trainer.validate(trainer.lightning_module, lit.batches(), verbose=False)


@on_lit_ranks(2)
def test_another_trainer_with_the_same_settings_goes_on() -> None:
    from tests.helpers import lightning as lit

    make = lit.fsdp.lightning.FullyShardedStrategy
    module, alone = lit.Regression(), lit.Regression()
    for form in ({}, {"param_init_fn": nn.Module.float, "sync_module_states": False}, {"state_dict_type": "sharded"}):
        strategy = make(auto_wrap_policy=[nn.Linear], fp32_reduce_scatter=False, use_orig_params=True, **form)
        trainer = lit.fitted(module, lit.trainer(strategy=strategy))
        torch.testing.assert_close(lit.state_of(trainer), lit.trained_alone(alone), rtol=1e-4, atol=1e-6)
    module = lit.Regression()
    for _ in range(2):  # another list of the same parameters
        lit.fitted(module, lit.trainer(strategy=make(ignored_parameters=[module.net.scale])))


@on_lit_ranks(2)
def test_another_function_is_told_once_it_is_not_called() -> None:
    from tests.helpers import lightning as lit

    make = lit.fsdp.lightning.FullyShardedStrategy
    module, policy = lit.Regression(), module_wrap_policy({nn.Linear})
    lit.fitted(module, lit.trainer(strategy=make(auto_wrap_policy=policy)))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="auto_wrap_policy")
        lit.fitted(module, lit.trainer(strategy=make(auto_wrap_policy=policy)))
    with pytest.warns(UserWarning, match="auto_wrap_policy of this Trainer's strategy differs from the function"):
        lit.fitted(module, lit.trainer(strategy=make(auto_wrap_policy=module_wrap_policy({nn.Linear}))))


# Advice


@on_lit_ranks(1)
def test_errors_about_precision_name_the_trainers_argument() -> None:
    from tests.helpers import lightning as lit

    make = lit.fsdp.lightning.FullyShardedStrategy
    half = torch.float16
    for options, precision, message in (
        ({"fp32_reduce_scatter": True}, "32-true", "needs precision='bf16-mixed' or '16-mixed' of the Trainer, got"),
        (
            {"compute_dtype": half},
            "32-true",
            "torch.float16 conflicts with precision='32-true'.*'16-true'",
        ),
        ({"compute_dtype": torch.float32}, "16-true", "conflicts with precision='16-true'.*computes in torch.float16"),
        ({"buffer_dtype": half}, "bf16-mixed", "buffer_dtype cannot be combined with precision='bf16-mixed'"),
        ({"force_input_to_fp32": True}, "bf16-mixed", "force_input_to_fp32 cannot be combined with precision='bf16"),
    ):
        with pytest.raises(ValueError, match=message) as caught, lit.quiet():
            lit.fitted(lit.Regression(), lit.trainer(strategy=make(**options), precision=precision))
        assert "mixed_precision=True" not in str(caught.value)
    with pytest.raises(ValueError, match="mixed_precision=True: choose precision='16-mixed' or 'bf16-mixed'"):
        make(mixed_precision=True)
    for kind in (lit.Regression, lit.WithLayers, lit.WithAutoWrap):
        with pytest.raises(ValueError, match=r"is torch.float16.*Under a Trainer, precision='bf16-mixed' chooses"):
            lit.fitted(kind().half(), lit.trainer(precision="bf16-mixed"))
