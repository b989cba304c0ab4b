"""A throw-away cluster whose hosts have networks and shared memory of their own, so that one can be cut off or lost."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.clusters import Devcluster, running_cluster
from tests.devcluster.network import VirtualHost
from tests.devcluster.spec import ClusterShape
from tests.programs import require


class Cluster(Devcluster):
    """A cluster whose links can be cut."""

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
        return self.run("sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%T")


@contextmanager
def networked_cluster(release: str, shape: ClusterShape) -> Iterator[Cluster]:
    """Boot one; the test is skipped where namespaces are not to be had."""
    require("ip")
    if subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True).returncode != 0:
        pytest.skip("network namespaces are not allowed here")
    with running_cluster("net", shape, release, wrapper=Cluster, network=True) as cluster:
        yield cluster
