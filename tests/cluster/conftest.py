"""A cluster whose jobs share GPUs, for the modules that let jobs train on one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster.packing_site import Site, packing_cluster, training_site
from tests.conftest import WaitUntil
from tests.devcluster.boot import BootRequest
from tests.devcluster.cgroups import groups_of, why_not
from tests.devcluster.programs import host_programs
from tests.devcluster.spec import DEFAULT_STATE_ROOT, ClusterShape


@pytest.fixture(scope="module")
def packing(request: pytest.FixtureRequest, release: str, running_cluster: Callable[..., Any]) -> Iterator[Any]:
    """One cluster for each module and release."""
    with packing_cluster(release, running_cluster, request.module.__name__.rpartition("_")[2]) as devcluster:
        yield devcluster


@pytest.fixture
def site(packing: Any, request: pytest.FixtureRequest, wait_until: WaitUntil) -> Iterator[Site]:
    with training_site(packing, request, wait_until) as site:
        yield site


@pytest.fixture(scope="module", params=["parents", pytest.param("control groups", marks=pytest.mark.slow)])
def proctrack_cluster(request: pytest.FixtureRequest, running_cluster: Callable[..., Any]) -> Iterator[Any]:
    """A cluster for each way in which Slurm finds the processes of a step, its ProctrackType."""
    if request.param == "parents":
        yield request.getfixturevalue("devclusters")("host")
        return
    programs = host_programs()
    problem = why_not(programs.version)
    if problem:
        pytest.skip(f"no control groups: {problem}")
    name = f"pytest-{os.getpid()}-{request.module.__name__.rpartition('_')[2]}-cgroups"
    boot = BootRequest(name, DEFAULT_STATE_ROOT / name, ClusterShape(1, 2, 1, 8), cgroups=True)
    with running_cluster(boot, programs) as found:
        yield found
    assert groups_of(found.record.cluster_name) == []
