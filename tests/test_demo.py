"""The demo: what it counts and prints, and the whole of it on the local backend and on a cluster."""

from __future__ import annotations

import json
import os
import re
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
from xml.etree import ElementTree

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

DIGITS = Path(__file__).resolve().parents[1] / "sbatch_templates" / "digits"
EPOCHS = 6  # in its train.sbatch
KEYS = {
    "backend",
    "slurm_version",
    "components",
    "steps",
    "samples_expected",
    "samples_delivered",
    "samples_lost",
    "samples_duplicated",
    "cores",
    "steps_compared",
    "steps_differing",
    "samples_per_s",
    "samples_per_s_plain",
    "trainer_wait_share",
    "trainer_wait_share_plain",
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


def test_compared_steps_are_those_of_all_loaders(report: ModuleType) -> None:
    loaders = [{"compared_steps": 70, "differing_steps": 0}, {"compared_steps": 12, "differing_steps": 1}]
    assert report.compared_of({"loaders": loaders}) == (82, 1)
    assert report.compared_of({"loaders": []}) == (0, 0)


def test_the_program_s_last_words_are_read(report: ModuleType) -> None:
    first = "epoch 1/2: loss 1.5, accuracy 0.8000, computed 0.5 of 2.0 s\n"
    text = f"{first}epoch 2/2: loss 0.7, accuracy 0.9250, computed 0.5 of 1.0 s\ntrained in 3.1 s\n"
    run = report.read_output(text, 5.0)
    assert run == report.Run(5.0, 3.1, 0.925, (report.Epoch(2.0, 0.5), report.Epoch(1.0, 0.5)))
    assert (run.wait_share, run.samples_per_s(100), run.samples_per_s_of_all(100)) == (0.5, 100.0, 40.0)
    with pytest.raises(ValueError, match="without its last lines"):
        report.read_output(first, 5.0)


def test_of_one_epoch_the_first_is_told(report: ModuleType) -> None:
    run = report.Run(5.0, 3.1, 0.9, (report.Epoch(2.0, 0.5),))
    assert (run.wait_share, run.samples_per_s(100)) == (0.75, 50.0)


def test_the_script_says_program_and_epochs(report: ModuleType) -> None:
    program, epochs = report.program_of((DIGITS / "train.sbatch").read_text())
    assert program[:2] == ["python", "train.py"]
    assert epochs > 0


def result(report: ModuleType, **changes: Any) -> Any:
    components = report.components_of(SCONTROL.format("COMPLETED", "COMPLETED"))
    delivery = report.Delivery(steps=57, expected=1797, delivered=1797, lost=0, duplicated=0)
    streamed = report.Run(20.0, 12.0, 0.97, (report.Epoch(5.0, 1.0), report.Epoch(2.0, 1.0)))
    plain = report.Run(15.0, 8.0, 0.98, (report.Epoch(4.0, 1.0), report.Epoch(4.0, 1.0)))
    whole = report.Result(
        backend="slurm",
        reason="a throw-away cluster",
        slurm_version="22.05.8",
        components=components,
        delivery=delivery,
        same_order=True,
        num_samples=1437,
        compared_steps=76,
        differing_steps=0,
        streamed=streamed,
        plain=plain,
        num_cores=2,
        busy_before=0.04,
    )
    return replace(whole, **changes)


def test_the_json_has_the_documented_keys(report: ModuleType) -> None:
    facts = json.loads(json.dumps(result(report).as_json()))
    assert set(facts) == KEYS
    assert facts["components"] == [
        {"role": "trainer", "nodes": 1, "cpus": 2, "gpus": 1},
        {"role": "data_workers", "nodes": 2, "cpus": 6, "gpus": 0},
    ]


def test_the_table_has_both_throughputs_and_what_is_emulated(report: ModuleType) -> None:
    text = report.table(result(report))
    assert re.search(r"epochs after the first +718 samples/s +359 samples/s\n", text)
    assert re.search(r"trainer waited for data +50% +75%\n", text)
    assert "76 steps, most of the first epoch's among them, were also made by torch's own workers" in text
    assert "2.00 times the throughput after the first epoch, 0.75 times in the whole run." in text
    assert "data workers have\nthe other core. The GPU is emulated" in text
    assert len(text.splitlines()) < 25
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("cores", "words"),
    [(1, "all nodes are one core here, so data workers add nothing"), (4, "data workers have\nthe other 3 cores.")],
)
def test_what_is_emulated_depends_on_the_cores(report: ModuleType, cores: int, words: str) -> None:
    assert words in report.emulation(result(report, num_cores=cores))


def test_on_a_busy_machine_the_times_are_not_compared(report: ModuleType) -> None:
    assert "busy" not in report.verdict(result(report))
    busy = report.verdict(result(report, busy_before=0.37))
    assert busy.startswith(
        "The machine was busy (37% of its cores) before the demo began: the times cannot be compared.\n"
    )
    assert "times the throughput" not in busy
    assert "seeds augmentation for each sample" in busy


def test_the_picture_has_a_bar_for_each_run(report: ModuleType) -> None:
    root = ElementTree.fromstring(report.picture(result(report)))
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles.count("start, end, test set") == 2
    assert titles.count("epoch 2: waited 3.0 s") == titles.count("epoch 2: waited 1.0 s") == 1
    boxes = [rect for rect in root.iter("{http://www.w3.org/2000/svg}rect") if "cut" in rect.get("class", "")]
    assert len(boxes) == 2 * (1 + 2 * 2)
    right = float(root.get("width")) - 20
    assert all(float(box.get("x")) + float(box.get("width")) <= right + 0.2 for box in boxes)
    text = " ".join(element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text"))
    assert "15 s: 359 samples/s and 75% of the time waiting" in text
    assert "20 s: 718 samples/s and 50% of the time waiting" in text


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
    return subprocess.run(argv, capture_output=True, text=True, timeout=290, cwd=tmp_path), out


def check_demo(done: subprocess.CompletedProcess[str], out: Path, backend: str, epochs: int = EPOCHS) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    facts: dict[str, Any] = json.loads(out.read_text())
    assert set(facts) == KEYS
    assert facts["backend"] == backend
    assert facts["samples_expected"] == facts["samples_delivered"] == epochs * 1797
    assert facts["samples_lost"] == facts["samples_duplicated"] == 0
    assert epochs < EPOCHS or facts["accuracy"] > 0.9
    assert 0 <= facts["trainer_wait_share"] <= 1
    assert facts["steps_compared"] > 0
    assert facts["steps_differing"] == 0
    assert "with data workers" in out.with_suffix(".svg").read_text()
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
