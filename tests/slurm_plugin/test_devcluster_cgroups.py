"""Control groups of a throw-away cluster: where they can be had, what Slurm does with them, and that none stays."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.clusters import running_cluster
from tests.devcluster.boot import BootRequest, boot
from tests.devcluster.cgroups import HIERARCHIES, groups_of, remove_groups, why_not
from tests.devcluster.errors import BootFailed
from tests.devcluster.programs import SlurmPrograms, host_programs
from tests.devcluster.spec import ClusterShape
from tests.devcluster.teardown import plan_teardown

DEVICES = "for n in 0 1 2 3; do head -c1 {} >&2 && echo $n; done; true"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """What looks like cgroup v1."""
    for name in HIERARCHIES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").touch()
    return tmp_path


def test_a_machine_with_cgroup_v1_has_them(root: Path) -> None:
    assert why_not("22.05.8", root) == why_not("24.11.5", root) == ""


def test_a_group_that_its_last_process_is_leaving_is_removed_a_moment_later(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in HIERARCHIES:
        (root / name / "cluster" / "slurm").mkdir(parents=True)
    own, busy = Path.rmdir, [root / "freezer" / "cluster"]

    def rmdir(path: Path) -> None:
        if path in busy:
            busy.remove(path)
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        own(path)

    monkeypatch.setattr(Path, "rmdir", rmdir)
    remove_groups("cluster", root)
    assert not busy
    assert not groups_of("cluster", root)


def test_what_is_missing_is_said(root: Path) -> None:
    (root / "freezer" / "cgroup.procs").unlink()
    assert why_not("22.05.8", root) == f"no cgroup v1 hierarchy is mounted at {root}/freezer"
    assert why_not("25.05.1", root).startswith("Slurm 25.05.1 uses cgroup v2 only")


def test_groups_are_listed_with_the_innermost_first(root: Path) -> None:
    (root / "freezer" / "mine" / "slurm_gpu0" / "uid_0").mkdir(parents=True)
    (root / "freezer" / "other").mkdir()
    assert [str(group.relative_to(root)) for group in groups_of("mine", root)] == [
        "freezer/mine/slurm_gpu0/uid_0",
        "freezer/mine/slurm_gpu0",
        "freezer/mine",
    ]


def test_up_says_why_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    programs = SlurmPrograms("26.05.5", *[Path("/none")] * 3)
    request = BootRequest("unit", tmp_path / "cluster", ClusterShape(), cgroups=True)
    with pytest.raises(BootFailed, match=r"--cgroups cannot be had here: Slurm 26\.05\.5 uses cgroup v2 only"):
        boot(request, programs, print)
    assert not (tmp_path / "cluster").exists()


@pytest.mark.slurm
def test_a_job_reaches_its_own_gpus_only_and_no_group_stays() -> None:
    problem = why_not(host_programs().version)
    if problem:
        pytest.skip(f"no control groups: {problem}")
    with running_cluster("groups", ClusterShape(1, 4, 1, 2), cgroups=True) as cluster:
        reached = DEVICES.format(cluster.state_dir / "dev" / "gpu$n")
        assert cluster.run("srun", "--gpus=2", "sh", "-c", reached).split() == ["0", "1"]
        assert cluster.run("srun", "sh", "-c", reached).split() == []
        inside = cluster.run("srun", "cat", "/proc/self/cgroup")
        assert ":freezer:/slurm_gpu0/uid_" in inside, "its own group looks like the root"
        plan = plan_teardown(cluster.state_dir)
        assert plan
        assert len(plan.cgroups) >= 4
    assert groups_of(cluster.record.cluster_name) == []
