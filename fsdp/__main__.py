"""``python -m fsdp``: checkpoints inspected, verified and converted, reports merged, training planned."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fsdp.checkpoint import cli
from fsdp.wrap.plan_command import add_plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    return cli.main(arguments, add_plan)


if __name__ == "__main__":
    sys.exit(main())
