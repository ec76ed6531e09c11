"""What the commands raise besides what those raise whom they call."""

from __future__ import annotations


class UsageError(Exception):
    """The command was given what makes no sense."""
