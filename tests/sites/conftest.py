"""Clusters like kinds of sites, `devcluster up --site`, and what hetstream tells there."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hetstream.slurm_plugin.cli import main
from tests.clusters import running_cluster
from tests.devcluster.roots import DEFAULT_CACHE_DIR, choose_programs
from tests.devcluster.sites import ACCOUNTING
from tests.devcluster.spec import ClusterShape

PROGRAM = Path(__file__).parents[1] / "cluster" / "programs" / "train.py"
HETSTREAM = Path(sys.executable).with_name("hetstream")
NOBODY = 65534
DROP = f"setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups"
_OWN = ("ClusterName", "SlurmctldPort", "StateSaveLocation", "SlurmctldPidFile", "SlurmctldLogFile", "DefMemPerCPU")
_OTHER_NODES = "NodeName=q[1-2] NodeAddr=127.0.0.1 NodeHostname=localhost Port=[1-2] CPUs=8 RealMemory=8000 Gres=gpu:2"
READERS = ("sacct", "scontrol", "sinfo", "squeue")
WaitUntil = Callable[..., None]


@dataclass(frozen=True)
class Site:
    """A cluster, with the jobs of one test in it.

    Attributes:
        cluster: a `Devcluster` of tests/conftest.py.
        as_nobody: a directory with Slurm's commands, each run as nobody.
        wait_until: see tests/conftest.py.
    """

    cluster: Any
    as_nobody: Path
    wait_until: WaitUntil

    def run(self, *argv: str) -> str:
        """Run a command of Slurm's and return what it printed."""
        return str(self.cluster.run(*argv)).strip()

    def submit(self, *options: str, command: str = "exec sleep 600", nobody: bool = False) -> str:
        """Submit a job and return its id."""
        drop = (*DROP.split(), "env", "--chdir=/") if nobody else ()
        return self.run(*drop, "sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={command}")

    def state(self, job: str) -> str:
        """State and reason, such as `PENDING Resources`; of a component or task as Slurm labels it."""
        return self.run("squeue", "--all", "--noheader", "--states=all", f"--jobs={job}", "--format=%T %r")

    def settle(self, **jobs: str) -> None:
        """Wait until each job is in its state: `settle(**{"7": "RUNNING", "8": "PENDING Resources"})`."""

        def are_there() -> bool:
            return all(self.state(job).startswith(wanted) for job, wanted in jobs.items())

        self.wait_until(are_there, 120, f"these states: {jobs}")

    def told(self, *words: str, nobody: bool = False) -> dict[str, Any]:
        """What `hetstream VERB --json` tells, in this process."""
        out = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
            for name, value in self.cluster.env.items():
                patch.setenv(name, value)
            if nobody:
                patch.setenv("PATH", f"{self.as_nobody}:{os.environ['PATH']}")
            patch.setattr("logging.basicConfig", lambda **options: None)
            assert main([*words, "--json"]) == 0
        found: dict[str, Any] = json.loads(out.getvalue())
        return found

    def blockers(self, job: str, **how: bool) -> list[tuple[str, str]]:
        """Kind and text of what `why` says that a job waits for."""
        return [(one["kind"], one["text"]) for one in self.told("why", job, **how)["blockers"]]

    def facts(self, job: str) -> dict[str, Any]:
        """What `why` tells of a job itself."""
        facts: dict[str, Any] = self.told("why", job)["summary"]["jobs"][0]
        return facts

    def totals(self, *names: str, **how: bool) -> list[int]:
        """Figures of `frag` for all nodes together."""
        summary = self.told("frag", **how)["summary"]
        return [summary[name] for name in names]

    def tells_everything(self) -> None:
        """Have a job wait that would start with data workers, and compare all that is told with what is so by hand.

        gpu0 has 4 CPUs and 3 GPUs in use, gpu1 14 and 4. The job that waits needs 1 GPU and 14 CPUs: with 2 it would
        start on gpu0, and 12 CPUs move to 3 data workers. Stranded are the GPU of gpu0 and the CPUs of both, 12 + 2.
        """
        small = ("--mem=1000", "--time=60")
        jobs = [self.submit("-wgpu0", "--gpus=3", "-c4", *small), self.submit("-wgpu1", "--gpus=4", "-c14", *small)]
        self.settle(**dict.fromkeys(jobs, "RUNNING"))
        starved = self.submit("--gpus=1", "-c14", *small)
        self.settle(**{starved: "PENDING Resources"})
        names = ("cpus", "cpus_free", "gpus", "gpus_free", "stranded_gpus", "stranded_cpus")
        assert self.totals(*names) == [96, 78, 8, 1, 1, 14]
        assert self.blockers(starved) == [
            ("CPUs", "it needs 14 CPUs on a node; of 1 node with enough GPUs and memory the most free is 12 (gpu0)")
        ]
        (advice,) = self.told("advise")["advice"]
        assert (advice["job"], advice["step"]) == (starved, "#HETSTREAM --data-workers=3 --data-worker-partition=cpu")
        assert {one["partition"]: one["num_jobs"] for one in self.told("util")["groups"]} == {"gpu": 2}

    def streams(self) -> None:
        """Run an unmodified program with 2 data workers, and compare its batches with those of a run without Slurm."""
        directory = self.cluster.out_dir / "job"
        directory.mkdir()
        (directory / "train.sbatch").write_text(
            "#!/bin/bash\n#SBATCH --gpus=1 --cpus-per-task=8 --time=10 --output=out\n"
            "#HETSTREAM --data-workers=2 --data-worker-cpus=1 --data-worker-partition=cpu\n"
            f"srun {sys.executable} {PROGRAM} ledger\n"
        )
        environ = {**self.cluster.env, "DECODE_S": "0"}
        for argv in (
            [HETSTREAM, "sbatch", "--wait", "train.sbatch"],
            [HETSTREAM, "run", "--data-workers", "0", "--", sys.executable, PROGRAM, "local"],
        ):
            subprocess.run(argv, cwd=directory, env=environ, check=True, timeout=180, capture_output=True)
        ledger = (directory / "ledger").read_text()
        assert ledger.count("\n") == 80
        assert ledger == (directory / "local").read_text()
        (master_log,) = directory.glob(".hetstream/job-*/master.log")
        assert "80 steps, 1280 samples" in master_log.read_text()


@pytest.fixture(scope="module")
def kinds(request: pytest.FixtureRequest) -> Sequence[str]:
    """Which kinds of sites the module's cluster is like."""
    found: Sequence[str] = request.module.KINDS
    return found


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, release: str, kinds: Sequence[str]) -> Iterator[Any]:
    """The module's own cluster: 2 nodes of 16 CPUs and 4 GPUs, 4 of 16 CPUs, 64,000 MB each; or its SHAPE and
    SETTINGS. With its PACKING, jobs share GPUs and the guard is in place.
    """
    programs = choose_programs(release, DEFAULT_CACHE_DIR, print, accounting=ACCOUNTING in kinds)
    with running_cluster(
        "site",
        getattr(request.module, "SHAPE", ClusterShape()),
        programs=programs,
        packing=getattr(request.module, "PACKING", False),
        sites=tuple(kinds),
        settings=getattr(request.module, "SETTINGS", ()),
    ) as found:
        yield found


@pytest.fixture
def site(cluster: Any, wait_until: WaitUntil, tmp_path: Path) -> Iterator[Site]:
    """The module's cluster with no job in it, before and after."""
    as_nobody = tmp_path / "as-nobody"
    as_nobody.mkdir()
    for name in READERS:
        found = cluster.run("sh", "-c", f"command -v {name}")
        (as_nobody / name).write_text(f'#!/bin/sh\nexec {DROP} {found} "$@"\n')
        (as_nobody / name).chmod(0o755)
    site = Site(cluster, as_nobody, wait_until)
    yield site
    cluster.clear(wait_until)


@pytest.fixture(scope="module")
def other(cluster: Any, release: str, tmp_path_factory: pytest.TempPathFactory, wait_until: Any) -> Iterator[str]:
    """The name of a cluster whose nodes nobody runs: partition qq, 500 MB for each CPU."""
    place = tmp_path_factory.mktemp("other")
    name = f"other{os.getpid()}"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    lines = (cluster.state_dir / "slurm.conf").read_text().splitlines()
    kept = [line for line in lines if not line.startswith((*_OWN, "NodeName", "PartitionName"))]
    conf = place / "slurm.conf"
    conf.write_text(
        "\n".join(kept) + f"\nClusterName={name}\nSlurmctldPort={port}\nStateSaveLocation={place}\n"
        f"SlurmctldPidFile={place}/pid\nSlurmctldLogFile={place}/log\nDefMemPerCPU=500\n{_OTHER_NODES}\n"
        "PartitionName=qq Nodes=ALL Default=YES MaxTime=INFINITE\n"
    )
    cluster.run("sacctmgr", "--immediate", "--quiet", "add", "cluster", name)
    argv = [choose_programs(release, DEFAULT_CACHE_DIR, print, accounting=True).slurmctld, "-D", "-f", conf]
    daemon = subprocess.Popen(argv, env={**cluster.env, "SLURM_CONF": str(conf)}, stderr=subprocess.DEVNULL)
    try:

        def is_registered() -> bool:
            said = cluster.run("sacctmgr", "--noheader", "--parsable2", "show", "cluster", name, "format=controlport")
            return bool(said == str(port))

        wait_until(is_registered, 60, "the other cluster's slurmctld in slurmdbd")
        yield name
    finally:
        daemon.terminate()
        daemon.wait(60)
