"""The site daemon as real processes: killed at any point, asked by strangers, on a real cluster as an ordinary user."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded import Recorded
from running_daemon import AS_USER, RunningDaemon, WaitUntil

from hetstream.hetjob.errors import SiteError
from hetstream.hetjob.site.client import Munge, TcpAddress, UnixAddress
from hetstream.hetjob.site.messages import (
    LENGTH,
    MAX_QUESTION_BYTES,
    AskStatus,
    GrantLimit,
    RefuseReport,
    ReportDemand,
    encode_request,
    new_request,
)
from hetstream.mpi_dataworkers.process.faults import POINTS
from hetstream.slurm_plugin.insight.observation import History
from tests.clusters import Devcluster, running_cluster
from tests.devcluster.record import read_daemons

NOBODY = 65534


def demand(job_id: int | str, wanted: int = 8, cpus: int = 8, minimum: int = 0) -> ReportDemand:
    return ReportDemand(int(job_id), minimum, minimum, wanted, cpus, 0.4)


def limit_of(daemon: RunningDaemon, report: ReportDemand) -> int | None:
    answer = daemon.ask(report)
    assert isinstance(answer, GrantLimit), answer
    return answer.limit


def raw(address: UnixAddress | TcpAddress, data: bytes) -> bytes:
    """Send bytes as they are; returns all that comes back until the other side closes."""
    family, where = (
        (socket.AF_UNIX, str(address.path))
        if isinstance(address, UnixAddress)
        else (socket.AF_INET, (address.host, address.port))
    )
    with socket.socket(family) as connection:
        connection.settimeout(30)
        connection.connect(where)
        got = b""
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(data)
            while part := connection.recv(65536):
                got += part
        return got


def frame(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


DAEMON_POINTS = [point for point in POINTS if point.startswith("daemon.")]


@pytest.mark.shows("the site daemon divides data workers, survives its death, and believes what Slurm confirms")
def test_a_daemon_killed_at_any_point_goes_on_with_what_it_said(local: RunningDaemon, wait_until: WaitUntil) -> None:
    local.start(wait_until)
    local.wait_for_reading(wait_until)
    first = local.ask(demand(1))
    assert isinstance(first, GrantLimit)
    assert (first.limit, first.reason, first.next_s, first.companions) == (8, "all that it wants: 8", 10.0, ())
    assert first.read_age_s is not None
    local.kill()
    known = local.wishes_on_disk()
    for number, point in enumerate(DAEMON_POINTS):
        marker = local.directory / point
        local.start(wait_until, HETSTREAM_FAULT=f"{point}:1:kill:{marker}")
        # Some die of the reading at the start, the others of this report.
        with contextlib.suppress(SiteError):
            local.ask(demand(1, wanted=7 - number))
        wait_until(local.has_ended, 60, f"death at {point}")
        assert marker.exists(), local.log
        after = local.wishes_on_disk()
        assert after in (known, {"1": 7 - number}), point
        known = after
    # The socket of the dead one is replaced, and what was committed is what the next one knows.
    local.start(wait_until)
    local.wait_for_reading(wait_until)
    assert {name: status.limit for name, status in local.jobs().items()} == known
    assert local.end() == 0
    assert not (local.directory / "socket").exists()


@pytest.mark.shows("the site daemon divides data workers, survives its death, and believes what Slurm confirms")
def test_strangers_replays_and_garbage(local: RunningDaemon, wait_until: WaitUntil) -> None:
    local.start(wait_until)
    local.wait_for_reading(wait_until)
    assert local.ask(demand(3)) == RefuseReport("job 3 is not yours")
    request = encode_request(new_request(demand(1), time.time_ns()))
    address = local.where
    assert b'"limit":8' in raw(address, frame(request))
    assert b"a clock that was set back, or a replay" in raw(address, frame(request))
    for data in (
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        frame(b""),
        frame(b"{}"),
        frame(b"\xff" * 100),
        frame(b"[" * 10000),
        frame(request.replace(b'"version":1', b'"version":9')),
        LENGTH.pack(MAX_QUESTION_BYTES + 1) + b"x",
        b"\0",
    ):
        assert raw(address, data) == b"" if len(data) > 4 else True, data
    with contextlib.ExitStack() as silent:

        def connect() -> bool:
            one = silent.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            return one.connect_ex(str(local.directory / "socket")) == 0

        for _ in range(260):
            wait_until(connect)
        # A crowd that says nothing keeps nobody out.
        assert limit_of(local, demand(1)) == 8
    assert local.log.count("more connections than are held") == 1, "it is said once a minute"
    assert "Traceback" not in local.log
    assert local.end() == 0


# A user who asks without end, from many connections, and leaves as many silent. It says when it has begun.
FLOOD = """
import contextlib, os, socket, sys, threading
os.setgroups([]); os.setgid(54322); os.setuid(54322)
silent = []

def flood(number):
    while True:
        with contextlib.suppress(OSError):
            one = socket.socket(socket.AF_UNIX)
            one.settimeout(1)
            one.connect(sys.argv[1])
            if number % 2:
                silent.append(one)
                del silent[:-200]
            else:
                one.sendall(bytes.fromhex(sys.argv[2]))
                one.recv(1)
                one.close()

for number in range(8):
    threading.Thread(target=flood, args=(number,), daemon=True).start()
while len(silent) < 150:
    pass
print("begun", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_a_flood_of_one_user_leaves_the_others_their_answers(local: RunningDaemon, wait_until: WaitUntil) -> None:
    with tempfile.TemporaryDirectory(prefix="hetstream-flood-") as place:
        Path(place).chmod(0o755)
        local.address = f"unix:{place}/socket"
        local.start(wait_until)
        local.wait_for_reading(wait_until)
        question = frame(encode_request(new_request(AskStatus(), time.time_ns()))).hex()
        argv = [sys.executable, "-c", FLOOD, f"{place}/socket", question]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as flood:
            try:
                assert flood.stdout is not None
                assert flood.stdout.readline() == b"begun\n"
                for wanted in range(1, 21):
                    assert limit_of(local, demand(1, wanted)) is not None
            finally:
                flood.kill()
        assert 1 <= local.log.count("more connections than are held") <= 2
        assert "Traceback" not in local.log
        assert local.end() == 0


def test_connections_that_come_all_at_once_are_closed_where_they_are_too_many(
    local: RunningDaemon, wait_until: WaitUntil
) -> None:
    """Also those whose turn was over before it began."""
    local.start(wait_until)
    assert local.process is not None
    path = str(local.where).removeprefix("unix:")
    local.process.send_signal(signal.SIGSTOP)
    with contextlib.ExitStack() as held:
        crowd = [held.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(120)]
        for one in crowd:
            one.connect(path)
        local.process.send_signal(signal.SIGCONT)
        for one in crowd[: 120 - 64]:
            one.settimeout(3)
            assert one.recv(1) == b"", "the end, and not a silence"


def test_the_questions_of_one_user_have_a_rate(local: RunningDaemon, wait_until: WaitUntil) -> None:
    local.start(wait_until)
    began = time.monotonic()
    for _ in range(250):
        local.status()
    # A hundred at once, and a hundred a second; those of other users are counted apart, see `test_turns.py`.
    assert time.monotonic() - began > 1.4
    assert local.end() == 0


def test_without_munge_there_is_no_daemon_over_tcp(tmp_path: Path, slurm: Recorded) -> None:
    """As on a cluster with auth/slurm: nobody could say who asks."""
    argv = [sys.executable, str(AS_USER), str(os.geteuid()), "site", "daemon", "--state-dir", str(tmp_path / "state")]
    argv += ["--address", f"tcp://{os.geteuid()}@127.0.0.1:0"]
    env = {"PATH": str(slurm.directory), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "needs MUNGE, here and on all nodes with jobs: munge: No such file or directory" in done.stderr
    assert "AuthType=auth/slurm" in done.stderr


@pytest.mark.shows("the site daemon divides data workers, survives its death, and believes what Slurm confirms")
def test_what_the_command_says(
    local: RunningDaemon, wait_until: WaitUntil, slurm: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    state = local.directory / "state"
    done = slurm.run(f"site daemon --dry-run --allocate --state-dir {state} --address {local.address}")
    assert done.returncode == 0, done.stderr
    assert "would allocate as user id" in done.stdout
    assert "would divide 88 CPUs of cpu among 0 jobs, and tell them" in done.stdout
    assert not state.exists(), "a dry run leaves nothing"
    alone = slurm.run(f"site status --address {local.address}")
    assert alone.returncode == 1
    assert (
        "does not answer: No such file or directory. Does it run there? --address or HETSTREAM_DAEMON" in alone.stderr
    )
    local.start(wait_until)
    local.wait_for_reading(wait_until)
    wait_until(lambda: limit_of(local, demand(1, wanted=20)) == 11)
    status = slurm.run(f"site status --json --address {local.address}")
    report = json.loads(status.stdout)
    assert report["summary"]["mode"] == "allocate"
    assert report["jobs"][0]["reason"] == "11 of 20: 88 CPUs are shared by 1 job, its weight is 4"
    assert "11 of 20" in slurm.run(f"site status --address {local.address}").stdout
    done = slurm.run(f"site daemon -n --json --state-dir {state} --address {local.address}")
    assert json.loads(done.stdout)["jobs"][0]["limit"] == 11
    for line, text in (
        (f"site daemon --state-dir {state} --address unix:/tmp/other", "is in use by the daemon with process id"),
        (
            f"site daemon --state-dir {local.directory}/two --address {local.address}",
            "is in use by another daemon. Stop that one, or give another --address",
        ),
        (f"site daemon --state-dir {local.directory}/two --address tcp://12345@127.0.0.1:0", "is for user 12345 alone"),
        (f"site daemon --state-dir {local.directory}/two --address here", "must be unix:/PATH"),
        (f"site daemon --dry-run --pool gone --state-dir {state}", "--pool: no partition gone"),
        (f"site daemon --json --state-dir {state}", "--json is for --dry-run"),
        (f"site daemon --interval 1 --state-dir {state}", "must be at least 5 seconds"),
    ):
        done = slurm.run(line)
        assert done.returncode in (1, 2), line
        assert text in done.stderr, line
        assert done.stderr.count("\n") == 1, done.stderr
    with History(state / "history.sqlite") as history:
        assert len(history.since(0.0)) >= 1


class Cluster(Devcluster):
    """A cluster of this module's own: its slurmctld is killed, and its sdiag is read."""

    def sleep(self, *options: str, uid: int = 0) -> str:
        return self.submit("--output=/dev/null", *options, "--wrap=sleep 600", uid=uid)

    def daemon(self, name: str) -> Any:
        return next(one for one in read_daemons(self.state_dir) if one.name == name)


@pytest.fixture(scope="module")
def cluster(release: str) -> Iterator[Cluster]:
    with running_cluster("daemon", release=release, wrapper=Cluster) as cluster:
        yield cluster


@pytest.fixture
def site(cluster: Cluster, tmp_path: Path) -> Iterator[RunningDaemon]:
    """A daemon on the cluster, as nobody, reached over TCP with MUNGE."""
    tmp_path.chmod(0o755)
    directory = Path("/tmp") / f"hetstreamd-{os.getpid()}"
    (directory / "state").mkdir(parents=True)
    os.chown(directory / "state", NOBODY, NOBODY)
    munge = cluster.state_dir / "run" / "munge.sock"
    env = {**cluster.env, "HETSTREAM_MUNGE_SOCKET": str(munge)}
    daemon = RunningDaemon(directory, f"tcp://{NOBODY}@127.0.0.1:0", env, ("--allocate",), NOBODY, munge)
    yield daemon
    daemon.kill()
    # Not by user: scancel of 26.05 takes nobody for no name.
    for partition in cluster.record.partitions:
        cluster.run("scancel", "--quiet", f"--partition={partition}")
    shutil.rmtree(directory)


def rpcs_of(cluster: Cluster, user: str) -> int:
    """How many requests slurmctld has had from a user."""
    found = re.search(rf"^\s*{user}\s+\(\s*\d+\)\s+count:(\d+)", cluster.run("sdiag"), re.MULTILINE)
    return int(found[1]) if found else 0


@pytest.mark.shows("a reading of the cluster has a bounded number of requests")
@pytest.mark.shows("the site daemon divides data workers, survives its death, and believes what Slurm confirms")
@pytest.mark.shows("the site daemon runs as nobody, reads Slurm and answers jobs")
@pytest.mark.slurm
@pytest.mark.every_release
def test_a_real_cluster_divided_by_an_ordinary_user(
    cluster: Cluster, site: RunningDaemon, wait_until: WaitUntil
) -> None:
    large = cluster.sleep("--gres=gpu:3", "--cpus-per-task=1", "--mem=100")
    small = cluster.sleep("--gres=gpu:1", "--cpus-per-task=1", "--mem=100")
    other = cluster.sleep("--gres=gpu:1", "--cpus-per-task=1", "--mem=100", uid=NOBODY)
    wait_until(lambda: cluster.run("squeue", "-h", "-t", "R", "-o", "%i").count("\n") == 2, 60)
    cluster.run("sdiag", "--reset")
    site.start(wait_until)
    assert Path(f"/proc/{site.pid}").stat().st_uid == NOBODY
    site.wait_for_reading(wait_until)
    num_readings = site.status().num_readings
    # 4 CPU nodes of 16 CPUs; the weights are 3 and 1.
    assert limit_of(site, demand(large, wanted=16, cpus=4)) == 16
    wait_until(lambda: limit_of(site, demand(small, wanted=16, cpus=4)) == 4, 60)
    assert limit_of(site, demand(large, wanted=16, cpus=4)) == 12
    # A companion holds CPUs of the pool, and another job's CPUs are gone from it.
    cluster.sleep("-p", "cpu", "-c", "4", "--mem=100", f"--comment=hets:trainer={large}")
    cluster.sleep("-p", "cpu", "-c", "8", "--mem=100")
    wait_until(lambda: cluster.run("squeue", "-h", "-t", "R", "-o", "%i").count("\n") == 4, 60)

    # Another user's job, a message that comes a second time, and what is no message.
    assert site.ask(demand(other)) == RefuseReport(f"job {other} is not yours")
    address = site.where
    assert isinstance(address, TcpAddress)
    munge = Munge(site.munge_socket)
    sent = frame(munge.encode(encode_request(new_request(demand(small), time.time_ns())), NOBODY))
    assert b"grant_limit" in raw(address, sent)
    assert raw(address, sent) == b""
    for_root = frame(munge.encode(encode_request(new_request(demand(small), time.time_ns())), 0))
    assert raw(address, for_root) == b""
    assert raw(address, frame(encode_request(new_request(demand(small), time.time_ns())))) == b""
    assert raw(address, frame(b"MUNGE:AwQDAAB" + b"A" * 100 + b":")) == b""
    assert raw(address, b"GET / HTTP/1.1\r\n\r\n") == b""
    assert "Replayed credential" in site.log

    site.wait_for_reading(wait_until, num_readings)
    assert site.status().pool_cpus == 64 - 8
    # What slurmctld is asked for depends on the readings alone, not on who reports: 8 requests each with 22.05.
    for _ in range(20):
        limit_of(site, demand(large, wanted=16, cpus=4))
    num_rpcs = rpcs_of(cluster, "nobody")
    assert 0 < num_rpcs <= 8 * (site.status().num_readings + 1)  # one may be under way
    cluster.run("scancel", small)
    wait_until(lambda: set(site.jobs()) == {large}, 60)
    assert limit_of(site, demand(large, wanted=16, cpus=4)) == 14
    assert site.end() == 0


@pytest.mark.shows("the site daemon divides data workers, survives its death, and believes what Slurm confirms")
@pytest.mark.slurm
@pytest.mark.every_release
@pytest.mark.slow
def test_slurmctld_dies_and_comes_back(cluster: Cluster, site: RunningDaemon, wait_until: WaitUntil) -> None:
    job_id = cluster.sleep("--gres=gpu:1", "--mem=100")
    wait_until(lambda: "R" in cluster.run("squeue", "-h", "-o", "%t"), 60)
    site.start(wait_until)
    site.wait_for_reading(wait_until)
    assert limit_of(site, demand(job_id)) == 8
    # slurmctld writes its state some seconds after a change: it is to know of the job in its next life.
    saved, seen_ns = cluster.state_dir / "state" / "job_state", time.time_ns()
    cluster.sleep("--hold")
    wait_until(lambda: saved.exists() and saved.stat().st_mtime_ns > seen_ns, 60, "slurmctld's state to be saved")
    process = Path(f"/proc/{cluster.daemon('slurmctld').pid}")
    argv = process.joinpath("cmdline").read_bytes().decode().split("\0")[:-1]
    environ = dict(word.split("=", 1) for word in process.joinpath("environ").read_bytes().decode().split("\0")[:-1])
    os.kill(int(process.name), signal.SIGKILL)
    wait_until(lambda: site.status().error, 120)
    # The known job goes on, also after the daemon's own death; a new one cannot be let in.
    assert limit_of(site, demand(job_id)) == 8
    site.kill()
    site.start(wait_until)
    assert limit_of(site, demand(job_id, wanted=12)) == 8
    assert limit_of(site, demand(99999)) is None
    # As the supervisor did, and not as a child of this process.
    subprocess.run(["setsid", "--fork", *argv], env=environ, stdin=subprocess.DEVNULL, check=True)
    wait_until(lambda: site.status().read_s is not None and not site.status().error, 120)
    wait_until(lambda: limit_of(site, demand(job_id, wanted=6)) == 6, 60)
    cluster.run("scancel", job_id)
    wait_until(lambda: not site.jobs(), 120)
    assert "Traceback" not in site.log
    assert site.end() == 0
