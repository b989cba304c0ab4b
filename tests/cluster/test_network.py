"""What a cut link, a dead slurmd and a drained node do to a streaming job, on nodes with networks of their own.

The trainer waits at gates and a host's data workers are held at a sample while a link is cut, so each cut comes at the
same point of the job. Whatever happens to data workers, the ledger of sample ids and bytes must equal that of a run
without Slurm.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from hetstream.base.errors import HetstreamError
from hetstream.hetjob.site.client import SiteSettings, TcpAddress, ask
from hetstream.hetjob.site.messages import AskStatus, ShowStatus
from hetstream.slurm_plugin.client.run import run_slurm
from tests.cluster.networked import Cluster, networked_cluster
from tests.devcluster.network import CONTROLLER
from tests.devcluster.record import read_daemons
from tests.devcluster.spec import ClusterShape

pytestmark = [pytest.mark.slurm, pytest.mark.every_release]

PROGRAM = Path(__file__).parent / "programs" / "train_gated.py"
HETSTREAM = Path(sys.executable).with_name("hetstream")
GATES = (10, 60)
STEPS = 80
# A node for each data worker. What a test takes away for good, others do without.
SHAPE = ClusterShape(gpu_nodes=3, gpus_per_node=1, cpu_nodes=9, cpus_per_node=2)
# Slurm takes a node for DOWN half a minute after its link was cut, and requeues what ran there.
SLURM_NOTICES_S = 90.0
SCRIPT = f"""#!/bin/bash
#SBATCH --job-name=net --output=out.txt --gres=gpu:1 --cpus-per-task=2 --time=10 --no-requeue
#HETSTREAM DIRECTIVES --data-worker-cpus=2 --data-worker-partition=cpu
export HETSTREAM_BUFFER_BYTES=20000
srun {sys.executable} {PROGRAM} "$PWD" ARGUMENTS
exit 7
"""

WaitUntil = Callable[..., None]


@pytest.fixture(scope="module")
def cluster(release: str) -> Iterator[Cluster]:
    with networked_cluster(release, SHAPE) as networked:
        yield networked


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The ledger of a run without Slurm and data workers."""
    return ledger_alone(tmp_path_factory.mktemp("reference"))


def ledger_alone(directory: Path, *arguments: str) -> list[str]:
    for gate in GATES:
        (directory / f"gate-{gate}").touch()
    argv = [HETSTREAM, "run", "--data-workers", "0", "--", sys.executable, PROGRAM, directory, *arguments]
    subprocess.run(argv, check=True, timeout=120, capture_output=True)
    return (directory / "ledger-0").read_text().splitlines()


@dataclass
class Job:
    """A streaming job that the test leads."""

    cluster: Cluster
    directory: Path
    job_id: str
    wait_until: WaitUntil
    companion_ids: list[str] = field(default_factory=list)

    def submit_companions(self, count: int) -> None:
        """Submit data workers as jobs of their own, as the job master does, each with a node for itself."""
        words = [
            str(HETSTREAM),
            "internal",
            "worker",
            "--service",
            f"file:{self.own_directory}/address",
            "--processes=2",
        ]
        for number in range(count):
            options = ["--parsable", "--partition=cpu", "--cpus-per-task=2", "--requeue", "--open-mode=append"]
            options += [f"--output={self.own_directory}/companion-{number}.log", "--wrap", shlex.join(words)]
            self.companion_ids.append(self.cluster.run("sbatch", *options))

    @property
    def own_directory(self) -> Path:
        return self.directory / ".hetstream" / f"job-{self.job_id}"

    def show(self) -> str:
        return self.cluster.run("scontrol", "show", "job", self.job_id)

    def node_of(self, offset: int) -> str:
        """The node of a component."""
        found = re.search(rf"HetJobOffset={offset}\b.*?\n\s+NodeList=(\S+)", self.show(), re.DOTALL)
        assert found is not None
        return found[1]

    def companions(self) -> dict[str, str]:
        """Running companions: job id -> node."""
        lines = self.cluster.run("squeue", "--noheader", "--states=R", "--format=%i %N").splitlines()
        running = dict(line.split() for line in lines)
        return {job_id: running[job_id] for job_id in self.companion_ids if job_id in running}

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = []
        for directory in (self.own_directory / "dispatcher", self.own_directory):
            path = directory / "events.jsonl"
            if path.exists():
                lines += path.read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def hosts(self) -> set[str]:
        """Where data worker processes have registered from."""
        return {event["host"] for event in self.events("DataWorkerRegistered")}

    def nodes(self) -> str:
        """The nodes of component 0, as a hostlist."""
        found = re.search(r"\n\s+NodeList=(\S+)", self.show())
        assert found is not None
        return found[1]

    def wait_at(self, step: int, rank: int = 0, timeout_s: float = 90.0) -> None:
        """Wait until a trainer waits at a gate."""
        self.wait_until(
            lambda: (self.directory / f"at-{step}.{rank}").exists(), timeout_s, f"step {step} ({self.whereabouts()})"
        )

    def whereabouts(self) -> str:
        logs = [self.directory / "out.txt", self.own_directory / "master.log"]
        return "; ".join(f"{log.name}: {log.read_text()[-300:]}" for log in logs if log.exists())

    def ledger(self) -> list[str]:
        """What rank 0 has trained on."""
        return (self.directory / "ledger-0").read_text().splitlines()

    def open_gate(self, step: int) -> None:
        (self.directory / f"gate-{step}").touch()

    def wait_ready(self, num_data_workers: int) -> list[str]:
        """Wait until the trainer is at the first gate and every data worker has registered; the companions' nodes."""
        self.wait_at(GATES[0])
        self.wait_until(lambda: len(self.hosts()) == num_data_workers, 60, f"{num_data_workers} data workers")
        return sorted(self.companions().values())

    def wait_lost(self, host: str) -> list[dict[str, Any]]:
        """Wait until the dispatcher has given up both processes of a data worker; what it said."""

        def lost() -> list[dict[str, Any]]:
            return [event for event in self.events("DataWorkerLost") if event["host"] == host]

        self.wait_until(lambda: len(lost()) == 2, 30, f"the loss of the data worker on {host}")
        return lost()

    def hold(self, host: str) -> None:
        """Let the trainer go on until a data worker process on `host` is at a sample of a lease, and stays there."""
        (self.directory / f"hold-{host}").touch()
        self.open_gate(GATES[0])
        self.wait_until(lambda: list(self.directory.glob(f"held-{host}-*")), 30, f"a held data worker on {host}")

    def release(self, host: str) -> None:
        (self.directory / f"hold-{host}").unlink()

    def state(self) -> str:
        found = re.search(r"JobState=(\S+)", self.show())
        assert found is not None
        return found[1]

    def wait_ended(self, timeout_s: float = 90.0) -> None:
        self.wait_until(
            lambda: self.state() not in ("RUNNING", "COMPLETING", "PENDING"),
            timeout_s,
            f"the end ({self.whereabouts()})",
        )

    def finish(self, reference: list[str]) -> None:
        """Let the job come to its end, and compare what it trained on."""
        for gate in GATES:
            self.open_gate(gate)
        self.wait_ended()
        assert "ExitCode=7:0" in self.show(), self.show()
        assert "trained" in (self.directory / "out.txt").read_text()
        assert self.ledger() == reference
        self.wait_gone()

    def wait_gone(self, timeout_s: float = 90.0) -> None:
        """Wait until no process of the service is left, and no key."""
        address = self.own_directory / "address"
        self.wait_until(lambda: not processes_naming(str(address)), timeout_s, "the end of the service's processes")
        self.wait_until(lambda: not address.exists(), timeout_s, "the removal of the keys")


def processes_naming(text: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in path.read_bytes().decode(errors="replace"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.fixture
def submit(cluster: Cluster, request: pytest.FixtureRequest, wait_until: WaitUntil) -> Iterator[Callable[..., Job]]:
    """A function that submits a streaming job; what is left of it is cancelled."""
    jobs: list[Job] = []

    def submit_job(
        directives: str = "--data-workers=1",
        *options: str,
        companions: int = 2,
        words: str = "",
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> Job:
        directory = cluster.out_dir / re.sub(r"\W+", "-", request.node.name)
        directory.mkdir()
        (directory / "train.sbatch").write_text(SCRIPT.replace("DIRECTIVES", directives).replace("ARGUMENTS", words))
        argv = [str(HETSTREAM), "sbatch", "--parsable", *options, "train.sbatch"]
        job_id = run_slurm(argv, env={**cluster.env, **environ}, cwd=str(directory)).stdout.strip()
        job = Job(cluster, directory, job_id, wait_until)
        jobs.append(job)
        wait_until((job.own_directory / "address").exists, 60, "the dispatcher")
        job.submit_companions(companions)
        return job

    yield submit_job
    for job in jobs:
        subprocess.run(["scancel", "--quiet", job.job_id, *job.companion_ids], env=cluster.env, check=False)


@pytest.mark.shows("a cut link, a killed slurmd and a drained node: the ledger is exact, or the job ends by name")
@pytest.mark.slow
def test_a_link_that_is_cut_for_good_costs_a_data_worker_and_nothing_else(
    cluster: Cluster, submit: Callable[..., Job], reference: list[str]
) -> None:
    job = submit()
    node, *_ = job.wait_ready(3)
    job.hold(node)
    cluster.cut(node)
    try:
        job.release(node)  # what it makes now goes nowhere
        job.wait_at(GATES[1])
        lost = job.wait_lost(node)
        assert all("silent for" in event["cause"] for event in lost)
        assert any("was lost: silent" in event["cause"] for event in job.events("LeaseRevoked"))
        job.finish(reference)
    finally:
        cluster.restore(node)


@pytest.mark.shows("a cut link, a killed slurmd and a drained node: the ledger is exact, or the job ends by name")
@pytest.mark.slow
def test_a_data_worker_whose_link_is_cut_is_replaced_on_another_node(
    cluster: Cluster, submit: Callable[..., Job], tmp_path: Path
) -> None:
    """The job's own controller submits the companions, because the trainer always waits for data."""
    directives = "--data-workers=0-3 --data-worker-cooldown=2"
    job = submit(directives, companions=0, words="16000 0.05")
    for gate in GATES:
        job.open_gate(gate)
    job.wait_until(lambda: len(job.hosts()) == 3, 150, f"three companions ({job.whereabouts()})")
    before = job.hosts()
    node = min(before)
    job.hold(node)
    cluster.cut(node)
    try:
        job.release(node)
        job.wait_until(lambda: job.hosts() - before, SLURM_NOTICES_S, "the replacement on another node")
        replaced_at = len(job.ledger())
        job.wait_until(lambda: len(job.ledger()) > replaced_at + 10, 60, "steps after the replacement")
        (job.directory / "stop").touch()
        job.wait_ended()
        assert "ExitCode=7:0" in job.show(), job.show()
        lines = job.ledger()
        assert lines == ledger_alone(tmp_path, "16000", "0")[: len(lines)]
        job.wait_gone()
    finally:
        cluster.restore(node)


@pytest.mark.shows("a cut link, a killed slurmd and a drained node: the ledger is exact, or the job ends by name")
@pytest.mark.slow
def test_a_killed_slurmd_takes_no_data_worker_with_it(
    cluster: Cluster, submit: Callable[..., Job], reference: list[str]
) -> None:
    job = submit()
    node, *_ = job.wait_ready(3)
    job.hold(node)
    (slurmd,) = [daemon for daemon in read_daemons(cluster.state_dir) if daemon.name == f"slurmd {node}"]
    os.kill(slurmd.pid, signal.SIGKILL)
    job.release(node)
    job.wait_at(GATES[1])
    assert not job.events("DataWorkerLost")
    job.finish(reference)


@pytest.mark.shows("a cut link, a killed slurmd and a drained node: the ledger is exact, or the job ends by name")
@pytest.mark.slow
def test_a_data_worker_that_comes_back_after_its_leases_expired_is_fenced(
    cluster: Cluster, submit: Callable[..., Job], reference: list[str]
) -> None:
    job = submit()
    node, *_ = job.wait_ready(3)
    job.hold(node)
    with cluster.no_way_between(node, job.node_of(0)):
        job.wait_at(GATES[1])
        lost = {event["pid"] for event in job.wait_lost(node)}

    def back() -> list[dict[str, Any]]:
        return [event for event in job.events("DataWorkerRegistered") if event["host"] == node][2:]

    job.wait_until(lambda: {event["pid"] for event in back()} == lost, 60, "the return of both processes")
    assert any(event["num_held"] for event in back()), "it still holds the lease that was taken from it"
    job.release(node)  # its batch is of a lease that counts no more
    job.finish(reference)


@pytest.mark.shows("a cut link, a killed slurmd and a drained node: the ledger is exact, or the job ends by name")
@pytest.mark.slow
@pytest.mark.parametrize("ends_meanwhile", [False, True])
def test_a_cut_link_to_slurmctld_does_not_touch_the_job(
    ends_meanwhile: bool, cluster: Cluster, submit: Callable[..., Job], reference: list[str]
) -> None:
    job = submit()
    job.wait_ready(3)
    cluster.cut(CONTROLLER)
    try:
        job.open_gate(GATES[0])
        job.wait_at(GATES[1])
        if ends_meanwhile:
            job.open_gate(GATES[1])
            out = job.directory / "out.txt"
            job.wait_until(lambda: "trained" in out.read_text(), 30, "the end of the training")
    finally:
        cluster.restore(CONTROLLER)
    # Once the training has ended the companions are told, and leave. On newer releases that needs no slurmctld.
    expected = {"left"} if ends_meanwhile else set()
    assert {event["cause"] for event in job.events("DataWorkerLost")} <= expected
    job.finish(reference)


@pytest.mark.shows("a cut link, a killed slurmd and a drained node: the ledger is exact, or the job ends by name")
@pytest.mark.slow
def test_a_drained_node_gets_no_new_work_and_keeps_what_it_has(
    cluster: Cluster, submit: Callable[..., Job], reference: list[str]
) -> None:
    job = submit()
    node, *_ = job.wait_ready(3)
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    try:
        assert cluster.state(node) == "draining"
        job.hold(node)
        job.release(node)
        job.wait_at(GATES[1])
        assert not job.events("DataWorkerLost")
        words = ["--parsable", "--partition=cpu", f"--nodelist={node}", "--output=/dev/null", "--wrap=true"]
        other = cluster.run("sbatch", *words)
        try:
            waits = r"JobState=PENDING Reason=(ReqNodeNotAvail|Nodes_required_for_job_are_DOWN,_DRAINED)"
            job.wait_until(lambda: re.search(waits, cluster.run("scontrol", "show", "job", other)), 30, waits)
        finally:
            cluster.run("scancel", other)
        job.finish(reference)
        job.wait_until(lambda: cluster.state(node) == "drained", 60, "the end of the node's last work")
    finally:
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")


@pytest.mark.shows("a cut link, a killed slurmd and a drained node: the ledger is exact, or the job ends by name")
@pytest.mark.slow
def test_a_job_whose_node_is_cut_off_ends_by_name_and_its_companions_end_too(
    cluster: Cluster, submit: Callable[..., Job]
) -> None:
    job = submit()
    job.wait_ready(3)
    trainer = job.node_of(0)
    cluster.cut(trainer)
    try:
        # Nobody tells the trainer: it makes the steps itself.
        job.open_gate(GATES[0])
        job.wait_at(GATES[1])
        job.wait_until(lambda: job.state() == "NODE_FAIL", SLURM_NOTICES_S, "Slurm's verdict on the job")
        assert cluster.state(trainer).startswith("down")
        job.wait_until(lambda: not job.companions(), 120, "the end of the companions")
        logs = [path.read_text() for path in job.own_directory.glob("companion-*.log")]
        assert len(logs) == 2
        address = cluster.host(trainer).address
        assert all(re.search(rf"the dispatcher at tcp://{address}:\d+ was silent", log) for log in logs), logs
    finally:
        cluster.restore(trainer)
    job.wait_until(lambda: not processes_naming(str(PROGRAM)), 90, "the end of the trainer")
    job.wait_gone()
    job.wait_until(lambda: cluster.state(trainer) == "idle", 90, "the node's return")


@pytest.mark.shows("a cut link, a killed slurmd and a drained node: the ledger is exact, or the job ends by name")
@pytest.mark.slow
def test_a_rank_that_is_cut_off_ends_the_job_by_name(cluster: Cluster, submit: Callable[..., Job]) -> None:
    job = submit("--data-workers=1", "--nodes=2", "--ntasks=2")
    job.wait_ready(3)
    first, second = cluster.run("scontrol", "show", "hostnames", job.nodes()).split()
    cluster.cut(second)
    try:
        job.open_gate(GATES[0])
        job.wait_at(GATES[1], rank=1)
        job.wait_until(lambda: job.state() == "NODE_FAIL", SLURM_NOTICES_S, "Slurm's verdict on the job")
        assert second in (job.directory / "out.txt").read_text()
        job.wait_until(lambda: cluster.state(first) == "idle", 90, "the end of what the other node did")
    finally:
        cluster.restore(second)
    job.wait_until(lambda: not processes_naming(str(PROGRAM)), 90, "the end of the rank")
    job.wait_gone()


@pytest.mark.shows("a cut link, a killed slurmd and a drained node: the ledger is exact, or the job ends by name")
@pytest.mark.slow
def test_a_cut_link_to_the_site_daemon_leaves_the_job_as_it_is(
    cluster: Cluster, submit: Callable[..., Job], reference: list[str], tmp_path: Path
) -> None:
    host = cluster.host("gpu2")
    munge = cluster.state_dir / "run" / "munge.sock"
    settings = SiteSettings(TcpAddress("root", host.address, 9420), munge)
    environ = {"HETSTREAM_DAEMON": str(settings.address), "HETSTREAM_MUNGE_SOCKET": str(munge)}
    words = [
        "site",
        "daemon",
        "--address",
        str(settings.address),
        "--state-dir",
        str(tmp_path / "state"),
        "--interval",
        "5",
    ]
    argv = ["nsenter", f"--net=/run/netns/{host.namespace}", sys.executable, "-m", "hetstream.slurm_plugin.cli", *words]
    with (tmp_path / "log").open("w") as log:
        daemon = subprocess.Popen(argv, env={**cluster.env, **environ}, stdout=log, stderr=log)

    def age_s() -> float | None:
        """How long ago the job's last report came; None before the first."""
        try:
            status = ask(settings, AskStatus(), 30)
        except HetstreamError:
            return None
        assert isinstance(status, ShowStatus)
        return next((one.age_s for one in status.jobs), None)

    try:
        job = submit("--data-workers=1-2", environ=environ)
        job.wait_ready(3)
        job.wait_until(lambda: age_s() is not None, 60, "the job's first report")
        log_file = job.own_directory / "master.log"
        with cluster.no_way_between("gpu2", job.node_of(0)):
            job.open_gate(GATES[0])
            job.wait_at(GATES[1])
            job.wait_until(lambda: "site daemon was not asked" in log_file.read_text(), 120, "what the job master says")
            before = age_s()
        assert before is not None
        job.wait_until(lambda: (age_s() or before) < before, 90, "the next report")
        job.finish(reference)
    finally:
        daemon.terminate()
        daemon.wait(30)
    assert "Traceback" not in (tmp_path / "log").read_text()
