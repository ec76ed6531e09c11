"""Short names of floating-point dtypes."""

from __future__ import annotations

import torch

HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
