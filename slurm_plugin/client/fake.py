"""A Slurm without Slurm: `FakeSlurm` runs steps and jobs as processes of this host.

It is a `SlurmClient`, which is what a job master needs of Slurm. Of the other methods of `CommandSlurm` it has `find`,
`hold`, `release`, `update`, `snapshot` and `usages`; what the rest ask, such as the script of a job, it cannot answer.
For tests, and for trying the job master on a laptop. It schedules nothing: everything starts at once, but for
jobs that ask for a node which is full.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGTERM

from hetstream.hetjob.errors import SlurmCommandError
from hetstream.hetjob.job.processes import start_child
from hetstream.hetjob.ports import Child, ClusterLimits, MarkedJob
from hetstream.slurm_plugin.client.accounting import Usage, from_queue
from hetstream.slurm_plugin.client.model import Snapshot


@dataclass
class FakeSlurm:
    """Answers like a small cluster.

    Attributes:
        directory: where scripts and output of submitted jobs go.
        environ: the environment of steps and jobs.
        facts: what `cluster` says.
        addresses: node name -> `NodeAddr`; others do not exist.
        refuse: names of methods that fail, each as its command would.
        calls: every call so far: method name and its words.
        jobs: job id -> its processes, one for each array task.
        keys: submission key -> the job that has it.
        comments: job id -> the words of its comment.
        full: nodes on which nothing starts.
        waiting: jobs that wait for one of them.
        times: job id -> seconds since its start, and until its time limit ends it.
        seen: what `snapshot` says.
    """

    directory: Path
    environ: Mapping[str, str]
    facts: ClusterLimits = field(
        default_factory=lambda: ClusterLimits(frozenset({"cpu", "gpu"}), "gpu", "sched/backfill")
    )
    addresses: Mapping[str, str] = field(default_factory=lambda: {"gpu0": "127.0.0.1"})
    refuse: set[str] = field(default_factory=set)
    calls: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    jobs: dict[str, list[Child]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    comments: dict[str, list[str]] = field(default_factory=dict)
    full: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)
    times: dict[str, tuple[float, float]] = field(default_factory=dict)
    seen: Snapshot = field(default_factory=lambda: Snapshot(0.0, "22.05.8", "fake", (), (), ()))

    def cluster(self, name: str = "") -> ClusterLimits:
        """Return the facts it was made with."""
        self._record("cluster", "sinfo", [name] if name else [])
        return self.facts

    def snapshot(self, *, details: bool = False) -> Snapshot:
        """Return what it was told to say."""
        self._record("snapshot", "squeue", ["--json"] if details else [])
        return self.seen

    def usages(self, snapshot: Snapshot, start_s: float, end_s: float) -> tuple[Usage, ...]:
        """Return what the jobs of the snapshot held."""
        self._record("usages", "squeue", [str(start_s), str(end_s)])
        return from_queue(snapshot.jobs)

    def submit(self, script: str, options: Sequence[str], key: str = "") -> str:
        """Start the script at once, as often as `--array=0-N` says; with a key, only the first time."""
        self._record("submit", "sbatch", options)
        if key in self.keys:
            return self.keys[key]
        job_id = str(1000 + len(self.jobs))
        path = self.directory / f"job-{job_id}.sh"
        path.write_text(script)
        array = next((re.fullmatch(r"--array=0-(\d+)", word) for word in options if word.startswith("--array")), None)
        count = int(array[1]) + 1 if array else 1
        if any(word.removeprefix("--nodelist=") in self.full for word in options):
            self.waiting.add(job_id)
            count = 0
        environ = {**self.environ, "SLURM_JOB_ID": job_id}
        self.jobs[job_id] = [
            start_child(["sh", str(path)], env=environ, log=path.with_suffix(f".{task}.out")) for task in range(count)
        ]
        if key:
            self.keys[key] = job_id
        said = next((word.partition("=")[2] for word in options if word.startswith("--comment=")), "")
        self.comments[job_id] = said.split()
        return job_id

    def begin(self, job_id: str) -> None:
        """The node has room now, for which a job waits."""
        path = self.directory / f"job-{job_id}.sh"
        self.jobs[job_id] = [start_child(["sh", str(path)], env=self.environ, log=path.with_suffix(".0.out"))]
        self.waiting.remove(job_id)  # last: whoever asks meanwhile must not find it ended

    def find(self, key: str) -> str | None:
        """Return the job that was submitted with this key."""
        self._record("find", "squeue", [key])
        return self.keys.get(key)

    def marked_jobs(self, mark: str) -> list[MarkedJob]:
        """Return the jobs with this word in their comment of which a process runs."""
        self._record("marked_jobs", "squeue", [mark])
        alive = [
            job_id for job_id, children in list(self.jobs.items()) if any(child.poll() is None for child in children)
        ]
        found = [(job_id, "PENDING" if job_id in self.waiting else "RUNNING") for job_id in [*alive, *self.waiting]]
        return [
            MarkedJob(job_id, state, 1, *self.times.get(job_id, (0.0, None)))
            for job_id, state in sorted(found)
            if mark in self.comments[job_id]
        ]

    def hold(self, job_id: str) -> None:
        """Only recorded: everything has started already."""
        self._record("hold", "scontrol", ["hold", job_id])

    def release(self, job_id: str) -> None:
        """Only recorded."""
        self._record("release", "scontrol", ["release", job_id])

    def update(self, job_id: str, fields: Mapping[str, str]) -> None:
        """Only recorded."""
        self._record("update", "scontrol", [job_id, *(f"{name}={value}" for name, value in fields.items())])

    def cancel(self, job_id: str) -> None:
        """End the job's processes."""
        self._record("cancel", "scancel", [job_id])
        self.waiting.discard(job_id)
        for child in self.jobs.get(job_id, []):
            if child.poll() is None:
                child.terminate()

    def ask_to_end(self, job_id: str) -> None:
        """Send SIGTERM to the job's processes."""
        self._record("ask_to_end", "scancel", ["--signal=TERM", job_id])
        for child in self.jobs[job_id]:
            child.terminate()

    def node_address(self, node: str) -> str:
        """From `addresses`."""
        self._record("node_address", "scontrol", [node])
        if node not in self.addresses:
            raise SlurmCommandError(["scontrol", "show", "node", node], 1, f"Node {node} not found", "")
        return self.addresses[node]

    def start_step(
        self, options: Sequence[str], command: Sequence[str], log: Path, *, in_background: bool = False
    ) -> Child:
        """Start the command as a process."""
        self._record("start_step", "srun", [*options, *command])
        return start_child(command, env=self.environ, log=log, death_signal=None if in_background else SIGTERM)

    def _record(self, method: str, program: str, arguments: Sequence[str]) -> None:
        self.calls.append((method, tuple(arguments)))
        if method in self.refuse:
            raise SlurmCommandError([program, *arguments], 1, "", f"{program}: error: refused by the fake")
