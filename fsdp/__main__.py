"""``python -m fsdp``: checkpoints inspected, verified and converted."""

from __future__ import annotations

import sys

from fsdp.checkpoint.cli import main

if __name__ == "__main__":
    sys.exit(main())
