"""The life of an opportunistic job on real Slurm, beside a guaranteed one: placed, evicted, placed again, upgraded.

Both train for real, on an emulated GPU. Whatever happens, the opportunistic job has the weights and the data of a run
that nobody disturbed, and the guaranteed one computes at each step what it computes alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clients.ckpt_job import SAVE_EVERY, CheckpointJob, differences, undisturbed
from hetstream.base.errors import HetstreamError
from hetstream.hetjob.site.address import ADDRESS_VARIABLE, SiteSettings, parse_address
from hetstream.hetjob.site.gpus import GpuNow, NodeGpus, SharingNow, ShowGpus
from hetstream.slurm_plugin.cli.packing_arguments import gpu_readings
from hetstream.slurm_plugin.client.packing_slurm import PackingSlurm
from hetstream.slurm_plugin.coordinator.look import look
from hetstream.slurm_plugin.coordinator.table import GpuRow, ProcessRow
from hetstream.slurm_plugin.devcluster.boot import BootRequest
from hetstream.slurm_plugin.devcluster.processes import cluster_processes
from hetstream.slurm_plugin.devcluster.record import ClusterRecord
from hetstream.slurm_plugin.devcluster.roots import DEFAULT_CACHE_DIR, choose_programs
from hetstream.slurm_plugin.devcluster.spec import DEFAULT_STATE_ROOT, ClusterShape
from hetstream.slurm_plugin.packing.events import PackingEvent
from hetstream.slurm_plugin.packing.packer import Packer
from hetstream.slurm_plugin.packing.quota import Quotas
from hetstream.slurm_plugin.packing.rules import PackingRules
from hetstream.slurm_plugin.packing.words import COMMENT_MARK
from tests.conftest import WaitUntil

pytestmark = [pytest.mark.slurm, pytest.mark.every_release, pytest.mark.timeout(400)]
STEPS = 80
OPTIONS = "#SBATCH --partition=opp --comment=hetstream:gpu-memory=128M\n"
# Root's jobs are not held by the guard; this one says itself that it waits.
PATIENT = """\
#SBATCH --partition=gpu --gpus=1 --hold --account=vision --comment=hetstream:gpu-memory=128M
#HETSTREAM --job-class=guaranteed --opportunistic-after=00:00:01
"""
QUOTAS = Quotas({"vision": 1}, partitions=("gpu",))
# It waits for data between its mini-batches, as long as nobody makes it busy.
GUARANTEED = Path(__file__).parents[1] / "slurm_plugin" / "coordinator" / "programs" / "train.py"
GUARANTEED_WORDS = ("1000000", "128", "40")
# A test has no minutes to wait for.
RULES = PackingRules(settle_s=0.0, first_delay_s=1.0, longest_delay_s=1.0, busy_s=1.0)


@dataclass
class Site:
    """A cluster with two GPUs, a guaranteed job on one of them, and a packer that acts when the test says so."""

    record: ClusterRecord
    directory: Path
    wait_until: WaitUntil
    guaranteed: str = ""
    events: list[PackingEvent] = field(default_factory=list)
    coordinator_died: bool = False
    complaint: str = ""
    daemon: SiteSettings | None = None
    number: int = 0

    def __post_init__(self) -> None:
        self.environ = dict(self.record.environment(os.environ))
        self.sharing = Path(self.record.state_dir) / "sharing" / "gpu0"
        self.plan = json.loads((Path(self.record.state_dir) / "run" / "plan.json").read_text())
        slurm = PackingSlurm(self.environ)
        self.packer = Packer(
            slurm, self.told, ["opp"], self.events.append, acting=True, quotas=lambda _: QUOTAS, rules=RULES
        )

    def gpu(self) -> GpuRow:
        """What the coordinator knows of the GPU that the guaranteed job has, or had."""
        gpus = look(str(self.sharing / "gpu.sock")).gpus
        self.number = next((int(gpu.gpu[-1]) for gpu in gpus if gpu.processes), self.number)
        return next(gpu for gpu in gpus if int(gpu.gpu[-1]) == self.number)

    def told(self) -> ShowGpus:
        """What the node tells of this GPU: by the site daemon, where there is one, else what the coordinator knows."""
        if self.daemon is not None:
            return gpu_readings(self.daemon)()
        gpu = self.gpu()
        guaranteed = tuple(process.job for process in gpu.processes if process.job_class == "guaranteed")
        used = 1 - (gpu.idle_share or 0.0) if gpu.is_reserved else 0.0
        sharing = [process.job for process in gpu.processes if process.job not in guaranteed]
        now = GpuNow(
            int(gpu.gpu[-1]), gpu.gpu, used, gpu.free_bytes, is_reserved=gpu.is_reserved, guaranteed=guaranteed,
            sharing=tuple(SharingNow(one, 0.0, self.complaint) for one in dict.fromkeys(sharing)),
        )  # fmt: skip
        return ShowGpus((NodeGpus("gpu0", 0.0, (now,)),), {})

    def is_told_of(self, job: str) -> bool:
        """Whether the node has told of a job that the packer can do something with."""
        gpus = [gpu for node in self.told().nodes for gpu in node.gpus]
        return any(job in (*gpu.guaranteed, *(one.job for one in gpu.sharing)) and not gpu.closed for gpu in gpus)

    def run(self, *argv: str) -> str:
        done = subprocess.run(
            argv, cwd=self.directory, env=self.environ, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, (argv, done.stderr)
        return done.stdout

    def start_guaranteed(self) -> None:
        """Submit it, and wait until it trains."""
        command = f"exec {sys.executable} {GUARANTEED} {' '.join(GUARANTEED_WORDS)} >losses 2>guaranteed.err"
        words = ("--partition=gpu", "--gpus=1", "--account=vision", "--mem=1G", "--time=20", "--output=guaranteed.out")
        self.guaranteed = self.run("sbatch", "--parsable", *words, f"--wrap={command}").strip()
        self.guaranteed_goes_on(5)

    def losses(self) -> list[str]:
        path = self.directory / "losses"
        return path.read_text().split() if path.exists() else []

    def guaranteed_goes_on(self, steps: int) -> None:
        target = len(self.losses()) + steps
        self.wait_until(lambda: len(self.losses()) >= target, 60, f"{steps} more steps of the guaranteed job")

    def check_guaranteed(self) -> None:
        """It goes on, in its first start, and has computed what it computes alone."""
        self.guaranteed_goes_on(3)
        shown = self.run("scontrol", "show", "job", self.guaranteed)
        assert "JobState=RUNNING" in shown
        assert "Restarts=0" in shown
        losses = self.losses()[:-1]  # the last line may not be whole
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HETSTREAM_"))}
        words = [sys.executable, str(GUARANTEED), str(len(losses)), GUARANTEED_WORDS[1], "0"]
        alone = subprocess.run(words, env=environ, capture_output=True, text=True, check=True, timeout=120)
        assert losses == alone.stdout.split()
        assert "goes on as if alone" not in (self.directory / "guaranteed.err").read_text() or self.coordinator_died

    def pack_until(self, condition: Callable[[], object], what: str, timeout_s: float = 90) -> None:
        """Let the packer act again and again until something is so."""

        def packed() -> object:
            try:
                self.packer.step()
            except HetstreamError as error:  # slurmctld is busy, or being killed
                print(error)
                return False
            return condition()

        self.wait_until(packed, timeout_s, f"{what} ({[event.event for event in self.events]})")

    def happened(self, event: str) -> int:
        return sum(one.event == event for one in self.events)

    def kill(self, daemon: str) -> None:
        """SIGKILL of one of the cluster's daemons, also of one that was started again."""
        self.coordinator_died |= daemon.startswith("coordinator")
        command = " ".join(self.planned(daemon)["argv"])

        def found() -> list[int]:
            return [process.pid for process in cluster_processes(self.record) if command in process.command]

        (pid,) = found()
        os.kill(pid, signal.SIGKILL)
        self.wait_until(lambda: not found(), 10, f"the end of {daemon}")

    def lose_node(self) -> None:
        """All that runs on the node is gone at once: slurmd, the coordinator, the jobs with their agents."""
        kept = [" ".join(self.planned(name)["argv"]) for name in ("munged", "slurmctld")]
        self.coordinator_died = True
        # Stopped first: a slurmstepd that lives on for a moment would say that its job's script has failed.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in cluster_processes(self.record):
                if not any(command in process.command for command in kept):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, number)

    def start_again(self, daemon: str) -> None:
        """Start it as `up` did, and as systemd would."""
        planned = self.planned(daemon)
        environ = {**self.plan["environment"], **planned["environment"]}
        with open(planned["output"], "ab") as output:
            subprocess.run(
                ["setsid", "--fork", *planned["argv"]], env=environ, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, check=True, timeout=10,
            )  # fmt: skip

    def planned(self, daemon: str) -> dict[str, Any]:
        """How `up` has started a daemon."""
        (found,) = (one for one in self.plan["daemons"] if one["name"] == daemon)
        return dict(found)

    def processes(self, job_class: str) -> list[ProcessRow]:
        return [process for process in self.gpu().processes if process.job_class == job_class]


@pytest.fixture(scope="module")
def running(release: str, running_cluster: Callable[..., Any]) -> Iterator[Any]:
    name = f"pytest-{os.getpid()}-life-{release.replace('.', '')}"
    request = BootRequest(name, DEFAULT_STATE_ROOT / name, ClusterShape(1, 2, 0, 4), packing=True)
    with running_cluster(request, choose_programs(release, DEFAULT_CACHE_DIR, print)) as devcluster:
        yield devcluster


@pytest.fixture
def site(running: Any, request: pytest.FixtureRequest, wait_until: WaitUntil) -> Iterator[Site]:
    """The module's cluster, with a guaranteed job that trains; at the end nothing is left of any job."""
    directory = running.out_dir / re.sub(r"\W+", "-", request.node.name)
    directory.mkdir()
    site = Site(running.record, directory, wait_until)
    site.start_guaranteed()
    yield site
    print(*site.events, sep="\n")  # all that is printed is shown if the test failed
    print((Path(running.record.state_dir) / "log" / "slurmctld.log").read_text()[-20_000:])
    site.run("scancel", "--user=root")
    wait_until(lambda: not site.run("squeue", "-h"), 60, "the end of all jobs")
    wait_until(lambda: not list(site.sharing.glob("*/[0-9]*")), 10, "the end of all that the Prolog wrote")
    wait_until(lambda: not site.processes("guaranteed") + site.processes("opportunistic"), 10, "an idle GPU")


@pytest.fixture
def job(site: Site) -> Iterator[CheckpointJob]:
    """An opportunistic job that was submitted, and is held."""
    job = CheckpointJob(site.directory / "opportunistic", site.environ, STEPS, step_s=0.02, options=OPTIONS)
    job.submit()
    shown = site.run("scontrol", "show", "job", job.job_id)
    assert "JobState=PENDING Reason=JobHeldUser" in shown
    yield job
    job.cancel()
    assert job.shared_memory() == []


@pytest.fixture
def chain(site: Site, wait_until: WaitUntil) -> Iterator[Callable[..., str]]:
    """All of a site: the node tells the site daemon of its GPU, and the packer reads it there. Calls `hetstream`."""
    address = f"unix:{site.directory}/daemon.sock"
    site.daemon = SiteSettings(parse_address(address), None)
    environ = {**site.environ, ADDRESS_VARIABLE: address}
    number = site.gpu().gpu[-1]  # the other one is told to nobody, and stays free
    gpu = f"{number}=emulation:{site.sharing}/gpu{number}"
    calls = (
        ("daemon", "--state-dir", str(site.directory / "daemon"), "--interval", "5"),
        ("gpu", "report", "--node", "gpu0", "--gpus", gpu, "--socket", str(site.sharing / "gpu.sock")),
    )
    hetstream = [sys.executable, "-m", "hetstream"]
    with contextlib.ExitStack() as stack:
        for words in calls:
            log = stack.enter_context((site.directory / f"{words[0]}.log").open("wb"))
            process = stack.enter_context(subprocess.Popen([*hetstream, *words], env=environ, stderr=log))
            stack.callback(process.terminate)
            wait_until(lambda path=log.name: Path(path).stat().st_size > 0, 30, f"hetstream {words[0]}")
        yield (
            lambda *words: (
                subprocess.run(
                    [*hetstream, *words], env=environ, capture_output=True, text=True, check=True, timeout=60
                ).stdout
            )
        )


def test_a_whole_life(site: Site, chain: Callable[..., str], tmp_path: Path) -> None:
    """A guaranteed job without quota shares a GPU after a while, gives way, and is guaranteed where it runs at last.

    Agents tell the coordinator, that a reporter, that the site daemon, that the packer, and that Slurm.
    """
    job = CheckpointJob(site.directory / "opportunistic", site.environ, 100_000, step_s=0.02, options=PATIENT)
    job.submit()
    try:
        live(site, job, chain)
        truth = undisturbed(tmp_path / "truth", max(int(words[0]) for words in job.ledger() if words[0].isdigit()))
        assert list(differences(job, truth)) == []
        assert job.starts()[-1].step >= SAVE_EVERY, "its state was not kept"
    finally:
        job.cancel()
    assert job.shared_memory() == []
    site.pack_until(lambda: not site.run("squeue", "-h"), "the end of what kept its GPU")


def live(site: Site, job: CheckpointJob, chain: Callable[..., str]) -> None:
    """Its life, as far as the packer, Slurm and the coordinator have to do with it."""

    def shown() -> str:
        return site.run("scontrol", "show", "job", job.job_id)

    assert "JobState=PENDING Reason=JobHeldUser" in shown()
    site.pack_until(lambda: site.happened("moved"), "its time without quota")
    assert "Partition=opp" in shown()
    site.wait_until(lambda: site.is_told_of(site.guaranteed), 60, "the node's word")
    lock = job.directory / "packer" / "lock"
    placed = chain("packer", "--once", "--json", "--partition=opp", f"--lock={lock}")
    assert f'"placed", "job": "{job.job_id}"' in placed
    site.pack_until(lambda: site.happened("started"), "a start beside the guaranteed job")
    job.wait_for_steps(SAVE_EVERY + 1)
    (process,) = site.processes("opportunistic")
    assert process.job == job.job_id
    assert process.paused_s > 0, "it launched whenever it liked"
    site.wait_until(lambda: site.is_told_of(job.job_id), 20, "the node's word of both jobs")
    rows = json.loads(chain("report", "--fresh", "--json"))["shared_gpus"]
    classes = {row["job"]: row["job_class"] for row in rows}
    assert classes == {site.guaranteed: "guaranteed", job.job_id: "opportunistic"}
    # The owner of the node needs its CPUs.
    # It has ended when the other one comes back: else that would give way a second time.
    words = ("--wait", "--partition=gpu", "--cpus-per-task=2", "--mem=100", "--output=/dev/null", "--wrap=true")
    site.run("sbatch", *words)
    job.wait(lambda: "Restarts=1" in shown(), "its requeueing")
    site.pack_until(lambda: site.happened("taken back"), "the packer's notice")
    assert "Priority=0" in shown()
    assert COMMENT_MARK not in shown(), "a Prolog would give it a GPU"
    site.pack_until(lambda: site.happened("started") == 2, "a second start")
    job.wait(lambda: len(job.starts()) == 2, "its trainer's second start")
    site.check_guaranteed()
    assert not site.happened("upgraded")
    (process,) = site.processes("opportunistic")
    site.run("scancel", site.guaranteed)
    site.pack_until(lambda: site.happened("upgraded"), "its upgrade")
    (upgraded,) = site.processes("guaranteed")
    assert (upgraded.job, upgraded.pid) == (job.job_id, process.pid), job.story()
    # Slurm's books say so, too: nobody else gets the GPU.
    holders = site.run("squeue", "-h", "-t", "R", "-p", "gpu", "-o", "%k").split()
    assert holders == [f"hetstream:holds={job.job_id}@1"]
    assert "Restarts=1" in shown()
    gives_way_no_more(site, job)
    job.wait_for_steps(1)
    job.end_soon(10)
    job.wait_for_end()


def gives_way_no_more(site: Site, job: CheckpointJob) -> None:
    """Again somebody needs its CPUs, whom it gave way to before. (22.05 has nothing that would keep it from that.)"""
    if site.run("scontrol", "--version").split()[1].startswith("22.05"):
        return
    words = ("--parsable", "--partition=gpu", "--cpus-per-task=3", "--mem=100", "--output=/dev/null", "--wrap=true")
    comes = site.run("sbatch", *words).strip()
    site.wait_until(lambda: site.run("squeue", "-h", "-j", comes, "-o", "%r").strip() == "Resources", 30, "its turn")
    shown = site.run("scontrol", "show", "job", job.job_id)
    assert "JobState=RUNNING" in shown
    assert "Restarts=1" in shown
    site.run("scancel", comes)


@pytest.mark.slow
def test_a_coordinator_that_dies_stops_the_opportunistic_job_alone(
    site: Site, job: CheckpointJob, tmp_path: Path
) -> None:
    truth = undisturbed(tmp_path / "truth", STEPS)
    site.kill("coordinator gpu0")
    site.packer.step()
    assert site.happened("placed") == 0, "nobody knows how the GPU is"
    site.guaranteed_goes_on(5)
    site.start_again("coordinator gpu0")
    site.pack_until(lambda: site.happened("started"), "a start")
    job.wait_for_steps(2)
    site.kill("coordinator gpu0")
    output = job.directory / "job.out"
    job.wait(lambda: "this opportunistic job pauses" in output.read_text(errors="replace"), "its pause")
    trained = len(job.ledger())
    site.guaranteed_goes_on(10)
    assert len(job.ledger()) <= trained + 1, "it went on without a coordinator"
    site.start_again("coordinator gpu0")
    job.wait_for_end()
    assert list(differences(job, truth)) == []
    site.check_guaranteed()


@pytest.mark.slow
def test_a_trainer_with_its_agent_that_is_killed_goes_on_from_memory(
    site: Site, job: CheckpointJob, tmp_path: Path
) -> None:
    truth = undisturbed(tmp_path / "truth", STEPS)
    site.pack_until(lambda: site.happened("started"), "a start")
    job.wait_for_steps(SAVE_EVERY + 1)
    job.kill_trainer()
    job.wait_for_end()
    assert list(differences(job, truth)) == []
    assert [start.source for start in job.starts()] == ["", "memory"]
    site.check_guaranteed()


@pytest.mark.slow
def test_a_slurmd_that_is_killed_takes_no_job_with_it(site: Site, job: CheckpointJob, tmp_path: Path) -> None:
    truth = undisturbed(tmp_path / "truth", STEPS)
    site.pack_until(lambda: site.happened("started"), "a start")
    job.wait_for_steps(2)
    site.kill("slurmd gpu0")
    trained = len(job.ledger())
    site.guaranteed_goes_on(10)
    job.wait(lambda: len(job.ledger()) > trained, "a step without slurmd")
    site.start_again("slurmd gpu0")
    job.wait_for_end()
    assert list(differences(job, truth)) == []
    site.check_guaranteed()


@pytest.mark.slow
def test_a_job_that_the_packer_takes_away_keeps_its_state(site: Site, job: CheckpointJob, tmp_path: Path) -> None:
    """Its node reports that it does not keep to its orders."""
    truth = undisturbed(tmp_path / "truth", STEPS)
    site.pack_until(lambda: site.happened("started"), "a start")
    job.wait_for_steps(SAVE_EVERY + 1)
    site.complaint = "it goes on although it should pause"
    site.packer.step()
    assert site.happened("evicted") == 1
    site.complaint = ""
    job.wait(lambda: job.state() == "PENDING", "its requeueing")
    site.guaranteed_goes_on(5)
    site.pack_until(lambda: site.happened("started") == 2, "a second start")
    job.wait_for_end()
    assert list(differences(job, truth)) == []
    assert job.starts()[-1].step >= SAVE_EVERY, "its state was not kept"
    site.check_guaranteed()


@pytest.mark.slow
def test_a_node_that_is_lost_with_all_that_runs_there_loses_no_state(
    site: Site, job: CheckpointJob, tmp_path: Path
) -> None:
    def node_state() -> str:
        return site.run("sinfo", "-h", "-N", "-n", "gpu0", "-O", "StateComplete:100")

    truth = undisturbed(tmp_path / "truth", STEPS)
    site.pack_until(lambda: site.happened("started"), "a start")
    job.wait_for_steps(SAVE_EVERY + 1)
    site.lose_node()
    site.run("scontrol", "update", "NodeName=gpu0", "State=DOWN", "Reason=lost")
    job.wait(lambda: job.state() == "PENDING", "its requeueing")
    site.start_again("coordinator gpu0")
    site.start_again("slurmd gpu0")
    # By ReturnToService=2 it is up again when its slurmd has registered; then Slurm refuses to resume it.
    site.wait_until(lambda: not re.search("NOT_RESPONDING|DOWN", node_state()), 60, "slurmd")
    losses = site.directory / "losses"
    losses.unlink()
    site.wait_until(losses.exists, 180, "the guaranteed job's second start")
    site.pack_until(lambda: site.happened("started") == 2, "a second start", 180)
    job.wait_for_end()
    assert list(differences(job, truth)) == []
    site.guaranteed_goes_on(5)
