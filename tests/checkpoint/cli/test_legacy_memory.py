"""Converting FairScale's and FSDP1's files needs memory for a few pieces, pages of mapped files included."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from tests.helpers.programs import printed_by_program
from tests.helpers.ranks import RankPool

NUMEL = 8 << 20
WHOLE = 3 * NUMEL * 4 / 2**20  # MiB, with two moments

needs_peaks = pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peak memory")


def growths(ranks: RankPool, script: str) -> list[float]:
    """What a process of its own prints: MiB."""
    common = """
        import os, torch
        from benchmarks._measure import forget_peak, peak_resident_bytes, resident_bytes, settle
        from fsdp.checkpoint.cli import main

        torch.set_num_threads(1)

        def save(folder, numel):  # four parameters in one flat parameter, of two ranks
            os.makedirs(folder)
            part = [numel // 4]
            flat = {"names": list("abcd"), "shapes": [torch.Size(part)] * 4, "numels": part * 4, "padding": 0}
            entry = {"fsdp_path": "", "params": {"flat_param_0": flat}, "no_broadcast_optim_state": False}
            metadata = {"param_metadata": [{**entry, "shared_param_info": []}], "buffer_names": []}
            for rank in range(2):
                make = lambda: torch.ones(numel // 2)
                state = {0: {"exp_avg": make(), "exp_avg_sq": make()}}
                optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}
                saved = {"model": {"flat_param_0": make()}, "fsdp_metadata": metadata, "optim": optimizer}
                torch.save(saved, folder + f"/rank{rank}.pt")

        def growth(*arguments):
            settle()
            forget_peak()
            before = resident_bytes()
            assert main(list(arguments)) == 0
            return (peak_resident_bytes() - before) / 2**20
        """
    text = textwrap.dedent(common) + textwrap.dedent(script)
    printed = printed_by_program(ranks, text, mapped_from=1 << 16)  # what was freed is given back at once
    return [float(word) for word in printed.splitlines()[-1].split()]


@needs_peaks
def test_converting_needs_memory_for_pieces(ranks: RankPool, tmp_path: Path) -> None:
    *found, mapped = growths(
        ranks,
        f"""
        found = []
        for name, numel in (("small", 64), ("large", {NUMEL})):  # imports are done for the small one
            path = "{tmp_path}/" + name
            save(path, numel)
            found = [
                growth("convert", path, path + ".ours"),
                growth("convert", path, path + ".pt"),
                growth("verify", path),
            ]
        held = torch.load("{tmp_path}/large/rank0.pt", mmap=True, weights_only=True)
        settle()
        forget_peak()
        before = resident_bytes()
        held["model"]["flat_param_0"].sum()
        print(*found, (peak_resident_bytes() - before) / 2**20)
        """,
    )
    for each in found:
        assert each <= 20, f"{each:.1f} MiB of {WHOLE:.0f}"
    assert mapped > 0.9 * WHOLE / 6  # so the measure sees pages of mapped files
