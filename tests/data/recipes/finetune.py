import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import fsdp


def load(source, layer=LlamaDecoderLayer, **options):
    """Build a model from a folder of safetensors files. Each rank reads only its shards."""
    with torch.device("meta"):  # shapes, and no memory
        plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)
    model = fsdp.shard(plain, units={layer}, **options)
    fsdp.load_safetensors(model, source)
    fsdp.materialize(model, param_init_fn=plain._init_weights)  # tables of rotary embeddings are in no file
    return model


def train(model, optimizer, batches, max_norm=1.0):
    """Run a step for each batch. All ranks need the same number of batches."""
    model.train()
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        model.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def generate(model, prompt, **options):
    """Generate on every rank. Prompts and their lengths may differ."""
    return model.eval().generate(prompt, synced_gpus=dist.get_world_size() > 1, **options)


def save(model, folder, optimizer=None):
    """Write a folder for `from_pretrained`, and for `fsdp.load` with the optimizer."""
    saved = fsdp.save(folder, model, optimizer)
    if dist.get_rank() == 0:
        model.config.save_pretrained(saved.path)
    dist.barrier()  # otherwise a rank could read files that rank 0 still writes
