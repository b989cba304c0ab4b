"""Configless: there is no slurm.conf but in slurmctld's own directory, and SLURM_CONF names none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.devcluster.sites import CONFIGLESS

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
KINDS = (CONFIGLESS,)


def test_commands_have_no_slurm_conf_and_everything_is_told(site: Any) -> None:
    assert "SLURM_CONF" not in site.cluster.env
    assert not Path("/etc/slurm/slurm.conf").exists()
    site.tells_everything()


def test_an_unmodified_job_streams(site: Any) -> None:
    site.streams()
