"""A cluster whose GPUs are shared, with a guaranteed job that trains and a packer that acts when a test says so."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clients.ckpt_job import CheckpointJob
from hetstream.base.errors import HetstreamError
from hetstream.hetjob.site.client import SiteSettings
from hetstream.hetjob.site.messages import GpuNow, NodeGpus, SharingNow, ShowGpus
from hetstream.slurm_plugin.cli.packing_arguments import gpu_readings
from hetstream.slurm_plugin.client.packing_slurm import PackingSlurm
from hetstream.slurm_plugin.coordinator.table import GpuRow, ProcessRow, look
from hetstream.slurm_plugin.packing.packer import Packer
from hetstream.slurm_plugin.packing.quota import Quotas
from hetstream.slurm_plugin.packing.state import PackingEvent, PackingRules
from tests.clusters import Devcluster
from tests.conftest import WaitUntil
from tests.devcluster.processes import cluster_processes

STEPS = 80
OPTIONS = "#SBATCH --partition=opp --comment=hetstream:gpu-memory=128M\n"
QUOTAS = Quotas({"vision": 1}, partitions=("gpu",))
# It waits for data between its mini-batches, as long as nobody makes it busy.
GUARANTEED = Path(__file__).parents[1] / "slurm_plugin" / "coordinator" / "programs" / "train.py"
GUARANTEED_WORDS = ("1000000", "128", "40")
# A test has no minutes to wait for.
RULES = PackingRules(settle_s=0.0, first_delay_s=1.0, longest_delay_s=1.0, busy_s=1.0, refused_s=1.0)


@dataclass
class Site(Devcluster):
    """A cluster with two GPUs, a guaranteed job on one of them, and a packer that acts when the test says so."""

    wait_until: WaitUntil
    guaranteed: str = ""
    events: list[PackingEvent] = field(default_factory=list)
    coordinator_died: bool = False
    complaint: str = ""
    daemon: SiteSettings | None = None
    number: int = 0

    def __post_init__(self) -> None:
        self.sharing = self.state_dir / "sharing" / "gpu0"
        self.plan = json.loads((self.state_dir / "run" / "plan.json").read_text())
        slurm = PackingSlurm(self.env)
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

    def start_guaranteed(self) -> None:
        """Submit it, and wait until it trains."""
        command = f"exec {sys.executable} {GUARANTEED} {' '.join(GUARANTEED_WORDS)} >losses 2>guaranteed.err"
        words = ("--partition=gpu", "--gpus=1", "--account=vision", "--mem=1G", "--time=20", "--output=guaranteed.out")
        self.guaranteed = self.submit(*words, f"--wrap={command}")
        self.guaranteed_goes_on(5)

    def losses(self) -> list[str]:
        path = self.out_dir / "losses"
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
        assert "goes on as if alone" not in (self.out_dir / "guaranteed.err").read_text() or self.coordinator_died

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
            found = {one.pid: one.command for one in cluster_processes(self.record)} | self.stepds()
            for pid, program in found.items():
                if not any(command in program for command in kept):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)

    def stepds(self) -> dict[int, str]:
        """Each slurmstepd that writes into a log of this cluster. Where slurmd was started again, newer releases leave
        nothing in its environment or among its ancestors that says whose it is.
        """
        found = {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended
                program = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                files = [os.readlink(link) for link in Path(f"/proc/{entry}/fd").iterdir()]
                if "slurmstepd" in program and any(file.startswith(self.record.state_dir) for file in files):
                    found[int(entry)] = program
        return found

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


@contextlib.contextmanager
def training_site(running: Devcluster, request: pytest.FixtureRequest, wait_until: WaitUntil) -> Iterator[Site]:
    """A cluster with a guaranteed job that trains; at the end nothing is left of any job."""
    site = Site(running.record, running.directory(request.node.name), wait_until)
    site.start_guaranteed()
    yield site
    print(*site.events, sep="\n")  # all that is printed is shown if the test failed
    print((running.state_dir / "log" / "slurmctld.log").read_text()[-20_000:])
    site.clear(wait_until)
    wait_until(lambda: not list(site.sharing.glob("*/[0-9]*")), 10, "the end of all that the Prolog wrote")
    wait_until(lambda: not site.processes("guaranteed") + site.processes("opportunistic"), 10, "an idle GPU")


@contextlib.contextmanager
def held_job(site: Site, steps: int = STEPS) -> Iterator[CheckpointJob]:
    """An opportunistic job that was submitted, and is held."""
    job = CheckpointJob(site.out_dir / "opportunistic", site.env, steps, step_s=0.02, options=OPTIONS)
    job.submit()
    shown = site.run("scontrol", "show", "job", job.job_id)
    assert "JobState=PENDING Reason=JobHeldUser" in shown
    yield job
    job.cancel()
    assert job.shared_memory() == []
