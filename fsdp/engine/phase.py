"""`Phase`: the state of a handle's unsharded buffer."""

from __future__ import annotations

from enum import Enum, auto


class Phase(Enum):
    """The states of a handle's unsharded buffer."""

    following: tuple[Phase, ...]  # the phases that may follow

    SHARDED = auto()  # without memory; modules see placeholders
    UNSHARDING = auto()  # allocated, with the all-gather in flight; must not be read
    UNSHARDED = auto()  # complete and valid; modules see the leaves


# Attributes instead of a dictionary of members, which would be slow because members are hashed in Python.
Phase.SHARDED.following = (Phase.UNSHARDING,)
Phase.UNSHARDING.following = (Phase.UNSHARDED, Phase.SHARDED)
Phase.UNSHARDED.following = (Phase.SHARDED,)
