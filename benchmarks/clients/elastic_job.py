"""A job with companions on Slurm, seen from outside: what it trains, what its controller decides, who is there.

Used by `benchmarks.elastic` and `tests/cluster/test_elastic_job.py`. The job is a converted script around
`elastic_train.py`, whose costs are sleeps.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("elastic_train.py")
HETSTREAM = Path(sys.executable).with_name("hetstream")


class ElasticJob:
    """One job.

    Args:
        directory: a new one, for the job's files.
        environ: in which Slurm's commands reach a cluster.
        directives: of `#HETSTREAM`.
        arguments: of the program, behind its output.
        program: `elastic_train.py`, or one that takes the same.

    Attributes:
        job_id: in Slurm.
        home: what hetstream keeps of it.
    """

    def __init__(
        self, directory: Path, environ: Mapping[str, str], directives: str, *arguments: str, program: Path = PROGRAM
    ) -> None:
        self.directory, self._environ = directory, dict(environ)
        directory.mkdir()
        words = " ".join([sys.executable, str(program), "steps", *arguments])
        (directory / "job.sbatch").write_text(
            "#!/bin/bash\n#SBATCH --gres=gpu:1 --cpus-per-task=2 --mem=2G --time=10 --output=out\n"
            f"#HETSTREAM --data-worker-partition=cpu --data-worker-mem=512M {directives}\nsrun {words}\n"
        )
        self.job_id = self.hetstream("sbatch", "--parsable", "job.sbatch").strip()
        self.home = directory / ".hetstream" / f"job-{self.job_id}"

    def hetstream(self, *words: str) -> str:
        """Output of a hetstream command."""
        return self.run(str(HETSTREAM), *words)

    def run(self, *argv: str) -> str:
        """Output of a command."""
        return subprocess.run(
            argv, cwd=self.directory, env=self._environ, capture_output=True, text=True, check=True, timeout=120
        ).stdout

    def companions(self, *states: str) -> list[str]:
        """Job ids of the companions in these states, by default all that are not over."""
        chosen = [f"--states={','.join(states)}"] if states else []
        rows = self.run("squeue", "--noheader", "--format=%A %k", *chosen).splitlines()
        return [row.split()[0] for row in rows if f"hets:trainer={self.job_id}" in row.split()]

    def events(self, *types: str) -> list[dict[str, Any]]:
        """What happened, of these types."""
        places = (self.home / "dispatcher" / "events.jsonl", self.home / "events.jsonl")
        text = next((path.read_text() for path in places if path.exists()), "")
        return [one for line in text.splitlines() if (one := json.loads(line))["event"] in types]

    def changes(self, device: str = "cpu") -> list[tuple[str, int]]:
        """Action and count of each change of the controller of a stage."""
        found = [one for one in self.events("DataWorkersChanged") if one.get("device", "cpu") == device]
        return [(one["action"], one["count"]) for one in found]

    def status(self) -> dict[str, Any]:
        """What `hetstream job --json` says."""
        said: dict[str, Any] = json.loads(self.hetstream("job", "--json", self.job_id))["service"]
        return said

    def steps(self) -> list[tuple[float, float, int, list[int]]]:
        """Time, wait, epoch and sample ids of each step so far."""
        path = self.directory / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        rows = (line.split() for line in lines if line.count(" ") == 3)
        return [(float(at), float(wait), int(epoch), [*map(int, ids.split(","))]) for at, wait, epoch, ids in rows]

    def wait_share(self, last_s: float) -> float:
        """Share of the last seconds that the training loop waited, as the program itself measured it."""
        steps = self.steps()
        recent = [step for step in steps if step[0] > steps[-1][0] - last_s]
        return sum(wait for _, wait, _, _ in recent[1:]) / (recent[-1][0] - recent[0][0])

    def steps_per_s(self, last_s: float) -> float:
        """Steps per second over the last seconds."""
        steps = self.steps()
        recent = [at for at, *_ in steps if at > steps[-1][0] - last_s]
        return (len(recent) - 1) / (recent[-1] - recent[0])

    def master_pids(self, *actions: str) -> list[int]:
        """Processes of `hetstream internal master ACTION`, without their srun."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_text(errors="replace").split("\0")
                # Not by the job's id: other clusters of this machine have jobs of the same number.
                mine = f"SLURM_SUBMIT_DIR={self.directory}\0" in (path / "environ").read_text(errors="replace")
            except OSError:
                continue
            if mine and "master" in words and words[words.index("master") + 1] in actions and "srun" not in words:
                found.append(int(path.name))
        return found

    def stop(self) -> None:
        """Let the program end after the step that it is at."""
        (self.directory / "steps.stop").touch()

    def cancel(self) -> None:
        """End it now."""
        self.run("scancel", "--quiet", self.job_id)

    def has_ended(self) -> bool:
        """Whether nothing of any job is left in the queue."""
        return not self.run("squeue", "--noheader", "--states=PD,R,CG")

    def ledger_problems(self, num_samples: int) -> list[str]:
        """What is wrong with the epochs that were read to their end: each sample must be there exactly once."""
        by_epoch: dict[int, list[int]] = {}
        for _, _, epoch, ids in self.steps():
            by_epoch.setdefault(epoch, []).extend(ids)
        whole = [ids for _, ids in sorted(by_epoch.items())][:-1]
        wrong = [number for number, ids in enumerate(whole) if sorted(ids) != list(range(num_samples))]
        return [f"epoch {number} has not each sample once" for number in wrong] + ([] if whole else ["no whole epoch"])
