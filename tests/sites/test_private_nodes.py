"""A site that hides its nodes from plain users (PrivateData=nodes): their jobs stream, and what is told is told."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from hetstream.slurm_plugin.client.slurm import CommandSlurm
from tests.sites.conftest import HETSTREAM

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
KINDS = ()
SETTINGS = ("PrivateData=nodes",)


def test_a_job_streams_where_slurm_does_not_tell_its_user_of_nodes(site: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # The job has this PATH too: all that asks Slurm there asks as a plain user.
        patch.setitem(site.cluster.env, "PATH", f"{site.as_nobody}:{site.cluster.env.get('PATH', os.environ['PATH'])}")
        site.streams()


def test_what_plain_users_may_know_of_the_cluster_is_known(site: Any) -> None:
    environ = {**os.environ, **site.cluster.env}
    told = CommandSlurm(environ).cluster()
    hidden = CommandSlurm({**environ, "PATH": f"{site.as_nobody}:{environ['PATH']}"}).cluster()
    assert (hidden.partitions, hidden.default_partition) == (told.partitions, told.default_partition)
    assert (hidden.scheduler, hidden.release) == (told.scheduler, told.release)
    assert hidden.default_mb_per_cpu == told.default_mb_per_cpu


def test_who_may_know_of_no_node_is_told_so(site: Any) -> None:
    """What serves the cluster ends, too: the next reading would say no more."""
    environ = {**os.environ, **site.cluster.env}
    environ["PATH"] = f"{site.as_nobody}:{environ['PATH']}"
    for words in (["jobs"], ["frag"], ["exporter", "--listen=127.0.0.1:0"], ["serve", "--listen=127.0.0.1:0"]):
        done = subprocess.run([HETSTREAM, *words], env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0
        said = [line for line in done.stderr.splitlines() if not line.startswith(("metrics at", "the cluster at"))]
        assert len(said) == 1, said
        assert "NodesHidden: Slurm tells this user nothing of nodes (PrivateData=nodes)" in said[0]
