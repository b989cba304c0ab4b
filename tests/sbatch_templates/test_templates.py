"""Every template converts, is sound shell, and is accepted by Slurm; some are run."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hetstream.hetjob.convert.convert import convert
from hetstream.hetjob.convert.directives import read_directives
from hetstream.hetjob.convert.render import render
from hetstream.hetjob.convert.spec import read_spec

ROOT = Path(__file__).parents[2]
TEMPLATES = sorted((ROOT / "sbatch_templates").glob("*.sbatch"))
HETSTREAM = Path(sys.executable).with_name("hetstream")
PROGRAM = ROOT / "tests" / "cluster" / "programs" / "train.py"
by_name = pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)

# What each template's trainer keeps, and its data-worker component.
EXPECTED: dict[str, tuple[tuple[str, ...], str | None] | None] = {
    "checkpoint": (("--cpus-per-task=2", "--mem=56G", "--requeue"), "--ntasks=2"),
    "checkpoint-by-hand": None,
    "companions-only": (("--cpus-per-task=4",), None),
    "imagenet": ((), "--ntasks=3"),
    "horovod": (("--cpus-per-task=2",), "--ntasks=4"),
    "multi-gpu-ddp": (("--cpus-per-task=2",), "--ntasks=4"),
    "multi-node-ddp": (("--cpus-per-task=2",), "--ntasks=4"),
    "nnunet": ((), "--ntasks=6"),
    "single-gpu": (("--cpus-per-task=2",), "--ntasks=2"),
}


@by_name
def test_each_template_converts_to_sound_shell(template: Path) -> None:
    text = template.read_text()
    spec = read_spec(read_directives(text, template.name), template.name)
    if EXPECTED[template.stem] is None:
        assert spec is None
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        return
    assert spec is not None
    plan = convert(spec, text, template.name)
    result = render(text, plan, ("/opt/hetstream/bin/hetstream",))
    subprocess.run(["bash", "-n"], input=result, text=True, check=True)
    trainer, data_workers = EXPECTED[template.stem]  # type: ignore[misc]
    assert plan.components[0].options == trainer
    if data_workers is None:
        assert len(plan.components) == 1
        assert "#SBATCH hetjob" not in result
    else:
        assert plan.components[1].options[:3] == ("--partition=cpu", "--cpus-per-task=4", data_workers)
    begin, end = result.index("# >>> hetstream >>>"), result.index("# <<< hetstream <<<\n")
    assert result[:begin] + result[end:].removeprefix("# <<< hetstream <<<\n") == text


def test_the_readme_names_every_template() -> None:
    readme = (ROOT / "sbatch_templates" / "README.md").read_text()
    assert {template.stem for template in TEMPLATES} == EXPECTED.keys()
    assert all(f"`{template.name}`" in readme for template in TEMPLATES)


@pytest.mark.slurm
@by_name
def test_slurm_accepts_each_template(template: Path, devcluster: Any) -> None:
    done = subprocess.run(
        [HETSTREAM, "sbatch", "--test-only", template], env=dict(devcluster.env), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        pytest.param("single-gpu", ["--data-workers=1", "--data-worker-cpus=1"], 1, marks=pytest.mark.slow),
        pytest.param("companions-only", ["--data-workers=0-1", "--data-worker-cpus=1"], 1, marks=pytest.mark.slow),
        ("multi-gpu-ddp", ["--data-workers=1", "--data-worker-cpus=1", "--ntasks-per-node=2"], 2),
        pytest.param("imagenet", ["--data-workers=1", "--data-worker-cpus=1", "--nodes=1"], 2, marks=pytest.mark.slow),
    ],
)
def test_templates_run_on_real_slurm(
    name: str, options: list[str], size: int, devcluster: Any, wait_until: Callable[..., None]
) -> None:
    directory = devcluster.out_dir / name
    directory.mkdir()
    shutil.copy(ROOT / "sbatch_templates" / f"{name}.sbatch", directory)
    environ = dict(devcluster.env) | {
        "TRAIN_PY": str(PROGRAM),
        "DECODE_S": "0.002",
        "MASTER_ADDR": "127.0.0.1",  # this cluster's node names do not resolve
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{devcluster.env['PATH']}",
    }
    words = [HETSTREAM, "sbatch", "--parsable", *options, f"{name}.sbatch", "ledger-%r"]
    done = subprocess.run(words, cwd=directory, env=environ, capture_output=True, text=True, check=True, timeout=60)
    job_id = done.stdout.strip()
    active = ["squeue", "--noheader", "--states=PD,R,CG"]
    wait_until(lambda: not devcluster.run(*active), timeout_s=120, what="the end of the job and its companions")
    output = (directory / f"{name}-{job_id}.out").read_text()
    assert "ExitCode=0:0" in devcluster.run("scontrol", "show", "job", job_id), output
    lines = [line for rank in range(size) for line in (directory / f"ledger-{rank}").read_text().splitlines()]
    for epoch in ("0", "1"):
        ids = [int(number) for line in lines if line.startswith(f"{epoch} ") for number in line.split()[1].split(",")]
        assert sorted(ids) == list(range(640))
    job_directory = directory / ".hetstream" / f"job-{job_id}"
    assert (job_directory / "summary.json").exists()
    assert not (job_directory / "dispatcher").exists()


def test_the_program_of_the_imagenet_template_trains(tmp_path: Path) -> None:
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("no torchvision for this torch")
    draw = np.random.default_rng(0)
    for number in range(24):
        path = tmp_path / "images" / ("val" if number % 3 == 0 else "train") / f"class {number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (40, 60, 3), np.uint8)).save(path)
    words = ["--data", "images", "--model", "resnet18", "--size", "32", "--batch-size", "4", "--epochs", "2"]
    program = ROOT / "sbatch_templates" / "imagenet" / "train.py"
    done = subprocess.run(
        [sys.executable, program, *words], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["epoch 1/2", "epoch 2/2"]


@pytest.mark.shows("a Horovod that knows no other rank is refused among several; two ranks train as one")
@pytest.mark.slurm
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.every_release
def test_two_ranks_of_the_horovod_template_train_as_one(
    horovod_bin: Path, devcluster: Any, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    directory = devcluster.out_dir / "horovod"
    directory.mkdir()
    shutil.copy(ROOT / "sbatch_templates" / "horovod.sbatch", directory)
    program = Path(__file__).with_name("train_horovod.py")
    environ = dict(devcluster.env) | {
        "TRAIN_PY": str(program),
        "PATH": f"{horovod_bin}{os.pathsep}{devcluster.env['PATH']}",
    }

    def run_job(*words: str | Path) -> tuple[str, str]:
        argv = [horovod_bin / "hetstream", "sbatch", "--parsable", *words]
        done = subprocess.run(argv, cwd=directory, env=environ, capture_output=True, text=True, check=True, timeout=60)
        active = ["squeue", "--noheader", "--states=PD,R,CG"]
        wait_until(lambda: not devcluster.run(*active), timeout_s=180, what="the end of the job")
        shown = devcluster.run("scontrol", "show", "job", done.stdout.strip())
        return shown, (directory / f"horovod-{done.stdout.strip()}.out").read_text()

    options = ("--data-workers=1", "--data-worker-cpus=1", "--ntasks-per-node=2")
    shown, said = run_job(*options, "horovod.sbatch", "rank-%r.json", "16")
    assert "ExitCode=0:0" in shown, said
    ranks = [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [(rank["size"], rank["local_steps"]) for rank in ranks] == [(2, 0), (2, 0)], said
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("HETSTREAM_", "SLURM_"))}
    words = [horovod_bin / "python", program, tmp_path / "alone.json", "16"]
    subprocess.run(words, env=alone, check=True, timeout=120)
    reference = json.loads((tmp_path / "alone.json").read_text())["losses"]
    assert len(reference) == 40
    of_both = [sum(losses) / 2 for losses in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert of_both == pytest.approx(reference, rel=1e-4)

    # Without what the script tells the ranks, each would be the only one.
    bare = (directory / "horovod.sbatch").read_text().replace("export HOROVOD_RANK", "true HOROVOD_RANK")
    (directory / "bare.sbatch").write_text(bare)
    shown, said = run_job(*options, "bare.sbatch", "bare-%r.json", "16")
    assert "ExitCode=0:0" not in shown, said
    assert "hvd.size() is 1, and this process is one of several (SLURM_STEP_NUM_TASKS=2)" in said
    assert not [*directory.glob("bare-*.json")]
