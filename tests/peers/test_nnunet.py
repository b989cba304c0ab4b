"""batchgenerators' augmenters and nnU-Net's training, unmodified: the same batches and losses under the hook.

The packages are those of `make test-peers`; what is missing skips the test.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import running_cluster
from tests.devcluster.spec import ClusterShape

PROGRAMS = Path(__file__).parent / "programs"
_TORCHVISION = Path(sys.prefix, "torchvision")  # nnunetv2's networks ask for it
_STEPS = 60  # of two epochs
_DATA_WORKER = b"internal\0worker"


def _needs(*packages: str) -> None:
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        pytest.skip(f"the packages that peers' tests need are not installed: {missing[0]}")


def _environment(**variables: str) -> dict[str, str]:
    found = {key: value for key, value in os.environ.items() if not key.startswith(("HETSTREAM_", "SLURM_"))}
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(_TORCHVISION)]))
    return found | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path} | variables


def _hetstream(data_workers: int, summary: Path | None = None) -> list[str]:
    command = [sys.executable, "-m", "hetstream.slurm_plugin.cli", "run", "--data-workers", str(data_workers)]
    return [*command, *(["--json", str(summary)] if summary else []), "--"]


def _streamed_steps(summary: Path) -> int:
    return sum(each["steps"] - each["local_steps"] for each in json.loads(summary.read_text())["loaders"])


def _output(command: Sequence[str], **variables: str) -> str:
    done = subprocess.run(command, env=_environment(**variables), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_with_seeds_a_deterministic_augmenter_gives_what_it_gives_alone(tmp_path: Path) -> None:
    _needs("batchgenerators")
    program, summary = [sys.executable, str(PROGRAMS / "augmenters.py"), "deterministic"], tmp_path / "summary.json"
    expected = _output(program)
    assert len(expected.splitlines()) == 4 * 14 + 1
    assert _output([*_hetstream(2, summary), *program], BREAK_S="3") == expected
    assert _streamed_steps(summary) > 0


def test_each_rank_has_batches_of_its_own_from_the_seed(tmp_path: Path) -> None:
    _needs("batchgenerators")

    def both(name: str, data_workers: int) -> list[str]:
        program = [sys.executable, str(PROGRAMS / "augmenters.py"), "two-ranks", str(tmp_path / name)]
        script = " & ".join(f"RANK={rank} {' '.join(program)} {rank} >{tmp_path}/{name}.{rank}" for rank in range(2))
        command = [*_hetstream(data_workers), "bash", "-c", f"export WORLD_SIZE=2; {script} & wait -n && wait -n"]
        _output(command, HETSTREAM_SEED="5", BREAK_S="3")
        return [Path(f"{tmp_path}/{name}.{rank}").read_text() for rank in range(2)]

    expected = both("plain", 0)
    assert [len(rank.splitlines()) for rank in expected] == [60, 60]
    assert expected[0] != expected[1]
    assert both("streamed", 2) == expected


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    _needs("nnunetv2", "SimpleITK")
    place = tmp_path_factory.mktemp("nnunet")
    variables = {f"nnUNet_{name}": str(place / name) for name in ("raw", "preprocessed", "results")}
    _output([sys.executable, str(PROGRAMS / "nnunet.py"), "data", "5", "48"], **variables)
    return variables


class _Training:
    """nnU-Net's training under the hook, in a folder of its own."""

    def __init__(self, folders: dict[str, str], place: Path) -> None:
        self._variables = folders | {"nnUNet_results": str(place), "nnUNet_n_proc_DA": "2", "HETSTREAM_SEED": "5"}
        self._variables["nnUNet_compile"] = "f"
        self.place, self._summary = place, place.with_suffix(".json")

    def environment(self, step_s: float) -> dict[str, str]:
        """What it runs with."""
        return _environment(**self._variables, STEP_S=str(step_s))

    def steps(
        self, data_workers: int, *options: str, fold: int = 0, step_s: float = 0, dies_at: int | None = None,
        who: bytes = b"nnunet.py",
    ) -> list[str]:  # fmt: skip
        """Losses and cases of its steps; its program, or one data worker, is killed after one of them."""
        program = [sys.executable, "-u", str(PROGRAMS / "nnunet.py"), "train", "900", "3d_fullres", str(fold)]
        command = [*_hetstream(data_workers, self._summary), *program, "-device", "cpu", *options]
        environment = self.environment(step_s)
        found: list[str] = []
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            guard = threading.Timer(280, process.terminate)
            guard.start()
            assert process.stdout is not None
            for line in process.stdout:
                found += [line] if line.startswith("STEP") else []
                if len(found) == dies_at and line.startswith("STEP"):
                    self._kill(process.pid, who)
            guard.cancel()
        assert (process.wait() == 0) == (dies_at is None or who == _DATA_WORKER)
        return found

    def _kill(self, parent: int, who: bytes) -> None:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        found = [child for child in children if who in Path(f"/proc/{child}/cmdline").read_bytes()]
        os.kill(int(found[0]), signal.SIGKILL)

    def streamed_steps(self) -> int:
        return _streamed_steps(self._summary)


@pytest.mark.slow
def test_nnunets_losses_are_those_of_a_run_without_data_workers(folders: Any, tmp_path: Path) -> None:
    alone, streamed = _Training(folders, tmp_path / "alone"), _Training(folders, tmp_path / "streamed")
    expected = alone.steps(0)
    assert len(expected) == _STEPS
    assert streamed.steps(2, step_s=0.3) == expected
    assert streamed.streamed_steps() > 0


@pytest.mark.slow
def test_losses_are_the_same_when_a_data_worker_is_killed(folders: Any, tmp_path: Path) -> None:
    expected = _Training(folders, tmp_path / "alone").steps(0)
    hurt = _Training(folders, tmp_path / "hurt")
    assert hurt.steps(2, step_s=0.3, dies_at=_STEPS * 2 // 3, who=_DATA_WORKER) == expected
    assert hurt.streamed_steps() > 0


@pytest.mark.slow
def test_a_resumed_training_goes_on_with_the_batches_of_one_that_was_not(folders: Any, tmp_path: Path) -> None:
    expected = _Training(folders, tmp_path / "alone").steps(0)
    killed = _Training(folders, tmp_path / "killed")
    assert killed.steps(2, dies_at=_STEPS * 3 // 4)[: _STEPS // 2] == expected[: _STEPS // 2]
    assert killed.steps(2, "--c") == expected[_STEPS // 2 :]


@pytest.mark.slow
def test_another_fold_trains_and_is_validated(folders: Any, tmp_path: Path) -> None:
    alone, streamed = _Training(folders, tmp_path / "alone"), _Training(folders, tmp_path / "streamed")
    expected = alone.steps(0, fold=1)
    assert expected != alone.steps(0, fold=0)
    assert streamed.steps(2, fold=1, step_s=0.3) == expected
    assert streamed.streamed_steps() > 0
    metrics = [
        json.loads(next(place.rglob("fold_1/**/summary.json")).read_text()) for place in (alone.place, streamed.place)
    ]
    assert metrics[0]["foreground_mean"] == metrics[1]["foreground_mean"]


@pytest.mark.slurm
@pytest.mark.slow
def test_a_job_of_slurm_trains_as_a_run_without_data_workers(folders: Any, tmp_path: Path) -> None:
    expected = _Training(folders, tmp_path / "alone").steps(0)
    with running_cluster("nnunet", ClusterShape(gpu_nodes=1, cpu_nodes=2)) as cluster:
        place = cluster.directory("job")
        script = place / "nnunet.sbatch"
        train = f"{sys.executable} -u {PROGRAMS / 'nnunet.py'} train 900 3d_fullres 0 -device cpu"
        script.write_text(
            f"#!/bin/bash\n#SBATCH --gres=gpu:1 --output={place}/output\n"
            f"#HETSTREAM --data-workers=2 --data-worker-cpus=1 --data-worker-partition=cpu\nsrun {train}\n"
        )
        environment = _Training(folders, place / "results").environment(step_s=0.3)
        kept = {
            key: value
            for key, value in environment.items()
            if key.startswith(("nnUNet_", "HETSTREAM_", "STEP_S", "PYTHONPATH", "CUDA"))
        }
        done = cluster.attempt(
            sys.executable, "-m", "hetstream.slurm_plugin.cli", "sbatch", "--wait", str(script), cwd=place, **kept
        )
        output = (place / "output").read_text()
        assert done.returncode == 0, done.stderr + output
        assert [line for line in output.splitlines(keepends=True) if line.startswith("STEP")] == expected
        summary = next((place / ".hetstream").rglob("summary.json"))
        assert _streamed_steps(summary) > 0
