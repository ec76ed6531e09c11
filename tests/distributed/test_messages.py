"""Groups that were given up are connected anew."""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fsdp.distributed import messages


@pytest.fixture
def group() -> dist.ProcessGroup:
    """Return a group of one rank."""
    store = dist.HashStore()
    made = dist.ProcessGroup(store, 0, 1)
    backend = dist.ProcessGroupGloo(store, 0, 1, timeout=timedelta(seconds=10))
    made._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    made._set_group_name("of one")
    return made


def test_a_group_that_is_connected_anew_opens_no_more_files(group: dist.ProcessGroup) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        messages.renew(group)
    assert len(os.listdir("/proc/self/fd")) == before
    assert group.allreduce([torch.ones(1)]).wait()


def test_a_group_that_torch_cannot_connect_anew_again_is_an_error(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_KINDS", range(66))
    messages.renew(group)
    messages.renew(group)
    with pytest.raises(RuntimeError, match=r"reconnected the process group .* 2 times, .*start the job again"):
        messages.renew(group)


def test_messages_that_another_thread_receives_stay_when_a_group_is_connected_anew() -> None:
    group, other = (SimpleNamespace(recv=lambda *_: SimpleNamespace(wait=lambda *_: None)) for _ in range(2))
    later: list[messages.Receiving] = []

    class Watched(messages.Receiving):
        """A message during whose examination another thread begins to receive."""

        def __getattribute__(self, name: str) -> object:
            if name == "_group" and not later:
                later.append(messages.Receiving(other, messages.blank(1), 0, 1))
            return super().__getattribute__(name)

    given_up = Watched(group, messages.blank(1), 0, 1)
    messages.Receiving.forget(group)
    assert given_up not in messages.Receiving._under_way
    assert later[0] in messages.Receiving._under_way
    later[0].wait()
    assert later[0] not in messages.Receiving._under_way
