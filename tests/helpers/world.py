"""A world of ranks in the session's own process, for tests where real processes add nothing; see docs/testing.md."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch

from fsdp.testing import World


class FreshWorld(World):
    """A `World` in which every run starts as one of `Ranks` does: from the same seeds."""

    def run(self, body: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `body` on every rank; see `World.run`."""
        __tracebackhide__ = True
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        with mock.patch.dict(os.environ):
            return super().run(body, *args, **kwargs)
