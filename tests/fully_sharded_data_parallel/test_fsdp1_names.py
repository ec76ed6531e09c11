"""What people from torch's FSDP1 pass and call: taken where it means something here, else it says what to use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload
from torch.distributed.fsdp import MixedPrecision as TorchMixedPrecision

from fsdp import FullyShardedDataParallel, MixedPrecision
from fsdp.engine.foreign_names import KEYWORDS, METHODS
from tests.helpers.parity import Alone


def wrapped(**options: Any) -> Any:
    return FullyShardedDataParallel(nn.Linear(2, 3), Alone(), **options)


def test_cpu_offload_goes_by_what_it_says() -> None:
    assert not wrapped(cpu_offload=CPUOffload(offload_params=False)).cpu_offload
    assert wrapped(cpu_offload=CPUOffload(offload_params=True)).cpu_offload
    with pytest.raises(TypeError, match=r"cpu_offload must be True, False or torch's CPUOffload, got 'cpu'"):
        wrapped(cpu_offload="cpu")


def test_a_mixed_precision_of_torch_is_taken() -> None:
    policy = TorchMixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    ours = wrapped(mixed_precision=policy).mixed_precision
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "buffer_dtype": torch.bfloat16}
    assert ours == MixedPrecision(**dtypes, full_precision_modules=(nn.modules.batchnorm._BatchNorm,))
    output = wrapped(mixed_precision=policy)(torch.ones(1, 2))
    assert output.dtype is torch.bfloat16


@pytest.mark.parametrize("name", list(KEYWORDS))
def test_other_arguments_say_what_to_use(name: str) -> None:
    with pytest.raises(TypeError, match=f"no argument {name}, which torch's has") as error:
        wrapped(**{name: BackwardPrefetch.BACKWARD_PRE})
    assert KEYWORDS[name] in str(error.value)


@pytest.mark.parametrize("name", list(METHODS))
def test_methods_say_what_to_use(name: str) -> None:
    for asked in (FullyShardedDataParallel, wrapped()):
        assert not hasattr(asked, name)
        with pytest.raises(AttributeError, match=f"FullyShardedDataParallel has no {name}, which torch's has") as error:
            getattr(asked, name)
        assert METHODS[name] in str(error.value)
