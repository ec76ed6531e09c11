"""The inference engine of train.py, which starts it: a plain transformers model in a
process without a process group.

Each line of the standard input is a request in JSON, and each line of the standard
output an answer. Weights arrive through shared memory. After any error the engine ends,
and train.py starts a new engine, so no tokens are generated with a part of an update.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp.weights import Update, receive

PATIENCE = 60  # seconds to wait for an update that was announced


@torch.no_grad()
def load(model: torch.nn.Module, update: Update) -> None:
    """Copy an update to the model, bucket by bucket.

    Raises: ValueError if the model has other parameters; the sending ranks raise an
    error as well.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    sent = {name: each.shape for each in update.plan.tensors for name in each.names}
    own = {name: param.shape for name, param in params.items()}
    if sent != own:
        name = min(name for name, _ in sent.items() ^ own.items())
        shapes = f"{own.get(name)} in the engine, {sent.get(name)} in the update"
        update.stop(f"{name} has shape {shapes}")
        raise ValueError(f"{name} has shape {shapes}")
    for name, tensor in update:
        params[name].copy_(tensor)


@torch.no_grad()
def generate(model: Any, prompts: list[list[int]], tokens: int, seed: int) -> Any:
    """Sample a completion of each prompt.

    Returns: `completions` and the `logprobs` of their tokens, [prompts, tokens].
    """
    torch.manual_seed(seed)
    inputs = torch.tensor(prompts)
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=True,
        top_k=0,  # sample from the distribution that is trained
        max_new_tokens=tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    completions = output.sequences[:, inputs.shape[1] :]
    logprobs = torch.stack(output.logits, 1).float().log_softmax(-1)
    logprobs = logprobs.gather(-1, completions[..., None]).squeeze(-1)
    return {"completions": completions.tolist(), "logprobs": logprobs.tolist()}


def main(folder: str, name: str) -> None:
    """Answer requests until the standard input is closed. `folder` contains the
    configuration of the model; `name` is the name of the `SharedMemorySink`.
    """
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with receive(name, keep=True) as receiver:  # changes apply to the kept weights
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            answer: Any = "loaded"
            if request["do"] == "update":
                load(model, receiver.next(timeout=PATIENCE))
            else:
                answer = generate(model, **request["arguments"])
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
