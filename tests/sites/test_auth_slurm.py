"""auth/slurm: no munged, a key beside slurm.conf."""

from __future__ import annotations

from typing import Any

import pytest

from tests.devcluster.sites import AUTH_SLURM
from tests.devcluster.status import observe

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.parametrize("release", ["24.11", "26.05"], indirect=True, scope="module"),
]
KINDS = (AUTH_SLURM,)


def test_without_munge_everything_is_told(site: Any) -> None:
    assert "auth/slurm" in site.run("scontrol", "show", "config")
    assert "munged" not in [daemon.name for daemon in observe(site.cluster.record).daemons]
    site.tells_everything()


def test_an_unmodified_job_streams(site: Any) -> None:
    site.streams()
