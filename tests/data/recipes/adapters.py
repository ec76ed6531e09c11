import torch
import torch.distributed as dist
from peft import get_peft_model
from transformers import AutoModelForCausalLM

import fsdp


def shard(base, adapters, layer, **options):
    """Shard a model that trains only adapters, described by a configuration of `peft`."""
    plain = get_peft_model(base, adapters)
    model = fsdp.shard(plain, units={layer}, **options)
    fsdp.register_fsdp_forward_method(model, "generate")  # `peft` calls the base, whose embedding belongs to the root
    return model


def save_adapters(model, folder):
    """Write a folder for `PeftModel.from_pretrained`."""
    with model.summon_full_params(rank0_only=True, volatile=True, offload_to_cpu=True):  # peft reads modules, too
        if dist.get_rank() == 0:
            state = dict(model.named_parameters()) | dict(model.named_buffers(remove_duplicate=False))
            model.module.module.save_pretrained(folder, state_dict=state)
    dist.barrier()


def save_merged(model, config, adapters, folder):
    """Write a folder for `from_pretrained`: the base with merged adapters. The model does not change."""
    state = model.state_dict(rank0_only=True)
    if dist.get_rank() == 0:
        with torch.device("meta"):  # the same model, unsharded and without memory, gets the tensors of the state
            plain = get_peft_model(AutoModelForCausalLM.from_config(config), adapters)
        plain.load_state_dict(state, assign=True)
        plain.merge_and_unload().save_pretrained(folder)
    dist.barrier()
