"""The course of `bench-gpu_sharing` on a real GPU, with programs in the place of those that need one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_antman, gpu_interference, gpu_machines, gpu_release, gpu_sharing
from benchmarks.gpu_machines import ON_CUDA, CudaMachine, Run
from benchmarks.harness import Row

# Does what `clients/gpu_training.py` does with files and lines, and computes nothing.
PROGRAM = """
import json, os, sys, time
request = json.loads(sys.argv[1])
with open(os.path.join(os.path.dirname(__file__), "requests"), "a") as file:
    seen = {name: text for name, text in os.environ.items() if name.startswith(("HETSTREAM_", "CUDA_MPS"))}
    file.write(json.dumps([request, seen]) + "\\n")
def wait_for(path):
    while path and not os.path.exists(path):
        time.sleep(0.001)
def told():
    return json.load(open(request["control"])) if "control" in request else {}
print("imported", flush=True)
wait_for(request.get("to_gpu"))
if "fill_bytes" in request:
    print("size 352")
print("ready", flush=True)
wait_for(request.get("go"))
end_s, losses = time.monotonic() + request.get("seconds", 1e9), []
for number in range(request.get("steps", 10**9)):
    while told().get("pause"):
        time.sleep(0.001)
    time.sleep(0.003)
    now_ns = time.monotonic_ns()
    print(now_ns, 3_000_000, flush=True)
    time.sleep(sum(told().get("gaps_s") or [0]))
    losses.append(1.0)
    if time.monotonic() > end_s and number + 1 >= request.get("least_steps", 1):
        break
print("peak 3000000000")
print("losses", json.dumps(losses), flush=True)
"""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaMachine:
    """A real GPU's machine that has none."""
    monkeypatch.setattr(gpu_machines, "CLIENTS", tmp_path)
    (tmp_path / "gpu_training.py").write_text(PROGRAM)
    made = object.__new__(CudaMachine)
    gpu_machines._Programs.__init__(made, tmp_path, ON_CUDA)
    made._capacity_bytes = ON_CUDA.capacity_bytes
    gpu_machines.end_by(200)
    monkeypatch.setattr(gpu_interference, "_QUICK", 0.05)
    monkeypatch.setattr(gpu_interference, "_QUIET_S", 0.05)
    return made


@pytest.fixture
def no_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something in its place that decides nothing."""

    @contextlib.contextmanager
    def coordinated(self: object, gpu: str) -> Iterator[subprocess.Popen[bytes]]:
        assert gpu == f"GPU-of-this-benchmark={ON_CUDA.capacity_bytes}"
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            yield process
            process.kill()

    monkeypatch.setattr(CudaMachine, "_coordinated", coordinated)


def asked(folder: Path) -> list[tuple[dict[str, Any], dict[str, str]]]:
    return [tuple(json.loads(line)) for line in (folder / "requests").read_text().splitlines()]


@pytest.mark.usefixtures("no_coordinator")
def test_real_jobs_run_in_all_modes(node: CudaMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = []

    def suspend(pid: int, library: object) -> None:
        stopped.append(pid)
        os.kill(pid, signal.SIGSTOP)

    monkeypatch.setattr(gpu_antman, "driver", object)
    monkeypatch.setattr(gpu_antman, "suspend", suspend)
    monkeypatch.setattr(gpu_antman, "resume", lambda pid, library: os.kill(pid, signal.SIGCONT))
    monkeypatch.setattr(gpu_antman, "_MODES", ("Preempt", "UMem", "hetstream", "suspend A"))
    rows: dict[str, Row] = {}
    run = Run(False, tmp_path, 0.03 * gpu_antman.PLANNED_S)
    for row in gpu_antman.real_jobs(node, run):
        rows[f"{row.case.removeprefix('real jobs: ')}: {row.system}"] = row
    assert stopped
    assert (rows["B: hetstream / Preempt"].target, rows["A: hetstream / alone"].target) == ("<= 1.01", "<= 1.03")
    assert (rows["A: suspend A / alone"].value or 0) > 1.2, "it stood still while B was there"
    assert "352 samples" in rows["A: FIFO / alone"].note
    assert rows["losses of A: suspend A: largest difference from alone"].met
    requests = asked(tmp_path)
    large = [(request, seen) for request, seen in requests if request["model"] == "resnet50"]
    assert [request.get("size") for request, _ in large] == [None, 352, 352, 352, 352], "found once, then the same"
    assert [request.get("host_bytes", 0) >> 30 for request, _ in large] == [0, 0, 6, 0, 0]
    assert [seen.get("HETSTREAM_JOB_CLASS") for _, seen in large] == [None, None, None, "guaranteed", None]
    assert {len(seen) for request, seen in requests if request["model"] == "gcn"} == {0, 4}


@pytest.mark.usefixtures("no_coordinator")
def test_interference_has_all_systems_also_under_mps(
    node: CudaMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text("#!/bin/sh\nexit 0\n")
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    rows = list(gpu_interference.interference(node, Run(True, tmp_path)))
    assert all(row.value is not None for row in rows), [row for row in rows if row.value is None]
    systems = {row.system.partition(":")[0] for row in rows}
    assert systems == {"packed", "AntMan", "TGS-like", "hetstream", "MPS", "MPS, 30 %", "MPS, priority"}
    assert len({row.case for row in rows}) == 2
    under_mps = [seen for _, seen in asked(tmp_path) if "CUDA_MPS_PIPE_DIRECTORY" in seen]
    assert [seen.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") for seen in under_mps].count("30") == 1
    assert [seen.get("CUDA_MPS_CLIENT_PRIORITY") for seen in under_mps].count("1") == 1
    assert len(under_mps) == 4
    assert not any("HETSTREAM_GPU" in seen for seen in under_mps)


def test_a_coordinator_that_cannot_be_started_does_not_end_the_run(node: CudaMachine, tmp_path: Path) -> None:
    """Also the programs' clients fail here: there are none."""
    rows, failures = gpu_sharing.run_all(node, ["probe", "release", "allocator"], Run(True, tmp_path), 200)
    assert set(failures) == {"probe", "allocator"}
    assert "gpu_probe.py ended with 2" in failures["probe"]
    assert len(rows) == 6, "three models with two allocators, each with its reason"
    assert all("can't open file" in row.note for row in rows)


def test_three_models_shrink_with_two_allocators(node: CudaMachine, tmp_path: Path) -> None:
    (tmp_path / "gpu_release.py").write_text(
        "import json, os, sys\n"
        "request = json.loads(sys.argv[1])\n"
        "is_expandable = 'expandable' in os.environ.get('PYTORCH_CUDA_ALLOC_CONF', '')\n"
        "is_expandable = is_expandable and request['model'] != 'vgg16'\n"
        "assert request['gpu'] == '' and request['fill_bytes'] == 17_600_000_000\n"
        "found = {'shrink_ms': [5.0], 'seen_ms': [], 'grow_ms': [9.0], 'step_ms': [200.0], 'freed_bytes': 2**34}\n"
        "print(json.dumps({**found, 'expandable': is_expandable}))\n"
    )
    rows = list(gpu_release.release(node, Run(False, tmp_path, gpu_release.PLANNED_S)))
    assert len({row.case for row in rows}) == 6
    (wrong,) = [row for row in rows if "VGG-16, expandable" in row.case]
    assert wrong.note == "this PyTorch did not do as its variable says"
    goals = [row for row in rows if row.target]
    assert len(goals) == 15, "shrink twice and grow once, of five"
    assert all(row.met for row in goals)


def test_the_kill_of_a_coordinator_is_judged(node: CudaMachine, tmp_path: Path) -> None:
    """The coordinator is a real one. The programs know nothing of it: that the opportunistic one goes on is seen."""
    rows = {row.system: row for row in gpu_interference.coordinator_killed(node, Run(True, tmp_path))}
    assert rows["opportunistic, from 1 s on"].met is False
    assert (rows["opportunistic, its last step"].value or 0) > 1000
    assert rows["guaranteed job alone, hetstream / no agent"].value is not None
