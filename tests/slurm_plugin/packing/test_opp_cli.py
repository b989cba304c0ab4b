"""`hetstream gpu pack`, `opp` and `why` on a recorded Slurm 22.05, with a real site daemon."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from recorded import AS_ASKED, Recorded, job
from running_daemon import RunningDaemon, WaitUntil

from hetstream.hetjob.site.messages import GpuNow, ReportGpus
from hetstream.slurm_plugin.cli.packing_arguments import named_partitions
from hetstream.slurm_plugin.client.packing_slurm import PackingSlurm, parse_topology
from hetstream.slurm_plugin.client.parse_text import FIELD_END, RECORD_END
from tests.base.users import needs_root

GIB = 1 << 30
HETSTREAM = str(Path(sys.executable).with_name("hetstream"))
OPP = {"HETSTREAM_OPPORTUNISTIC_PARTITIONS": "opp"}
COMMENT = "hetstream:gpu-memory=8G"


@pytest.fixture
def slurm(tmp_path: Path) -> Recorded:
    """Job 41 waits in partition opp, held by the guard; g0's GPUs 0 and 1 are shared."""
    directory = tmp_path / "bin"
    directory.mkdir()
    slurm = Recorded(directory)
    held = {"Partition": "opp", "Reason": "JobHeldUser", "PriorityLong": "0", "Comment": COMMENT}
    slurm.write("queue", job("41", "PENDING", **held) + job("42", "RUNNING", NodeList="g1"))
    slurm.write("notes", f"41{FIELD_END}PENDING{FIELD_END}ticket=5{FIELD_END}1{RECORD_END}\n")
    words = f'case "$*" in *admin_comment*) f=notes;; *) f=queue;; esac; cat {directory}/$f | {AS_ASKED}'
    slurm.tool("squeue", words)
    shown = (directory / "scontrol").read_text().removeprefix("#!/bin/sh\n")
    doors = f'update|release) echo "$@" >> {directory}/calls; exit;; ping) exec cat {directory}/ping;;'
    slurm.tool("scontrol", f"case $1 in {doors} esac\n{shown}")
    slurm.write("ping", f"Slurmctld(primary) at {socket.gethostname()}.site is UP\n")
    return slurm


@pytest.mark.shows("nobody is told to release what the guard holds")
def test_without_a_daemon_a_held_job_is_not_told_to_be_released(slurm: Recorded) -> None:
    unknown = slurm.run("why 41 --fresh")
    assert "scontrol release 41" in unknown.stdout  # nobody says that partition opp is the packer's
    told = slurm.run("why 41 --fresh --json", **OPP)
    assert told.returncode == 0, told.stderr
    (blocker,) = json.loads(told.stdout)["blockers"]
    assert blocker["kind"] == "packer"
    assert blocker["next_step"] == "hetstream gpu jobs 41"
    assert "it waits for the packer" in blocker["text"]
    assert "scontrol release" not in told.stdout


@pytest.mark.shows("nobody is told to release what the guard holds")
def test_where_no_partition_is_named_a_job_that_the_guard_holds_is_not_told_to_be_released(slurm: Recorded) -> None:
    slurm.write("notes", f"41{FIELD_END}PENDING{FIELD_END}hetstream:guarded{FIELD_END}1{RECORD_END}\n")
    told = slurm.run("why 41 --fresh").stdout
    assert "it waits for the packer" in told
    assert "hetstream gpu jobs takes --partition=NAME" in told
    assert "scontrol release" not in told
    slurm.write("queue", (slurm.directory / "queue").read_text().replace(COMMENT, "hetstream:hold"))
    assert "scontrol release 41" in slurm.run("why 41 --fresh").stdout  # its owner holds it, too


def test_a_look_that_finds_nothing_to_do_says_so(slurm: Recorded, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert slurm.run("gpu pack --once --observe", **OPP).returncode == 0
    assert "nothing is to be done" not in caplog.text  # job 41 waits, which is said
    slurm.write("queue", job("42", "RUNNING", NodeList="g1"))
    assert slurm.run("gpu pack --once --observe", **OPP).returncode == 0
    assert "nothing is to be done" in caplog.text


def test_a_job_that_an_administrator_has_placed_is_shown_where_it_is(slurm: Recorded) -> None:
    by_hand = {"Partition": "opp", "NodeList": "g0", "Comment": f"hetstream:gpu=0,2 {COMMENT}"}
    note = "hetstream:placed=g0:0,2@1795000000@0"
    slurm.write("queue", job("43", "RUNNING", **by_hand))
    slurm.write("notes", f"43{FIELD_END}RUNNING{FIELD_END}{note}{FIELD_END}1{RECORD_END}\n")
    (row,) = json.loads(slurm.run("gpu jobs --json", **OPP).stdout)["jobs"]
    assert row["place"] == "GPU 0,2 of g0"


@pytest.mark.shows("`opp`, `gpu top`, doctor, metrics and page show shared GPUs")
def test_who_looks_sees_what_the_packer_decides(slurm: Recorded, local: RunningDaemon, wait_until: WaitUntil) -> None:
    local.start(wait_until)
    local.wait_for_reading(wait_until)
    environ = {**OPP, "HETSTREAM_DAEMON": local.address}
    busy = GpuNow(0, "GPU-a", 0.9, 60 * GIB)
    local.ask(ReportGpus("g0", (busy,)))
    (blocker,) = json.loads(slurm.run("why 41 --json --fresh", **environ).stdout)["blockers"]
    assert "1 in use for 80% of the last 10 s or more" in blocker["text"]
    (row,) = json.loads(slurm.run("gpu jobs --json", **environ).stdout)["jobs"]
    assert (row["job"], row["gpus"], row["gpu_memory_gib"], row["reason"]) == ("41", 1, 8.0, blocker["text"])
    why = slurm.run("gpu jobs 41 --json", **environ)
    gpus = json.loads(why.stdout)["gpus"]
    assert (gpus[0]["node"], gpus[0]["gpu"], gpus[0]["used_share"], gpus[0]["free_gib"]) == ("g0", 0, 0.9, 60.0)
    assert gpus[0]["verdict"] == "in use for 80% of the last 10 s or more"
    assert len(gpus) == 16
    assert slurm.run("gpu jobs 42", **environ).returncode == 1
    # Nothing is to be done, and nothing is done.
    assert "no GPU of 16 takes it now" in slurm.run("gpu pack --dry-run --json", **environ).stdout
    assert not (slurm.directory / "calls").exists()

    local.ask(ReportGpus("g0", (busy, GpuNow(2, "GPU-c", 0.2, 60 * GIB))))
    dry = slurm.run("gpu pack --dry-run --json", **environ)
    (event,) = map(json.loads, dry.stdout.splitlines())
    assert (event["event"], event["job"], event["nodes"], event["gpus"]) == ("would place", "41", ["g0"], [2])
    assert "it is to be placed on GPU 2 of g0" in slurm.run("gpu jobs", **environ).stdout
    assert not (slurm.directory / "calls").exists()
    placed = slurm.run(f"gpu pack --once --json --lock {local.directory}/run/lock", **environ)
    assert [json.loads(line)["event"] for line in placed.stdout.splitlines()] == ["placed"], placed.stderr
    update, release = (slurm.directory / "calls").read_text().splitlines()
    assert update.startswith(
        f"update JobId=41 ReqNodeList=g0 Gres=opp:p2:1 Comment=hetstream:gpu=2 {COMMENT} "
        "AdminComment=ticket=5 hetstream:placed=g0:2@"
    )
    assert release == "release 41"


def test_a_second_packer_is_refused(slurm: Recorded, tmp_path: Path) -> None:
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = slurm.run(f"gpu pack --once --lock {tmp_path}/lock", **OPP)
        assert done.returncode == 1
        assert "another packer holds" in done.stderr
        assert slurm.run(f"gpu pack --dry-run --lock {tmp_path}/lock", **OPP).returncode == 0  # it changes nothing
    finally:
        os.close(lock)


@dataclass
class TwoHosts:
    """Two packers in processes of their own, each on a host of its own name and with a /run of its own."""

    slurm: Recorded
    directory: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, host: str, *options: str) -> None:
        command = [HETSTREAM, "gpu", "pack", "--interval=1", f"--lock={self.directory}/{host}/lock", *options]
        environ = {
            "PATH": f"{self.slurm.directory}:/usr/sbin:/usr/bin:/sbin:/bin",
            **OPP,
            "HETSTREAM_DAEMON": "unix:/no",
        }
        script = f"hostname {host}; exec {shlex.join(command)}"
        with open(self.directory / f"{host}.log", "ab") as log:
            self.running[host] = subprocess.Popen(["unshare", "--uts", "sh", "-c", script], env=environ, stderr=log)

    def log(self, host: str) -> str:
        return (self.directory / f"{host}.log").read_text()

    def ping(self, *lines: str) -> None:
        self.slurm.write("new", "".join(f"Slurmctld({line}\n" for line in lines))
        (self.slurm.directory / "new").rename(self.slurm.directory / "ping")


@pytest.fixture
def hosts(slurm: Recorded, tmp_path: Path) -> Iterator[TwoHosts]:
    # Each look says who looks.
    shown = (slurm.directory / "squeue").read_text().removeprefix("#!/bin/sh\n")
    slurm.tool("squeue", f"hostname >> {tmp_path}/looks\n{shown}")
    found = TwoHosts(slurm, tmp_path)
    yield found
    for process in found.running.values():
        process.kill()
        process.wait()


@needs_root
def test_of_two_packers_on_two_hosts_the_one_beside_slurmctld_acts(hosts: TwoHosts, wait_until: WaitUntil) -> None:
    hosts.ping("primary) at ctl1 is UP", "backup) at ctl2 is UP")
    looks = hosts.directory / "looks"
    for host in ("ctl1", "ctl2"):
        hosts.start(host)
    wait_until(lambda: "slurmctld runs on ctl1, and the packer beside it acts" in hosts.log("ctl2"), 30, "a wait")
    wait_until(lambda: "ctl1" in looks.read_text().split(), 30, "a look")
    before = looks.read_text().split().count("ctl2")  # each looks once before it begins, at its command line
    # slurmctld moves: so does the packer, and the other one waits from then on.
    hosts.ping("primary) at ctl1 is DOWN", "backup) at ctl2 is UP")
    wait_until(lambda: "slurmctld runs on ctl2" in hosts.log("ctl1"), 30, "a wait of the first")
    wait_until(lambda: looks.read_text().split().count("ctl2") > before, 30, "a look of the second")
    assert hosts.log("ctl2").count("acts; this one") == 1, "it says so again and again"
    # Nobody acts as long as no slurmctld answers.
    hosts.ping("primary) at ctl1 is DOWN", "backup) at ctl2 is DOWN")
    wait_until(lambda: "no slurmctld answers" in hosts.log("ctl2"), 30, "a wait of both")


@needs_root
def test_of_two_packers_with_a_shared_lock_one_acts_and_the_other_takes_over(
    hosts: TwoHosts, wait_until: WaitUntil
) -> None:
    hosts.ping("primary) at ctl1 is UP")
    looks, shared = hosts.directory / "looks", f"--shared-lock={hosts.directory}/shared/lock"
    hosts.start("login1", shared)
    wait_until(lambda: "nothing is known of any GPU" in hosts.log("login1"), 30, "a look")
    hosts.start("login2", shared)
    wait_until(lambda: "another packer holds" in hosts.log("login2"), 30, "a wait")
    before = looks.read_text().split().count("login2")
    os.kill(hosts.running["login1"].pid, signal.SIGKILL)
    wait_until(lambda: looks.read_text().split().count("login2") > before, 30, "a look of the second")


def test_a_packer_that_is_called_once_on_another_host_is_refused(slurm: Recorded, tmp_path: Path) -> None:
    slurm.write("ping", "Slurmctld(primary) at elsewhere is UP\n")
    for line in (
        f"gpu pack --once --lock {tmp_path}/lock",
        f"gpu pack --once --lock {tmp_path}/l --shared-lock {tmp_path}/x",
    ):
        done = slurm.run(line, **OPP)
        assert done.returncode == int("shared" not in line), done.stderr
    assert "slurmctld runs on elsewhere" in slurm.run(f"gpu pack --once --lock {tmp_path}/lock", **OPP).stderr
    assert slurm.run(f"gpu pack --dry-run --lock {tmp_path}/lock", **OPP).returncode == 0


@pytest.mark.shows("unknown classes, and quotas that the cluster cannot keep, are refused")
def test_quotas_are_checked_before_anything_is_done(slurm: Recorded, tmp_path: Path) -> None:
    path = tmp_path / "quotas.json"
    path.write_text('{"partitions": ["gpus", "opp"], "tenants": {"vision": 1000}}')
    done = slurm.run(f"gpu pack --once --observe --quotas {path}", **OPP)
    assert done.returncode == 1
    for text in ("no partition 'gpus' (did you mean gpu?)", "'opp' is for opportunistic jobs", "quotas of 1,000 GPUs"):
        assert text in done.stderr


def test_users_hear_why_their_jobs_wait_for_quota(slurm: Recorded, tmp_path: Path) -> None:
    (tmp_path / "quotas.json").write_text('{"partitions": ["gpu"], "tenants": {"vision": 1}}')
    gpu = {"tres-per-node": "gres:gpu:1", "Reason": "JobHeldUser", "PriorityLong": "0", "Account": "vision"}
    running = job("42", "RUNNING", NodeList="g1", **{"tres-per-node": "gres:gpu:1", "Account": "vision"})
    slurm.write("queue", running + job("43", "PENDING", **gpu))
    environ = {**OPP, "HETSTREAM_QUOTAS": str(tmp_path / "quotas.json")}
    text = "tenant vision has 0 of its 1 GPU left, and it asks for 1"
    assert text in slurm.run("why 43 --fresh", **environ).stdout
    assert text in slurm.run("gpu jobs 43", **environ).stdout
    assert "it could start now: submit it again with --opp" in slurm.run("gpu jobs", **environ).stdout
    assert "release" not in slurm.run("why 43 --fresh", **environ).stdout
    (tmp_path / "quotas.json").unlink()
    said = slurm.run("why 43 --fresh", **environ).stdout
    assert "perhaps for quota" in said
    assert "release" not in said


def test_users_hear_that_an_upgrade_was_given_up_and_why(slurm: Recorded) -> None:
    running = job("45", "RUNNING", NodeList="g1", **{"Partition": "opp", "Comment": f"hetstream:gpu=0 {COMMENT}"})
    slurm.write("queue", running)
    note = "hetstream:placed=g1:0@1@0 hetstream:not-upgraded=5@0@1@g1%20lacks%20a%20GPU"
    slurm.write("notes", f"45{FIELD_END}RUNNING{FIELD_END}{note}{FIELD_END}1{RECORD_END}\n")
    text = "its upgrade was given up, and is tried again: g1 lacks a GPU"
    for verb in ("why 45 --fresh", "gpu jobs 45", "gpu jobs"):
        assert text in slurm.run(verb, **OPP).stdout, verb
    (row,) = json.loads(slurm.run("gpu jobs --json", **OPP).stdout)["jobs"]
    assert (row["reason"], row["not_upgraded"]) == ("", text)


def test_the_partitions_must_be_named(slurm: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in ("gpu pack --once", "gpu jobs"):
        done = slurm.run(line, HETSTREAM_OPPORTUNISTIC_PARTITIONS="")
        assert done.returncode == 2
        assert "whose jobs are opportunistic?" in done.stderr
    (tmp_path / "site").write_text('HETSTREAM_OPPORTUNISTIC_PARTITIONS="opp opp2"\n')
    monkeypatch.delenv("HETSTREAM_OPPORTUNISTIC_PARTITIONS", raising=False)
    assert named_partitions((tmp_path / "no", tmp_path / "site")) == {"opp", "opp2"}


def test_a_partition_that_does_not_exist_is_told(slurm: Recorded) -> None:
    for line in ("gpu pack --once --observe --partition=opp,nosuch", "gpu jobs --partition=nosuch"):
        done = slurm.run(line)
        assert done.returncode == 2
        assert "nosuch. See: sinfo --all" in done.stderr


def test_what_has_ended_by_itself_is_slurms_word(monkeypatch: pytest.MonkeyPatch) -> None:
    states = ["RUNNING", "FAILED", "COMPLETED", "CANCELLED", "TIMEOUT", "COMPLETING"]

    def ask(_: PackingSlurm, *argv: str) -> str:
        if "-O" not in argv:
            return ""
        asked = [field.split(":", 1) for field in argv[argv.index("-O") + 1].split(",")]
        known = [{"JobID": f"{number}", "State": state, "requeue": "1"} for number, state in enumerate(states)]
        return "".join("".join(job.get(name, "") + end for name, end in asked) + "\n" for job in known)

    monkeypatch.setattr(PackingSlurm, "_ask", ask)
    notes = PackingSlurm().notes(["opp"])
    assert [states[number] for number, of_job in notes.items() if of_job.has_ended] == ["FAILED", "COMPLETED"]


def test_what_a_job_got_is_slurms_word(slurm: Recorded) -> None:
    def got(text: str) -> object:
        slurm.tool("scontrol", f"echo '{text}'")
        return PackingSlurm({"PATH": f"{slurm.directory}:/usr/bin:/bin"}).got("41")

    found = got("JobId=41 JobName=x NodeList=g0 JOB_GRES=opp:p2:1 Nodes=g0 GRES=opp:p2:1(IDX:2)")
    assert [(gres.name, gres.type, gres.count) for gres in found] == [("opp", "p2", 1)]  # type: ignore[attr-defined]
    assert got("JobId=41 JobName=x JOB_GRES=opp:p0:1 JOB_GRES=opp:p2:1") is None  # a name that looks like a record
    assert got("nothing") is None


def test_switches_above_nodes() -> None:
    text = """SwitchName=s0 Level=0 LinkSpeed=1 Nodes=g[0-1]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=g2
SwitchName=core Level=1 LinkSpeed=1 Nodes=g[0-2] Switches=s[0-1]
"""
    assert parse_topology(text) == {"g0": ("core", "s0"), "g1": ("core", "s0"), "g2": ("core", "s1")}
    assert parse_topology("No topology information") == {}
