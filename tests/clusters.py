"""The throw-away cluster of tests: one wrapper, which a module's own kind of cluster extends."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from hetstream.slurm_plugin.client.run import run_slurm
from tests.devcluster.boot import BootRequest, boot
from tests.devcluster.programs import SlurmPrograms
from tests.devcluster.record import ClusterRecord
from tests.devcluster.roots import DEFAULT_CACHE_DIR, HOST, choose_programs
from tests.devcluster.spec import DEFAULT_STATE_ROOT, ClusterShape
from tests.devcluster.teardown import tear_down


@dataclass
class Devcluster:
    """A running cluster.

    Attributes:
        record: what `up` wrote down: version, nodes, partitions.
        out_dir: a directory that jobs of every user can write to, where commands run.
    """

    record: ClusterRecord
    out_dir: Path

    @property
    def state_dir(self) -> Path:
        return Path(self.record.state_dir)

    @cached_property
    def env(self) -> dict[str, str]:
        """The environment in which Slurm's commands reach the cluster."""
        return dict(self.record.environment(os.environ))

    def run(self, *argv: str, uid: int = 0, stdin: str = "", timeout_s: float = 60.0) -> str:
        """Return what a command prints, without the end of the last line; SlurmCommandError if it fails."""
        drop = ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups") if uid else ()
        done = run_slurm((*drop, *argv), env=self.env, stdin=stdin, timeout_s=timeout_s, cwd=str(self.out_dir))
        return done.stdout.rstrip("\n")

    def attempt(
        self, *argv: str, cwd: Path | None = None, stdin: str = "", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command that may fail, with more variables."""
        return subprocess.run(
            argv, cwd=cwd or self.out_dir, env={**self.env, **variables}, input=stdin, capture_output=True, text=True,
            errors="surrogateescape", check=False, timeout=180,
        )  # fmt: skip

    def directory(self, name: str) -> Path:
        """Make a directory that jobs of every user can write to."""
        path = self.out_dir / re.sub(r"\W+", "-", name).strip("-")
        path.mkdir()
        path.chmod(0o1777)
        return path

    def submit(self, *words: str, uid: int = 0) -> str:
        """Submit a job and return its id."""
        return self.run("sbatch", "--parsable", *words, uid=uid)

    def show(self, job: str) -> str:
        """What Slurm tells of a job."""
        return self.run("scontrol", "--details", "show", "job", job)

    def cancel_all(self) -> None:
        """End all jobs, whoever has submitted them: scancel takes no uid of nobody, nor a component that is pending."""
        labels = self.run("squeue", "--all", "--noheader", "--format=%i").split()
        if jobs := {re.split("[+_]", label)[0] for label in labels}:
            self.run("scancel", "--quiet", *jobs)

    def clear(self, wait_until: Callable[..., None]) -> None:
        """End all jobs, and wait until they are gone."""
        self.cancel_all()
        wait_until(lambda: not self.run("squeue", "--all", "--noheader"), 120, "the end of all jobs")


USUAL_SHAPE = ClusterShape()
Wrapper = TypeVar("Wrapper", bound=Devcluster)


def name_of(what: str, release: str = HOST) -> str:
    """A name that clusters of other test processes do not have."""
    return f"pytest-{os.getpid()}-{what}-{release.replace('.', '')}"


@contextmanager
def running_cluster(
    what: str,
    shape: ClusterShape = USUAL_SHAPE,
    release: str = HOST,
    *,
    wrapper: Callable[[ClusterRecord, Path], Wrapper] = Devcluster,  # type: ignore[assignment]
    programs: SlurmPrograms | None = None,
    **more: Any,
) -> Iterator[Wrapper]:
    """Boot a cluster, with a directory for its jobs' output; nothing is left of either afterwards.

    Args:
        what: a word for its name.
        shape: its nodes.
        release: of Slurm.
        wrapper: a class that extends `Devcluster`.
        programs: those of the release, unless they are given.
        more: of its `BootRequest`.
    """
    name = name_of(what, release)
    request = BootRequest(name, DEFAULT_STATE_ROOT / name, shape, **more)
    record = boot(request, programs or choose_programs(release, DEFAULT_CACHE_DIR, print), print)
    out_dir = Path("/tmp") / f"hetstream-{name}"
    try:
        out_dir.mkdir()
        out_dir.chmod(0o1777)
        yield wrapper(record, out_dir)
    finally:
        tear_down(Path(record.state_dir))
        shutil.rmtree(out_dir, ignore_errors=True)
