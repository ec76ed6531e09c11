"""Several adapters of `peft`, adapters of parameters, and merging into a quantised base, sharded and not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, fully_shard
from fsdp.state_dict_utils import gather_state_dict
from tests.helpers.equality import assert_close_state
from tests.helpers.hugging_face import FORMS, PATIENCE, plain_of
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_ranks
from tests.helpers.quantised import plain_values

pytestmark = [
    needs("transformers", "peft"),
    # peft calls what transformers has renamed.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]
PRELOAD = ["peft"]


class Experts(nn.Module):
    """Two layers whose weights are of one parameter of three dimensions, beside a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 6, 6) / 6)
        self.mix = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        shares = self.mix(inputs).softmax(-1)
        return inputs + torch.einsum("bi,eij,be->bj", inputs, self.experts, shares)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs)


def peft_model(**settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(Model(), LoraConfig(r=2, init_lora_weights=False, **settings))


def shard(model: Any, form: str) -> Any:
    blocks = {id(layer) for layer in plain_of(model).base_model.model.layers}
    if form == "fully_shard":
        for module in model.modules():
            if id(module) in blocks:
                fully_shard(module)
        return fully_shard(model)
    layers = plain_of(model).base_model.model.layers
    for number, layer in enumerate(layers):
        layers[number] = FullyShardedDataParallel(layer, **FORMS[form])
    return FullyShardedDataParallel(model, **FORMS[form])


def train(model: Any, steps: int = 3) -> list[Tensor]:
    optimizer, losses = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.2), []
    for step in range(steps):
        loss = model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("form", ["original", "flat", "fully_shard"])
@on_ranks(2, timeout=PATIENCE)
def test_adapters_of_parameters_of_three_dimensions(form: str) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    plain = peft_model(target_modules=[], target_parameters=["experts"])
    model = shard(peft_model(target_modules=[], target_parameters=["experts"]), form)
    torch.testing.assert_close(train(model), train(plain), rtol=1e-5, atol=1e-6)
    state = gather_state_dict(model.state_dict()) if form == "fully_shard" else model.state_dict()
    adapters = get_peft_model_state_dict(plain_of(model), state_dict=state)
    expected = get_peft_model_state_dict(plain)
    assert_close_state(adapters, expected, rtol=1e-5, atol=1e-6)
    assert len(expected) == 4
    again = peft_model(target_modules=[], target_parameters=["experts"])
    set_peft_model_state_dict(again, adapters)
    inputs = torch.ones(2, 6)
    torch.testing.assert_close(again(inputs), model(inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["original", "fully_shard"])
@on_ranks(2, timeout=PATIENCE)
def test_adapters_are_switched(form: str) -> None:
    from peft import LoraConfig

    models = [peft_model(target_modules=["mix"]) for _ in range(2)]
    for one in models:
        torch.manual_seed(1)
        one.add_adapter("other", LoraConfig(r=3, target_modules=["mix"], init_lora_weights=False))
    plain, model = models[0], shard(models[1], form)
    for name in ("default", "other", "default"):
        plain.set_adapter(name)
        plain_of(model).set_adapter(name)
        torch.testing.assert_close(train(model), train(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["original", "fully_shard"])
@on_ranks(2, timeout=PATIENCE)
def test_adapters_that_are_no_modules_are_disabled(form: str) -> None:
    from peft import IA3Config, get_peft_model

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(get_peft_model(Model(), IA3Config(target_modules=["mix"], feedforward_modules=[])))
    plain, model = models[0], shard(models[1], form)
    for step in range(2):
        torch.testing.assert_close(train(model), train(plain), rtol=1e-5, atol=1e-6)
        with plain.disable_adapter(), plain_of(model).disable_adapter():
            assert not any(param.requires_grad for param in model.parameters())
            inputs = torch.full((2, 6), float(step))
            torch.testing.assert_close(model(inputs), plain(inputs), rtol=1e-5, atol=1e-6)
        assert [one.requires_grad for one in model.parameters()] == [one.requires_grad for one in plain.parameters()]


@on_ranks(2, timeout=PATIENCE)
def test_adapters_of_a_flat_parameter_are_not_switched_one_by_one() -> None:
    from peft import LoraConfig

    model = peft_model(target_modules=["mix"])
    model.add_adapter("other", LoraConfig(r=3, target_modules=["mix"]))
    model = shard(model, "flat")
    with pytest.warns(UserWarning, match=r"lists no parameters.*use_orig_params=True"):
        plain_of(model).set_adapter("other")
    with pytest.raises(RuntimeError, match="does not require grad"):
        train(model)


@pytest.mark.parametrize("form", ["original", "flat"])
@on_ranks(2, timeout=PATIENCE)
def test_adapters_are_merged_into_a_base_of_torchao(form: str) -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    models = []
    for _ in range(2):
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        base = Model()
        quantize_(base, Int8WeightOnlyConfig(), filter_fn=lambda _, name: name.endswith("mix"))
        base.requires_grad_(False)
        torch.manual_seed(1)
        models.append(get_peft_model(base, LoraConfig(r=2, target_modules=["mix"], init_lora_weights=False)))
        for module in models[-1].modules():
            if type(module).__name__ == "TorchaoLoraLinear":
                module.get_apply_tensor_subclass = Int8WeightOnlyConfig
    plain, model = models[0], shard(models[1], form)
    inputs = torch.ones(2, 6)
    with torch.compiler.set_stance("force_eager"):
        train(model)
        train(plain)
        for change in ("merge_adapter", "unmerge_adapter"):
            with model.summon_full_params():
                getattr(plain_of(model), change)()
            getattr(plain, change)()
            torch.testing.assert_close(model(inputs), plain(inputs), rtol=1e-4, atol=1e-5)
        state = model.state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(plain_values(state[name]), plain_values(value), rtol=1e-4, atol=1e-4, msg=name)
        with torch.no_grad(), model.summon_full_params():
            merged = plain_of(model).merge_and_unload()
            torch.testing.assert_close(merged(inputs), plain.merge_and_unload()(inputs), rtol=1e-3, atol=1e-4)
