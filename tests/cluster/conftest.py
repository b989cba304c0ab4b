"""A cluster whose jobs share GPUs, for the modules that let jobs train on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster.packing_site import Site, packing_cluster, training_site
from tests.conftest import WaitUntil


@pytest.fixture(scope="module")
def packing(request: pytest.FixtureRequest, release: str, running_cluster: Callable[..., Any]) -> Iterator[Any]:
    """One cluster for each module and release."""
    with packing_cluster(release, running_cluster, request.module.__name__.rpartition("_")[2]) as devcluster:
        yield devcluster


@pytest.fixture
def site(packing: Any, request: pytest.FixtureRequest, wait_until: WaitUntil) -> Iterator[Site]:
    with training_site(packing, request, wait_until) as site:
        yield site
