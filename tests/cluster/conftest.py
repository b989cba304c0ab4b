"""A cluster whose jobs share GPUs, for the modules that let jobs train on one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.packing_site import Site, training_site
from tests.clusters import Devcluster, running_cluster
from tests.conftest import WaitUntil
from tests.devcluster.cgroups import groups_of, why_not
from tests.devcluster.programs import host_programs
from tests.devcluster.spec import ClusterShape


@pytest.fixture(scope="module")
def packing(request: pytest.FixtureRequest, release: str) -> Iterator[Devcluster]:
    """One cluster for each module and release: one node with two GPUs."""
    what = request.module.__name__.rpartition("_")[2]
    with running_cluster(what, ClusterShape(1, 2, 0, 4), release, packing=True) as devcluster:
        yield devcluster


@pytest.fixture
def site(packing: Any, request: pytest.FixtureRequest, wait_until: WaitUntil) -> Iterator[Site]:
    with training_site(packing, request, wait_until) as site:
        yield site


@pytest.fixture(scope="module", params=["parents", pytest.param("control groups", marks=pytest.mark.slow)])
def proctrack_cluster(request: pytest.FixtureRequest) -> Iterator[Devcluster]:
    """A cluster for each way in which Slurm finds the processes of a step, its ProctrackType."""
    if request.param == "parents":
        yield request.getfixturevalue("devclusters")("host")
        return
    problem = why_not(host_programs().version)
    if problem:
        pytest.skip(f"no control groups: {problem}")
    what = f"{request.module.__name__.rpartition('_')[2]}-cgroups"
    with running_cluster(what, ClusterShape(1, 2, 1, 8), cgroups=True) as found:
        yield found
    assert groups_of(found.record.cluster_name) == []
