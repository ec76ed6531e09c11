import torch
import torch.distributed as dist
from peft import get_peft_model
from transformers import AutoModelForCausalLM

import fsdp


def shard(base, adapters, layer, **options):
    """A sharded model that trains adapters, described by a configuration of `peft`, and nothing else."""
    plain = get_peft_model(base, adapters)
    model = fsdp.shard(plain, units={layer}, **options)
    fsdp.register_fsdp_forward_method(model, "generate")  # of `peft`: it calls the base, whose embedding the root has
    return model


def save_adapters(model, folder):
    """A folder that `PeftModel.from_pretrained` reads."""
    with model.summon_full_params(rank0_only=True, volatile=True, offload_to_cpu=True):  # peft reads modules, too
        if dist.get_rank() == 0:
            state = dict(model.named_parameters()) | dict(model.named_buffers(remove_duplicate=False))
            model.module.module.save_pretrained(folder, state_dict=state)
    dist.barrier()


def save_merged(model, config, adapters, folder):
    """A folder that `from_pretrained` reads: the base with the adapters in its weights. The model stays as it is."""
    state = model.state_dict(rank0_only=True)
    if dist.get_rank() == 0:
        with torch.device("meta"):  # the same model, unsharded and without memory, gets the tensors of the state
            plain = get_peft_model(AutoModelForCausalLM.from_config(config), adapters)
        plain.load_state_dict(state, assign=True)
        plain.merge_and_unload().save_pretrained(folder)
    dist.barrier()
