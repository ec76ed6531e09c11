"""Models of `peft`, a frozen base with adapters that are trained: sharded they do, count and save as unsharded.

By recipes of docs/hugging_face.md.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from tests.helpers.equality import assert_close_state, assert_same_state
from tests.helpers.hugging_face import (
    FORMS,
    MODULES,
    PATIENCE,
    as_launched,
    logits,
    made,
    plain_of,
    recipe,
    rows,
    trainer_of,
    whole_state,
    wrapped,
)
from tests.helpers.models import Net
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import RankPool

pytestmark = [
    needs("transformers", "peft"),
    # peft calls what transformers has renamed.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]
PRELOAD = [*MODULES, "peft"]

every_form = pytest.mark.parametrize("form", ["original", "flat", "fully_shard"])
CASES = [("llama", "original"), ("gpt2", "flat"), ("gpt2", "fully_shard")]
every_case = pytest.mark.parametrize(("family", "form"), CASES)
TARGETS = {"llama": ["q_proj", "v_proj", "lm_head"], "gpt2": ["c_attn"]}


def adapters(family: str) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules=TARGETS[family], init_lora_weights=False, task_type="CAUSAL_LM")


def plain_peft(family: str, seed: int = 1) -> Any:
    from peft import get_peft_model

    base, _ = made(family)
    torch.manual_seed(seed)
    return get_peft_model(base, adapters(family))


def sharded_peft(family: str, form: str) -> Any:
    base, layer = made(family)
    torch.manual_seed(1)
    if form != "fully_shard":
        return recipe("adapters").shard(base, adapters(family), layer, **FORMS[form])
    from peft import get_peft_model

    model = get_peft_model(base, adapters(family))
    for module in model.modules():
        if isinstance(module, layer):
            fully_shard(module)
    register_fsdp_forward_method(fully_shard(model), "generate")
    return model


def train(model: Any) -> None:
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    for row in rows(2):
        model.train()(**{name: value[None] for name, value in row.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# What is trained and saved


@every_case
@on_ranks(2, timeout=PATIENCE)
def test_adapters_are_trained_and_saved_as_those_of_the_plain_model(tmp_path: Path, family: str, form: str) -> None:
    from peft import PeftModel, get_peft_model_state_dict

    model, plain = sharded_peft(family, form), plain_peft(family)
    assert torch.equal(logits(model), logits(plain))
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    for one in (model, plain):
        train(one)  # on the same rows on every rank
    state, expected = whole_state(model), plain.state_dict()
    assert_close_state(state, expected, rtol=1.3e-6, atol=1e-5)
    changed = [name for name, value in expected.items() if not torch.equal(value, before[name])]
    assert changed == [name for name in expected if ".lora_" in name]
    kept = get_peft_model_state_dict(plain_of(model), state_dict=state)
    assert_close_state(kept, get_peft_model_state_dict(plain), rtol=1.3e-6, atol=1e-5)
    with model.disable_adapter(), plain.disable_adapter():
        torch.testing.assert_close(logits(model), logits(plain))
    if form == "fully_shard":
        assert_same_state(whole_state_of(get_peft_model_state_dict(model)), kept)
        plain_of(model).save_pretrained(tmp_path, state_dict=state, is_main_process=dist.get_rank() == 0)
        dist.barrier()
    else:
        with model.summon_full_params():
            for inside in (plain_of(model), model.module):  # the second is FSDP1's name for the first
                assert_same_state(get_peft_model_state_dict(inside), kept)
        assert_same_state(get_peft_model_state_dict(model), kept)
        assert_same_state(get_peft_model_state_dict(model, state_dict=state), kept)
        recipe("adapters").save_adapters(model, tmp_path)
    again = PeftModel.from_pretrained(made(family)[0], tmp_path)
    assert torch.equal(logits(again), logits(model))


def whole_state_of(state: dict[str, Any]) -> dict[str, Tensor]:
    from fsdp.state_dict_utils import gather_state_dict

    return gather_state_dict(state)  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", ["original", "fully_shard"])
def test_the_trainer_saves_the_adapters(ranks: RankPool, tmp_path: Path, form: str) -> None:
    pytest.importorskip("accelerate")
    ranks(2, timeout=PATIENCE).run(_save_by_trainer, tmp_path, form)


@pytest.mark.parametrize("form", ["flat", "fully_shard"])
@pytest.mark.parametrize("kind", ["modules_to_save", "prompts", "buffers"])
def test_the_trainer_saves_modules_prompts_and_buffers(ranks: RankPool, tmp_path: Path, kind: str, form: str) -> None:
    pytest.importorskip("accelerate")
    ranks(2, timeout=PATIENCE).run(_save_modules_or_prompts, tmp_path, kind, form)


def _save_modules_or_prompts(folder: Path, kind: str, form: str) -> None:
    from peft import LoraConfig, PeftModel, PromptTuningConfig, VeraConfig, get_peft_model

    base, layer = made("llama")
    configs: dict[str, Any] = {
        "modules_to_save": LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False),
        "prompts": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "buffers": VeraConfig(r=2, target_modules=["q_proj"]),  # layers share two, which are saved under a third name
    }
    plain: Any = get_peft_model(base, configs[kind])
    with torch.no_grad():
        for param in plain.parameters():
            if param.requires_grad:
                param.add_(1)
    model: Any = copy.deepcopy(plain)
    if form == "fully_shard":
        fully_shard(next(module for module in model.modules() if isinstance(module, layer)))
        fully_shard(model)
    else:
        model = wrapped(model, layer, **FORMS[form])
    with as_launched():
        trainer = trainer_of(model, folder)
        trainer.save_model(str(folder / "trainer"))
        trainer.accelerator.wait_for_everyone()
    if form != "fully_shard":
        recipe("adapters").save_adapters(model, folder / "recipe")
    for place in (path for path in (folder / "trainer", folder / "recipe") if path.exists()):
        assert torch.equal(logits(PeftModel.from_pretrained(made("llama")[0], place)), logits(plain))
    assert torch.equal(logits(model), logits(plain))  # it goes on, sharded


def _save_by_trainer(folder: Path, form: str) -> None:
    from peft import PeftModel

    from fsdp.accelerate import Accelerator

    model = sharded_peft("llama", form)
    with as_launched():
        trainer = trainer_of(model, folder, save_strategy="steps", save_steps=2)
        trainer.train()
        assert trainer.get_num_trainable_parameters() == plain_peft("llama").get_nb_trainable_parameters()[0]
        trainer.save_model(str(folder / "trained"))
        trainer.accelerator.wait_for_everyone()
        expected = logits(model)
        again = trainer_of(sharded_peft("llama", form), folder, save_strategy="steps", save_steps=2)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        assert torch.equal(logits(again.model_wrapped), expected)
    with as_launched():
        recipe("accelerated").export(Accelerator(), model, folder / "exported")
    for place in ("trained", "exported"):
        assert torch.equal(logits(PeftModel.from_pretrained(made("llama")[0], folder / place)), expected)
    assert not torch.equal(logits(plain_peft("llama")), expected)


@every_case
@on_ranks(2, timeout=PATIENCE)
def test_adapters_are_merged_as_in_the_plain_model(tmp_path: Path, family: str, form: str) -> None:
    import transformers

    model, plain = sharded_peft(family, form), plain_peft(family)
    inner = plain_of(model)
    if form == "fully_shard":
        for one in (model, plain):
            one.merge_adapter()
        torch.testing.assert_close(logits(model), logits(plain))
        for one in (model, plain):
            one.unmerge_adapter()
        torch.testing.assert_close(logits(model), logits(plain))
        model.merge_and_unload()
        plain.merge_and_unload()
        assert_close_state(whole_state(model), plain.state_dict(), rtol=1.3e-6, atol=1e-5)
        return
    with pytest.raises(RuntimeError, match=r"lora_B\.default\.weight is sharded"):
        model.merge_and_unload()
    assert torch.equal(logits(model), logits(plain))
    config = inner.get_base_model().config
    recipe("adapters").save_merged(model, config, adapters(family), tmp_path)
    assert torch.equal(logits(model), logits(plain))  # as it was
    with model.summon_full_params():
        inner.merge_adapter()
    plain.merge_adapter()
    assert torch.equal(logits(model), logits(plain))
    assert_same_state(whole_state(model), plain.state_dict())
    with model.summon_full_params():
        inner.unmerge_adapter()
        inner.merge_and_unload()
    plain.unmerge_adapter()
    merged = plain.merge_and_unload()
    assert torch.equal(logits(model), logits(plain))
    assert_same_state(whole_state(model), plain.state_dict())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(loaded), logits(merged))


@every_form
@on_ranks(2, timeout=PATIENCE)
def test_adapters_are_loaded_into_a_sharded_model(form: str) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    model, other = sharded_peft("llama", form), plain_peft("llama", seed=2)
    state = get_peft_model_state_dict(other)
    if form == "fully_shard":
        set_peft_model_state_dict(model, state)
    else:
        with model.summon_full_params():
            set_peft_model_state_dict(plain_of(model), state)
    assert torch.equal(logits(model), logits(other))


# Generating


@every_form
@on_ranks(2, timeout=PATIENCE)
def test_a_model_with_adapters_generates_as_the_plain_one(form: str) -> None:
    model, plain = sharded_peft("llama", form), plain_peft("llama")
    rank = dist.get_rank()
    prompt = torch.arange(3 + rank)[None]
    for options in ({"do_sample": False}, {"do_sample": False, "num_beams": 3}):
        options |= {"max_new_tokens": 5 - rank}
        found = model.eval().generate(input_ids=prompt, synced_gpus=True, **options)
        assert torch.equal(found, plain.eval().generate(input_ids=prompt, **options))


# What a model says of itself


@every_form
@on_ranks(2, timeout=PATIENCE)
def test_parameters_are_counted_whole(form: str) -> None:
    model, plain = sharded_peft("llama", form), plain_peft("llama")
    if form == "fully_shard":
        assert counts(model) == counts(plain)
        return
    expected = counts(plain)
    assert counts(model)[1][1] < 0.6 * expected[1][1]  # this rank's part
    if dist.get_rank() == 0:  # alone
        with model.summon_shapes():
            assert counts(model) == expected
            assert counts(plain_of(model)) == expected
            assert {name: param.shape for name, param in model.named_parameters()} == {
                name: param.shape for name, param in plain.named_parameters()
            }
            with pytest.raises(RuntimeError, match=r"inside summon_shapes\(\)"):
                model.state_dict()
            with model.summon_shapes():  # again
                assert counts(model) == expected
    assert torch.equal(logits(model), logits(plain))
    with model.summon_full_params(), model.summon_shapes():
        assert counts(model) == expected
        assert torch.equal(logits(model), logits(plain))


def counts(model: Any) -> tuple[Any, ...]:
    each = model.num_parameters(), model.num_parameters(only_trainable=True), model.get_memory_footprint()
    return each, model.get_nb_trainable_parameters()


# Names, and what is assigned through a wrapper


def block() -> nn.Module:
    """Whose adapters are directly in what is wrapped."""
    return Net(lambda net, x: x + net.out(net.entry(x).tanh()), entry=nn.Linear(5, 7), out=nn.Linear(7, 5))


@every_form
@on_ranks(2, timeout=PATIENCE)
def test_adapters_directly_in_a_wrapped_module_are_merged(form: str) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    def blocks() -> Any:
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["entry"], init_lora_weights=False)
        return get_peft_model(nn.Sequential(block(), block()), config)

    plain, inner = blocks(), blocks()
    sequence = inner.base_model.model
    for number in range(2):
        if form == "fully_shard":
            fully_shard(sequence[number])
        else:
            sequence[number] = FullyShardedDataParallel(sequence[number], **FORMS[form])
    model = fully_shard(inner) if form == "fully_shard" else FullyShardedDataParallel(inner, **FORMS[form])
    inputs = torch.ones(2, 5)
    state = whole_state(model)
    assert_same_state(get_peft_model_state_dict(inner, state_dict=state), get_peft_model_state_dict(plain))
    if form == "fully_shard":
        model.merge_and_unload()
    else:
        with model.summon_full_params():
            inner.merge_and_unload()
    plain.merge_and_unload()
    assert type(inner.base_model.model[0].entry) is nn.Linear
    torch.testing.assert_close(model(inputs), plain(inputs))
    assert_close_state(whole_state(model), plain.state_dict(), rtol=1.3e-6, atol=1e-5)
