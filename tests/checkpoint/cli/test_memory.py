"""The command needs little memory, however large a checkpoint is: a few pieces, and for DCP folders one tensor."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from tests.helpers.programs import printed_by_program
from tests.helpers.ranks import RankPool

WIDTH, LAYERS = 1024, 5
TENSOR = WIDTH * WIDTH * 4 / 2**20  # MiB
PIECES = 16  # MiB: blocks that are read, cast and written, and what the allocator keeps of them
WHOLE = 3 * LAYERS * TENSOR  # with two moments

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's /proc")


def growths(ranks: RankPool, script: str) -> list[float]:
    """What a process of its own prints: MiB of anonymous memory."""
    common = f"""
        import re, torch, fsdp
        from torch import nn
        from fsdp.checkpoint.cli import Progress, main

        def anonymous():
            return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

        def save(folder, width, layers):
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
            optimizer = torch.optim.Adam(model.parameters())
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            fsdp.save(folder, model, optimizer)

        def convert(source, target, *options):
            assert main(["convert", source, target, "--overwrite", *options]) == 0

        highest = 0

        def look(self, nbytes):
            global highest
            highest = max(highest, anonymous())

        Progress.__call__ = look

        def growth(*arguments):
            global highest
            before = highest = anonymous()
            assert main(list(arguments)) == 0
            return max(highest, anonymous()) - before

        torch.set_num_threads(1)
        WIDTH, LAYERS = {WIDTH}, {LAYERS}
        """
    text = textwrap.dedent(common) + textwrap.dedent(script)
    # What is resident is what is alive.
    printed = printed_by_program(ranks, text, mapped_from=1 << 16)
    return [float(word) for word in printed.splitlines()[-1].split()]


@needs_proc
def test_converting_and_verifying_need_memory_for_pieces(ranks: RankPool, tmp_path: Path) -> None:
    *found, whole = growths(
        ranks,
        f"""
        import ctypes, gc
        words = ("fsdp", "torch", "dcp", "safetensors")
        save("{tmp_path}/small", 8, 1)
        save("{tmp_path}/large", WIDTH, LAYERS)
        for word in words:  # what is imported at first use is not the checkpoint's
            convert("{tmp_path}/small", "{tmp_path}/small." + word, "--to", word)
            assert main(["verify", "{tmp_path}/small." + word]) == 0
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        found = []
        source = "{tmp_path}/large"
        for word in ("torch", "fsdp", "dcp", "dcp", "torch", "safetensors"):
            target = "{tmp_path}/" + str(len(found)) + word
            found.append(growth("convert", source, target, "--to", word))
            found.append(growth("verify", target))
            source = target
        before = anonymous()
        held = torch.load("{tmp_path}/0torch")  # what a converter must not do
        print(*found, anonymous() - before)
        """,
    )
    assert whole > 0.9 * WHOLE  # so the measure sees what is in memory
    for number, each in enumerate(found):
        limit = 1.2 * TENSOR + PIECES if number in (4, 6) else PIECES  # to a DCP folder, whole tensors go
        assert each <= limit, f"{number}: {each:.1f} MiB of {WHOLE:.0f}"
