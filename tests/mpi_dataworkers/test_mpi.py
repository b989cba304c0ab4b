"""Batches by MPI: the conformance suite in an MPI world, and trainers and data workers as ranks of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hetstream.mpi_dataworkers.process.config import transports_from_environment

BIN = Path(sys.executable).parent
MPIEXEC = BIN / "mpiexec"
PROGRAM = """
import json, sys
import torch
from hetstream import DataLoader

class Squares(torch.utils.data.Dataset):
    def __init__(self, bad):
        self.bad = bad
    def __len__(self):
        return 64 * 6 * 2
    def __getitem__(self, index):
        if index == self.bad:
            raise ValueError(f"sample {index} is bad")
        return torch.full((30_000,), float(index)), torch.tensor(index * index)

if __name__ == "__main__":
    dataset = Squares(int(sys.argv[2]))
    loaders = [DataLoader(dataset, batch_size=4, shuffle=True, seed=seed, job_name=f"mpi{seed}") for seed in (1, 2)]
    ledger = []
    for number, loader in enumerate(loaders):
        for values, squares in loader:
            assert (values[:, 0] ** 2 == squares).all()
            values.add_(1)  # received memory is the program's own
            ledger += [(number, int(value[0]) - 1) for value in values]
    rank = loaders[0]._order.rank
    report = {"ledger": ledger, "stats": [loader.stats() for loader in loaders]}
    open(f"{sys.argv[1]}/rank-{rank}.json", "w").write(json.dumps(report))
    sys.exit(5)
"""

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec beside Python: pip install 'hetstream[mpi]'"),
]


def in_world(*words: str, timeout_s: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run mpiexec as a user would."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("HETSTREAM_", "SLURM_"))}
    return subprocess.run(
        [str(MPIEXEC), *words],
        env=environ | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_the_conformance_suite_holds_for_mpi() -> None:
    suite = str(Path(__file__).with_name("test_transport_conformance.py"))
    chosen = "mpi and not tcp and not ipc and not shm and not best_transport and not had_is_not_written and not two_gib"
    done = in_world("-n", "1", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", suite, "-k", chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    assert passed >= 20, done.stdout


def service_words(service: Any, directory: Path, trainers: int, bad: int) -> list[str]:
    (directory / "train.py").write_text(PROGRAM)
    trainer = ["-n", str(trainers), sys.executable, str(directory / "train.py"), str(directory), str(bad)]
    return [*trainer, ":", "-n", "2", str(BIN / "hetstream"), "internal", "worker", "--mpi", "--service", service.name]


def test_trainers_and_data_workers_are_ranks_of_one_world(service: Any, tmp_path: Path) -> None:
    done = in_world(
        *service_words(service, tmp_path, 1, -1), HETSTREAM_SERVICE=service.name, HETSTREAM_TRANSPORT="mpi,tcp"
    )
    assert done.returncode == 5, done.stdout + done.stderr
    report = json.loads((tmp_path / "rank-0.json").read_text())
    assert sorted(map(tuple, report["ledger"])) == [(number, index) for number in (0, 1) for index in range(64 * 12)]
    for stats in report["stats"]:
        assert stats["transport"] == {"mpi": 192}
        assert stats["local_steps"] == stats["duplicates_dropped"] == 0
        assert stats["bytes"] > 64 * 12 * 120_000
    log = service.log("dispatcher")
    assert log.count("registered") == 2
    assert "lost" not in log.replace("job=mpi", ""), "all left in an orderly way"


@pytest.mark.shows("a rank that is alone in its world, and trainers that nobody numbers, are told so")
def test_trainers_that_nobody_numbers_are_counted(service: Any, tmp_path: Path) -> None:
    """mpiexec tells them from no data worker; each would read all the data."""
    done = in_world(
        *service_words(service, tmp_path, 2, -1), HETSTREAM_SERVICE=service.name, HETSTREAM_TRANSPORT="mpi,tcp"
    )
    assert done.returncode == 5, done.stdout + done.stderr
    reports = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    samples = sorted(map(tuple, reports[0]["ledger"] + reports[1]["ledger"]))
    assert samples == [(number, index) for number in (0, 1) for index in range(64 * 12)]


@pytest.mark.shows("a rank that is alone in its world, and trainers that nobody numbers, are told so")
def test_a_process_alone_in_its_world_is_told_so(service: Any, tmp_path: Path) -> None:
    """As under another MPI's launcher, or srun without --mpi: each rank is a world of its own."""
    way_out = "Start trainers and data workers by one launch, `mpiexec ... : ...`"
    words = [str(BIN / "hetstream"), "internal", "worker", "--mpi", "--service", service.name]
    worker = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert worker.returncode == 1
    assert "this data worker is alone in its MPI world" in worker.stderr
    assert way_out in worker.stderr
    (tmp_path / "train.py").write_text(PROGRAM)
    trainer = subprocess.run(
        [sys.executable, str(tmp_path / "train.py"), str(tmp_path), "-1"],
        env=os.environ | {"HETSTREAM_SERVICE": service.name, "HETSTREAM_TRANSPORT": "mpi,tcp"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert trainer.returncode == 5, trainer.stderr
    assert trainer.stderr.count("alone in its MPI world: no data worker reaches this process") == 1
    assert way_out in trainer.stderr


def test_a_trainer_that_fails_ends_the_whole_world_at_once(service: Any, tmp_path: Path) -> None:
    began, before = time.monotonic(), set(Path("/dev/shm").glob("mpich_shm_*"))
    done = in_world(
        *service_words(service, tmp_path, 1, 40), HETSTREAM_SERVICE=service.name, HETSTREAM_TRANSPORT="mpi,tcp"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ValueError: sample 40 is bad" in done.stderr
    assert time.monotonic() - began < 60
    for left in set(Path("/dev/shm").glob("mpich_shm_*")) - before:
        left.unlink()  # MPICH does not remove it when a world is aborted


def test_an_address_of_another_world_is_refused_at_once() -> None:
    """So that the data worker takes the next transport."""
    source = """
from hetstream.mpi_dataworkers.wire.messages import EndOfShard
from hetstream.mpi_dataworkers.transports.base import PeerUnreachable
from hetstream.mpi_dataworkers.transports.mpi import MpiBatchSender, world_id
for address in ("mpi:other/0/1/2", f"mpi:{world_id()}/9/1/2", "mpi:nonsense"):
    try:
        MpiBatchSender("5a" * 32, "w").send(address, EndOfShard("s", 1, 1), [])
    except PeerUnreachable as error:
        print(error)
"""
    done = in_world("-n", "1", sys.executable, "-c", source)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is not in this data worker's MPI world") == 2
    assert "is no address of this transport" in done.stdout


def test_mpi_is_used_only_where_it_was_asked_for() -> None:
    assert "mpi" not in transports_from_environment({})
    assert transports_from_environment({"HETSTREAM_TRANSPORT": "mpi,tcp"}) == {"mpi", "tcp"}


def test_a_rank_is_one_process() -> None:
    done = subprocess.run(
        [str(BIN / "hetstream"), "internal", "worker", "--mpi", "--processes", "2", "--service", "file:x"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "a rank is one process" in done.stderr
