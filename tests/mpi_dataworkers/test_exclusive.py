"""What one process alone can have (a port, a lock): data workers give way to torch's own, and nothing hangs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from hooking import assert_no_local_step, connection_of, hooked
from torch.utils.data import DataLoader, get_worker_info

from hetstream.mpi_dataworkers.hook import environment
from hetstream.mpi_dataworkers.loader import client, compared_pass, remote_source

PROGRAMS = Path(__file__).parent / "programs"


def free_ports(count: int) -> int:
    """The first of some ports in a row that nobody has, and that the kernel gives to nobody who asks for any."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        first = random.randrange(10_000, lowest - count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


@pytest.mark.parametrize(
    ("kind", "where", "num_workers"),
    [
        ("port", "worker_init_fn", "1"),
        ("port", "worker_init_fn", "2"),
        ("try", "worker_init_fn", "2"),
        ("try", "samples", "1"),
        ("try", "kept", "1"),
    ],
)
def test_what_is_refused_to_a_second_process_is_torchs_own_workers(
    kind: str, where: str, num_workers: str, three: Any, tmp_path: Path, run_program: Any
) -> None:
    (tmp_path / "port").write_text(str(free_ports(2)))
    source = (PROGRAMS / "exclusive.py").read_text()
    plain = run_program(source, tmp_path, kind, where, num_workers)
    assert (plain.returncode, plain.stderr) == (0, "")
    found = run_program(source, tmp_path, kind, where, num_workers, **environment(three.name, {}))
    assert (found.returncode, found.stdout) == (0, plain.stdout), found.stderr
    assert found.stderr.count("stays local: ") == 1, found.stderr
    assert "Traceback" not in found.stderr


class Locked:
    """Its first sample in each process waits for a lock, and the process has it from then on."""

    def __init__(self, lock: Path) -> None:
        self.held: Any
        self.lock, self.trainer, self.held = lock, os.getpid(), None

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> Any:
        assert os.getpid() != self.trainer, "in the trainer"
        if self.held is None:
            self.held = self.lock.open("w")
            fcntl.flock(self.held, fcntl.LOCK_EX)
        info = get_worker_info()
        assert info is not None
        return torch.tensor([index, info.id])


def expected_of(num_workers: int) -> list[Any]:
    return [[[2 * step, step % num_workers], [2 * step + 1, step % num_workers]] for step in range(7)]


@pytest.mark.parametrize("keywords", [{"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_what_a_second_process_waits_for_hangs_nobody(
    keywords: dict[str, Any],
    three: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for module in (compared_pass, remote_source):
        monkeypatch.setattr(module, "LEAST_S", 2.0)
    for module in (client, client, remote_source):
        monkeypatch.setattr(module, "LATE_STEP_S", 2.0)
    monkeypatch.setattr(remote_source, "_LATE_FOR_S", 3.0)
    with hooked(three.name, monkeypatch):
        loader: Any = DataLoader(Locked(tmp_path / "lock"), 2, **keywords)
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == expected_of(keywords["num_workers"])
        assert vars(loader)["_hetstream"].connection is None
    lines = [message for message in caplog.messages if "stays local" in message]
    assert len(lines) == 1
    # Whoever has the lock, the others are waited for no longer than that.
    assert "may wait for what" in lines[0] or "did not deliver it within" in lines[0]


class Partly:
    """Shows which worker makes a sample; data workers cannot make some."""

    def __init__(self) -> None:
        self.trainer = os.getpid()

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        if index == 6 and os.getppid() != self.trainer:
            raise LookupError(index)
        info = get_worker_info()
        assert info is not None
        return torch.tensor([index, info.id, info.seed])


@pytest.mark.parametrize("keywords", [{"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_torchs_own_workers_go_on_as_if_they_had_made_the_steps_before(
    keywords: dict[str, Any], three: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def passes() -> list[Any]:
        torch.manual_seed(5)
        loader: Any = DataLoader(Partly(), 2, **keywords)
        return [[batch.tolist() for batch in loader] for _ in range(2)]

    expected = passes()
    assert [row[0][1] for row in expected[0][:7]] == [0, 1, 0, 1, 0, 1, 0]
    with hooked(three.name, monkeypatch):
        assert passes() == expected


def refuse(batch: Any) -> Any:
    raise ValueError(f"refused: {batch.tolist()}")


def test_what_raises_under_other_stages_is_looked_at_under_them(three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with hooked(three.name, monkeypatch):
        loader: Any = DataLoader(torch.arange(12), 2, num_workers=1)  # type: ignore[arg-type]
        passing = iter(loader)
        assert [next(passing).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        connection_of(loader).use_batch_stage(refuse)
        with pytest.raises(ValueError, match=r"refused: \[4, 5\]"):
            next(passing)
        connection_of(loader).use_batch_stage(None)  # it is streamed as before: the program's own raises that, too
        assert [batch.tolist() for batch in passing] == [[6, 7], [8, 9], [10, 11]]
        assert_no_local_step(loader)
