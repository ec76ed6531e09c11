"""Copies activations to the host after forward, and back before their backward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Saved:
    """An activation on the host, and, while it is needed, on its device (`here`)."""

    def __init__(self, tensor: Tensor) -> None:
        self.here: Tensor | None = tensor
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self.host.copy_(tensor, non_blocking=True)


class Offload:
    """Offload the activations of all layers but the last one, in the order of forward.

    Create it after sharding: its hooks must run while parameters are unsharded. The
    copies of a layer run beside the next layer, in forward and in backward.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.stream = torch.Stream(next(layers[0].parameters()).device)
        self.last, self.calls, self.own = len(layers) - 1, 0, set[int]()
        # Owned by the graph, so that they are freed with it.
        self.saved: list[Any] = [WeakValueDictionary() for _ in layers]
        self.copied: list[Any] = [None for _ in layers]  # events of the last copies
        for number, layer in enumerate(layers):
            hooks: Any = partial(self.pack, number), partial(self.unpack, number)
            context = saved_tensors_hooks(*hooks)
            layer.register_forward_pre_hook(partial(self.enter, context))
            leave = partial(self.leave, context, number)
            layer.register_forward_hook(leave, always_call=True)

    def enter(self, context: Any, layer: nn.Module, *_: Any) -> None:
        self.own = {each.untyped_storage().data_ptr() for each in layer.parameters()}
        self.calls += 1
        context.__enter__()

    def leave(self, context: Any, number: int, *_: Any) -> None:
        context.__exit__()
        self.copied[number] = self.stream.record_event()
        if number > 0:  # the layer before has had time
            torch.accelerator.current_stream().wait_event(self.copied[number - 1])
            for each in self.saved[number - 1].values():
                each.here = None

    def pack(self, number: int, tensor: Tensor) -> Tensor | Saved:
        # Unsharded parameters are no activations: their unit frees and gathers them.
        if number == self.last or tensor.untyped_storage().data_ptr() in self.own:
            return tensor
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        key = self.calls, tensor._version, *place
        # Several operations may save the same tensor.
        saved = self.saved[number].get(key)
        if saved is None:
            self.stream.wait_stream(torch.accelerator.current_stream())
            with self.stream:
                saved = self.saved[number][key] = Saved(tensor)
        return saved

    def unpack(self, number: int, saved: Tensor | Saved) -> Tensor | None:
        self.fetch(number)
        self.fetch(number - 1)  # which backward reaches next; the last has nothing
        if isinstance(saved, Tensor):
            return saved
        torch.accelerator.current_stream().wait_event(self.copied[number])
        return saved.here

    def fetch(self, number: int) -> None:
        wanted = [each for each in self.saved[number].values() if each.here is None]
        if wanted:
            self.stream.wait_stream(torch.accelerator.current_stream())
            with self.stream:
                for each in wanted:
                    each.here = each.host.to(self.stream.device, non_blocking=True)
            self.copied[number] = self.stream.record_event()
