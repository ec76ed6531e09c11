"""``python -m fsdp``: checkpoints inspected, verified and converted, reports merged, trainings planned and compared."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from fsdp.checkpoint import cli
from fsdp.checkpoint.compare import add_compare
from fsdp.wrap.plan_command import add_plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    return cli.main(arguments, _add)


def _add(commands: Any) -> None:
    add_plan(commands)
    add_compare(commands)


if __name__ == "__main__":
    sys.exit(main())
