"""Under which address the other nodes of a job reach its job master."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hetstream.hetjob.errors import MasterError
from hetstream.hetjob.job.job import JobEnvironment
from hetstream.hetjob.master import server
from hetstream.slurm_plugin.client.fake import FakeSlurm


def address(tmp_path: Path, node: str, addresses: dict[str, str]) -> str:
    environ = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURMD_NODENAME": node}
    return server._reachable_address(FakeSlurm(tmp_path, {}, addresses=addresses), JobEnvironment.read(environ))


def test_it_is_the_one_that_slurm_uses(tmp_path: Path) -> None:
    assert address(tmp_path, "gpu0", {"gpu0": "192.0.2.7"}) == "192.0.2.7"


def test_where_slurm_tells_none_it_is_that_of_the_nodes_name(tmp_path: Path) -> None:
    assert address(tmp_path, "192.0.2.8", {}) == "192.0.2.8"


def test_a_name_on_the_loopback_interface_is_not_for_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "192.0.2.9")
    assert address(tmp_path, "localhost", {}) == "192.0.2.9"
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert address(tmp_path, "localhost", {}) == "127.0.0.1"
    with pytest.raises(MasterError, match=r"no-such-node\.invalid or no-such-host\.invalid, .* does not resolve"):
        address(tmp_path, "no-such-node.invalid", {})
