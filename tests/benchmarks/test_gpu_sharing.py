"""`bench-gpu_sharing`: peers' laws, shapes of jobs, and the course of its experiments, on an emulated GPU or none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_antman, gpu_release, gpu_sharing
from benchmarks.clients import gpu_training
from benchmarks.clients.gpu_models import Job, job_of, resnet50, transformer, vgg16
from benchmarks.clients.gpu_peers import AntMan, Control, Tgs
from benchmarks.gpu_antman import Alone, Done
from benchmarks.gpu_interference import BURSTS, Seen, Shape
from benchmarks.gpu_laws import (
    LaunchRate,
    allotted_s,
    antman_idle_s,
    antman_percent,
    extrapolated_s,
    gaps_of,
    largest_difference,
    least_s,
    quantile,
    size_that_fills,
    tgs_rate,
)
from benchmarks.gpu_machines import CLIENTS, ON_CUDA, CudaMachine, Machine, OutOfTime, Run, Training, why_no_gpu
from benchmarks.harness import Row
from benchmarks.rap_mps import mps_service
from hetstream import HetstreamError
from tests.conftest import WaitUntil

ROOT = Path(__file__).resolve().parents[2]


def test_antmans_job_sleeps_so_that_it_runs_in_its_part_of_the_time() -> None:
    assert antman_idle_s(0.02, 100) == 0
    assert antman_idle_s(0.02, 25) == pytest.approx(0.06 - 50e-6)
    assert [antman_percent(30, slowdown) for slowdown in (1.0, 1.03, 1.04)] == [40, 40, 15]
    assert (antman_percent(95, 1.0), antman_percent(1, 2.0)) == (100, 1)


def test_the_rate_like_tgs_grows_by_a_factor_then_by_little_and_falls_by_a_factor() -> None:
    rate = tgs_rate(LaunchRate(1000), 1.0)
    assert rate == LaunchRate(1500)
    rate = tgs_rate(rate, 1.05)
    assert rate == LaunchRate(1000, 10)
    assert tgs_rate(rate, 1.0) == LaunchRate(1010, 10)
    assert tgs_rate(rate, 1.05) == LaunchRate(920, 10)
    assert tgs_rate(rate, 1.2) == LaunchRate(100), "much too much: from the beginning"


@pytest.mark.parametrize("duty", [0.3, 0.5, 0.7])
def test_gaps_leave_a_job_busy_in_its_part_of_the_time(duty: float) -> None:
    for is_long in (True, False):
        gaps = gaps_of(0.02, duty, BURSTS, is_long=is_long)
        assert len(gaps) == BURSTS
        assert 0.02 / (0.02 + sum(gaps)) == pytest.approx(duty)
    short = [gap for gap in gaps if gap]
    assert len(short) > 1
    assert max(short) < 0.01
    assert gaps_of(0.02, duty, BURSTS, is_long=False) == gaps, "the same each time"


def test_what_is_left_of_a_stopped_job_is_extrapolated() -> None:
    assert extrapolated_s(10.0, 5, 20) == 40.0
    assert least_s(2.0, 10.0, 0.5) == 4.0, "it ends beside the other one"
    assert least_s(8.0, 10.0, 0.5) == 13.0, "3 s of it are left then"


def test_a_batch_fills_memory_that_grows_evenly() -> None:
    assert size_that_fills((32, 128), (3_000, 9_000), 30_000) == 464
    with pytest.raises(ValueError, match="no batch fits"):
        size_that_fills((32, 128), (3_000, 9_000), 100)
    with pytest.raises(ValueError, match="need 3,000 and 3,000 bytes"):
        size_that_fills((32, 128), (3_000, 3_000), 30_000)


def test_quantiles_and_differences_of_losses() -> None:
    values = list(range(1, 101))
    assert [quantile(values, part) for part in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert quantile([7.0], 0.99) == 7
    assert largest_difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="zip"):
        largest_difference([1.0], [1.0, 2.0])


def test_experiments_have_their_part_of_the_time_and_leave_the_others_half_of_theirs() -> None:
    assert allotted_s({"a": 100, "b": 300}, 200) == (50, 125)
    assert allotted_s({"b": 300}, 80) == (80, 80)
    assert allotted_s({"b": 300}, -5) == (0, 0)
    assert sum(gpu_sharing._PLANNED_S.values()) <= 1.15 * gpu_sharing._LIMIT_S, "little has to be shorter"


class Clock:
    """Time that passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_antmans_job_looks_once_a_second_and_spreads_its_sleep_over_launches(tmp_path: Path) -> None:
    config, clock = tmp_path / "antman.json", Clock()
    config.write_text('{"perfControl": 50}')
    pacer = AntMan(config, dict, clock, clock.sleep)
    for _ in range(10):
        pacer.before_launch()
    assert clock.now_s == 100, "nothing is known of the mini-batch before"
    pacer.end_step(0.1)
    for _ in range(10):
        pacer.before_launch()
    assert clock.now_s == pytest.approx(100.1, abs=1e-3), "as long as it ran"
    config.write_text('{"perfControl": 100}')
    pacer.end_step(0.2)
    assert pacer._idle_s_per_launch > 0, "it has not looked yet"
    clock.sleep(1)
    pacer.end_step(0.2)
    assert pacer._idle_s_per_launch == 0


def test_a_job_like_that_of_tgs_launches_at_its_rate_and_ends_its_step_when_it_is_to_pause() -> None:
    told: dict[str, Any] = {"rate_per_s": 100.0}
    clock = Clock()
    pacer = Tgs(lambda: told, clock, clock.sleep)
    for _ in range(20):
        pacer.before_launch()
    assert clock.now_s == pytest.approx(100.2, abs=0.02)
    told["pause"] = True
    for _ in range(2000):
        pacer.before_launch()
    assert clock.now_s < 100.25


def test_a_program_takes_over_gaps_and_pacing_at_its_next_step(tmp_path: Path) -> None:
    path, config = tmp_path / "control", tmp_path / "antman.json"
    config.write_text('{"perfControl": 100}')

    def tell(**what: object) -> None:
        (tmp_path / "new").write_text(json.dumps(what))
        (tmp_path / "new").replace(path)

    tell(gaps_s=[0.0, 0.5])
    control = Control(str(path), 2)
    control.begin_step()
    assert control.gaps == [0.0, 0.5]
    tell(pacing="antman", antman=str(config))
    control.begin_step()
    assert control.gaps == [0.0, 0.0]
    torch.ones(2) + 1
    assert isinstance(control._pacer, AntMan)
    assert control._pacer._launches == 2
    tell()
    control.begin_step()
    assert control._pacer is None


def test_models_are_those_that_they_are_called() -> None:
    with torch.device("meta"):
        sizes = [
            sum(tensor.numel() for tensor in model.parameters())
            for model in (resnet50(), vgg16(), transformer(2048, 20))
        ]
    assert sizes == [25_557_032, 138_357_544, 1_007_165_440]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "request_",
    [
        {"model": "gcn", "width": 8, "nodes": 50, "degree": 4, "classes": 3},
        {"model": "resnet50", "side": 32, "size": 2},
        {"model": "transformer", "width": 128, "layers": 1, "tokens": 4, "size": 2},
        {"width": 8, "rows": 4, "layers": 1},
    ],
    ids=lambda request_: request_.get("model", "mlp"),
)
def test_each_model_has_gradients(request_: dict[str, Any]) -> None:
    torch.manual_seed(0)
    job = job_of(request_, "cpu")
    job.loss_of(job.batch_of(job.size)).backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in job.model.parameters())


@pytest.mark.filterwarnings("ignore:Sparse")
def test_the_gradient_over_a_graph_is_that_of_a_dense_matrix() -> None:
    torch.manual_seed(0)
    job = job_of({"model": "gcn", "width": 8, "nodes": 50, "degree": 4, "classes": 3}, "cpu")
    matrix, features, classes = job.batch_of(50)
    job.loss_of((matrix, features, classes)).backward()
    found = [tensor.grad.clone() for tensor in job.model.parameters() if tensor.grad is not None]
    job.model.zero_grad()
    dense, first, second = matrix.to_dense(), job.model.first, job.model.second
    hidden = torch.relu(dense @ first(features))  # type: ignore[operator]
    torch.nn.functional.cross_entropy(dense @ second(hidden), classes).backward()  # type: ignore[operator]
    for one, tensor in zip(found, job.model.parameters(), strict=True):
        torch.testing.assert_close(one, tensor.grad)
    assert torch.equal(dense, dense.T)


ALONE = Alone(Done(100, 9.8, (1.0, 0.5)), Done(50, 4.8, (3.0, 2.0)), 0, 0.25, "both")


def rows_of(mode: str, a: Done, b: Done, preempted: Done | None = None) -> dict[str, Row]:
    found = gpu_antman._rows(mode, {"A": a, "B": b}, ALONE, preempted, is_judged=True)
    return {f"{row.case}: {row.system}": row for row in found}


def test_real_jobs_are_judged_as_antmans_are() -> None:
    b = Done(50, 4.83, (3.0, 2.0), first_s=2.0)
    rows = rows_of("hetstream", Done(100, 12.0, (1.0, 0.5001)), b, preempted=Done(50, 4.8))
    row = rows["real jobs: B: hetstream / Preempt"]
    assert (row.value, row.target, row.met) == (pytest.approx(1.00625), "<= 1.01", True)
    row = rows["real jobs: A: hetstream / alone"]
    assert (row.target, row.met) == ("<= 1.03", False)
    assert row.note.startswith("at least 1.37: B leaves 25%"), "what 3.92 s of work take beside 4.8 s of B"
    assert rows["real jobs: losses of B: hetstream: largest difference from alone"].note == "the same to the bit"
    assert rows["real jobs: losses of A: hetstream: largest difference from alone"].met is True


def test_a_mode_that_fails_has_rows_that_say_why() -> None:
    failed = Done(0, None, note="HetstreamError: no driver")
    rows = rows_of("hetstream", failed, failed)
    assert all(row.value is None or "first" in row.system for row in rows.values())
    assert rows["real jobs: B: hetstream / alone"].target == "<= 1.01", "it counts as not compared"
    assert rows["real jobs: B: hetstream / alone"].note == "HetstreamError: no driver"
    out = Done(0, None, note="torch.OutOfMemoryError: CUDA out of memory.")
    assert rows_of("Pack", Done(100, 9.8), out)["real jobs: B: Pack runs out of memory"].met is True
    assert rows_of("Pack", Done(100, 9.8), Done(50, 4.8))["real jobs: B: Pack runs out of memory"].met is False


def test_a_stopped_job_is_extrapolated_to_all_its_steps() -> None:
    rows = rows_of("UMem", Done(100, 9.8), Done(14, 9.6, note="stopped after 14 steps, and extrapolated"))
    assert rows["real jobs: B: UMem / alone"].value == pytest.approx(8.0)


def test_interference_is_judged_on_a_real_gpu_alone() -> None:
    from benchmarks.gpu_interference import _rows

    alone = Seen((0.04,) * 10, (0.02,) * 10, 0.0)
    beside = Seen((0.041,) * 99 + (0.08,), (0.02,) * 100, 45.0)
    rows = {
        row.system: row
        for row in _rows(Shape(0.5, False), (alone, alone), {"hetstream": beside}, 100.0, is_judged=True)
    }
    assert rows["hetstream: guaranteed, mean step / alone"].met is False
    assert rows["hetstream: guaranteed, p99 / p99 alone"].met is True
    assert rows["hetstream: opportunistic / what is left"].value == pytest.approx(0.9)
    assert rows["hetstream: opportunistic / what is left"].target == ">= 0.5"
    rows = {
        row.system: row for row in _rows(Shape(0.5, True), (alone, alone), {"TGS-like": beside}, 100.0, is_judged=True)
    }
    assert all(row.target is None for row in rows.values()), "peers have no goals"


def test_shrinking_has_two_goals_on_a_real_gpu() -> None:
    node = object.__new__(CudaMachine)
    node.sizes = ON_CUDA
    found = {
        "shrink_ms": [10.0] * 29 + [50.0],
        "seen_ms": [1.0],
        "grow_ms": [70.0],
        "step_ms": [200.0],
        "freed_bytes": 0,
    }
    rows = {row.system: row for row in gpu_release.rows(node, Run(False, Path()), "case", found)}
    assert (rows["shrink"].target, rows["shrink"].met) == ("<= 17", True)
    assert (rows["shrink, p99"].target, rows["shrink, p99"].met) == ("<= 40", False)
    assert (rows["grow"].target, rows["grow"].met) == ("<= 60", False)
    assert rows["seen"].target is None


def test_an_experiment_that_fails_keeps_its_rows_and_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(node: Machine, run: Run) -> Iterator[Row]:
        """Fails."""
        yield Row("first", "x", 1.0, "s")
        raise RuntimeError("CUDA error")

    def second(node: Machine, run: Run) -> Iterator[Row]:
        """Takes too long."""
        yield Row("second", "x", 1.0, "s")
        raise OutOfTime

    def third(node: Machine, run: Run) -> Iterator[Row]:
        """Is there."""
        yield Row("third", f"{run.seconds:.0f}", 1.0, "s")

    monkeypatch.setattr(gpu_sharing, "ALL", {"first": first, "second": second, "third": third})
    node = object.__new__(CudaMachine)
    rows, failures = gpu_sharing.run_all(node, ["first", "second", "third"], Run(True, tmp_path), 500)
    assert [row.case for row in rows] == ["first", "second", "third"]
    assert failures["first"] == "RuntimeError: CUDA error"
    assert "too busy" in failures["second"]
    assert rows[-1].system == "500", "what the others left"


def test_without_a_gpu_each_experiment_says_why_it_is_not_there(tmp_path: Path) -> None:
    if why_no_gpu() == "":
        pytest.skip("there is a GPU")
    command = [sys.executable, "-m", "benchmarks.gpu_sharing", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "gpu_sharing.json").read_text())["rows"]
    assert [row["case"] for row in rows] == [
        "probe", "real jobs", "release", "interference", "coordinator killed", "allocator",
    ]  # fmt: skip
    assert all(row["value"] is None and "no CUDA device" in row["note"] for row in rows)


def test_what_one_gpu_alone_can_do_is_not_asked_of_an_emulated_one() -> None:
    assert gpu_sharing.chosen_names("", on_cpu=True) == ["table 2", "figure 10", "figure 11", "release", "figure 12"]
    assert gpu_sharing.chosen_names("real,table", on_cpu=True) == ["table 2", "real jobs"]
    with pytest.raises(SystemExit, match="no such system"):
        gpu_sharing.chosen_names("probe", on_cpu=True)
    assert "figure 12" in gpu_sharing.chosen_names("figure", on_cpu=False)


def test_a_program_waits_for_its_files_and_says_what_it_did(tmp_path: Path) -> None:
    go = tmp_path / "go"
    request = {"width": 8, "rows": 4, "layers": 1, "wait_ms": 0, "steps": 3, "to_gpu": str(go), "go": str(go)}
    argv = [sys.executable, str(CLIENTS / "gpu_training.py"), json.dumps(request)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        go.touch()
        lines = process.stdout.read().splitlines()
    assert process.returncode == 0
    (tmp_path / "out").write_text("\n".join(lines) + "\n")
    training = Training(process, tmp_path / "out", tmp_path / "none")  # type: ignore[arg-type]
    assert training.said("ready") == ""
    assert training.said("size") is None
    assert len(training.steps()) == 3
    assert len(json.loads(training.said("losses") or "")) == 3


def test_batches_fill_the_memory_that_two_of_them_tell_of(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000 + 10 * asked[-1])

    def job(request: dict[str, Any], device: str) -> Job:
        made = job_of({"width": 4, "rows": 1, "layers": 1}, device)

        def batch_of(size: int) -> torch.Tensor:
            asked.append(size)
            return torch.ones(size, 4)

        return replace(made, batch_of=batch_of)

    monkeypatch.setattr(gpu_training, "job_of", job)
    assert gpu_training.filling({"fill_bytes": 5000, "try_sizes": (4, 12)}, "cpu") == 400
    assert asked == [4, 4, 12]


def mps_control(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Put something in the place of NVIDIA's command."""
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_mps_is_there_as_long_as_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tmp_path / "seen"
    mps_control(tmp_path, monkeypatch, f'echo "$1 $CUDA_MPS_PIPE_DIRECTORY" >> {seen}; [ "$1" ] || cat >> {seen}')
    with mps_service() as environment:
        assert Path(environment["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
        assert seen.read_text() == f"-d {environment['CUDA_MPS_PIPE_DIRECTORY']}\n"
        assert set(environment) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
    assert seen.read_text().endswith("quit\n")
    assert not Path(environment["CUDA_MPS_PIPE_DIRECTORY"]).exists()


def test_mps_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mps_control(tmp_path, monkeypatch, "echo no such device >&2; exit 1")
    with pytest.raises(RuntimeError, match="MPS: no such device"), mps_service():
        pass


def test_a_coordinator_that_does_not_start_is_told_at_once(tmp_path: Path) -> None:
    node = object.__new__(CudaMachine)
    node.socket = tmp_path / "gpu.sock"
    says = "the coordinator did not start: .*--gpu nonsense"
    with pytest.raises(HetstreamError, match=says), node._coordinated("nonsense"):
        pass


def test_a_benchmark_that_is_killed_leaves_no_program_behind(tmp_path: Path, wait_until: WaitUntil) -> None:
    program = (
        "import os, pathlib, signal, sys\n"
        "from benchmarks.gpu_machines import EmulatedMachine\n"
        "from hetstream.hetjob.gpu.orders import JobClass\n"
        "node = EmulatedMachine(pathlib.Path(sys.argv[1]))\n"
        "never = {**node.sizes.small, 'wait_ms': 0, 'to_gpu': sys.argv[1] + '/never'}\n"
        "with node.coordinator() as coordinator, node.train(JobClass.OPPORTUNISTIC, never) as training:\n"
        "    print(coordinator.pid, training.process.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    argv = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    pids = done.stdout.split()
    assert len(pids) == 2, done.stderr
    for pid in pids:
        wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists())
