"""`make gpu`: it runs through without a GPU, and whatever a stage does, the others run and all results are kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import gpu_session, gpu_sharing, gpu_wheels, rap
from benchmarks.gpu_session import (
    BUDGET_S,
    DRY,
    FAILED,
    LATE,
    LOST,
    OK,
    SKIPPED,
    STAGES,
    Line,
    Result,
    Session,
    Stage,
    allowed_s,
    bundle,
    judged,
    table,
)
from benchmarks.gpu_wheels import ROOT, unpacked

CARD = "NVIDIA H200, 143771 MiB, 580.159.04"
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT)}


def stage(*argv: str, name: str = "one", limit_s: float = 20.0) -> Stage:
    return Stage(name, argv, limit_s, 1.0, "A test")


@pytest.mark.shows("one command runs all that has to be known of a first GPU, and its dry run is whole")
def test_without_a_gpu_every_stage_starts_or_says_why_not(tmp_path: Path) -> None:
    out, few = tmp_path / "out", tmp_path / "few"
    command = [sys.executable, "-m", "benchmarks.gpu_session", "--out", str(out), "--bundle", str(few)]
    # Programs of the system alone, so that there is no nvidia-smi, on whatever machine this is.
    (tmp_path / "bin").mkdir()
    environ = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "CC": "/usr/bin/gcc"}
    began_s = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began_s < BUDGET_S
    shown = done.stdout.splitlines()[-len(STAGES) :]
    assert [line[:14].strip() for line in shown] == [each.name for each in STAGES], "the last lines are the table"
    found = {each["stage"]: each for each in json.loads((few / "gpu.json").read_text())}
    for each in STAGES:
        result = found[each.name]
        assert result["verdict"] == (SKIPPED if each.like else DRY), result
        assert result["gpu"] == ""
        assert each.like in result["why"]
    assert not found["imports"]["found"]["missing"].keys() & {"torch", "triton", "pytest"}
    assert all(isinstance(why, str) for why in found["probe"]["found"].values()), "each fact says why it is not known"
    assert all(how == "skipped: no CUDA device" for how in found["memory"]["found"].values())
    assert "hetstream, captured" in found["RAP quick"]["found"][0]["dry_run"]["systems"]
    assert len(found["feed"]["found"][0]["dry_run"]) == 4, "all ways to feed"
    with tarfile.open(few / "gpu.tar.gz") as packed:
        assert "01-imports.log" in packed.getnames()


def test_what_a_stage_does_costs_only_itself(tmp_path: Path) -> None:
    session = Session(tmp_path, CARD, ENVIRON)
    assert session.run(stage("-c", "raise SystemExit('no such thing')"), 60).verdict == FAILED
    # It hangs, and so does what it has started in a session of its own, as a data worker may.
    hangs = (
        "import subprocess, sys, time\n"
        "argv = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "print(subprocess.Popen(argv, start_new_session=True).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    began_s = time.monotonic()
    with gpu_session._descendants_end_here():
        late = session.run(stage("-c", hangs, name="two", limit_s=2.0), 60)
    assert late.verdict == LATE
    assert "ended after 2 s" in late.why
    assert time.monotonic() - began_s < 15
    with pytest.raises(ProcessLookupError):
        os.kill(int(late.said.split()[-1]), 0)
    printed = session.run(stage("-c", 'print(\'{"rate": [3, "GB/s"]}\')', name="three"), 60)
    assert (printed.verdict, printed.found) == (OK, {"rate": [3, "GB/s"]})
    assert session.run(stage("-c", "pass", name="four"), 0.5).verdict == SKIPPED
    assert [Result.read(path).verdict for path in sorted(tmp_path.glob("*.json"))] == [SKIPPED, FAILED, OK, LATE]  # type: ignore[union-attr]


def test_what_was_printed_before_a_stage_was_ended_is_kept(tmp_path: Path) -> None:
    program = "import time; print('{\"first\": 1}', flush=True); time.sleep(60)"
    late = Session(tmp_path, CARD, ENVIRON).run(stage("-c", program, limit_s=2.0), 60)
    assert (late.verdict, late.found) == (LATE, {"first": 1})


def test_a_second_call_goes_on_with_what_is_missing_on_this_card(tmp_path: Path) -> None:
    stages = [stage("-c", "", name=name) for name in ("good", "lost", "failed", "other card", "dry", "never")]
    session = Session(tmp_path, CARD, ENVIRON)
    for each, verdict, card in zip(
        stages, (OK, LOST, FAILED, OK, DRY), (CARD, CARD, CARD, "NVIDIA H100", ""), strict=False
    ):
        text = json.dumps({"stage": each.name, "verdict": verdict, "gpu": card, "lines": []})
        session._path(each).write_text(text)
    assert list(session.kept(stages)) == ["good", "lost"]
    assert not Session(tmp_path, "", ENVIRON).kept(stages), "a dry run keeps nothing"
    session._path(stages[0]).write_text("{")
    assert list(session.kept(stages)) == ["lost"]


def test_all_stages_together_take_no_longer_than_they_may() -> None:
    assert BUDGET_S < 540
    for lasts in (0.01, 1.0):  # each is done at once, or takes all that it may
        left_s = BUDGET_S
        for each in STAGES:
            allowed = allowed_s(each, left_s)
            assert allowed in (0.0, each.limit_s, left_s)
            left_s -= allowed * lasts
        assert left_s >= 0
    assert allowed_s(STAGES[0], STAGES[0].least_s - 1) == 0
    names = [each.name for each in STAGES]
    assert [each.name for each in gpu_session.chosen("release, imports")] == ["imports", "release"]
    assert len(set(names)) == len(names)
    with pytest.raises(SystemExit, match="there is no relase; there are imports, probe"):
        gpu_session.chosen("relase")


def test_each_stage_has_a_command_line_that_its_program_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are not started without a GPU, too."""
    for each in STAGES:
        argv = gpu_session.filled(each, tmp_path, 30)
        if "benchmarks.gpu_sharing" in argv:
            words = argv[argv.index("--systems") + 1]
            assert len(gpu_sharing.chosen_names(words, on_cpu=False)) == 1
        for module in (gpu_sharing, rap):
            if module.__name__ not in argv:
                continue
            monkeypatch.setattr(sys, "argv", ["x", *argv[2:], "--help"])
            with pytest.raises(SystemExit) as ended:
                module.main()
            assert ended.value.code == 0, "an option that there is not would be 2"
        for path in (word for word in argv if word.endswith(".py")):
            assert (ROOT / path).exists()


def report(rows: Sequence[tuple[str, float | None, str | None, bool | None]]) -> str:
    return json.dumps(
        {
            "rows": [
                {"case": "case", "system": name, "value": value, "unit": "x", "target": target, "met": met}
                for name, value, target, met in rows
            ]
        }
    )


def test_a_lost_goal_says_so_and_each_goal_has_its_line(tmp_path: Path) -> None:
    rows = [
        ("a", 1.5, "<= 1.01", False),
        ("b", 0.9, ">= 0.85", True),
        ("c", None, "<= 3", None),
        ("d", 7.0, None, None),
    ]
    (tmp_path / "rap.json").write_text(report(rows))
    (tmp_path / "history.json").write_text("[]")
    result = judged(STAGES[0], 0, tmp_path, "said", 60, is_dry=False)
    assert result.verdict == LOST
    assert result.lines == (
        Line("", OK, "3 of 4 rows have a value"),
        Line("case: a", LOST, "1.5 x", "<= 1.01"),
        Line("case: b", OK, "0.9 x", ">= 0.85"),
        Line("case: c", "no value", "none", "<= 3"),
    )
    shown = table([result], {}).splitlines()
    assert shown[2].split() == ["imports", "LOST", "3", "of", "4", "rows", "have", "a", "value", "0"]
    assert shown[3].split() == ["case:", "a", "LOST", "1.5", "x", "<=", "1.01"]
    assert table([result], {"imports": result}).splitlines()[2].endswith("0 before")
    failed = judged(STAGES[0], 1, tmp_path, "FAILED: real jobs: CUDA error\nwrote it", 60, is_dry=False)
    assert (failed.verdict, failed.why) == (FAILED, "FAILED: real jobs: CUDA error")
    assert len(failed.lines) == 5, "what was measured is shown beside"


def test_tests_that_fail_are_named(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite><testcase name="good"/><testcase name="bad"><failure message="assert 1 == 2&#10;more"/>'
        '</testcase><testcase name="left"><skipped message="no CUDA device"/></testcase></testsuite></testsuites>'
    )
    result = judged(STAGES[2], 1, tmp_path, "1 failed", 60, is_dry=False)
    assert (result.verdict, result.why) == (FAILED, "bad: failure: assert 1 == 2")
    assert result.lines[0].figure == "1 of 3 tests pass, 1 skipped"
    (tmp_path / "tests.xml").write_text(
        '<testsuite><testcase name="left"><skipped message="no CUDA device"/></testcase></testsuite>'
    )
    skipped = judged(STAGES[2], 0, tmp_path, "1 skipped", 60, is_dry=False)
    assert (skipped.verdict, skipped.why) == (FAILED, "nothing was shown: skipped: no CUDA device")
    (tmp_path / "tests.xml").write_text("<testsuites>")
    assert judged(STAGES[2], None, tmp_path, "", 60, is_dry=False).why == "ended after 60 s: it printed nothing"


def test_tests_that_had_ended_before_one_hung_are_kept(tmp_path: Path) -> None:
    said = "tests/x.py::test_good PASSED [ 33%]\ntests/x.py::test_bad[1] FAILED [ 66%]\ntests/x.py::test_hangs "
    result = judged(STAGES[2], None, tmp_path, said, 60, is_dry=False)
    assert result.verdict == LATE
    assert result.found == {"test_good": "passed", "test_bad[1]": "failure: "}


def test_a_report_without_a_value_shows_nothing(tmp_path: Path) -> None:
    (tmp_path / "rap.json").write_text(report([("a", None, None, None)]))
    assert judged(STAGES[5], 0, tmp_path, "no CUDA device", 60, is_dry=False).verdict == FAILED


def test_results_fit_into_two_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "packages/zmq").mkdir(parents=True)
    (out / "packages/zmq/x.py").write_text("")
    (out / "01-imports.json").write_text('{"stage": "imports"}')
    bundle(out, tmp_path / "few")
    assert sorted(path.name for path in (tmp_path / "few").iterdir()) == ["gpu.json", "gpu.tar.gz"]
    with tarfile.open(tmp_path / "few/gpu.tar.gz") as packed:
        assert packed.getnames() == ["01-imports.json"]


def test_what_a_gpu_machine_lacks_comes_from_wheels_and_nothing_else(tmp_path: Path) -> None:
    names = {text.partition(">")[0] for text in gpu_wheels.requirements()}
    assert {"msgspec", "pyzmq", "xxhash", "cloudpickle", "nvidia-ml-py"} <= names
    assert "numpy" not in names
    for name, module in (("here", "pytest"), ("missing", "no_such_module")):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{module}/__init__.py", "")
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", "")
    assert unpacked(tmp_path / "into", tmp_path) == (str(tmp_path / "into"), ["missing"])
    assert (tmp_path / "into/no_such_module/__init__.py").exists()
    assert not (tmp_path / "into/pytest").exists(), "what is installed is used as it is"
    assert unpacked(tmp_path / "other", tmp_path / "into") == ("", [])


def test_the_tree_that_goes_to_a_gpu_machine_is_small() -> None:
    """What git tracks, and what it does not ignore: machines that are lent take so much and no more."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode:
        pytest.skip("no git checkout")
    paths = [ROOT / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    assert sum(path.lstat().st_size for path in paths if path.exists() or path.is_symlink()) < 40 * 2**20
    wheels = sum(path.stat().st_size for path in gpu_wheels.FOLDER.glob("*.whl"))
    assert wheels <= gpu_wheels.MOST_BYTES


def test_results_that_are_kept_name_their_card_and_versions() -> None:
    folder = ROOT / "docs/measured/gpu"
    kept = sorted(folder.glob("*.json"))
    says_none = "There are none yet" in (folder / "README.md").read_text()
    assert says_none == (not kept), "the page says whether there are any"
    for path in kept:
        results = {each["stage"]: each for each in json.loads(path.read_text())}
        assert {each["gpu"] for each in results.values()} not in (set(), {""}), path
        assert {"torch", "triton", "python"} <= results["imports"]["found"].keys(), path
        assert {each["verdict"] for each in results.values()} <= {OK, LOST, FAILED, LATE, SKIPPED}, path
