"""How much memory is left, with files as the kernel writes them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hetstream.base import limits
from hetstream.base.limits import available_bytes

V1 = "35 31 0:32 {root} {mount} rw,relatime - cgroup cgroup rw,memory\n36 31 0:33 / /none rw - cgroup cgroup rw,cpu\n"
V2 = "41 31 0:38 {root} {mount} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
HOST_BYTES = 50 << 10


class Groups:
    """Control groups, as the kernel shows them; the process is in job/step."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mount = path / "groups"
        self.path = path
        (self.mount / "job" / "step").mkdir(parents=True)
        (path / "meminfo").write_text("MemTotal:       99 kB\nMemAvailable:    50 kB\n")
        self.say("0::/job/step\n", V2)
        monkeypatch.setattr(limits, "_MEMINFO", path / "meminfo")
        monkeypatch.setattr(limits, "_OWN_GROUPS", path / "own")
        monkeypatch.setattr(limits, "_MOUNTS", path / "mounts")

    def say(self, own: str, mounts: str, root: str = "/") -> None:
        """What a process is told of its groups."""
        (self.path / "own").write_text(f"12:cpu,cpuacct:/elsewhere\n1:name=systemd:/elsewhere\n{own}")
        (self.path / "mounts").write_text(
            "23 1 8:1 / / rw - ext4 /dev/sda rw\n" + mounts.format(root=root, mount=self.mount)
        )

    def limit(self, group: str, most: str, current: int, cache: int, high: str = "max") -> None:
        """Of version 2."""
        where = self.mount / group
        (where / "memory.max").write_text(f"{most}\n")
        (where / "memory.high").write_text(f"{high}\n")
        (where / "memory.current").write_text(f"{current}\n")
        (where / "memory.stat").write_text(f"anon 7\ninactive_file {cache}\n")

    def limit_v1(self, group: str, most: int, current: int, cache: int) -> None:
        """Of version 1."""
        where = self.mount / group
        (where / "memory.limit_in_bytes").write_text(f"{most}\n")
        (where / "memory.usage_in_bytes").write_text(f"{current}\n")
        (where / "memory.stat").write_text(f"inactive_file 3\ntotal_inactive_file {cache}\n")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    return Groups(tmp_path, monkeypatch)


def test_without_limits_the_host_counts(groups: Groups) -> None:
    groups.limit("job", "max", 1, 0)
    assert available_bytes() == HOST_BYTES


@pytest.mark.shows("shared memory that is too small is refused before a byte is written, and a file takes its place")
def test_the_jobs_limit_holds_for_its_steps(groups: Groups) -> None:
    groups.limit("job", "30000", 20000, 5000)
    groups.limit("job/step", "max", 20000, 5000)
    assert available_bytes() == 15000


def test_where_a_process_would_be_slowed_down_is_a_limit(groups: Groups) -> None:
    groups.limit("job", "30000", 20000, 0, high="25000")
    assert available_bytes() == 5000


def test_a_group_over_its_limit_has_nothing_left(groups: Groups) -> None:
    groups.limit("job/step", "100", 200, 0)
    assert available_bytes() == 0


@pytest.mark.parametrize("own", ["/", "/../../other", "/job/step"], ids=["namespace", "outside", "without namespace"])
def test_in_a_container_the_root_of_what_is_mounted_counts(groups: Groups, own: str) -> None:
    groups.say(f"0::{own}\n", V2, "/job/step" if own == "/job/step" else "/")
    groups.limit("", "9000", 2000, 0)
    assert available_bytes() == 7000


def test_version_1_limits_at_every_level(groups: Groups) -> None:
    groups.say("4:memory:/job/step\n0::/\n", V1)
    groups.limit_v1("", 9223372036854771712, 10**12, 0)
    groups.limit_v1("job", 40000, 30000, 1000)
    groups.limit_v1("job/step", 9223372036854771712, 20000, 0)
    assert available_bytes() == 11000
    groups.limit_v1("job/step", 21000, 20000, 0)
    assert available_bytes() == 1000


def test_of_a_mixture_the_lower_limit_counts(groups: Groups) -> None:
    groups.say("4:memory:/job/step\n0::/job\n", V1 + V2)
    groups.limit("job", "30000", 25000, 0)
    groups.limit_v1("job/step", 40000, 30000, 1000)
    assert available_bytes() == 5000
    groups.limit("job", "30000", 5000, 0)
    assert available_bytes() == 11000


def test_what_cannot_be_read_does_not_limit(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_MEMINFO", groups.mount / "missing")
    (groups.mount / "job" / "memory.max").write_text("nonsense")
    assert available_bytes() == sys.maxsize
    monkeypatch.setattr(limits, "_MOUNTS", groups.mount / "missing")
    assert available_bytes() == sys.maxsize


def test_of_this_machine_something_is_known() -> None:
    assert 0 < available_bytes() < sys.maxsize
