"""torchrun whose agent forks the ranks, for tests that start it: ranks need not import torch again."""

from __future__ import annotations

# For `python -c`, with the arguments of torchrun. The process imports nothing of the tests, which may not be installed.
TORCHRUN = """
import runpy, signal, sys
import fsdp, torch._dynamo
from torch.distributed import run
from torch.distributed.launcher.api import elastic_launch
config, _, [_, *sys.argv] = run.config_from_args(run.parse_args(sys.argv[1:]))
config.start_method = "fork"
def rank():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the handler of the agent
    runpy.run_path(sys.argv[0], run_name="__main__")
elastic_launch(config, rank)()
"""
