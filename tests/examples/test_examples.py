"""The programs of `examples`, in a small form: they learn, go on where they were, and do what their originals did."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import io
import os
import re
import resource
import shutil
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run

import fsdp
from benchmarks._machines import NotAllowedError, two_machines
from tests.conftest import LitRanks
from tests.helpers.forking_torchrun import TORCHRUN
from tests.helpers.hugging_face import PATIENCE
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_ranks
from tests.helpers.paths import ROOT
from tests.helpers.ranks import RankPool

PRELOAD = ["peft", "transformers.models.llama.modeling_llama", "fsdp.lightning"]
CPU = torch.device("cpu")


def program(name: str, before: str = "", after: str = "") -> Any:
    """Return an example as a module, in which `before` was replaced by `after`; it may be named with its file."""
    path = ROOT / "examples" / name
    text = (path if path.suffix else path / "train.py").read_text(encoding="utf-8")
    module = types.ModuleType(f"example_{name}")
    sys.modules[module.__name__] = module  # where dataclasses and pickle look
    assert before in text
    exec(compile(text.replace(before, after), name, "exec"), module.__dict__)
    return module


def test_each_has_a_readme_with_its_command_and_is_in_the_list() -> None:
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    for folder in sorted((ROOT / "examples").iterdir()):
        if folder.name == "__pycache__" or not folder.is_dir():
            continue
        readme = (folder / "README.md").read_text(encoding="utf-8")
        assert f"`examples/{folder.name}`" in page
        assert "\n```\n" in readme  # what it prints
        for file in folder.glob("*.py"):
            for command in re.findall(
                r"^    (.*examples/.*/\w+\.\w+)$", file.read_text(encoding="utf-8"), re.MULTILINE
            ):
                assert f"\n    {command}\n" in readme


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*/train.py")), ids=lambda file: file.parent.name)
@on_ranks(1)  # which have imported peft and Lightning
def test_the_length_of_a_training_is_an_argument(file: Path) -> None:
    if file.parent.name == "gpt":
        pytest.skip("tests/examples/test_examples.py trains it by its arguments")
    try:
        example = program(file.parent.name)
    except ImportError as error:
        pytest.skip(f"{error}")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", [str(file), "--help"])
        with pytest.raises(SystemExit):
            example.main()
    assert re.search(r"--(steps|epochs)", printed.getvalue())


def test_images_are_classified(ranks: RankPool, tmp_path: Path) -> None:
    for accuracy in ranks(2).run(_classify, tmp_path / "image")[0]:
        assert accuracy > 0.6  # of four classes


def _classify(folder: Path) -> list[float]:
    """Return the accuracy of the average, and that of what was saved of it."""
    example = program("image", before="+= 0.5", after="+= 3.0")  # which is learned sooner
    example.EMA = lambda model, decay: fsdp.EMA(model, 0.3)
    accuracy = example.train(CPU, folder, epochs=2, count=256)
    plain = example.Classifier()
    fsdp.load(folder, plain)  # as anybody loads it
    return [accuracy, example.accuracy(plain, example.images(256, seed=2), CPU)]


def test_a_gan_goes_on_with_more_ranks_from_one_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    through = ranks(2).run(_train_gan, tmp_path / "through", 10)[0]
    first = ranks(2).run(_train_gan, tmp_path / "resumed", 5)[0]
    second = ranks(3).run(_train_gan, tmp_path / "resumed", 10)[0]
    assert first + second == pytest.approx(through, rel=1e-2)
    assert len(through) == 2


def _train_gan(folder: Path, steps: int) -> list[float]:
    example = program("gan", before="step % 100 == 99", after="step % 5 == 4")
    distances: list[float] = example.train(CPU, folder, steps)
    return distances


@on_ranks(2)
def test_on_disk_a_model_trains_as_in_memory(tmp_path: Path) -> None:
    example = program("larger_than_memory")
    on_disk = example.train(example.build(16, 3, offload="disk", offload_folder=tmp_path), 16, steps=3)
    assert on_disk == example.train(example.build(16, 3), 16, steps=3)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the memory of a process")
@on_ranks(1)
def test_memory_can_be_limited() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        program("larger_than_memory").limit_memory(2**20)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(2**26)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@needs("transformers", "peft")
@pytest.mark.parametrize("quantise", [False, True])
def test_adapters_are_trained_and_saved(ranks: RankPool, tmp_path: Path, quantise: bool) -> None:
    if quantise:
        pytest.importorskip("torchao")
    losses = ranks(2, timeout=PATIENCE).run(_train_adapters, tmp_path, quantise)[0]
    assert losses[-1] < losses[0] - 0.5


def _train_adapters(folder: Path, quantise: bool) -> list[float]:
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    warnings.filterwarnings("ignore", category=FutureWarning)  # peft calls what transformers has renamed
    warnings.filterwarnings("ignore", message="TorchaoLoraLinear was instantiated", category=UserWarning)
    example = program("adapters")
    with torch.compiler.set_stance("force_eager"):
        losses: list[float] = example.train(CPU, folder, steps=12, quantise=quantise)
    dist.barrier()
    torch.manual_seed(0)
    base = LlamaForCausalLM(example.configuration()).bfloat16()
    loaded = PeftModel.from_pretrained(base, folder)
    batch = example.sequences(12, CPU)
    assert loaded(input_ids=batch, labels=batch).loss.item() < losses[0] - 0.5
    return losses


@needs("transformers", "peft", "accelerate")
def test_the_trainer_goes_on_with_other_ranks(ranks: RankPool, tmp_path: Path) -> None:
    first = ranks(2, timeout=PATIENCE).run(_train_by_trainer, tmp_path, 20)[0]
    resumed = ranks(1, timeout=PATIENCE).run(_train_by_trainer, tmp_path, 40, resume=True)[0]
    assert resumed[0] == first[0]  # as it was logged
    assert resumed[1] < first[0] - 0.1


def _train_by_trainer(folder: Path, steps: int, **options: bool) -> list[float]:
    from tests.helpers.hugging_face import as_launched

    warnings.filterwarnings("ignore", category=FutureWarning)  # peft calls what transformers has renamed
    with as_launched():
        losses: list[float] = program("with_trainer").train(CPU, folder, steps, **options)
    return losses


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray: not installed (pip install 'ray[train]')")
def test_ray_starts_again_what_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "with_ray" / "train.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = re.search(r"step 99: loss ([\d.]+); the last start was at step [45]0", done.stdout)
    assert found, done.stdout
    assert float(found[1]) < 0.2


# Several machines


@pytest.mark.waiting
def test_two_machines_train(tmp_path: Path) -> None:
    try:
        with two_machines():
            pass
    except NotAllowedError as reason:
        pytest.skip(f"this system makes no two machines: {reason}")
    (tmp_path / "launch.py").write_text(TORCHRUN)
    (tmp_path / "torchrun").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/launch.py" "$@" --steps 40\n')
    (tmp_path / "torchrun").chmod(0o755)
    here = {"PYTHONPATH": str(ROOT), "FOLDER": str(tmp_path / "checkpoints"), "OMP_NUM_THREADS": "1", "RANKS": "1"}
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    given = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command, env = ["bash", "examples/two_machines/here.sh"], {**given, **here, "PATH": path}
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"step 39: loss ([\d.]+)", done.stdout)[0]) < 1.5  # 4.4 in the first step
    assert fsdp.checkpoint.newest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step-00000039"
    assert "machine 0: 1 of 2 ranks" in done.stdout  # their ends of lines may come after each other
    assert "machine 1: 1 of 2 ranks" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="Slurm is for Linux")
def test_slurm_starts_it(tmp_path: Path) -> None:
    """With stand-ins for Slurm's programs and torchrun, which understands what it is told."""
    for name, code in {"srun": 'shift; exec "$@"', "scontrol": "echo first", "torchrun": 'echo "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "41234", "SLURM_JOB_NODELIST": "first,second", "SLURM_NNODES": "2"}
    given = os.environ | slurm | {"SLURM_GPUS_ON_NODE": "4", "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "examples/slurm/job.sh"], cwd=ROOT, env=given, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    asked = torch.distributed.run.parse_args(done.stdout.split())
    assert (asked.nnodes, asked.nproc_per_node, asked.rdzv_id) == ("2", "4", "41234")
    assert (asked.rdzv_backend, asked.rdzv_endpoint) == ("c10d", "first:21234")
    assert (ROOT / asked.training_script).is_file()


@needs("yaml")
def test_kubernetes_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of each pod, with the variables that the operator would give it, as torchrun understands them."""
    import yaml

    job = yaml.safe_load((ROOT / "examples" / "kubernetes" / "job.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    pods = job["spec"]["pytorchReplicaSpecs"]
    assert pods.keys() == {"Master", "Worker"}
    assert pods["Master"]["replicas"] == 1  # or the operator refuses it
    for pod in pods.values():
        spec = pod["template"]["spec"]
        (container,) = spec["containers"]
        assert container["name"] == "pytorch"
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
        assert container["resources"]["limits"]["nvidia.com/gpu"] == job["spec"]["nprocPerNode"]
        operators = {"NNODES": "2", "NPROC_PER_NODE": "8", "NODE_RANK": "1", "MASTER_ADDR": "first"}
        for name, value in operators.items():
            monkeypatch.setenv(f"PET_{name}", value)
        assert container["command"][0] == "torchrun"
        asked = torch.distributed.run.parse_args(container["command"][1:])
        assert (asked.nnodes, asked.nproc_per_node, asked.node_rank, asked.master_addr) == ("2", "8", 1, "first")
        assert (ROOT / asked.training_script).is_file()


@needs("tqdm")
def test_the_gpt_goes_on_with_other_ranks(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(97, 113)) * 200)  # soon learned
    first = ranks(2).run(_train_gpt, tmp_path, "--steps=10")[0]
    resumed = ranks(3).run(_train_gpt, tmp_path, "--steps=20", "--resume")[0]
    assert (first.steps, resumed.steps) == (10, 11)  # the last checkpoint was that of step 8
    assert resumed.first_loss == first.first_loss
    assert resumed.last_loss < first.last_loss < first.first_loss
    from examples.gpt import launch, options

    def resumes(*arguments: str) -> Path:
        return launch.resolve(options.parse_options([f"--out={tmp_path}", "--resume", *arguments])).out

    with pytest.raises(launch.OptionError, match=r"--steps 18 are done: .* has 18 steps. Give more to go on"):
        resumes("--steps=18")
    assert resumes("--steps=19") == tmp_path


def _train_gpt(folder: Path, *arguments: str) -> Any:
    from examples.gpt import options, text, train

    given = [f"--data={folder / 'text'}", f"--out={folder}", "--size=tiny", "--save-every=9", *arguments]
    read = options.parse_options(given)
    corpus = text.load_corpus(read.data, context=31, max_bytes=read.max_bytes)
    return train.train(read, train.Place(dist.get_rank(), dist.get_world_size(), CPU), corpus)


@needs("lightning")
def test_lightning_trains_and_goes_on_with_other_ranks(lit_ranks: LitRanks, tmp_path: Path) -> None:
    first = lit_ranks(2).run(_fit, tmp_path, 1)[0]
    assert lit_ranks(1).run(_fit, tmp_path, 2)[0] < first


def _fit(folder: Path, epochs: int) -> float:
    from tests.helpers.lightning import Here, quiet

    checkpoints = sorted(folder.rglob("*.ckpt"))
    with quiet():
        loss: float = program("with_lightning").train(
            folder,
            epochs,
            resume=str(checkpoints[-1]) if checkpoints else None,
            accelerator="cpu",
            devices=dist.get_world_size(),
            plugins=[Here()],
        )
    return loss


@pytest.mark.parametrize("name", ["from_ddp/after.py", "from_fairscale", "from_fsdp1", "from_fsdp2"])
def test_it_goes_on_with_more_ranks_as_if_it_had_not_stopped(ranks: RankPool, tmp_path: Path, name: str) -> None:
    through = ranks(2).run(_train, name, tmp_path / "through", 4)[0]
    first = ranks(2).run(_train, name, tmp_path / "resumed", 2)[0]
    shutil.copytree(tmp_path / "resumed", tmp_path / "again")
    second = ranks(3).run(_train, name, tmp_path / "resumed", 4)[0]
    assert first + second == pytest.approx(through, rel=2e-3)  # in 16 bits, and in another order
    assert first + ranks(2).run(_train, name, tmp_path / "again", 4)[0] == through  # to the bit, on as many


def _train(name: str, folder: Path, steps: int) -> list[float]:
    losses: list[float] = program(name).train(CPU, folder, steps)
    return losses


@on_ranks(2)
def test_it_trains_as_with_ddp(tmp_path: Path) -> None:
    before, after = program("from_ddp/before.py"), program("from_ddp/after.py")
    for max_norm in (float("inf"), 0.5):
        theirs = before.train(CPU, tmp_path / f"theirs {max_norm}", steps=2, max_norm=max_norm)
        ours = after.train(CPU, tmp_path / f"ours {max_norm}", steps=2, max_norm=max_norm)
        if max_norm == float("inf"):
            assert ours == theirs  # to the bit, as docs/migration.md says
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_ddp_program_changes_in_a_few_places() -> None:
    before, after = (
        (ROOT / "examples" / "from_ddp" / f"{name}.py").read_text(encoding="utf-8").split('"""\n', 1)[1].splitlines()
        for name in ("before", "after")
    )
    edits = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    assert len([edit for edit in edits if edit[0] != "equal"]) <= 7
    assert len(after) < len(before)


@pytest.mark.parametrize("name", ["from_fairscale", "from_fsdp1", "from_fsdp2", "two_machines", "gan"])
def test_a_finished_training_says_how_to_go_on(ranks: RankPool, tmp_path: Path, name: str) -> None:
    first, again, shorter = (ranks(2).run(_train_and_print, name, tmp_path / name, steps)[0] for steps in (5, 5, 3))
    assert "to go on: --steps" not in first
    assert re.search(r"has all of 5 steps; to go on: --steps \d+\n$", again)
    assert shorter == again  # nothing was saved as an earlier step


def _train_and_print(name: str, folder: Path, steps: int) -> str:
    # Checkpoints every five steps instead of 20.
    example = program(name) if name == "gan" else program(name, before="% 20 == 19", after="% 5 == 4")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        example.train(CPU, folder, steps)
    return printed.getvalue()


@on_ranks(2)
def test_the_import_of_fairscale_may_stay(tmp_path: Path) -> None:
    compat = importlib.import_module("fsdp.compat.fairscale")
    ours = _train("from_fairscale", tmp_path / "ours", 2)
    compat.install()
    try:
        theirs = program("from_fairscale", before="from fsdp import", after="from fairscale.nn import")
        assert theirs.train(CPU, tmp_path / "theirs", 2) == ours
    finally:
        compat.uninstall()


@on_ranks(2)
def test_it_trains_as_with_torchs_fsdp1(tmp_path: Path) -> None:
    ours = _train("from_fsdp1", tmp_path / "ours", 3)
    known: dict[str, Any] = {}
    readme = (ROOT / "examples" / "from_fsdp1" / "README.md").read_text(encoding="utf-8")
    exec(readme.split("```python\n")[1].split("```")[0], known)
    example = program("from_fsdp1")
    example.shard = known["shard"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "save", lambda *args, **options: None)  # its own was another
        assert example.train(CPU, tmp_path / "theirs", 3) == pytest.approx(ours, rel=1e-3)


@on_ranks(2)
def test_it_trains_as_with_torchs_fsdp2(tmp_path: Path) -> None:
    theirs = program("from_fsdp2", before="from fsdp import", after="from torch.distributed.fsdp import")
    through = theirs.train(CPU, tmp_path / "theirs", 4)
    first = _train("from_fsdp2", tmp_path / "ours", 2)
    assert first == pytest.approx(through[:2], rel=1e-3)
    assert theirs.train(CPU, tmp_path / "ours", 4) == pytest.approx(through[2:], rel=1e-3)  # reads what ours has saved
