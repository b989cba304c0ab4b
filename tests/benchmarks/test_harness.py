"""The benchmark harness: turns, teardown, ratios and what a reader is told. No test looks at an absolute time."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import harness, machine, peers, running
from benchmarks.harness import Goal, Metric, Results, System, Target
from benchmarks.running import ClientFailed, run_client

ECHO = "import json, sys; [print(json.dumps({'case': c, **v})) for c, v in json.loads(sys.argv[-1])['cases'].items()]"
SPEED = Metric("gb_per_s", "GB/s", ("large",))


def client(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def results_of(**by_system: list[float]) -> Results:
    results = Results()
    for system, values in by_system.items():
        for repeat, value in enumerate(values):
            results.samples["large", system, repeat] = {"gb_per_s": value}
    return results


def alive(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] not in "ZX"


# -- running


def test_a_client_gets_the_request_and_its_lines_become_samples() -> None:
    request = {"cases": {"large": {"gb_per_s": 1.5}, "small": {"gb_per_s": 0.5}}}
    assert run_client(client(ECHO), request, 30) == {"large": {"gb_per_s": 1.5}, "small": {"gb_per_s": 0.5}}


def test_a_failing_client_reports_its_last_line() -> None:
    with pytest.raises(ClientFailed, match="exit code 3: no such thing"):
        run_client(client("import sys; print('no such thing', file=sys.stderr); sys.exit(3)"), {}, 30)


def test_a_client_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    note = tmp_path / "child"
    code = (
        "import pathlib, subprocess, sys, signal\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        f"pathlib.Path({str(note)!r}).write_text(str(child.pid))\n"
        "signal.pause()\n"
    )
    with pytest.raises(ClientFailed, match="no end after 2 s"):
        run_client(client(code), {}, 2)
    assert not alive(int(note.read_text()))


def test_a_client_that_leaves_a_process_behind_fails_and_the_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    monkeypatch.setattr(running, "TEARDOWN_GRACE_S", 0.1)
    note = tmp_path / "child"
    code = (
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        f"pathlib.Path({str(note)!r}).write_text(str(child.pid))\n"
    )
    with pytest.raises(ClientFailed, match="left processes running"):
        run_client(client(code), {}, 30)
    # It was sent SIGKILL; that takes longer than the short grace on a busy machine.
    wait_until(lambda: not alive(int(note.read_text())), what="the end of the process")


def test_systems_take_turns_and_a_failed_one_is_not_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    systems = [
        System("one", client(ECHO)),
        System("broken", client("raise SystemExit('gone')")),
        System("two", client(ECHO)),
        System("absent", missing="not installed here"),
    ]
    results = harness.collect(systems, {"large": {"gb_per_s": 2.0}}, {}, 2, 30, lambda case, sample: "2 GB/s")
    said = capsys.readouterr().err.splitlines()
    order = [line.split("] ")[1].split(":")[0] for line in said if "] " in line]
    assert order == ["one", "broken", "two", "two", "one"]
    assert results.failures == {"broken": "exit code 1: gone"}
    assert results.of("large", "two", "gb_per_s") == {0: 2.0, 1: 2.0}
    assert said[0] == "  absent: not run: not installed here"


# -- reducing


def test_a_ratio_pairs_the_repeats_and_names_a_lost_target() -> None:
    # The machine slowed down tenfold between the repeats: the ratio does not notice.
    results = results_of(hetstream=[8.0, 0.8, 8.0], raw=[10.0, 1.0, 16.0])
    targets = [
        Target("large", "hetstream", "raw", "gb_per_s", at_least=0.75),
        Target("large", "hetstream", "raw", "gb_per_s", at_least=0.9),
        Target("large", "hetstream", "raw", "gb_per_s", at_most=0.7),
    ]
    rows = harness.rows_of(results, [System("hetstream"), System("raw")], [SPEED], targets)
    assert [(row.system, row.value, row.unit) for row in rows[:2]] == [
        ("hetstream", 8.0, "GB/s"),
        ("raw", 10.0, "GB/s"),
    ]
    assert rows[0].spread == (0.8, 8.0)
    assert [(row.value, row.target, row.met) for row in rows[2:]] == [
        (0.8, ">= 0.75", True),
        (0.8, ">= 0.9", False),
        (0.8, "<= 0.7", False),
    ]
    text = harness.table(rows)
    assert text.count("LOST") == 2
    assert text.count(" met") == 1


def test_a_disturbed_repeat_does_not_count_where_there_is_a_quiet_one() -> None:
    results = results_of(hetstream=[9.0, 7.0], raw=[3.0, 10.0])
    results.samples["large", "raw", 0] = {"gb_per_s": 3.0, "other_load": 0.6}
    target = Target("large", "hetstream", "raw", "gb_per_s", at_least=0.75)
    row = harness.rows_of(results, [System("hetstream"), System("raw")], [SPEED], [target])[-1]
    assert (row.value, row.met, row.note) == (0.7, False, "1 of 2 repeats undisturbed")


def test_a_missing_system_keeps_its_row_with_the_reason() -> None:
    results = results_of(hetstream=[1.0])
    results.failures["slow"] = "no end after 5 s: nothing on stderr"
    systems = [System("hetstream"), System("peer", missing="no network"), System("slow")]
    targets = [Target("large", "hetstream", "peer", "gb_per_s", at_least=1.0)]
    rows = {row.system: row for row in harness.rows_of(results, systems, [SPEED], targets)}
    assert (rows["peer"].value, rows["peer"].note) == (None, "no network")
    assert rows["slow"].note == "no end after 5 s: nothing on stderr"
    ratio = rows["hetstream / peer"]
    assert (ratio.value, ratio.met, ratio.note) == (None, None, "no value of peer: not compared")
    assert "no network" in harness.table(rows.values())


def test_a_target_has_one_direction() -> None:
    with pytest.raises(ValueError, match="one of them"):
        Target("large", "a", "b", "gb_per_s", at_least=1.0, at_most=2.0)


def test_a_ratio_without_a_goal_is_only_shown() -> None:
    samples = {("large", name, 0): {"cpu_ms": value} for name, value in (("a", 3.0), ("b", 2.0))}
    results = Results(samples, {})
    rows = harness.rows_of(
        results, [System("a"), System("b")], [Metric("cpu_ms", "ms", ("large",))], [Target("large", "a", "b", "cpu_ms")]
    )
    assert (rows[-1].value, rows[-1].target, rows[-1].met) == (1.5, None, None)


def test_systems_are_chosen_by_words() -> None:
    systems = [System("hetstream"), System("raw TCP"), System("memcpy")]
    assert [system.name for system in harness.chosen(systems, "raw,MEM")] == ["raw TCP", "memcpy"]
    assert harness.chosen(systems, "") == systems
    with pytest.raises(SystemExit, match="there are hetstream, raw TCP, memcpy"):
        harness.chosen(systems, "grpc")


def test_two_cores_are_allowed_ones() -> None:
    assert set(machine.two_cores()) <= os.sched_getaffinity(0)


# -- reporting


def test_the_file_holds_machine_command_versions_and_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = results_of(hetstream=[1.0], raw=[2.0])
    targets = [Target("large", "hetstream", "raw", "gb_per_s", at_least=0.75)]
    rows = harness.rows_of(results, [System("hetstream"), System("raw")], [SPEED], targets)
    context = {"machine": machine.describe(client=[0]), "versions": machine.versions("numpy"), "notes": ["pinned"]}
    assert harness.finish("example", tmp_path, rows, {}, context) == 0  # a lost target is a result
    assert harness.finish("example", tmp_path, rows, {"peer": "failed"}, context) == 1
    written = json.loads((tmp_path / "example.json").read_text())
    assert set(written) == {"command", "machine", "versions", "notes", "rows"}
    assert {"case", "system", "value", "unit", "spread", "target", "met"} <= set(written["rows"][0])
    assert written["machine"]["pinned_cores"] == {"client": [0]}
    report = (tmp_path / "example.txt").read_text()
    assert report in capsys.readouterr().out
    assert report.startswith("python -m benchmarks.example")
    assert f"python {written['versions']['python']}" in report.splitlines()[2]
    assert "LOST: large: hetstream / raw is 0.500 x, target >= 0.75" in report
    assert "FAILED: peer: failed" in report


def test_a_run_in_parts_makes_one_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    context = {"machine": machine.describe(), "versions": machine.versions()}
    first = harness.row_of("large", "hetstream", [3.0], "us", at_most=4.0)
    rows, notes = harness.added("mine", tmp_path, [first], ["Simulated.", "In 1 s."])
    assert (rows, notes) == ([first], ["Simulated.", "In 1 s."]), "there is none yet"
    harness.finish("mine", tmp_path, rows, {}, {**context, "notes": notes})
    second = harness.row_of("small", "hetstream", [5.0], "us", at_most=4.0)
    rows, notes = harness.added("mine", tmp_path, [second], ["Simulated.", "In 2 s."])
    assert [row.case for row in rows] == ["large", "small"]
    assert notes[:3] == ["Simulated.", "In 2 s.", "In 1 s."]
    assert notes[3].startswith("Added to: python -m benchmarks.mine")
    capsys.readouterr()
    harness.finish("mine", tmp_path, rows, {}, {**context, "notes": notes})
    assert "1 of 2 targets met" in capsys.readouterr().out


def test_an_absent_peer_environment_is_a_reason_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    found = peers.environment(make=False)
    assert found.python is None
    assert "no peer environment" in found.missing
    found = peers.environment(peers.PeerSet(".venv-peers", ("no such requirement!",)))
    assert found.python is None
    assert "cannot be made: ERROR: Invalid requirement" in found.missing
    assert not (tmp_path / ".venv-peers").exists()


def test_a_run_beside_other_load_is_repeated_and_the_calmest_kept(tmp_path: Path) -> None:
    # Each run adds a dot and reads its load from their number: the second is calmer and kept, though it is slower.
    code = (
        "import json, pathlib\n"
        f"log = pathlib.Path({str(tmp_path / 'runs')!r})\n"
        "number = len(log.read_text()) if log.exists() else 0\n"
        "log.write_text('.' * (number + 1))\n"
        "load, speed = [(0.4, 3.0), (0.2, 1.0)][number]\n"
        "print(json.dumps({'case': 'large', 'gb_per_s': speed, 'other_load': load}))\n"
    )
    kept = harness.quietest(System("one", client(code)), {"cases": {}}, 30)
    assert kept == {"large": {"gb_per_s": 1.0, "other_load": 0.2}}
    results = Results({("large", "one", 0): kept["large"]})
    assert harness.disturbance(results).startswith("Other processes used 20% of the pinned cores")


@pytest.mark.parametrize(
    ("goal", "target", "met"),
    [
        (Goal("large", "ours", "GB/s", at_least=2), ">= 2", True),  # the median
        (Goal("large", "ours", "GB/s", at_most=2), "<= 2", False),  # every repeat
        (Goal("large", "ours", "GB/s", at_most=3), "<= 3", True),
        (Goal("large", "theirs", "GB/s", at_most=3), None, None),
        (Goal("large", "ours", "batches/s", at_most=3), None, None),
    ],
)
def test_a_goal_judges_its_own_row_alone(goal: Goal, target: str | None, met: bool | None) -> None:
    (row,) = harness.rows_of(results_of(ours=[1.0, 2.0, 3.0]), [System("ours")], [SPEED], [])
    judged = goal.judge(row)
    assert (judged.target, judged.met, judged.value) == (target, met, 2.0)


def test_a_goal_of_a_system_that_did_not_run_is_not_judged() -> None:
    (row,) = harness.rows_of(Results(), [System("ours", missing="no compiler")], [SPEED], [])
    assert Goal("large", "ours", "GB/s", at_least=1).judge(row).met is None
