"""`hetstream simulate`: what it prints, writes and refuses."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from recorded import Recorded

from hetstream.slurm_plugin.cli import main
from hetstream.slurm_plugin.client.accounting import SACCT_STATES
from hetstream.slurm_plugin.simulate.traces import EXPORT

JOBS = "job,submit_s,run_s,num_gpus,cpus_per_gpu,trainer_cpus_per_gpu\n" + "".join(
    f"j{at},{at * 300},{1200 + 700 * (at % 5)},{1 + at % 2},{(16, 2)[at % 3 == 0]},2\n" for at in range(24)
)
HEAD = "JobIDRaw|User|State|Submit|Start|End|NNodes|AllocCPUS|AllocTRES|TimelimitRaw\n"
DAY = "2026-11-20T"
SACCT = HEAD + "".join(
    f"{at}|ann|COMPLETED|{DAY}16:{at:02}:00|{DAY}{16 + at}:00:00|{DAY}{16 + at}:59:00|1|8|cpu=8,gres/gpu=1|90\n"
    for at in range(7)
)
CLUSTER = "2*gpus=4,cpus=24"


@pytest.fixture
def jobs(tmp_path: Path) -> str:
    path = tmp_path / "jobs.csv"
    path.write_text(JOBS)
    return str(path)


def document(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["simulate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_all_disciplines_stand_beside_each_other(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, jobs, "--cluster", CLUSTER)
    pairs = {(row["policy"], row["discipline"]) for row in found["runs"]}
    policies = ("tuned", "hardware", "fixed", "fair", "maxtp", "srtf", "stretch", "stretch+rules")
    assert pairs == {(policy, discipline) for policy in policies for discipline in ("fifo", "easy", "greedy")}
    assert found["meta"]["form"] == "csv"
    assert all(row["num_finished"] == 24 for row in found["runs"])
    again = document(capsys, jobs, "--cluster", CLUSTER)
    assert again == found, "the same seed and input give the same figures"


@pytest.mark.shows("prices stand beside time in `util`, `report`, `simulate` and `bench-cost`")
@pytest.mark.shows("the simulator tells waits by cause, slowdown, use and cost; table, JSON and CSV agree")
def test_the_table_and_the_csv_agree(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [jobs, "--cluster", CLUSTER, "--policies", "tuned,srtf", "--prices", "gpu_hour=2, cpu_hour=0.1"]
    assert main(["simulate", *words]) == 0
    printed = capsys.readouterr().out
    assert "24 jobs on 2 nodes, 8 GPUs, 48 CPUs" in printed
    assert "costs: 2 for an hour of a GPU, 0.1 for one of a CPU" in printed
    assert main(["simulate", *words, "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 6
    for row in rows:
        assert f"{float(row['cost']):,.0f}" in printed


@pytest.mark.shows("traces, tables and exports of sacct are read; an export is first replayed as it happened")
def test_a_sites_export_is_replayed_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "month.txt"
    path.write_text(SACCT)
    words = [str(path), "--cluster", "gpus=1,cpus=16", "--disciplines", "easy"]
    assert main(["simulate", *words]) == 0
    told = capsys.readouterr()
    assert "what really happened, replayed (7 jobs, EASY)" in told.out
    assert "starts in the right order 100.0% of pairs" in told.out
    assert "recorded" in told.out
    assert "known of 0" in told.err
    found = document(capsys, *words)
    assert abs(found["summary"]["replay"]["mean_jct"]) < 0.02, "an hour a job, one after the other, as it was"


def test_the_export_has_all_jobs_that_ran() -> None:
    """As `hetstream util` asks for them: without states sacct leaves out running jobs that were held for a moment."""
    assert f" --endtime=now --state={SACCT_STATES} " in EXPORT
    assert f"\n{EXPORT} > month.txt\n" in (Path(__file__).resolve().parents[3] / "docs" / "simulate.md").read_text()


def test_the_nodes_of_the_site(jobs: str, tmp_path: Path) -> None:
    found = Recorded(tmp_path).run(f"simulate {jobs} --from-slurm --policies share --disciplines easy --json")
    told = json.loads(found.stdout)
    assert told["summary"]["gpus"] > 0
    assert told["runs"][0]["num_jobs"] == 24


@pytest.mark.shows("the simulator tells waits by cause, slowdown, use and cost; table, JSON and CSV agree")
def test_a_progress_bar_on_a_terminal_alone(
    jobs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", jobs, "--cluster", CLUSTER, "--policies", "fair", "--disciplines", "fifo"]
    monkeypatch.setattr("hetstream.slurm_plugin.simulate.engine._PROGRESS_EVENTS", 10)
    assert main(words) == 0
    assert "#" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(words) == 0
    told = capsys.readouterr().err
    assert "of 24 jobs: fair, fifo" in told
    assert told.endswith("\r\x1b[K"), "it is taken away at the end"


@pytest.mark.shows("a job larger than the simulated cluster is reported")
def test_jobs_that_do_not_fit_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(JOBS + "huge,0,100,99,1,1\n")
    assert main(["simulate", str(path), "--cluster", CLUSTER, "--policies", "tuned", "--disciplines", "fifo"]) == 0
    assert "1 job left out; huge is larger than the cluster: not enough GPUs" in capsys.readouterr().err


def test_all_problems_of_a_file_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("submit_s,run_s,num_gpus\n-1,5,1\n0,0,1\n")
    assert main(["simulate", str(path), "--cluster", CLUSTER]) == 1
    told = capsys.readouterr().err
    assert "line 2: submit_s" in told
    assert "line 3: run_s" in told


def test_wrong_lines_are_told_with_the_option_that_leaves_them_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("submit_s,run_s,num_gpus\n-1,5,1\n0,1,1\n")
    assert main(["simulate", str(path), "--cluster", CLUSTER]) == 1
    assert "leave such lines out with --skip-bad" in capsys.readouterr().err
    words = (str(path), "--cluster", CLUSTER, "--skip-bad", "--policies", "tuned", "--disciplines", "easy")
    assert document(capsys, *words)["summary"]["num_jobs"] == 1


def test_a_cluster_of_many_groups_may_be_text_and_json_may_stand_on_the_command_line(
    jobs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = ("--policies", "tuned", "--disciplines", "easy")
    groups = ";".join(["1*gpus=4,cpus=24,memory_gib=256"] * 20)
    assert document(capsys, jobs, "--cluster", groups, *rest)["summary"]["num_nodes"] == 20
    inline = '{"nodes": [{"count": 2, "gpus": 4, "cpus": 24}]}'
    assert document(capsys, jobs, "--cluster", inline, *rest)["summary"]["num_nodes"] == 2
    assert main(["simulate", jobs, "--cluster", ""]) == 2
    assert "--cluster is empty: must be a file, or text such as" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policies", "best"], "no policy 'best'"),
        (["--policies", "tuned+rules"], "no policy 'tuned'"),
        (["--policies", "recorded"], "recorded is for an export"),
        (["--disciplines", "lifo"], "must be one or more of fifo, easy, greedy"),
        (["--policies", ","], "names none"),
        (["--seeds", "0"], "must be at least 1"),
        (["--seed", "-1"], "must be 0 or more"),
        (["--window", "nan"], "must be a finite number of hours above 0"),
        (["--node-mtbf", "0"], "must be a finite number of hours above 0"),
        (["--node-mtbf", "1e-3"], "must be at least 1 hour"),
        (["--bf-interval", "nan"], "--bf-interval=nan: must be from 0 to 1e+10"),
        (["--data-worker-cpus", f"{10**30}"], "must be at least 1, and at most 1e+10"),
        (["--seeds", f"{10**9}"], "at most 10,000"),
        (["--prices", "gpu_hour=inf"], "gpu_hour is 'inf': must be a number from 0 to 1e+09"),
        (["--gpu-busy", "2"], "must be above 0 and at most 1"),
        (["--prices", "cpu_hour=-1"], "cpu_hour is '-1': must be a number from 0"),
        (["--data-worker-cpus", "0"], "must be at least 1"),
        (["--checkpoint", "1e9"], "--checkpoint=1e+09: must be from 0 to 2.77778e+06"),
        (["--checkpoint", "0"], "--checkpoint=0: must be above 0"),
        (["--window", "1e308"], "--window=1e+308: must be at most 2,777,778 hours"),
    ],
)
def test_wrong_words_are_refused(jobs: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", jobs, "--cluster", CLUSTER, *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "limit", "what"),
    [
        ("", "simulate._MOST_OF_TRACE", "list of jobs"),
        ("--cluster", "simulate._MOST_OF_CLUSTER", "list of nodes"),
        ("--policy-settings", "simulate._MOST_OF_SETTINGS", "settings of a policy"),
        ("--prices", "cluster_source._MOST_CHARACTERS", "list of prices"),
    ],
)
def test_of_a_file_without_end_no_more_is_read_than_such_a_file_has(
    jobs: str, option: str, limit: str, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"hetstream.slurm_plugin.cli.{limit}", 2000)
    words = {"": jobs, "--cluster": CLUSTER} | {option: "/dev/zero"}
    assert main(["simulate", *(word for pair in words.items() for word in pair if word)]) == 2
    assert capsys.readouterr().err == (
        f"hetstream simulate: /dev/zero: more than 2,000 characters are no {what}. Check its name\n"
    )


def test_a_placement_is_in_the_answer(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [jobs, "--cluster", CLUSTER, "--policies", "tuned,srtf", "--disciplines", "easy"]
    assert document(capsys, *words)["summary"]["placement"] is None
    placed = document(capsys, *words, "--placement", "fgd")
    assert placed["summary"]["placement"] == "fgd"
    assert all(row["num_finished"] == 24 for row in placed["runs"])
    over_time = placed["fragmentation"]
    assert [row["policy"] for row in over_time] == ["tuned", "srtf"]
    assert all(len(row["indicator"]) == len(row["unusable_gpus"]) == 8 for row in over_time)
    assert main(["simulate", *words, "--placement", "fgd"]) == 0
    assert "nodes over time, first seed" in capsys.readouterr().out


def test_failures_and_seeds(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [jobs, "--cluster", CLUSTER, "--policies", "fair", "--disciplines", "easy"]
    calm = document(capsys, *words)["runs"][0]
    hurt = document(capsys, *words, "--node-mtbf", "2", "--checkpoint", "0.2", "--seeds", "3")["runs"][0]
    assert hurt["num_restarts"] > 0
    assert hurt["mean_jct_s"] > calm["mean_jct_s"]
    assert hurt["mean_jct_s_low"] < hurt["mean_jct_s_high"]


def test_caps_and_floors_of_the_daemon_hold_under_rules(
    jobs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "settings.json"
    settings.write_text('{"policy": "maxtp", "floor": 0.1, "user_caps": {"*": 16, "nobody": 1}}')
    words = [jobs, "--cluster", CLUSTER, "--disciplines", "easy", "--policies", "maxtp,maxtp+rules"]
    free, ruled = document(capsys, *words)["runs"]
    capped_free, capped = document(capsys, *words, "--policy-settings", str(settings))["runs"]
    assert capped_free == free, "a policy without rules knows no caps"
    assert capped["cpu_allocated"] < ruled["cpu_allocated"]
    assert capped["mean_jct_s"] > ruled["mean_jct_s"]
    assert main(["simulate", *words[:-2], "--policy-settings", str(settings)]) == 0
    told = capsys.readouterr()
    assert "maxtp+rules" in told.out, "the policy that is set is among the usual ones"
    assert "user nobody has a cap, and no job" in told.err
    settings.write_text('{"policy": "best"}')
    assert main(["simulate", *words, "--policy-settings", str(settings)]) == 2
    assert "no policy 'best'" in capsys.readouterr().err


def test_a_table_from_a_spreadsheet_begins_with_a_mark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, own = tmp_path / "jobs.csv", tmp_path / "cluster.json"
    path.write_bytes(b"\xef\xbb\xbfsubmit_s,run_s,num_gpus\r\n0,10,1\r\n")
    own.write_bytes(b'\xef\xbb\xbf{"nodes": [{"gpus": 1, "cpus": 1}]}')
    words = ["--cluster", str(own), "--policies", "tuned", "--disciplines", "fifo"]
    assert document(capsys, str(path), *words)["summary"]["num_jobs"] == 1


def test_a_job_that_never_fits_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("submit_s,run_s,num_gpus,job\n0,10,100,\x1b[31m\u202e<b>\n")
    assert main(["simulate", str(path), "--cluster", "1*gpus=8,cpus=8", "--policies", "fair"]) == 0
    told = capsys.readouterr()
    assert "\\x1b[31m\\u202e<b> is larger" in told.err
    assert "not enough GPUs" in told.err


SHARED = "job,submit_s,run_s,num_gpus,job_class,gpu_use\n" + "".join(
    f"j{at},{at * 100},{1200 + 700 * (at % 5)},1,{('guaranteed', 'opportunistic')[at % 2]},0.4\n" for at in range(24)
)


def test_packing_stands_beside_each_policy_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(SHARED)
    words = (str(path), "--cluster", "gpus=4,cpus=24", "--policies", "tuned", "--disciplines", "easy")
    plain, packed = document(capsys, *words, "--packing")["runs"]
    assert (plain["policy"], packed["policy"]) == ("tuned", "tuned+packing")
    assert plain["gpu_effective_shared"] is None
    assert packed["gpu_effective"] > plain["gpu_effective"]
    assert 0 < packed["gpu_effective_shared"] < packed["gpu_effective"]
    assert 1.0 <= packed["guaranteed_p99_held_up"] <= 1.005
    assert main(["simulate", *words, "--packing"]) == 0
    assert "OF IT SHARED" in capsys.readouterr().out
    (only,) = document(capsys, *words[:-4], "--policies", "tuned+packing", "--disciplines", "easy")["runs"]
    assert only == packed


@pytest.mark.parametrize(
    ("row", "text"),
    [("j,0,5,1,best-effort,0.5", 'job_class is "best-effort"'), ("j,0,5,1,,1.5", "gpu_use"), ("j,0,5,1,,0", "gpu_use")],
)  # fmt: skip
def test_what_is_no_class_and_no_use_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str, text: str
) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(SHARED + row + "\n")
    assert main(["simulate", str(path), "--cluster", CLUSTER]) == 1
    assert text in capsys.readouterr().err


def test_packing_without_an_opportunistic_job_is_refused(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", jobs, "--cluster", CLUSTER, "--packing"]) == 2
    assert "a column job_class says so" in capsys.readouterr().err
    assert main(["simulate", jobs, "--cluster", CLUSTER, "--policies", "tuned+packing"]) == 2
