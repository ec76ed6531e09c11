"""FairScale's FSDP as recipes for inference use it: one rank, layers that stream from host memory."""

from __future__ import annotations

from typing import Any

import torch
from fairscale.nn.data_parallel import FullyShardedDataParallel as FSDP
from fairscale.nn.wrap import enable_wrap, wrap
from fairscale.utils.testing import DummyProcessGroup

from tests.data.clients.task import Net, global_batches

CONFIG: dict[str, Any] = {
    "mixed_precision": True,
    "flatten_parameters": True,
    "state_dict_device": torch.device("cpu"),
    "cpu_offload": True,
    "compute_device": torch.device("cpu"),
}


def main() -> dict[str, Any]:
    group = DummyProcessGroup(0, 1)
    with enable_wrap(wrapper_cls=FSDP, process_group=group, process_group_reduce_scatter=group, **CONFIG):
        model: Any = Net().eval()
        for name, child in model.named_children():
            if name == "layers":
                for layer_name, layer in child.named_children():
                    setattr(child, layer_name, wrap(layer))
        model = wrap(model)
    inputs = next(global_batches())[0]
    with torch.no_grad():
        outputs = [model(inputs).float() for _ in range(2)]
    torch.testing.assert_close(outputs[0], outputs[1])
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    return {"losses": [float(outputs[0].mean())], "state": {"outputs": outputs[0]}}


def plain() -> dict[str, Any]:
    net, inputs = Net().eval().half(), next(global_batches())[0]
    with torch.no_grad():
        output = net(inputs.half()).float()
    return {"losses": [float(output.mean())], "state": {"outputs": output}}
