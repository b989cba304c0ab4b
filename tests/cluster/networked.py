"""A throw-away cluster whose hosts have networks and shared memory of their own, so that one can be cut off or lost."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hetstream.slurm_plugin.client.run import run_slurm
from tests.devcluster.boot import BootRequest
from tests.devcluster.network import VirtualHost
from tests.devcluster.record import ClusterRecord
from tests.devcluster.roots import DEFAULT_CACHE_DIR, choose_programs
from tests.devcluster.spec import DEFAULT_STATE_ROOT, ClusterShape
from tests.programs import require


@dataclass(frozen=True)
class Cluster:
    """A cluster whose links can be cut."""

    record: ClusterRecord
    out_dir: Path

    @property
    def state_dir(self) -> Path:
        return Path(self.record.state_dir)

    @property
    def env(self) -> dict[str, str]:
        return self.record.environment(os.environ)

    def run(self, *argv: str) -> str:
        return run_slurm(argv, env=self.env).stdout

    def host(self, name: str) -> VirtualHost:
        assert self.record.network is not None
        return self.record.network.host(name)

    def cut(self, name: str) -> None:
        """Cut a host off: from now on nobody reaches it."""
        subprocess.run(["ip", "link", "set", self.host(name).link, "down"], check=True)

    def restore(self, name: str) -> None:
        subprocess.run(["ip", "link", "set", self.host(name).link, "up"], check=True)

    def processes(self, name: str) -> list[int]:
        """Everything that runs on a host."""
        argv = ["ip", "netns", "pids", self.host(name).namespace]
        return [int(pid) for pid in subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()]

    def shared_memory(self, name: str) -> Path:
        """Of a host: /dev/shm as its processes see it."""
        return Path(f"/proc/{self.processes(name)[0]}/root/dev/shm")

    def lose(self, name: str) -> None:
        """What a loss of power does: a host falls silent at once, with all that ran there and all of its memory."""
        self.cut(name)
        while pids := self.processes(name):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    @contextmanager
    def no_way_between(self, one: str, other: str) -> Iterator[None]:
        """Lose every frame between two hosts, both ways; each of them reaches everybody else."""
        ways = [(self.host(one), self.host(other)), (self.host(other), self.host(one))]
        for source, goal in ways:
            neighbour = ["ip", "-netns", source.namespace, "neigh", "replace", goal.address, "dev", "eth0"]
            subprocess.run([*neighbour, "lladdr", "02:00:00:00:00:01", "nud", "permanent"], check=True)
        try:
            yield
        finally:
            for source, goal in ways:
                neighbour = ["ip", "-netns", source.namespace, "neigh", "del", goal.address, "dev", "eth0"]
                subprocess.run(neighbour, check=True)

    def state(self, node: str) -> str:
        return self.run("sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%T").strip()


@contextmanager
def networked_cluster(release: str, shape: ClusterShape, running_cluster: Callable[..., Any]) -> Iterator[Cluster]:
    """Boot one; the test is skipped where namespaces are not to be had."""
    require("ip")
    if subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True).returncode != 0:
        pytest.skip("network namespaces are not allowed here")
    name = f"pytest-{os.getpid()}-net"
    request = BootRequest(name, DEFAULT_STATE_ROOT / name, shape, network=True)
    with running_cluster(request, choose_programs(release, DEFAULT_CACHE_DIR, print)) as devcluster:
        yield Cluster(devcluster.record, devcluster.out_dir)
