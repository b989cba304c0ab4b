"""The commands for admins on recorded clusters, and on clusters and command lines that are wrong."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import clusters
import pytest
from recorded import Recorded, hours_ago, job

from hetstream.base.text import user_name
from hetstream.slurm_plugin.cli import main
from hetstream.slurm_plugin.cli.cluster import frag_report
from hetstream.slurm_plugin.insight.fragmentation import measure

FIXTURES = Path(__file__).with_name("fixtures")
VERSIONS = ("22.05", "24.11", "26.05")
READING = ("frag", "jobs", "why 41", "util", "advise", "doctor")
ASKING = (*READING, "report", "migrate 41", "site daemon --dry-run")
TABLES = {
    "frag": "nodes", "jobs": "jobs", "why": "blockers", "util": "groups", "advise": "advice", "doctor": "findings",
}  # fmt: skip


def fails(done: subprocess.CompletedProcess[str], code: int) -> str:
    """One line on stderr, nothing on stdout, this exit code."""
    assert (done.returncode, done.stdout) == (code, ""), done
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_why_without_a_job_id_takes_the_newest_pending_job_of_the_caller(tmp_path: Path) -> None:
    cluster, me = Recorded(tmp_path), user_name(os.geteuid())
    assert "no job of yours is pending. Of another job: hetstream why JOBID" in fails(cluster.run("why"), 1)
    later = {"UserName": me, "SubmitTime": "2026-11-20T17:00:00"}
    rows = [
        job("51", "PENDING", **later),
        job("52", "PENDING", UserName=me, SubmitTime="2026-11-20T16:30:00"),
        job("53", "RUNNING", **later, NodeList="g1", StartTime=hours_ago(1)),
        job("54", "PENDING", SubmitTime="2026-11-20T18:00:00"),
    ]
    cluster.write("queue", "".join(rows))
    assert json.loads(cluster.run("why --json").stdout)["summary"]["job"] == "51"
    year = (datetime.now() + timedelta(days=364)).strftime("%Y-%m-%dT%H:00:00")
    cluster.write("queue", job("51", "PENDING", **later, StartTime=year))
    assert "(Slurm's guess of a year for a job without a time limit)" in cluster.run("why").stdout
    assert cluster.run("why").stdout == cluster.run("why 51").stdout


def test_a_verb_without_its_action_lists_the_actions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["gpu"])
    assert "show opportunistic jobs, and why they wait" in capsys.readouterr().out


@pytest.mark.shows("JSON, table and CSV are made from the same rows; hostlist compression round-trips")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("line", READING)
def test_table_json_and_csv_agree_on_every_version(tmp_path: Path, version: str, line: str) -> None:
    cluster = Recorded(tmp_path, version)
    # A window that does not move while three commands look at it.
    long = f" --start {hours_ago(2)} --end {hours_ago(1)}" if line == "util" else ""
    has_csv = line in ("frag", "jobs", "util", "advise")
    forms = ("", "--json", "--csv" if has_csv else "--json")
    table, document, lines = (cluster.run(f"{line}{long} {form}".rstrip()) for form in forms)
    # The recorded clusters have slots for opportunistic jobs and no Epilog, which the doctor calls a problem.
    code = 3 if line == "doctor" else 0
    assert [done.returncode for done in (table, document, lines)] == [code] * 3, table.stderr + document.stderr
    facts = json.loads(document.stdout)
    assert facts["meta"]["version"] == 1
    assert facts["meta"]["slurm"].startswith(version)
    rows = facts[TABLES[line.split()[0]]]
    in_csv = list(csv.DictReader(io.StringIO(lines.stdout))) if has_csv else []
    assert len(in_csv) == (len(rows) if has_csv else 0)
    assert rows or (line == "advise" and version != "22.05")
    for said, row in zip(in_csv, rows, strict=has_csv):
        for key, value in row.items():
            flat = " ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
            # A second may pass between two commands.
            assert said[key] == flat or (key == "time_s" and abs(int(said[key]) - value) < 60), key
    assert "\x1b" not in table.stdout


@pytest.mark.shows("unknown jobs, missing commands and no permission are one line with the next step")
@pytest.mark.parametrize("line", ASKING)
def test_missing_commands(tmp_path: Path, line: str) -> None:
    cluster = Recorded(tmp_path)
    (tmp_path / "scontrol").unlink()
    done = cluster.run(line, PATH=str(tmp_path))
    assert "Run this where Slurm's commands are installed" in fails(done, 1)


@pytest.mark.shows("unknown jobs, missing commands and no permission are one line with the next step")
@pytest.mark.parametrize("line", ASKING)
@pytest.mark.parametrize(
    "said",
    [
        "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)",
        "slurm_load_node error: Access/permission denied",
        "scontrol: error: resolve_ctls_from_dns_srv: Unknown host\nscontrol: fatal: no configuration source",
    ],
)
def test_a_controller_that_does_not_answer(tmp_path: Path, line: str, said: str) -> None:
    cluster = Recorded(tmp_path)
    cluster.write("said", said + "\n")
    cluster.tool("scontrol", f"cat {tmp_path}/said >&2; exit 1")
    text = fails(cluster.run(line), 1)
    assert "scontrol exited with 1" in text
    assert "Check: scontrol ping" in text


@pytest.mark.shows("unknown jobs, missing commands and no permission are one line with the next step")
@pytest.mark.parametrize("line", ASKING)
def test_an_old_slurm(tmp_path: Path, line: str) -> None:
    cluster = Recorded(tmp_path)
    cluster.write("config", "SLURM_VERSION = 20.11.9\n")
    assert "hetstream reads 22.05 and newer" in fails(cluster.run(line), 1)


@pytest.mark.shows("unknown jobs, missing commands and no permission are one line with the next step")
@pytest.mark.parametrize("line", READING)
def test_an_answer_of_another_form(tmp_path: Path, line: str) -> None:
    cluster = Recorded(tmp_path)
    cluster.write("queue", "41|train|PENDING\n")
    assert "could not be read: squeue printed 1 fields" in fails(cluster.run(line), 1)


@pytest.mark.shows("unknown jobs, missing commands and no permission are one line with the next step")
@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("frag -p nope", "no partition nope. There are: cpu, gpu, opp"),
        ("jobs -p gpu,nope", "no partition nope"),
        ("jobs --user root,no-such-user", "there is no user 'no-such-user' here. Check: getent passwd"),
        ("migrate 42", "job 42 is alice's, and only they can move it. Your own: hetstream jobs -u $USER"),
        ("jobs -t PD,nope", "no job in the queue can be NOPE. There are: PENDING, RUNNING"),
        ("frag -w g[0-9]", "no node g4, g5"),
        ("frag -w g[0-", "brackets do not match"),
        ("util --start yesterday", "--start=yesterday: must be 2026-11-20T16:00:00"),
        ("util -S now-1hour -E now-2hours", "the window must begin before it ends"),
        ("util --start now+1hour", "must be"),
        ("why x", "job id 'x': must be N, N+COMPONENT or N_TASK"),
        ("jobs 41 y", "job id 'y'"),
        ("report --html .", "--html=.: is a directory. Name a file, such as cluster.html"),
    ],
)
def test_a_wrong_command_line(tmp_path: Path, line: str, text: str) -> None:
    assert text in fails(Recorded(tmp_path).run(line), 2)


@pytest.mark.shows("unknown jobs, missing commands and no permission are one line with the next step")
@pytest.mark.parametrize("line", ["why 999", "why 41+1", "why 41_2", "jobs 999"])
def test_unknown_jobs(tmp_path: Path, line: str) -> None:
    cluster = Recorded(tmp_path)
    name = line.split()[1]
    assert f"no job {name} is pending or running. Check: scontrol show job" in fails(cluster.run(line), 1)
    config = (tmp_path / "config").read_text().replace("PrivateData             = none", "PrivateData = jobs,usage")
    cluster.write("config", config)
    assert "may hide it" not in fails(cluster.run(line), 1), "from root nothing is hidden"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 54321)
        assert "PrivateData=jobs,usage may hide it from you" in fails(cluster.run(line), 1)


@pytest.mark.shows("unknown jobs, missing commands and no permission are one line with the next step")
def test_jobs_of_users_and_states_as_squeue_takes_them(tmp_path: Path) -> None:
    cluster = Recorded(tmp_path)
    everybody = json.loads(cluster.run("jobs --json").stdout)["jobs"]
    (user,) = {row["user"] for row in everybody}

    def ids(line: str) -> list[str]:
        return [row["job"] for row in json.loads(cluster.run(f"jobs {line} --json").stdout)["jobs"]]

    assert ids(f"-u {user}") == ids("-t PD,R") == ids("-t pending,running") == [row["job"] for row in everybody]
    assert ids("-u nobody") == []
    assert ids("-t PD") == [row["job"] for row in everybody if row["state"] == "PENDING"]


@pytest.mark.shows("unknown jobs, missing commands and no permission are one line with the next step")
def test_a_page_that_cannot_be_written_is_told_by_its_own_name(tmp_path: Path) -> None:
    said = fails(Recorded(tmp_path).run("report --html /proc/page.html"), 1)
    assert said == ("hetstream report: /proc/page.html: No such file or directory. Check: namei -l /proc/page.html\n")


def test_a_page_takes_no_place_of_what_is_no_page(tmp_path: Path) -> None:
    cluster, pipe = Recorded(tmp_path), tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(pipe.read_text)
        assert cluster.run(f"report --html {pipe}").returncode == 0
        assert "<html" in read.result(timeout=30)
    assert pipe.is_fifo()

    page, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(page)
    assert cluster.run(f"report --html {link}").returncode == 0
    assert link.is_symlink()
    assert "<html" in page.read_text()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_on_a_full_device_is_one_line(tmp_path: Path, unbuffered: str) -> None:
    trace = tmp_path / "jobs.csv"
    trace.write_text("submit_s,run_s,num_gpus\n0,10,1\n")
    words = ["simulate", str(trace), "--cluster", "gpus=1,cpus=1", "--policies", "tuned"]
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        argv = [sys.executable, "-m", "hetstream.slurm_plugin.cli", *words]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, env=environ, timeout=120)
    assert done.returncode == 1
    told = "hetstream simulate: No space left on device: what it writes, to stdout or a file, is cut off"
    assert done.stderr.splitlines()[-1] == told
    assert "Traceback" not in done.stderr
    assert "ignored" not in done.stderr


@pytest.mark.shows("unknown jobs, missing commands and no permission are one line with the next step")
def test_a_cluster_without_gpus_jobs_and_usable_nodes(tmp_path: Path) -> None:
    cluster = Recorded(tmp_path)
    cluster.write("queue", "")
    lines = [line for line in (tmp_path / "node").read_text().splitlines() if line.startswith("NodeName=c")]
    cluster.write("node", "\n".join(lines) + "\n")
    done = cluster.run("frag")
    assert (done.returncode, done.stderr) == (0, "")
    assert "no node has GPUs: there is no indicator" in done.stdout
    assert "no job waits for resources" in done.stdout
    assert "maintenance window" in done.stdout
    assert "no job is pending or running" in cluster.run("jobs").stdout
    cluster.write("node", lines[3] + "\n")
    assert "no node can run jobs. Check: sinfo -R" in cluster.run("frag").stdout
    assert json.loads(cluster.run("frag --json").stdout)["summary"]["mean_indicator"] is None


def test_a_cluster_whose_gpus_are_all_drained(tmp_path: Path) -> None:
    cluster = Recorded(tmp_path)
    nodes = (tmp_path / "node").read_text()
    cluster.write("node", re.sub(r"(Gres=gpu.* State=\w+)", r"\1+DRAIN", nodes))
    done = cluster.run("frag")
    assert (done.returncode, done.stderr) == (0, "")
    assert "no node in use has GPUs: there is no indicator. Check: sinfo -R" in done.stdout


def test_bars_tell_ends_from_a_middle() -> None:
    """Of many nodes; a few are seen in the table."""

    def bars(*layout: tuple[int, int]) -> list[str]:
        nodes = tuple(clusters.gpu_node(number, cpus, gpus) for number, (cpus, gpus) in enumerate(layout))
        seen = replace(clusters.snapshot(), nodes=nodes, jobs=())
        return [line for line in frag_report(measure(nodes, ()), seen).lines if "nodes by FRAG" in line]

    at_both_ends, in_step = [(16, 0), (0, 4)], [(8, 2), (4, 1)]
    assert bars(*at_both_ends * 3) == []
    assert bars(*at_both_ends * 4) == ["nodes by FRAG: CPUs gone -1 [█         █] +1 GPUs gone"]
    assert bars(*in_step * 4) == ["nodes by FRAG: CPUs gone -1 [     █     ] +1 GPUs gone"]
    assert bars(*in_step * 40, (16, 0)) == ["nodes by FRAG: CPUs gone -1 [▁    █     ] +1 GPUs gone"]


def test_tasks_of_an_array_stand_in_their_order(tmp_path: Path) -> None:
    cluster = Recorded(tmp_path)
    tasks = [("6", "10"), ("8", "9"), ("7", "2")]  # the last to start keeps the array's own number
    cluster.write("queue", "".join(job(id_, "RUNNING", ArrayJobID="6", ArrayTaskID=task) for id_, task in tasks))
    assert [row["job"] for row in json.loads(cluster.run("jobs --json").stdout)["jobs"]] == ["6_2", "6_9", "6_10"]


@pytest.mark.shows("unknown jobs, missing commands and no permission are one line with the next step")
def test_gpus_without_types_and_other_gres(tmp_path: Path) -> None:
    cluster = Recorded(tmp_path)
    nodes = (tmp_path / "node").read_text()
    cluster.write(
        "node", nodes.replace("Gres=gpu:h200:4,shard:h200:16", "Gres=gpu:4(S:0-1),craynetwork:2,bandwidth:1G")
    )
    assert json.loads(cluster.run("frag --json").stdout)["summary"]["gpus"] == 16


@pytest.mark.shows("colours are only on terminals, and not with NO_COLOR")
def test_colours_are_for_terminals_that_want_them(tmp_path: Path) -> None:
    cluster = Recorded(tmp_path)
    command = f"{sys.executable} -m hetstream.slurm_plugin.cli frag"
    env = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "TERM": "xterm"}
    for name, colours in (("NO_COLOR", False), ("X", True)):
        done = subprocess.run(
            ["script", "-qec", command, "/dev/null"], env={**env, name: "1"}, capture_output=True, text=True, timeout=60
        )
        assert ("\x1b[1m" in done.stdout) == colours
    assert cluster.run("frag").returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("packer --once", "hetstream: packer is no verb. Did you mean gpu pack?"),
        ("explain train.py", "hetstream: explain is no verb. Did you mean run --explain?"),
        ("install --prefix /usr", "hetstream: install is no verb. Did you mean site install?"),
        ("checkpoint ls", "hetstream: checkpoint is no verb. Did you mean ckpt?"),
        ("queue", "hetstream: queue is no verb. Did you mean jobs?"),
        ("version", "hetstream: version is no verb. Did you mean --version?"),
        ("worker", "hetstream: worker is no verb. Did you mean internal worker?"),
        ("simulat", "hetstream: simulat is no verb. Did you mean simulate?"),
        ("gpu job", "hetstream gpu: job is no action. Did you mean jobs?"),
        ("site nothing-like-it", "hetstream site: nothing-like-it is no action. See: hetstream site --help"),
    ],
)
def test_a_word_that_is_no_verb_is_answered_with_what_does_it(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"{said}\n"


def test_the_list_of_verbs_has_three_groups_and_no_internals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^(\w.*):$", shown, re.MULTILINE) == ["your job", "the cluster", "for the admin"]
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert "internal" not in shown


@pytest.mark.shows("the command starts without torch and without the data plane")
@pytest.mark.parametrize(
    ("verbs", "heavy"),
    [
        # Each program that shares a GPU begins with one.
        (("gpu run", "internal coordinator", "internal gpu-emulate", "ckpt ls", "internal writer"), []),
        # Those look at thousands of nodes for thousands of shapes, as arrays.
        (("frag", "jobs", "why", "advise", "report"), ["numpy"]),
        # Those are quick, and `filter` runs at each sbatch.
        (("util", "doctor", "convert", "sbatch", "internal filter"), []),
    ],
)
def test_no_reading_command_imports_torch_or_the_data_plane(verbs: tuple[str, ...], heavy: list[str]) -> None:
    script = (
        "import sys; from hetstream.slurm_plugin.cli import build_parser; "
        f"[build_parser(*verb.split()) for verb in {verbs}]; "
        "print([name for name in ('torch', 'zmq', 'numpy', 'hetstream.mpi_dataworkers.loader') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == repr(heavy)
