"""`fsdp.compress` with replicas: sums over replicas that are sent quantised, beside exact or quantised shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel, QuantizedGather, QuantizedReduce, ShardingStrategy, compress
from fsdp.distributed.collectives import communicator
from fsdp.distributed.consensus import from_everyone
from fsdp.layers.quantized_replicas import ReplicaFeedback
from tests.helpers.equality import assert_same
from tests.helpers.forms import FORMS, full_state, inside, sharded
from tests.helpers.hybrid import mesh_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.quantised_collectives import (
    BLOCK,
    assert_resumes_with_the_same_bits,
    averaged_gradient,
    backward,
    batch,
    compressed,
    handles_of,
    layers,
    rounded,
)
from tests.helpers.ranks import RankPool
from tests.helpers.traffic import Counting, Traffic

every_form = pytest.mark.parametrize("form", FORMS)
every_size = pytest.mark.parametrize("bits", [4, 8])


def policy(bits: int = 8, feedback: bool = False) -> QuantizedReduce:
    return QuantizedReduce(bits, BLOCK, feedback)


def on_mesh(form: str, replicas: int, shards: int, **options: Any) -> dict[str, Any]:
    """Collective. Options for hybrid sharding, or for replicas alone, of a form."""
    mesh = mesh_of(replicas, shards)
    if form == "rows":
        return options | {"mesh": mesh}
    return options | {"process_group": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}


def gradients(model: Any) -> dict[str, Tensor]:
    """Of each flat parameter this rank's gradient, flat."""
    found = {}
    for handle in handles_of(model):
        handle.flat_param.bring_gradient()
        if handle.orig_params is not None:
            handle.orig_params.collect_gradients()
        found[handle.name] = handle.flat_param.grad.detach().view(-1).clone()
    return found


def quantised_sum(by_rank: list[Tensor], bits: int) -> Tensor:
    """The sum of equal gradients of ranks as it arrives, by the book."""
    ranks = len(by_rank)
    padded = [torch.cat([each, each.new_zeros(-each.numel() % ranks)]).view(ranks, -1) for each in by_rank]
    sums = []
    for owner in range(ranks):
        total = torch.zeros_like(padded[0][owner])
        for sender, pieces in enumerate(padded):
            total += pieces[owner] if sender == owner else rounded(pieces[owner], bits)
        sums.append(rounded(total, bits))
    return torch.cat(sums)[: by_rank[0].numel()]


def everyone() -> Any:
    return communicator(dist.group.WORLD, torch.device("cpu"))


# Sums


@every_size
@on_ranks(2, 3)
def test_pieces_and_sums_are_rounded_and_all_replicas_have_the_same_bits(bits: int) -> None:
    model = compressed("flat", replicas=policy(bits), sharding_strategy=ShardingStrategy.NO_SHARD, bucket_cap_mb=0)
    backward(model)
    plain = layers()
    plain(batch()).square().mean().backward()
    world_size, before = dist.get_world_size(), 2.0  # divided by 2 before the sum, and by the rest after it
    for layer, gradient in zip((plain[0], plain[2], plain[4]), gradients(model).values(), strict=True):
        by_rank = from_everyone([everyone()], torch.cat([param.grad.view(-1) for param in layer.parameters()]) / before)
        expected = quantised_sum(by_rank, bits) / (world_size / before)
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)
        assert not torch.equal(gradient, torch.stack(by_rank).sum(0) / (world_size / before)), "nothing was quantised"
        assert all(torch.equal(other, gradient) for other in from_everyone([everyone()], gradient))


@pytest.mark.parametrize(("form", "feedback"), [("orig", False), ("rows", True)])
@on_ranks(4)
def test_with_shards_training_comes_down_as_without(form: str, feedback: bool) -> None:
    """Alone, and beside gradients and parameters that are quantised between shards."""
    losses: dict[str, list[float]] = {}
    kinds: dict[str, Any] = {
        "exact": {},
        "replicas": {"replicas": policy(8, feedback)},
        "all": {"replicas": policy(8, feedback), "reduce": policy(8, feedback), "gather": QuantizedGather(8, BLOCK)},
    }
    for kind, policies in kinds.items():
        model = compressed(form, **policies, **on_mesh(form, 2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses[kind] = []
        for _ in range(5):
            loss = (model(batch()) - 1.0).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[kind].append(loss.item())
        assert_replicas_have_the_same_bits(model)
    assert losses["exact"][-1] < 0.9 * losses["exact"][0]
    assert losses["replicas"] != losses["exact"] != losses["all"]
    torch.testing.assert_close(losses["replicas"], losses["exact"], rtol=2e-3, atol=0)
    torch.testing.assert_close(losses["all"], losses["exact"], rtol=2e-2, atol=0)


def assert_replicas_have_the_same_bits(model: Any) -> None:
    for handle in handles_of(model):
        found = from_everyone([handle.replicas], handle.flat_param.detach().clone())
        assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("strategy", ["NO_SHARD", "HYBRID_SHARD"])
@on_ranks(4)
def test_buckets_and_the_collectives_of_torch_send_the_same_way(strategy: str) -> None:
    """Buckets divide into other pieces, so the bits differ; each is the exact gradient but for the rounding."""
    options: dict[str, Any] = {"sharding_strategy": ShardingStrategy[strategy]}
    if strategy == "HYBRID_SHARD":
        options["process_group"] = mesh_of(2, 2)
    exact = sharded(layers(), "flat", (nn.Linear,), **options)
    backward(exact)
    for bucket_cap_mb in (0, 25):
        for torchs in (False, True):
            fsdp.use_torch_collectives(torchs)
            try:
                model = compressed("flat", replicas=policy(8), bucket_cap_mb=bucket_cap_mb, **options)
            finally:
                fsdp.use_torch_collectives(False)
            backward(model)
            for found, expected in zip(gradients(model).values(), gradients(exact).values(), strict=True):
                assert (
                    0
                    < (found - expected).abs().max()
                    <= 2 * sum(each.abs().max() for each in gradients(exact).values()) / 127
                )


@on_ranks(2)
def test_feedback_brings_what_is_too_small_for_a_block() -> None:
    """Of pieces, which one replica sends, and of sums, which the other sends back."""
    options = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    average, scale = averaged_gradient(replicas=policy(4, feedback=True), **options)
    assert (average - 0.5 * scale).abs().max() < 0.002
    average, _ = averaged_gradient(replicas=policy(4), **options)
    assert average[1] == average[BLOCK + 1] == 0.0


@on_ranks(2)
def test_what_is_not_finite_is_not_finite_on_all_replicas_and_not_in_the_next_step() -> None:
    model = compressed("flat", replicas=policy(8, True), sharding_strategy=ShardingStrategy.NO_SHARD)
    inputs = batch()
    model(inputs * (float("inf") if dist.get_rank() == 1 else 1.0)).mean().backward()
    assert any(each.isnan().any() for each in gradients(model).values())
    model.zero_grad()
    backward(model)
    assert all(each.isfinite().all() for each in gradients(model).values())


@on_ranks(4)
def test_ranks_without_a_batch_join_in() -> None:
    states = []
    for policies in ({}, {"replicas": policy(8, feedback=True)}):
        model = compressed("flat", **policies, **on_mesh("flat", 2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fsdp.join(model, optimizer):
            for step in range(2 + dist.get_rank()):
                backward(model, step)
                optimizer.step()
                optimizer.zero_grad()
        assert_replicas_have_the_same_bits(model)
        states.append(full_state(model))
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-2, atol=1e-3)
        assert not torch.equal(states[1][name], value)


@on_ranks(4)
def test_frozen_and_unused_parameters_keep_their_errors() -> None:
    model = compressed("orig", replicas=policy(4, True), **on_mesh("orig", 2, 2))
    backward(model)
    first = errors_of(model)
    inside(model)[0].requires_grad_(False)
    backward(model, 1)
    inside(model)[0].requires_grad_(True)
    second = errors_of(model)
    changed = [name for name, value in second.items() if not torch.equal(value, first[name])]
    assert changed
    assert not any(name.startswith("0.") for name in changed)
    assert all(name in changed for name in first if not name.startswith("0."))


# Saving


def errors_of(model: Any) -> dict[str, Tensor]:
    """Collective. The unsharded sums over all ranks of the errors that are kept."""
    found = {}
    for handle, kept in inside(model).compression._feedback.items():
        whole = torch.zeros(handle.comm.world_size, handle.layout.shard_numel)
        for each in kept:
            if isinstance(each, ReplicaFeedback):
                whole[handle.comm.rank] += 0.0 if each.errors is None else each.errors
            else:
                whole += each._whole(whole.device)
        whole = torch.stack(from_everyone([handle.comm, handle.replicas], whole)).sum(0).view(-1)
        for slot, value in zip(handle.layout.slots, handle.layout.unpack(whole), strict=True):
            found[f"{handle.unit_name}.{slot.name}"] = value.clone()
    return found


@pytest.mark.parametrize("form", ["orig", "rows"])
@on_ranks(4)
def test_a_resumed_training_has_the_bits_of_the_one_that_went_on(form: str, tmp_path: Path) -> None:
    def begun() -> tuple[Any, torch.optim.Optimizer]:
        policies = {"reduce": policy(8, True), "replicas": policy(4, True)}
        model = compressed(form, **policies, **on_mesh(form, 2, 2))
        return model, torch.optim.Adam(model.parameters(), lr=1e-2)

    assert_resumes_with_the_same_bits(begun, tmp_path)


def test_errors_of_replicas_are_loaded_by_another_mesh(ranks: RankPool, tmp_path: Path) -> None:
    """Nothing of their sum is lost, and nothing is added twice."""
    saved = ranks(4).run(_save_errors, tmp_path)[0]
    for loaded in (ranks(4).run(_load_errors, tmp_path, 4, 1)[0], ranks(2).run(_load_errors, tmp_path, 1, 2)[0]):
        for name, value in saved.items():
            assert value.abs().max() > 0
            torch.testing.assert_close(loaded[name], value, rtol=2**-7, atol=0)  # in bfloat16


def _save_errors(folder: Path) -> dict[str, Tensor]:
    model = compressed("orig", reduce=policy(4, True), replicas=policy(4, True), **on_mesh("orig", 2, 2))
    optimizer = torch.optim.Adam(model.parameters())
    backward(model)
    optimizer.step()
    before = errors_of(model)
    with inside(model).compression.stored_in(optimizer):
        fsdp.save(folder, model, optimizer)
    after = errors_of(model)
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-7)
    return after


def _load_errors(folder: Path, replicas: int, shards: int) -> dict[str, Tensor]:
    policies: dict[str, Any] = {"replicas": policy(4, True)} if replicas > 1 else {"reduce": policy(4, True)}
    model = compressed("orig", **policies, **on_mesh("orig", replicas, shards))
    optimizer = torch.optim.Adam(model.parameters())
    fsdp.load(folder, model, optimizer)
    inside(model).compression.load_from(optimizer)
    return errors_of(model)


# Bytes


@pytest.mark.parametrize(("bits", "share"), [(8, 0.27), (4, 0.15)])
@on_ranks(4)
def test_bytes_between_replicas_are_a_quarter_and_less(bits: int, share: float) -> None:
    counts = []
    for policies in ({}, {"replicas": QuantizedReduce(bits)}):
        torch.manual_seed(0)
        plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        model = compressed(model=plain, sharding_strategy=ShardingStrategy.NO_SHARD, **policies)
        for _ in range(3):
            model(torch.ones(1, 64)).sum().backward()
        with Counting(Traffic()) as counting:
            model(torch.ones(1, 64)).sum().backward()
        counts.append(counting.traffic.values + counting.traffic.words)
    assert counts[1] <= share * counts[0]
    lines = str(inside(model).compression).splitlines()
    assert lines[:2] == ["all-gather: 0 B instead of 0 B", "reduction: 0 B instead of 0 B"]
    assert lines[2].startswith("sum over replicas: ")
    assert lines[2].endswith(f"({0.255 if bits == 8 else 0.130:.3f})")


@on_ranks(4)
def test_the_feedback_between_replicas_takes_two_bytes_for_each_element_of_the_shard() -> None:
    model = compressed("flat", replicas=policy(4, True), **on_mesh("flat", 2, 2))
    backward(model)
    numel = sum(handle.layout.shard_numel for handle in handles_of(model))
    assert inside(model).compression.feedback_nbytes == 2 * numel


# Errors


@on_ranks(4)
def test_a_second_call_replaces_the_first_and_one_without_arguments_ends_it() -> None:
    options = on_mesh("flat", 2, 2)
    exact = sharded(layers(), "flat", (nn.Linear,), **options)
    backward(exact)
    model = compressed("flat", replicas=policy(4, True), **options)
    compress(model, replicas=policy(8))
    compress(model)
    backward(model)
    assert_same(gradients(model), gradients(exact))


@on_ranks(4)
def test_what_cannot_be_combined_is_refused_by_name() -> None:
    replicas = {"replicas": policy()}
    with pytest.raises(ValueError, match=r"no unit has replicas, so that `replicas` has no effect: use `reduce`"):
        compress(FullyShardedDataParallel(layers()), **replicas)
    whole = FullyShardedDataParallel(layers(), sharding_strategy=ShardingStrategy.NO_SHARD)
    with pytest.raises(ValueError, match=r"nothing is sharded, so that `reduce` and `gather` have no effect"):
        compress(whole, reduce=policy())
    with pytest.raises(TypeError, match=r"replicas must be an fsdp.QuantizedReduce or None, got QuantizedGather"):
        compress(whole, replicas=QuantizedGather())  # type: ignore[arg-type]
    nested = FullyShardedDataParallel(
        layers(), process_group=mesh_of(2, 2), sharding_strategy=ShardingStrategy.HYBRID_SHARD_OPTIM
    )
    for policies in (replicas, {"reduce": policy()}, {"gather": QuantizedGather()}):
        with pytest.raises(NotImplementedError, match=r"optimizer state that is sharded over replicas as well"):
            compress(nested, **policies)  # type: ignore[arg-type]
    wide = FullyShardedDataParallel(layers().double(), sharding_strategy=ShardingStrategy.NO_SHARD)
    with pytest.raises(NotImplementedError, match=r"torch.float64: only float32"):
        compress(wide, **replicas)
    compress(whole, **replicas)
    with pytest.raises(NotImplementedError, match="custom or quantised reduce-scatter"):
        fsdp.SameBits(whole, 4)
