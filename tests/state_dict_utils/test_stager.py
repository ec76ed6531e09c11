"""What a staged copy is: memory, views, containers and objects as torch.save and copy.deepcopy would have them."""

from __future__ import annotations

import copy
import enum
import io
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fsdp import StateDictStager


def staged(tree: Any) -> Any:
    return StateDictStager().stage(tree)


def share(*tensors: Tensor) -> bool:
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def looks(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.requires_grad


# Memory


def test_a_copy_has_the_values_and_other_memory() -> None:
    original = torch.arange(6.0)
    copied = staged(original)
    assert torch.equal(copied, original)
    original.zero_()
    assert copied.tolist() == [0, 1, 2, 3, 4, 5]


def test_what_was_shared_is_shared_and_nothing_else_is() -> None:
    whole, other = torch.arange(6.0), torch.arange(6.0)
    copied = staged({"whole": whole, "tail": whole[2:], "other": other, "again": whole})
    assert share(copied["whole"], copied["tail"])
    assert not share(copied["whole"], copied["other"])
    assert copied["again"] is copied["whole"]
    copied["tail"][0] = 9
    assert copied["whole"][2] == 9


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "complex": lambda whole: torch.view_as_complex(whole.view(12, 2)),
    "conjugate": lambda whole: torch.view_as_complex(whole.view(12, 2)).conj(),
    "negative": lambda whole: torch.view_as_complex(whole.view(12, 2)).conj().imag,
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_stay_views(name: str) -> None:
    whole = torch.arange(24.0)
    view = VIEWS[name](whole)
    copied = staged([whole, view])
    assert looks(copied[1]) == looks(view)
    assert torch.equal(copied[1], view)
    assert (copied[1].is_conj(), copied[1].is_neg()) == (view.is_conj(), view.is_neg())
    assert share(*copied)


def test_tensors_without_memory_are_copied() -> None:
    tree = [torch.empty(0), torch.empty(3, 0, 2), torch.empty(0, dtype=torch.int8)]
    assert [looks(copied) for copied in staged(tree)] == [looks(original) for original in tree]


@st.composite
def trees_of_views(draw: st.DrawFn) -> Any:
    """Nests in which tensors look at a few storages in all possible ways."""
    dtypes = [torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex64]
    storages = [
        torch.randint(0, 2, (draw(st.integers(1, 96)),), dtype=torch.uint8) for _ in range(draw(st.integers(1, 3)))
    ]

    @st.composite
    def views(draw: st.DrawFn) -> Tensor:
        memory = draw(st.sampled_from(storages))
        dtype = draw(st.sampled_from(dtypes))
        room = memory.numel() // dtype.itemsize
        sizes = draw(st.lists(st.integers(0, 3), max_size=3))
        strides = [draw(st.integers(0, 4)) for _ in sizes]
        needed = 1 + sum(max(size - 1, 0) * stride for size, stride in zip(sizes, strides, strict=True))
        if needed > room:
            return memory
        offset = draw(st.integers(0, room - needed))
        return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), offset, sizes, strides)

    leaves = views() | st.integers() | st.text(max_size=2) | st.none()
    return draw(
        st.recursive(
            leaves,
            lambda parts: (
                st.lists(parts, max_size=4)
                | st.dictionaries(st.text(max_size=2), parts, max_size=4)
                | st.tuples(parts, parts)
                | parts.map(lambda part: [part, part])
            ),
            max_leaves=12,
        )
    )


@settings(deadline=None, max_examples=60)
@given(trees_of_views())
def test_a_copy_is_what_torch_load_gives_of_what_torch_save_wrote(tree: Any) -> None:
    file = io.BytesIO()
    torch.save(map_leaves(tree, look_and_memory), file)
    file.seek(0)
    assert described(map_leaves(staged(tree), look_and_memory)) == described(torch.load(file, weights_only=False))


def look_and_memory(view: Tensor) -> tuple[Any, ...]:
    # The memory as bytes, because torch.save refuses one storage in several dtypes.
    return *looks(view), torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())


def map_leaves(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_leaves(value, function) for key, value in tree.items()}
    return type(tree)(map_leaves(item, function) for item in tree) if isinstance(tree, (list, tuple)) else tree


def described(tree: Any) -> str:
    """With storages numbered in the order in which they are met, and their bytes."""
    storages: dict[int, int] = {}

    def shown(part: Any) -> Any:
        if isinstance(part, Tensor):
            return storages.setdefault(part.data_ptr(), len(storages)), part.tolist()
        if isinstance(part, dict):
            return {key: shown(value) for key, value in part.items()}
        return [type(part), *map(shown, part)] if isinstance(part, (list, tuple)) else part

    return repr(shown(tree))


# What is not a tensor


class Point(NamedTuple):
    x: Tensor
    y: int = 0


@dataclass(frozen=True)
class Frozen:
    weight: Tensor
    inner: Any = None
    derived: int = field(init=False, default=3)


@dataclass(slots=True)
class Slotted:
    weight: Tensor


@dataclass(frozen=True, slots=True)
class FrozenSlotted:
    weight: Tensor


class Plain:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


class OnlySlots:
    __slots__ = ("__hidden", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.__hidden = weight, [weight]

    @property
    def hidden(self) -> Tensor:
        return self.__hidden[0]


class Reduced:
    def __init__(self, weight: Tensor, note: str) -> None:
        self.weight, self.note = weight, note

    def __reduce__(self) -> Any:
        return Reduced, (self.weight, "rebuilt")


class StateSet(Plain):
    def __getstate__(self) -> Any:
        return (self.weight, 1)

    def __setstate__(self, state: Any) -> None:
        self.weight, self.extra = state


class CopiedByItself:
    def __init__(self, weight: Tensor, param: nn.Parameter | None = None) -> None:
        self.weight, self.param, self.copies = weight, param, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiedByItself:
        made = CopiedByItself(copy.deepcopy(self.weight, memo), copy.deepcopy(self.param, memo))
        made.copies = self.copies + 1
        return made


class MyDict(dict[Any, Any]):
    pass


class MyList(list[Any]):
    pass


class Colour(enum.Enum):
    RED = 1


MAKERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda w: {"w": w}, lambda made: made["w"]),
    "OrderedDict": (lambda w: OrderedDict(w=w), lambda made: made["w"]),
    "defaultdict": (lambda w: defaultdict(list, w=w), lambda made: made["w"]),
    "subclass of dict": (lambda w: MyDict(w=w), lambda made: made["w"]),
    "list": (lambda w: [w], lambda made: made[0]),
    "subclass of list": (lambda w: MyList([w]), lambda made: made[0]),
    "deque": (lambda w: deque([w], maxlen=4), lambda made: made[0]),
    "tuple": (lambda w: (w, 1), lambda made: made[0]),
    "set": (lambda w: {w}, lambda made: next(iter(made))),
    "frozenset": (lambda w: frozenset({w}), lambda made: next(iter(made))),
    "NamedTuple": (lambda w: Point(w, 2), lambda made: made.x),
    "frozen dataclass": (Frozen, lambda made: made.weight),
    "nested dataclass": (lambda w: Frozen(w, Frozen(w)), lambda made: made.inner.weight),
    "dataclass with slots": (Slotted, lambda made: made.weight),
    "frozen dataclass with slots": (FrozenSlotted, lambda made: made.weight),
    "object": (Plain, lambda made: made.weight),
    "object with slots": (OnlySlots, lambda made: made.hidden),
    "object with __reduce__": (lambda w: Reduced(w, "original"), lambda made: made.weight),
    "object with __setstate__": (StateSet, lambda made: made.weight),
    "object with __deepcopy__": (CopiedByItself, lambda made: made.weight),
    "bound method": (lambda w: Plain(w).__init__, lambda made: made.__self__.weight),  # type: ignore[misc]
    "partial": (lambda w: partial(torch.add, w), lambda made: made.args[0]),
    "module": (lambda w: nn.ParameterList([nn.Parameter(w)]), lambda made: made[0]),
}


@pytest.mark.parametrize("name", MAKERS)
def test_containers_and_objects_keep_their_class_and_what_they_share(name: str) -> None:
    make, weight_of = MAKERS[name]
    weight = torch.arange(3.0)
    original = make(weight)
    made, alias = staged([original, weight.view(3)])
    assert type(made) is type(original)
    assert made is not original
    assert torch.equal(weight_of(made), weight)
    assert share(weight_of(made), alias)
    assert not share(alias, weight)


def test_rules_of_classes_are_followed() -> None:
    reduced, state_set, by_itself = staged(
        [Reduced(torch.ones(1), "original"), StateSet(torch.ones(1)), CopiedByItself(torch.ones(1))]
    )
    assert (reduced.note, state_set.extra, by_itself.copies) == ("rebuilt", 1, 1)
    assert staged(Frozen(torch.ones(1))).derived == 3
    assert staged(defaultdict(list))["new"] == []
    assert staged(deque([1], maxlen=4)).maxlen == 4


# What reads values while it is copied


class ReadsAs:
    """Notes the values of its tensor; how it is copied is up to the subclass."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.seen = weight.tolist()


class ReadsInConstructor(ReadsAs):
    def __reduce__(self) -> Any:
        return type(self), (self.weight,)


class ReadsInSetState(ReadsAs):
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["weight"])  # type: ignore[misc]


class ReadsInDeepCopy(ReadsAs):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)(copy.deepcopy(self.weight, memo))


class ReadsInAppend(list[Any]):
    def append(self, item: Any) -> None:
        super().append(item)
        self.seen = [each.tolist() for each in self]


class ReadsInSetItem(dict[Any, Any]):
    def __setitem__(self, key: Any, item: Any) -> None:
        super().__setitem__(key, item)
        self.seen = item.tolist()


class ReadsInHash(ReadsAs):
    def __hash__(self) -> int:
        return hash(tuple(self.weight.tolist()))

    def __eq__(self, other: Any) -> bool:
        return bool(torch.equal(self.weight, other.weight))


class ReadsAsTensor(Tensor):
    seen: list[float]

    @staticmethod
    def of(weight: Tensor) -> ReadsAsTensor:
        made = Tensor._make_subclass(ReadsAsTensor, weight)
        made.seen = weight.tolist()
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ReadsAsTensor.of, (self.as_subclass(Tensor),)


class ReadsAsWrapper(Tensor):
    weight: Tensor
    seen: list[float]

    @staticmethod
    def __new__(cls, weight: Tensor) -> ReadsAsWrapper:
        made = Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)
        made.weight, made.seen = weight, weight.tolist()
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["weight"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> ReadsAsWrapper:
        return ReadsAsWrapper(inner["weight"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} was called on it")


READERS: dict[str, Callable[[Tensor], Any]] = {
    "__reduce__": ReadsInConstructor,
    "__setstate__": ReadsInSetState,
    "__deepcopy__": ReadsInDeepCopy,
    "append": lambda weight: ReadsInAppend([weight]),
    "__setitem__": lambda weight: ReadsInSetItem(weight=weight),
    "__reduce_ex__ of a tensor": ReadsAsTensor.of,
    "__tensor_unflatten__": ReadsAsWrapper,
}


@pytest.mark.parametrize("name", READERS)
def test_code_of_classes_that_runs_while_they_are_copied_reads_the_values(name: str) -> None:
    stager = StateDictStager()
    weight = torch.full((3,), 7.0)
    for value in (1.0, 2.0):  # the second time in memory that holds the values of the first
        weight.fill_(value)
        copied = stager.stage([weight, READERS[name](weight)])
        expected = [value] * 3
        assert copied[0].tolist() == expected
        assert copied[1].seen in (expected, [expected])
        del copied


def test_a_key_whose_hash_depends_on_values_is_found() -> None:
    copied = staged({ReadsInHash(torch.ones(2)): 1, (ReadsInHash(torch.ones(2)),): 2})
    key, group = copied
    assert (copied[key], copied[group]) == (1, 2)
    assert staged({ReadsInHash(torch.ones(2))}) == {ReadsInHash(torch.ones(2))}


def test_a_generator_goes_on_where_the_original_was() -> None:
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    copied = staged({"generator": generator})["generator"]
    assert copied is not generator
    assert torch.equal(torch.rand(5, generator=copied), torch.rand(5, generator=generator))


def test_what_copies_itself_finds_parameters_staged() -> None:
    param = nn.Parameter(torch.ones(3))
    made, alias = staged([CopiedByItself(torch.zeros(2), param), param])
    assert made.param is alias


def test_the_metadata_of_a_state_dict_survives() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state: Any = model.state_dict()
    copied: Any = staged(state)
    assert type(copied) is OrderedDict
    assert vars(copied)["_metadata"] == vars(state)["_metadata"]
    assert vars(copied)["_metadata"] is not vars(state)["_metadata"]
    nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).load_state_dict(copied)


def test_cycles_are_closed() -> None:
    tree: dict[str, Any] = {"tensor": torch.ones(2)}
    tree["self"], tree["pair"] = tree, ([tree],)
    copied = staged(tree)
    assert copied["self"] is copied
    assert copied["pair"][0][0] is copied


def test_a_tuple_in_a_cycle_with_itself_is_copied_once() -> None:
    inner: list[Any] = [torch.ones(1)]
    pair = (inner,)
    inner.append(pair)
    copied = staged(pair)
    assert copied[0][1] is copied


def test_values_that_are_no_tensors_are_copied_as_by_deepcopy() -> None:
    mutable = [1]
    tree = [None, 1, 2.5, "text", b"bytes", True, ..., Colour.RED, torch.float16, torch.device("cpu"), torch.Size([2])]
    copied = staged([*tree, mutable, int, len, share, (1, "same")])
    assert copied == [*tree, mutable, int, len, share, (1, "same")]
    assert copied[-5] is not mutable
    assert copied[7] is Colour.RED
    assert copied[-2] is share


def test_objects_that_live_only_while_they_are_copied_do_not_become_others() -> None:
    class Fleeting:
        def __reduce__(self) -> Any:
            return list, ([torch.full((1,), float(id(self) % 97))],)

    tree = [Fleeting() for _ in range(50)]
    assert [made[0].item() for made in staged(tree)] == [id(each) % 97 for each in tree]


# What cannot be copied


def test_what_cannot_be_copied_is_named() -> None:
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock' object"):
        staged({"model": [torch.ones(1), {"guard": threading.Lock()}]})


def test_a_tensor_whose_memory_was_freed_is_named_with_its_place() -> None:
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"\['w'\]: a torch.Tensor of shape \(4,\).*needs 16 bytes .* has 0"):
        staged({"w": freed})


def test_a_tensor_that_looks_beyond_its_storage_is_an_error() -> None:
    whole = torch.arange(10.0)
    view = whole.view(2, 5)[:, 1:3]
    whole.untyped_storage().resize_(28)
    with pytest.raises(RuntimeError, match="needs 32 bytes of its storage, which has 28"):
        staged(view)


def test_after_an_error_the_stager_works_on() -> None:
    stager = StateDictStager()
    weight = torch.ones(2)
    with pytest.raises(TypeError, match="cannot pickle"):
        stager.stage([weight, threading.Lock()])
    assert torch.equal(stager.stage([weight])[0], weight)


def test_originals_are_left_as_they_are() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    before = [(id(param), id(param.untyped_storage()), param._version) for param in model.parameters()]
    copied = staged(model)
    assert [(id(param), id(param.untyped_storage()), param._version) for param in model.parameters()] == before
    assert model.weight.grad is not None
    assert copied.weight.grad is None  # as a file has none
