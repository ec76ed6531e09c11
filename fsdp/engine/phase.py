"""`Phase`: the state of a handle's unsharded buffer."""

from __future__ import annotations

from enum import Enum, auto


class Phase(Enum):
    """The states of a handle's unsharded buffer."""

    following: tuple[Phase, ...]  # the phases that may follow

    SHARDED = auto()  # it has no memory; modules see placeholders
    UNSHARDING = auto()  # allocated, the all-gather is in flight; nobody may read it
    UNSHARDED = auto()  # complete and valid; modules see the leaves


# On the members, because a dictionary of them would be slow: members have a hash of Python's.
Phase.SHARDED.following = (Phase.UNSHARDING,)
Phase.UNSHARDING.following = (Phase.UNSHARDED, Phase.SHARDED)
Phase.UNSHARDED.following = (Phase.SHARDED,)
