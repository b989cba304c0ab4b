"""The demo: what it counts and prints, and the whole of it on the local backend and on a cluster."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

DIGITS = Path(__file__).resolve().parents[1] / "sbatch_templates" / "digits"
EPOCHS = 8  # in its train.sbatch
KEYS = {
    "backend",
    "slurm_version",
    "components",
    "steps",
    "samples_expected",
    "samples_delivered",
    "samples_lost",
    "samples_duplicated",
    "trainer_wait_share",
    "accuracy",
    "elapsed_s",
    "elapsed_plain_s",
}
# As Slurm 22.05 prints a heterogeneous job of two components, shortened; it repeats the last line.
SCONTROL = """\
JobId=7 HetJobId=7 HetJobOffset=0 JobName=digits UserId=root(0) JobState={0} Reason=None NodeList=gpu0 \
NumNodes=1 NumCPUs=2 NumTasks=1 CPUs/Task=2 TRES=cpu=2,mem=8000M,node=1 TresPerNode=gres:gpu:1
JobId=8 HetJobId=7 HetJobOffset=1 JobName=digits UserId=root(0) JobState={1} Reason=None NodeList=cpu[0-1] \
NumNodes=2 NumCPUs=6 NumTasks=2 CPUs/Task=3 TRES=cpu=6,mem=24000M,node=2
JobId=8 HetJobId=7 HetJobOffset=1 JobName=digits UserId=root(0) JobState={1} Reason=None NodeList=cpu[0-1] \
NumNodes=2 NumCPUs=6 NumTasks=2 CPUs/Task=3 TRES=cpu=6,mem=24000M,node=2
"""


@pytest.fixture(scope="module")
def report() -> ModuleType:
    sys.path.insert(0, str(DIGITS))
    try:
        return import_module("report")
    finally:
        sys.path.remove(str(DIGITS))


def line(epoch: int, ids: list[int], split: str = "train") -> str:
    return json.dumps({"split": split, "epoch": epoch, "ids": ids})


def test_an_exact_ledger_counts_nothing_lost(report: ModuleType) -> None:
    lines = [line(0, [3, 1]), line(0, [2]), line(1, [1, 2, 3]), line(0, [9], "test"), line(1, [9], "test")]
    delivery = report.count_delivery(lines, {"train": [1, 2, 3], "test": [9]}, epochs=2)
    assert delivery == report.Delivery(steps=5, expected=8, delivered=8, lost=0, duplicated=0)


def test_a_sample_twice_does_not_hide_one_that_is_missing(report: ModuleType) -> None:
    delivery = report.count_delivery([line(0, [1, 1]), line(1, [1, 2])], {"train": [1, 2]}, epochs=2)
    assert (delivery.expected, delivery.delivered, delivery.lost, delivery.duplicated) == (4, 4, 1, 1)


def test_a_missing_epoch_is_lost_and_one_too_many_is_duplicated(report: ModuleType) -> None:
    assert report.count_delivery([line(0, [1])], {"train": [1]}, epochs=3).lost == 2
    assert report.count_delivery([line(0, [1]), line(1, [1])], {"train": [1]}, epochs=1).duplicated == 1
    assert report.count_delivery([], {"train": [1]}, epochs=1) == report.Delivery(0, 1, 0, 1, 0)


@given(st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=4))
def test_the_counts_balance(report: ModuleType, epochs: list[list[int]]) -> None:
    delivery = report.count_delivery([line(*batch) for batch in enumerate(epochs)], {"train": range(8)}, epochs=3)
    assert delivery.expected - delivery.lost + delivery.duplicated == delivery.delivered
    assert (delivery.lost == delivery.duplicated == 0) == ([Counter(ids) for ids in epochs] == [Counter(range(8))] * 3)


def test_components_come_from_scontrol(report: ModuleType) -> None:
    shown = SCONTROL.format("COMPLETED", "COMPLETED")
    assert report.components_of(shown) == (
        report.Component("trainer", 1, 2, 1, "gpu0"),
        report.Component("data_workers", 2, 6, 0, "cpu[0-1]"),
    )


@pytest.mark.parametrize(
    ("tres", "gpus"),
    [
        ("TresPerNode=gres:gpu:a100:2", 4),
        ("TresPerNode=gres/gpu:2", 4),
        ("TresPerNode=gres/gpu=2", 4),
        ("TresPerJob=gres/gpu:a100:3", 3),
        ("TresPerTask=cpu=2,gres/gpu=1", 8),
        ("TresPerNode=gres/shard:2", 0),
        ("", 0),
    ],
)
def test_gpus_are_read_in_every_spelling(report: ModuleType, tres: str, gpus: int) -> None:
    (component,) = report.components_of(
        f"JobId=1 JobState=RUNNING NodeList=g[0-1] NumNodes=2 NumCPUs=8 NumTasks=8 {tres}"
    )
    assert component.gpus == gpus


@pytest.mark.parametrize(
    ("states", "active", "completed"),
    [
        (("PENDING", "PENDING"), True, False),
        (("COMPLETED", "COMPLETING"), True, True),
        (("COMPLETED", "CANCELLED"), False, True),
        (("FAILED", "CANCELLED"), False, False),
        (("NODE_FAIL", "COMPLETED"), False, False),
    ],
)
def test_the_trainer_decides_whether_a_job_completed(
    report: ModuleType, states: tuple[str, str], active: bool, completed: bool
) -> None:
    shown = SCONTROL.format(*states)
    assert (report.active(shown), report.completed(shown)) == (active, completed)


def test_the_wait_share_weighs_loaders_by_their_time(report: ModuleType) -> None:
    loaders = [{"wait_s": 1.0, "elapsed_s": 10.0}, {"wait_s": 2.0, "elapsed_s": 2.0}]
    assert report.wait_share_of({"loaders": loaders}) == 0.25
    assert report.wait_share_of({"loaders": []}) == 0.0
    assert report.wait_share_of({"loaders": [{"wait_s": 2.1, "elapsed_s": 2.0}]}) == 1.0


def test_the_program_s_last_words_are_read(report: ModuleType) -> None:
    text = "epoch 1/2: loss 1.5, accuracy 0.8, 1.0 s\nepoch 2/2: loss 0.7, accuracy 0.9250, 1.0 s\ntrained in 2.1 s\n"
    assert report.read_output(text, 5.0) == report.Run(5.0, 2.1, 0.925)
    with pytest.raises(ValueError, match="without its last lines"):
        report.read_output("epoch 1/2: loss 1.5, accuracy 0.8, 1.0 s\n", 5.0)


def test_the_script_says_program_and_epochs(report: ModuleType) -> None:
    program, epochs = report.program_of((DIGITS / "train.sbatch").read_text())
    assert program[:2] == ["python", "train.py"]
    assert epochs > 0


def result(report: ModuleType, **changes: Any) -> Any:
    components = report.components_of(SCONTROL.format("COMPLETED", "COMPLETED"))
    delivery = report.Delivery(steps=57, expected=1797, delivered=1797, lost=0, duplicated=0)
    streamed, plain = report.Run(20.0, 12.0, 0.97), report.Run(15.0, 8.0, 0.98)
    whole = report.Result(
        backend="slurm",
        reason="a throw-away cluster",
        slurm_version="22.05.8",
        components=components,
        delivery=delivery,
        same_order=True,
        wait_share=0.125,
        streamed=streamed,
        plain=plain,
        machine_cpus=2,
        load_before=0.4,
    )
    return replace(whole, **changes)


def test_the_json_has_the_documented_keys(report: ModuleType) -> None:
    facts = json.loads(json.dumps(result(report).as_json()))
    assert set(facts) == KEYS
    assert facts["components"] == [
        {"role": "trainer", "nodes": 1, "cpus": 2, "gpus": 1},
        {"role": "data_workers", "nodes": 2, "cpus": 6, "gpus": 0},
    ]


def test_the_table_is_short_and_says_when_hetstream_is_slower(report: ModuleType) -> None:
    text = report.table(result(report))
    assert "Training took 50% longer with hetstream than without." in text
    assert "Every node is the same 2 cores here" in text
    assert "12.5%" in text
    assert len(text.splitlines()) < 25
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("seconds", "sentence"),
    [
        (7.0, "Training took 12% less time with hetstream than without."),
        (8.1, "Training took as long with hetstream as without it."),
    ],
)
def test_the_verdict_is_plain(report: ModuleType, seconds: float, sentence: str) -> None:
    assert report.verdict(result(report, streamed=report.Run(9.0, seconds, 0.9))).startswith(sentence)


def test_on_a_busy_machine_the_times_are_not_compared(report: ModuleType) -> None:
    assert "busy" not in report.verdict(result(report))
    busy = report.verdict(result(report, load_before=3.1))
    assert busy.startswith("The machine was busy (load 3.1) before the demo began: the times cannot be compared.\n")
    assert "hetstream than without" not in busy
    assert "seeds augmentation for each sample" in busy


def test_a_lost_repeated_or_misplaced_sample_fails_the_demo(report: ModuleType) -> None:
    assert result(report).passed
    assert not result(report, same_order=False).passed
    for lost, duplicated in ((1, 0), (0, 1)):
        assert not result(report, delivery=report.Delivery(57, 1797, 1797, lost, duplicated)).passed


def test_prepare_writes_every_digit_once(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(DIGITS / "prepare.py"), "digits.h5"], cwd=tmp_path, check=True, timeout=60)
    with h5py.File(tmp_path / "digits.h5") as file:
        ids = np.concatenate([file["train/ids"][:], file["test/ids"][:]])
        assert sorted(ids) == list(range(1797))
        assert file["train/images"].dtype == np.uint8
        assert file["train/images"][:].max() == 255
        assert len(file["test/labels"]) == len(file["test/images"]) == 360


def run_demo(tmp_path: Path, epochs: int, *options: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run the demo; with fewer epochs than it has, a copy."""
    folder, out = tmp_path / "digits", tmp_path / "demo.json"
    shutil.copytree(DIGITS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    script = (folder / "train.sbatch").read_text()
    assert f"--epochs {EPOCHS} " in script
    (folder / "train.sbatch").write_text(script.replace(f"--epochs {EPOCHS} ", f"--epochs {epochs} "))
    argv = [sys.executable, str(folder / "demo.py"), "--work-dir", str(tmp_path / "work"), "--json", str(out), *options]
    return subprocess.run(argv, capture_output=True, text=True, timeout=250, cwd=tmp_path), out


def check_demo(done: subprocess.CompletedProcess[str], out: Path, backend: str, epochs: int = EPOCHS) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    facts: dict[str, Any] = json.loads(out.read_text())
    assert set(facts) == KEYS
    assert facts["backend"] == backend
    assert facts["samples_expected"] == facts["samples_delivered"] == epochs * 1797
    assert facts["samples_lost"] == facts["samples_duplicated"] == 0
    assert epochs < EPOCHS or facts["accuracy"] > 0.9
    assert 0 <= facts["trainer_wait_share"] <= 1
    return facts


@pytest.mark.slow
def test_the_demo_on_the_local_backend(tmp_path: Path) -> None:
    done, out = run_demo(tmp_path, EPOCHS, "--local")
    facts = check_demo(done, out, "local")
    assert facts["slurm_version"] is None


@pytest.mark.slurm
@pytest.mark.parametrize("epochs", [1, pytest.param(EPOCHS, marks=pytest.mark.slow)])
def test_the_demo_on_a_cluster(tmp_path: Path, epochs: int) -> None:
    done, out = run_demo(tmp_path, epochs)
    facts = check_demo(done, out, "slurm", epochs)
    assert [(part["role"], part["nodes"], part["gpus"]) for part in facts["components"]] == [
        ("trainer", 1, 1),
        ("data_workers", 1, 0),
    ]
    assert "removed /var/lib/hetstream/devcluster/demo-" in done.stdout


@pytest.mark.slurm
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_demo_removes_its_cluster(tmp_path: Path, number: signal.Signals) -> None:
    argv = [sys.executable, str(DIGITS / "demo.py"), "--work-dir", str(tmp_path / "work")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        said = [next(text for text in process.stdout if " is up: " in text)]
        process.send_signal(number)
        said += process.stdout.readlines()
        assert process.wait(60) == 130, said
    assert f"removed /var/lib/hetstream/devcluster/demo-{process.pid}" in "".join(said)
    assert not os.path.exists(f"/var/lib/hetstream/devcluster/demo-{process.pid}")
