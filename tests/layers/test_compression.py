"""`fsdp.compress`: what arrives of quantised gradients and parameters, and what stays exact."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel, MixedPrecision, QuantizedGather, QuantizedReduce, ShardingStrategy, compress
from fsdp.distributed.consensus import from_everyone
from fsdp.layers.quantized_reduce import Feedback
from tests.helpers.comm_hooks import average
from tests.helpers.equality import assert_same_state
from tests.helpers.forms import FORMS, full_state, inside, sharded
from tests.helpers.models import Net
from tests.helpers.on_ranks import on_ranks
from tests.helpers.own_collectives import OwnReduceScatter
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import alone
from tests.helpers.quantised_collectives import (
    BLOCK,
    assert_resumes_with_the_same_bits,
    averaged_gradient,
    backward,
    batch,
    compressed,
    gathered_gradients,
    handles_of,
    layers,
    rounded,
    sent_gradients,
)
from tests.helpers.ranks import RankPool
from tests.helpers.traffic import Counting, Traffic

every_form = pytest.mark.parametrize("form", FORMS)
every_size = pytest.mark.parametrize("bits", [4, 8])


def reduce(bits: int = 8, feedback: bool = False) -> QuantizedReduce:
    return QuantizedReduce(bits, BLOCK, feedback)


GATHER = QuantizedGather(8, BLOCK)


# Parameters


@every_form
@on_ranks(2, 3)
def test_all_ranks_compute_with_the_same_rounded_parameters(form: str) -> None:
    model = compressed(form, gather=GATHER)
    exact = full_state(model)
    seen: dict[str, Tensor] = {}
    for name, module in inside(model).named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(
                lambda module, _, name=name: seen.update(
                    {f"{name}.{each}": getattr(module, each).detach().clone() for each in ("weight", "bias")}
                )
            )
    model(batch())
    assert seen.keys() == exact.keys()
    for name, value in seen.items():
        assert not torch.equal(value, exact[name]), f"{name} was not quantised"
        assert (value - exact[name]).abs().max() <= max(abs(each).max() for each in exact.values()) / 254
    (comm, *_) = {handle.comm for handle in handles_of(model)}
    others = from_everyone([comm], seen)
    assert all(torch.equal(other[name], value) for other in others for name, value in seen.items())


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-7), (torch.bfloat16, 2**-8)])
@on_ranks(3)
def test_each_shard_is_rounded_in_float32_by_blocks_of_its_own(dtype: torch.dtype, rtol: float) -> None:
    """With flat parameters: no block has elements of two ranks."""
    model = compressed("flat", gather=GATHER, mixed_precision=MixedPrecision(param_dtype=dtype))
    for handle in handles_of(model):
        shards = from_everyone([handle.comm], handle.flat_param.detach().clone())
        handle.unshard()
        handle.wait_for_unshard()
        assert handle.unsharded.full.dtype is dtype
        expected = torch.cat([rounded(shard, 8) for shard in shards])
        torch.testing.assert_close(handle.unsharded.full.float(), expected, rtol=rtol, atol=0)
        handle.reshard()


@every_form
@on_ranks(2)
def test_state_dicts_and_summoned_parameters_are_exact(form: str) -> None:
    plain, model = layers(), compressed(form, gather=GATHER, reshard_after_forward=False)
    for is_unsharded in (False, True):
        if is_unsharded:
            with torch.no_grad():
                model(batch())  # and what was gathered may still be there
        assert_same_state(full_state(model), plain.state_dict())
        if form != "rows":
            with model.summon_full_params():
                assert_same_state(dict(model.named_parameters()), dict(plain.named_parameters()))


@on_ranks(2)
def test_a_changed_shard_is_gathered_again() -> None:
    """Also where no version tells, as with writes by NumPy, of one rank alone."""
    model = compressed("orig", gather=GATHER, reshard_after_forward=False)
    with torch.no_grad():
        before = model(batch(rank=0))
        if dist.get_rank() == 0:
            for param in model.parameters():
                param.detach().numpy()[:] *= 2
        after = model(batch(rank=0))
        assert not torch.equal(before, after)
        assert torch.equal(after, model(batch(rank=0)))


@on_ranks(2)
def test_writing_to_quantised_parameters_is_an_error() -> None:
    def halved(net: Net, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            net.layer.weight.mul_(net.factor)
        return net.layer(inputs)

    plain = Net(halved, layer=nn.Linear(5, 3), factor=0.5)
    exact = plain.layer.weight.clone()
    model = sharded(plain, "orig")
    compress(model, gather=GATHER)
    with pytest.raises(RuntimeError, match=r"layer.weight was written to while it was unsharded and quantised"):
        model(batch())
    assert torch.equal(full_state(model)["layer.weight"], exact)


# Gradients


@parametrize_pairs(at_most=10, form=FORMS, bits=[4, 8], bucket_cap_mb=[0, 25], world_size=[2, 3])
@on_ranks("world_size")
def test_gradients_are_sums_of_rounded_pieces_in_the_order_of_ranks(form: str, bits: int, bucket_cap_mb: float) -> None:
    """Alike with and without buckets, since no block has elements of two flat parameters."""
    options: dict[str, Any] = {} if form == "rows" else {"bucket_cap_mb": bucket_cap_mb}
    model = compressed(form, reduce(bits), **options)
    assert_sums_are_rounded(model, bits)


def assert_sums_are_rounded(model: Any, bits: int, backward: Callable[[Any], None] = backward) -> None:
    """Collective. The gradients of a backward are the sums of what arrives."""
    with sent_gradients() as sent:
        backward(model)
    for handle, found in zip(handles_of(model), gathered_gradients(model), strict=True):
        expected = expected_sums(handle, sent[id(handle.gradients)], bits)
        assert expected.abs().max() > 0
        assert torch.equal(found, expected.view(-1))


@on_ranks(3)
def test_pieces_travel_alike_with_the_collectives_of_torch() -> None:
    fsdp.use_torch_collectives()
    try:
        model = compressed("orig", reduce(4), GATHER)
    finally:
        fsdp.use_torch_collectives(False)
    assert not any(handle.comm.sends_pieces for handle in handles_of(model))
    assert_sums_are_rounded(model, 4)


def expected_sums(handle: Any, own: Tensor, bits: int) -> Tensor:
    """Collective. The averages ``[world_size, n]`` that the shards have, from the gradients of all ranks."""
    by_rank = from_everyone([handle.comm], own)
    sums = torch.zeros_like(own)
    for receiver in range(len(own)):
        for sender, gradient in enumerate(by_rank):
            piece = gradient[receiver]
            sums[receiver] += piece if sender == receiver else rounded(piece, bits)
    return sums / (len(own) / 2.0)  # for two or three ranks, gradients were divided by 2 before


@every_size
@on_ranks(3)
def test_with_feedback_the_errors_of_a_gradient_are_in_the_next(bits: int) -> None:
    model = compressed("flat", reduce(bits, feedback=True))
    errors: dict[Any, Tensor] = {}
    for step in range(3):
        with sent_gradients() as sent:
            backward(model, step)
        for handle, found in zip(handles_of(model), gathered_gradients(model), strict=True):
            gradient = sent[id(handle.gradients)] + errors.get(handle, 0.0)
            torch.testing.assert_close(found, expected_sums(handle, gradient, bits).view(-1), rtol=1e-5, atol=1e-7)
            arrived = torch.stack([rounded(row, bits) for row in gradient])
            arrived[dist.get_rank()] = gradient[dist.get_rank()]
            errors[handle] = (gradient - arrived).bfloat16().float()
        model.zero_grad()
    assert inside(model).compression.feedback_nbytes == sum(2 * 2 * each.shape[1] for each in errors.values())


@on_ranks(2)
def test_feedback_brings_what_is_too_small_for_a_block() -> None:
    """A constant gradient below half a step of its block arrives on average, and without feedback never."""
    with_feedback, without = (averaged_gradient(reduce=reduce(4, feedback))[0] for feedback in (True, False))
    if dist.get_rank() == 1:  # whose shard comes from the other rank
        assert abs(with_feedback[1] - 0.025) < 0.001
        assert without[1] == 0.0


@on_ranks(3)
def test_the_norm_of_clipping_is_that_of_the_sums_that_arrived() -> None:
    model = compressed("flat", reduce(4))
    backward(model)
    expected = torch.cat(gathered_gradients(model)).norm()
    torch.testing.assert_close(model.clip_grad_norm_(1e-3), expected)
    torch.testing.assert_close(torch.cat(gathered_gradients(model)).norm(), torch.tensor(1e-3))


@every_form
@on_ranks(2)
def test_accumulated_gradients_are_quantised_once(form: str) -> None:
    model = compressed(form, reduce(8))
    with sent_gradients() as sent:
        if form == "rows":
            model.set_requires_gradient_sync(False)
            backward(model, 0)
            model.set_requires_gradient_sync(True)
        else:
            with model.no_sync():
                backward(model, 0)
    assert not sent
    assert_sums_are_rounded(model, 8)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("feedback", [True, False])
@on_ranks(2)
def test_what_is_not_finite_on_one_rank_is_not_finite_in_the_sum_and_not_in_the_next(
    wrong: float, feedback: bool
) -> None:
    model = compressed("flat", reduce(4, feedback))
    loss = model(batch()).square().mean()
    (loss * (wrong if dist.get_rank() == 1 else 1.0)).backward()
    assert not any(torch.isfinite(each).all() for each in gathered_gradients(model))
    assert not torch.isfinite(model.clip_grad_norm_(1.0))
    model.zero_grad()
    backward(model)
    assert all(torch.isfinite(each).all() for each in gathered_gradients(model))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@on_ranks(2)
def test_gradients_of_16_bits_are_quantised(dtype: torch.dtype) -> None:
    model = compressed(reduce=reduce(8), mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=dtype))
    assert {handle.gradients.dtype for handle in handles_of(model)} == {dtype}
    assert_sums_are_rounded(model, 8, lambda model: model(batch().to(dtype)).float().square().mean().backward())


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(5, 7), nn.Linear(5, 7)

    def forward(self, inputs: Tensor, both: bool) -> Tensor:
        return self.one(inputs) + self.other(inputs) if both else self.one(inputs)


@on_ranks(3)
def test_errors_of_a_parameter_that_is_left_out_of_a_step_are_kept(tmp_path: Path) -> None:
    """Under `fully_shard`, a parameter that no rank uses is not sent."""
    model = fsdp.fully_shard(TwoBranches())
    compression = compress(model, reduce=reduce(4, feedback=True))
    kept = []
    for step, both in enumerate((True, False, False, True)):
        model(batch(step), both).square().mean().backward()
        (handle,) = handles_of(model)
        (feedback,) = compression._feedback[handle]
        whole = feedback._whole(torch.device("cpu"))  # type: ignore[union-attr]
        by_param = handle.layout.places(whole.view(-1))
        kept.append([torch.cat([place.reshape(-1) for place in places]) for places in by_param])
        assert handle.gradients.layout is handle.layout or not both
        model.zero_grad()
    for slot, name in enumerate(each.name for each in handle.layout.slots):
        is_left_out = name.startswith("other")
        assert kept[0][slot].any()
        assert torch.equal(kept[0][slot], kept[1][slot]) is is_left_out
        assert torch.equal(kept[1][slot], kept[2][slot]) is is_left_out
        assert not torch.equal(kept[2][slot], kept[3][slot])


@pytest.mark.parametrize("policies", [(reduce(8, feedback=True), None), (None, GATHER), (reduce(), GATHER)])
@on_ranks(2)
def test_ranks_without_a_batch_join_in(policies: tuple[Any, Any]) -> None:
    states = []
    for policy in ((None, None), policies):
        model = compressed("flat", *policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fsdp.join(model, optimizer):
            for step in range(2 + 3 * dist.get_rank()):
                backward(model, step)
                optimizer.step()
                optimizer.zero_grad()
        states.append(full_state(model))
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-2, atol=1e-3)
        assert not torch.equal(states[1][name], value)


WAYS: dict[str, dict[str, Any]] = {
    "no buckets": {"bucket_cap_mb": 0},
    "offloaded": {"offload": "cpu"},
    "on disk": {"offload": "disk"},
    "kept until backward": {"reshard_after_forward": False},
    "kept on two ranks": {"reshard_after_forward": 2},
    "ZeRO-2": {"sharding_strategy": ShardingStrategy.SHARD_OPTIM_GRADS},
    "ZeRO-1": {"sharding_strategy": ShardingStrategy.SHARD_OPTIM},
}


@on_ranks(4)
def test_all_ways_to_train_have_the_same_bits(tmp_path: Path) -> None:
    states = {}
    for way, options in ({"default": {}} | WAYS).items():
        options = options | ({"offload_folder": tmp_path} if way == "on disk" else {})
        model = compressed("flat", reduce(4, feedback=True), GATHER, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(2):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        states[way] = full_state(model)
    for way, state in states.items():
        for name, value in state.items():
            assert torch.equal(value, states["default"][name]), f"{name} has other bits: {way}"


@on_ranks(2)
def test_frozen_parameters_are_rounded_and_integers_are_not() -> None:
    seen: dict[str, Tensor] = {}

    def compute(net: Net, inputs: Tensor) -> Tensor:
        seen.update({name: getattr(net, name).detach().clone() for name in ("table", "scale")})
        return net.layer(inputs) * net.scale.sum()

    numbers = torch.arange(40)
    frozen = {"table": numbers * 1000, "scale": numbers.float().sin()}
    plain = Net(compute, layer=nn.Linear(5, 3), **{name: nn.Parameter(each, False) for name, each in frozen.items()})
    model = sharded(plain, "orig")
    compress(model, reduce=reduce(8), gather=GATHER)
    backward(model)
    assert torch.equal(seen["table"], frozen["table"])
    assert 0 < (seen["scale"] - frozen["scale"]).abs().max() <= 1 / 254


# What is sent


@pytest.mark.parametrize(("bits", "share"), [(8, 0.27), (4, 0.20)])
@on_ranks(2)
def test_bytes_are_a_quarter_and_less(bits: int, share: float) -> None:
    """Of a step that gathers once: parameters in 8 bits, and gradients in 8 or 4."""
    counts = []
    for quantised in (False, True):
        torch.manual_seed(0)
        plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        policies = {"reduce": QuantizedReduce(bits), "gather": QuantizedGather()} if quantised else {}
        model = compressed(model=plain, reshard_after_forward=False, **policies)
        for _ in range(3):
            model(torch.ones(1, 64)).sum().backward()
        with Counting(Traffic()) as counting:
            model(torch.ones(1, 64)).sum().backward()
        counts.append(counting.traffic.values + counting.traffic.words)
    assert counts[1] <= share * counts[0]


@on_ranks(2)
def test_the_text_shows_the_bytes_of_each_collective() -> None:
    model = compressed(model=nn.Linear(64, 64), reduce=QuantizedReduce(4))
    lines = str(inside(model).compression).splitlines()
    assert lines[0].startswith("all-gather: 8.1 KiB instead of 8.1 KiB (1.000)")
    assert lines[1].startswith("reduction: 1.1 KiB instead of 8.1 KiB (0.129)")
    assert "0 B" in lines[2]


@on_ranks(2)
def test_gradients_stay_quantised_when_they_are_reduced_over_a_separate_group() -> None:
    model = compressed("rows", reduce(4))
    backward(model)
    model.set_separate_reduce_scatter_group()
    model.zero_grad()
    assert not any(handle.reduce_comm is handle.comm for handle in handles_of(model))
    assert_sums_are_rounded(model, 4)


# World size 1, other calls


@every_form
@on_ranks(1)
def test_a_single_rank_quantises_nothing(form: str) -> None:
    gradients = []
    for policies in ({}, {"reduce": reduce(4), "gather": GATHER}):
        model = compressed(form, **policies)
        backward(model)
        gradients.append(gathered_gradients(model))
    assert all(map(torch.equal, *gradients))


def test_a_model_without_a_process_group_quantises_nothing() -> None:
    model = alone(layers())
    compress(model, reduce=reduce(4), gather=GATHER)
    plain = layers()
    inputs = torch.ones(2, 5)
    assert torch.equal(model(inputs), plain(inputs))


@on_ranks(2)
def test_a_second_call_replaces_the_first_and_one_without_arguments_ends_it() -> None:
    model = compressed("flat", reduce(4, feedback=True), GATHER)
    exact = sharded(layers(), "flat", (nn.Linear,))
    backward(model)
    model.zero_grad()
    compress(model)
    for each in (model, exact):
        backward(each)
    assert all(map(torch.equal, gathered_gradients(model), gathered_gradients(exact)))
    compress(model, reduce=reduce(8))
    model.zero_grad()
    assert_sums_are_rounded(model, 8)


@on_ranks(2)
def test_an_object_that_was_replaced_stores_nothing() -> None:
    model = compressed("orig", reduce(4, feedback=True))
    before = inside(model).compression
    optimizer = torch.optim.Adam(model.parameters())
    compress(model, reduce=reduce(8, feedback=True))
    for use in (before.load_from, lambda optimizer: before.stored_in(optimizer).__enter__()):
        with pytest.raises(RuntimeError, match=r"fsdp.compress was called again for this model"):
            use(optimizer)


@on_ranks(2)
def test_copies_are_exact() -> None:
    model = compressed("flat", reduce(4, feedback=True), GATHER)
    backward(model)
    model.zero_grad()
    inside(model).__dict__.pop("compression")
    exact = sharded(layers(), "flat", (nn.Linear,))
    copied = copy.deepcopy(model)
    unpickled = pickle.loads(pickle.dumps(model))
    for wrapper in fsdp.get_fsdp_instances(unpickled):
        wrapper.process_group = dist.group.WORLD
    for each in (copied, unpickled, exact):
        backward(each)
    for each in (copied, unpickled):
        assert all(map(torch.equal, gathered_gradients(each), gathered_gradients(exact)))


# Saving


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
}


@parametrize_pairs(at_most=len(FORMS), form=list(FORMS), optimizer=list(OPTIMIZERS))
@on_ranks(2)
def test_a_resumed_training_has_the_bits_of_the_one_that_went_on(form: str, optimizer: str, tmp_path: Path) -> None:
    def begun() -> tuple[Any, torch.optim.Optimizer]:
        model = compressed(form, reduce(4, feedback=True), GATHER)
        return model, OPTIMIZERS[optimizer](model.parameters())

    assert_resumes_with_the_same_bits(begun, tmp_path)


def test_feedback_is_loaded_by_another_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """The sums of all errors are the same for each number of ranks."""
    saved = ranks(3).run(_save_feedback, tmp_path)[0]
    loaded = ranks(2).run(_load_feedback, tmp_path)[0]
    assert saved.keys() == loaded.keys()
    for name, value in saved.items():
        assert value.abs().max() > 0
        assert torch.equal(loaded[name], value)


def _errors_of(model: Any) -> dict[str, Tensor]:
    found = {}
    for handle, (feedback,) in inside(model).compression._feedback.items():
        whole = torch.cat(from_everyone([handle.comm], feedback.received))
        for slot, value in zip(handle.layout.slots, handle.layout.unpack(whole), strict=True):
            found[f"{handle.unit_name}.{slot.name}"] = value.clone()
    return found


def _save_feedback(folder: Path) -> dict[str, Tensor]:
    model = compressed("orig", reduce(4, feedback=True))
    optimizer = torch.optim.Adam(model.parameters())
    backward(model)
    optimizer.step()
    with inside(model).compression.stored_in(optimizer):
        fsdp.save(folder, model, optimizer)
    return _errors_of(model)


def _load_feedback(folder: Path) -> dict[str, Tensor]:
    model = compressed("orig", reduce(4, feedback=True))
    optimizer = torch.optim.Adam(model.parameters())
    fsdp.load(folder, model, optimizer)
    inside(model).compression.load_from(optimizer)
    return _errors_of(model)


@on_ranks(2)
def test_parameters_that_no_step_has_used_have_no_feedback(tmp_path: Path) -> None:
    model = fsdp.fully_shard(TwoBranches())
    compression = compress(model, reduce=reduce(4, feedback=True))
    optimizer = torch.optim.Adam(model.parameters())
    model(batch(0), False).square().mean().backward()
    optimizer.step()
    with compression.stored_in(optimizer):
        assert sum("quantized_reduce_feedback" in state for state in optimizer.state.values()) == len(optimizer.state)
        fsdp.save(tmp_path, model, optimizer)
        taken = optimizer.state_dict()
    assert all("quantized_reduce_feedback" in state for state in taken["state"].values())
    assert not any("quantized_reduce_feedback" in state for state in optimizer.state.values())
    fsdp.load(tmp_path, model, optimizer)
    compression.load_from(optimizer)


@on_ranks(2)
def test_nothing_is_stored_if_the_errors_of_a_unit_cannot_be_added_up() -> None:
    model = compressed("orig", reduce(4, feedback=True))
    optimizer = torch.optim.Adam(model.parameters())
    backward(model)
    optimizer.step()
    settle = Feedback.settle
    outcomes = iter([settle])

    def settle_once(feedback: Feedback) -> Tensor:
        if (found := next(outcomes, None)) is None:
            raise RuntimeError("the connection was closed")
        return found(feedback)

    stored = inside(model).compression.stored_in(optimizer)
    with mock.patch.object(Feedback, "settle", settle_once), pytest.raises(RuntimeError, match="was closed"), stored:
        pass
    assert not any("quantized_reduce_feedback" in state for state in optimizer.state.values())


@on_ranks(2)
def test_feedback_cannot_be_stored_before_the_first_step_or_in_another_optimizer() -> None:
    model = compressed("orig", reduce(4, feedback=True))
    backward(model)
    compression = inside(model).compression
    early = compression.stored_in(torch.optim.Adam(model.parameters()))
    with pytest.raises(RuntimeError, match=r"Adam has no state yet"), early:
        pass
    owned = fsdp.OwnedOptimizer(model, [{"optimizer": torch.optim.AdamW}])
    owned.step()
    with pytest.raises(NotImplementedError, match=r"has no state of its own parameters"), compression.stored_in(owned):
        pass
    strange = compression.stored_in(torch.optim.Adam([nn.Parameter(torch.ones(1))]))
    with pytest.raises(ValueError, match=r"Adam does not have this parameter"), strange:
        pass


@on_ranks(2)
def test_feedback_that_one_rank_cannot_store_is_an_error_on_every_rank() -> None:
    model = compressed("orig", reduce(4, feedback=True))
    backward(model)
    optimizer = torch.optim.Adam(model.parameters())
    if dist.get_rank() == 0:
        optimizer.step()
    with pytest.raises(RuntimeError, match="Adam has no state yet"), inside(model).compression.stored_in(optimizer):
        pass


# Errors


@on_ranks(2)
def test_different_policies_are_an_error_on_every_rank() -> None:
    model = sharded(layers(), "flat", (nn.Linear,))
    with pytest.raises(RuntimeError, match=r"different arguments of fsdp.compress.*bits=8.*bits=4"):
        compress(model, reduce=reduce(4 if dist.get_rank() else 8))
    with pytest.raises((TypeError, RuntimeError), match=r"fsdp.compress: reduce must be"):
        compress(model, reduce=GATHER if dist.get_rank() else None)  # type: ignore[arg-type]
    backward(model)


@on_ranks(2)
def test_what_cannot_be_combined_is_refused_by_name() -> None:
    def refused(model: Any, match: str, **policies: Any) -> None:
        with pytest.raises(NotImplementedError, match=f"fsdp.compress: .*{match}"):
            compress(model, **policies or {"reduce": reduce(), "gather": GATHER})

    refused(FullyShardedDataParallel(layers().double()), r"torch.float64: only float32")
    hooked = FullyShardedDataParallel(layers())
    hooked.register_comm_hook(None, average)
    refused(hooked, "has a communication hook")
    compress(hooked, gather=GATHER)
    own = fsdp.fully_shard(layers())
    own.set_custom_reduce_scatter(OwnReduceScatter())
    refused(own, "has a custom reduce-scatter")
    same = FullyShardedDataParallel(layers())
    fsdp.SameBits(same, 2)
    refused(same, "custom reduce-scatter", reduce=reduce())
    refused(same, "fsdp.SameBits", gather=GATHER)
    with pytest.raises(TypeError, match=r"fsdp.compress needs the outermost"):
        compress(layers())


@on_ranks(2)
def test_a_compressed_model_refuses_what_it_cannot_be_combined_with() -> None:
    model = compressed("flat", reduce(), GATHER)
    with pytest.raises(ValueError, match="gradients are sent quantised"):
        model.register_comm_hook(None, average)
    with pytest.raises(NotImplementedError, match="custom or quantised reduce-scatter"):
        fsdp.SameBits(model, 2)
    rows = compressed("rows", reduce())
    with pytest.raises(RuntimeError, match="QuantizedReduceScatter that is set already"):
        rows[0].set_custom_reduce_scatter(OwnReduceScatter())


@pytest.mark.parametrize("policy", [QuantizedReduce, QuantizedGather])
def test_policies_refuse_other_numbers(policy: Any) -> None:
    with pytest.raises(ValueError, match="bits must be 8 or 4"):
        policy(bits=3)
    with pytest.raises(ValueError, match="block must be an even"):
        policy(block=7)
