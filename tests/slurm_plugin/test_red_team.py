"""The red team: what users can write, hostile, through everything that reads it.

Nobody else's reading changes, nothing but text reaches a terminal, no process ends, nothing is removed. Here are the
texts that Slurm passes on (names, comments, accounts, directories, dependencies) through `frag`, `jobs`, `why`, `util`,
`advise`, `report`, the page, the metrics and the site daemon; what lies in a job's directory through `job`;
words of scripts and of command lines through `convert`, `sbatch` and slurmctld's hook; and all of it once more on real
daemons. Elsewhere, each beside what it attacks:

* frames, handshakes and pickles at the ports of a job: `tests/mpi_dataworkers/test_security.py`, `test_fuzz.py`
* reports to the site daemon, byte by byte: `test_strangers_replays_and_garbage` in `test_daemon.py`
* HTTP requests: `tests/base/test_web.py`
* checkpoints, their journals and names: `tests/checkpoint/test_hostile.py`, `test_bombs.py`, `test_untrusted.py`
* what the user's Python prints while the cli_filter plans: `test_lua_modules.py`
* what a second user of the host may try: `tests/mpi_dataworkers/test_second_user.py`
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded import Recorded, hours_ago

from hetstream.base.errors import UsageError
from hetstream.hetjob.errors import SlurmCommandError
from hetstream.hetjob.site.messages import JobStatus, ReportDemand
from hetstream.slurm_plugin.client.accounting import from_queue
from hetstream.slurm_plugin.client.model import Snapshot
from hetstream.slurm_plugin.client.parse_json import parse_jobs
from hetstream.slurm_plugin.client.parse_text import JOB_FIELDS
from hetstream.slurm_plugin.client.run import run_slurm
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.daemon.registry import Registry
from hetstream.slurm_plugin.insight.observation import Observation, Reading, observe
from hetstream.slurm_plugin.insight.proposals import ended_jobs
from hetstream.slurm_plugin.render.metrics import ClusterCollector
from hetstream.slurm_plugin.render.page import page
from tests.base.hostile import HARMLESS, HOSTILE, Said, as_read, check_shown, hostile, said_by, said_of_words

# Fields of squeue with what users write; slurmctld checks the others against what the cluster has.
FIELDS = ("Name", "Comment", "WorkDir", "Account", "Dependency")
COMMANDS = (
    "frag", "jobs", "jobs 43", "why 41", "why 43", "util", "util --by account", "util --by user", "advise", "report",
)  # fmt: skip


def record(job_id: int, uid: int, state: str, **more: str) -> dict[str, str]:
    return dict.fromkeys(JOB_FIELDS, "N/A") | {
        "JobID": str(job_id), "ArrayJobID": str(job_id), "UserID": str(uid), "UserName": f"user{uid}",
        "Partition": "gpu", "State": state, "Reason": "Resources", "NumCPUs": "16", "NumNodes": "1",
        "tres-alloc": "cpu=16,mem=100M,node=1,billing=16", "tres-per-node": "gres:gpu:4", "TimeLimit": "30:00",
        "PriorityLong": "100", "SubmitTime": hours_ago(5), "Name": "train", "Comment": "", "WorkDir": "/home",
    } | more  # fmt: skip


class Cluster(Recorded):
    """A recorded Slurm whose squeue prints any bytes, between the separators that it is asked for.

    Jobs 41 (pending) and 42 (running) are user 1001's; 43 (pending) and 44 (running) are the attacker's.
    """

    def prints(self, text: str) -> None:
        attack = dict.fromkeys(FIELDS, text)
        jobs = [
            record(41, 1001, "PENDING"),
            record(42, 1001, "RUNNING", NodeList="g1", StartTime=hours_ago(3)),
            record(43, 1002, "PENDING", **attack | {"Reason": "Dependency"}),
            record(44, 1002, "RUNNING", **attack | {"NodeList": "g1", "StartTime": hours_ago(2)}),
        ]
        (self.directory / "jobs.json").write_text(json.dumps(jobs))
        path = self.directory / "squeue"
        path.write_text(
            f"#!{sys.executable} -IS\nimport json, os, sys\n"
            f"jobs = json.load(open({str(self.directory / 'jobs.json')!r}))\n"
            "if '-O' not in sys.argv: raise SystemExit  # which nodes jobs exclude\n"
            "asked = [one.split(':', 1) for one in sys.argv[sys.argv.index('-O') + 1].split(',')]\n"
            "for job in jobs:\n"
            "    sys.stdout.buffer.write(os.fsencode(''.join(job[name] + end for name, end in asked) + '\\n'))\n"
        )
        path.chmod(0o755)

    def reads(self, text: str) -> Snapshot:
        self.prints(text)
        return CommandSlurm({"PATH": f"{self.directory}:/usr/bin:/bin"}).snapshot()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def said_of(seen: Snapshot, words: str, monkeypatch: pytest.MonkeyPatch) -> Said:
    """What a command says of jobs that were read before."""
    with monkeypatch.context() as patch:
        patch.setattr(CommandSlurm, "snapshot", lambda self, *, details=False: seen)
        patch.setattr(CommandSlurm, "usages", lambda self, snapshot, start_s, end_s: from_queue(seen.jobs))
        return said_by(words)


def without(value: Any, text: str) -> Any:
    """A document in which a text is the harmless one."""
    if isinstance(value, dict):
        return {without(key, text): without(one, text) for key, one in value.items() if key != "taken_s"}
    if isinstance(value, list):
        return [without(one, text) for one in value]
    return value.replace(text, HARMLESS) if isinstance(value, str) else value


@hostile
def test_what_a_job_is_called_changes_no_reading_but_its_own(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    usual_jobs, seen = (cluster.reads(one) for one in (HARMLESS, text))
    seen = replace(seen, taken_s=usual_jobs.taken_s)
    assert [job.job_id for job in seen.jobs] == [41, 42, 43, 44]
    assert [job.name for job in seen.jobs] == ["train", "train", as_read(text), as_read(text)]
    for words in COMMANDS:
        usual, shown = (said_of(one, words, monkeypatch) for one in (usual_jobs, seen))
        usual_json, shown_json = (said_of(one, f"{words} --json", monkeypatch) for one in (usual_jobs, seen))
        has_csv = words.split()[0] in ("frag", "jobs", "util", "advise")
        csv = said_of(seen, f"{words} --csv" if has_csv else words, monkeypatch)
        assert {one.code for one in (usual, shown, usual_json, shown_json, csv)} == {0}
        assert without(json.loads(shown_json.out), as_read(text)) == without(json.loads(usual_json.out), HARMLESS), (
            words
        )
        assert shown.out.count("\n") == usual.out.count("\n"), words
        assert shown.err == usual.err, words
        for said in (shown.out, shown.err, shown_json.out, shown_json.err, csv.out):
            check_shown(said)


@hostile
def test_what_a_job_is_called_changes_no_page_no_metric_and_no_share(cluster: Cluster, text: str) -> None:
    usual_jobs, seen = (cluster.reads(one) for one in (HARMLESS, text))
    seen = replace(seen, taken_s=usual_jobs.taken_s)
    usual, shown = (observe(one, {}) for one in (usual_jobs, seen))
    assert shown.sample == usual.sample
    assert [one.job.label for one in shown.waiting] == [one.job.label for one in usual.waiting]
    html = page(shown, [shown.sample])
    check_shown(html)
    assert html.count("<") == page(usual, [usual.sample]).count("<")
    assert metrics(shown) == metrics(usual)
    assert granted(seen) == granted(usual_jobs)


def metrics(seen: Observation) -> str:
    collector = ClusterCollector()
    collector.reading = Reading(seen)
    return collector.text()


def granted(seen: Snapshot) -> list[JobStatus]:
    """What the site daemon's policy gives to the jobs, both of which report."""
    registry = Registry([], allocating=True)
    registry.observe(seen, 100.0)
    for number, (job_id, uid) in enumerate(((42, 1001), (44, 1002))):
        registry.report({str(uid)}, ReportDemand(job_id, 0, 0, 8, 8, 0.4), 1, 110.0 + number)
    registry.observe(seen, 120.0)
    return list(registry.status(None, 130.0))


@hostile
def test_a_job_with_an_odd_gres_in_json_stays_and_hides_none(text: str, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"job_id": number, "job_state": "PENDING", "partition": "gpu", "name": text, "tres_per_node": gres}
        for number, gres in ((41, "gres:gpu:1"), (43, f"gres:gpu:a:b:1:{text}"))
    ]
    job, odd = parse_jobs(os.fsencode(json.dumps({"jobs": rows}, ensure_ascii=False)).decode(errors="replace"))
    assert (job.job_id, job.name) == (41, os.fsencode(text).decode(errors="replace"))
    assert (odd.job_id, odd.gpus_in_doubt, odd.count("gpu") > 0) == (43, True, True)
    assert "of job 43 a part cannot be read" in caplog.text
    assert len(caplog.text) < 2000


# --- what lies in the directory of a job ------------------------------------------------------------------------------

SUMMARIES = {
    "nested": "[" * 100_000,
    "no object": "[1]",
    "numbers": '{"loaders": [{"rank": 1e999}], "elastic": {"trainer_cpus_recommended": Infinity, "trainer_cpus": NaN}}',
    "words": '{"loaders": 5, "elastic": {"decisions": [{"time": "now"}]}, "job_name": "\\u001b[2J"}',
    "bytes": "\udcff{}",
}


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that a job has left, with everything in it that a program may have put there."""
    directory = tmp_path / ".hetstream" / "job-7"
    directory.mkdir(parents=True)
    secret = tmp_path / "secret"
    secret.write_text("the admin's\n")
    for place, text in enumerate(HOSTILE.values()):
        content = f"{text}\n".encode(errors="surrogateescape")
        (directory / f"companion-{place}.log").write_bytes(content)
        name = text.replace("/", "").encode(errors="surrogateescape")[:200]
        Path(os.fsdecode(bytes(directory) + b"/" + name + b".log")).write_bytes(content)
    lines = [text.encode(errors="surrogateescape") for text in HOSTILE.values()]
    lines += [b'{"time": 1e300, "event": "x"}', b"[" * 10_000]
    (directory / "events.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    (directory / "data-worker-0.log").symlink_to(secret)
    os.mkfifo(directory / "data-worker-1.log")
    (directory / "writers").symlink_to("/etc")
    monkeypatch.chdir(tmp_path)
    return directory


@pytest.mark.parametrize(
    "words", ["job --logs {0}", "job --logs {0} --path", "job --events {0}", "job --events {0} --json"]
)
def test_what_a_job_left_is_shown_as_text(left: Path, words: str) -> None:
    before = sorted(os.listdir(left))
    said = said_by(words.format(left))
    assert said.code == 0
    check_shown(said.out + said.err)
    assert "the admin's" not in said.out
    assert sorted(os.listdir(left)) == before


def test_events_are_read_from_no_link_and_no_pipe(left: Path) -> None:
    for make in (lambda path: path.symlink_to(left.parents[1] / "secret"), os.mkfifo):
        (left / "events.jsonl").unlink()
        make(left / "events.jsonl")
        said = said_by(f"job --events {left}")
        assert (said.code, said.out) == (1, "")
        assert "is a link, which is not followed" in said.err or "no regular file" in said.err


@pytest.mark.parametrize("text", SUMMARIES.values(), ids=SUMMARIES)
def test_a_record_that_is_none_is_said_to_be_none(left: Path, text: str) -> None:
    (left / "summary.json").write_text(text, errors="surrogateescape")
    said = said_by(f"job {left}")
    assert said.code == 1
    assert str(left / "summary.json") in said.err
    check_shown(said.err)
    assert ended_jobs([left.parent], 0.0, float("inf")) == []


@hostile
def test_names_beside_those_of_jobs_are_not_removed(
    left: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    place = left.parent
    name = f"job-{text}".replace("/", "").encode(errors="surrogateescape")[:200]
    named, linked = Path(os.fsdecode(bytes(place) + b"/" + name)), place / "job-9"
    named.mkdir()
    linked.symlink_to("/etc")
    cluster.prints(text)
    monkeypatch.setenv("PATH", f"{cluster.directory}:/usr/bin:/bin")
    said = said_by(f"job --clean {place.parent} --older-than 0h --remove")
    check_shown(said.out + said.err)
    assert said.code == 0
    assert not left.exists()
    assert named.is_dir()
    assert linked.is_symlink()


# --- what a script or a command line says -----------------------------------------------------------------------------

SCRIPT = """#!/bin/bash
#SBATCH --gres=gpu:1 --cpus-per-task=16
#SBATCH --job-name={0} --comment={0} --dependency={0} --account={0} --chdir={0}
#HETSTREAM --data-workers=2 --data-worker-partition=cpu
echo {0}
"""


@hostile
def test_a_script_is_converted_line_by_line(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """What stands in options is in the same lines as before, and the user's commands are as they were."""
    monkeypatch.setenv("PATH", f"{cluster.directory}:/usr/bin:/bin")
    cluster.tool("sinfo", 'printf "gpu*\\ncpu\\n"')
    found = []
    for one in (HARMLESS, text):
        script = cluster.directory / "train.sbatch"
        written = shlex.quote(one) if "\n" not in one else HARMLESS
        script.write_text(SCRIPT.format(written), errors="surrogateescape")
        # On the command line a value may have line breaks, too.
        words = ["convert", f"--wckey={one}", str(script)]
        found.append(said_of_words(words))
    usual, said = found
    check_shown(said.err)
    if "\n" in text or len(text) > 200_000:
        assert (said.code, said.out) == (2, "")
        assert len(said.err) < 2000
        assert ("a value with a line break" if "\n" in text else "at most are read") in said.err
        return
    assert said.code == usual.code == 0
    assert said.out.replace(shlex.quote(text), HARMLESS).replace(text, HARMLESS).count("\n") == usual.out.count("\n")
    options = [[line.split("=")[0] for line in one.out.split("\n") if line.startswith("#SBATCH")] for one in found]
    assert options[0] == options[1]


@pytest.mark.parametrize("words", [["evil.sh"], ["--", "evil.sh"], ["-p", "cpu", "evil.sh"], ["--hold", "x", "-H"]])
def test_no_name_becomes_the_script_of_a_submission(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no option of sbatch"):
        CommandSlurm({"PATH": str(tmp_path)}).submit("#!/bin/sh\n", words)


@hostile
def test_a_value_of_a_submission_stays_a_value(cluster: Cluster, text: str) -> None:
    cluster.tool("sbatch", 'for word in "$@"; do printf "%s\\0" "$word"; done > "$OUT"; echo 7')
    out = cluster.directory / "words"
    slurm = CommandSlurm({"PATH": f"{cluster.directory}:/usr/bin:/bin", "OUT": str(out)})
    value = text[:100_000]
    options = [f"--job-name={value}", "-J", value, f"--chdir=/{value}"]
    if "\n" in text:
        with pytest.raises(UsageError, match="a value with a line break"):
            slurm.submit("#!/bin/sh\n", options)
        options = [f"--chdir=/{value}"]
    assert slurm.submit("#!/bin/sh\n", options) == "7"
    assert out.read_bytes().split(b"\0") == [b"--parsable", *map(os.fsencode, options), b""]


def test_an_error_is_a_line_however_much_was_said() -> None:
    error = SlurmCommandError(["sbatch", HOSTILE["terminal"] * 100_000], 1, "", HOSTILE["megabyte"] * 10)
    assert len(str(error)) < 6000
    check_shown(str(error))
    with pytest.raises(SlurmCommandError, match="embedded null byte"):
        run_slurm(["true", "a\0b"])
    with pytest.raises(SlurmCommandError, match="longer than the kernel takes"):
        run_slurm(["true", HOSTILE["megabyte"]])
