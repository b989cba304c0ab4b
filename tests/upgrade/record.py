"""Write what this release leaves on disk and sends, small, for the tests of all later ones.

    make record-release    # once a release, before its version goes up; then commit tests/upgrade/recorded

It writes through the classes that programs, jobs and daemons write through. What is recorded is never changed
afterwards: a release that cannot read it says so in docs/upgrade.md, and the test says which error it gives.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hetstream import DataLoader, FlashCheckpointer, mix
from hetstream.hetjob.site.messages import GrantLimit, ReportDemand, SiteRequest, encode_answer, encode_request
from hetstream.mpi_dataworkers.dispatcher.server import Journal
from hetstream.mpi_dataworkers.wire.address import ServiceAddress, write_address_file
from hetstream.mpi_dataworkers.wire.codec import encode
from hetstream.mpi_dataworkers.wire.messages import LoaderStats, Program, ProvidePipeline, RegisterLoader
from hetstream.slurm_plugin.daemon.registry import Registered
from hetstream.slurm_plugin.daemon.store import Store
from hetstream.slurm_plugin.insight.observation import History, Sample
from hetstream.slurm_plugin.install.installation import install

RECORDED = Path(__file__).with_name("recorded")
NOW_S = 1.8e9
KEYS = ["k" * 40] * 5
REPORT = ReportDemand(8123, 1, 3, 5, 4, 0.25)
REGISTERED = Registered("ada", REPORT, 7, NOW_S, 2.0, 4, "4 of 5: 64 CPUs are shared by 2 job(s)")
SAMPLE = Sample(NOW_S, 64, 32, 8, 6, 1000, 500, 12.5, 4, 2, 0.25, (1, 2, 3, 0), 5, 4, 1.5, {})
LOADER = RegisterLoader("train", 0, 0, 1, "gpu0", 42, "d0", {})
STATS = LoaderStats(epochs=2, steps=10)
REPLY_KEY = "0f" * 32


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    """Twelve samples that say which they are."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, index * index])


class Counted(torch.utils.data.IterableDataset[int]):
    """Twelve elements, and a state of its own."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> int:
        if self.next == 12:
            raise StopIteration
        self.next += 1
        return self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def loaders() -> dict[str, Any]:
    """The loaders whose states are recorded."""
    return {
        "map": DataLoader(Squares(), batch_size=2, shuffle=True, seed=3),
        "stream": DataLoader(Counted(), batch_size=2),
        "mixture": mix(
            [DataLoader(Squares(), batch_size=2, shuffle=True, seed=4), DataLoader(Squares(), batch_size=3)],
            weights=[2, 1], seed=5,
        ),
    }  # fmt: skip


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that have made one step."""
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def values_of(batch: Any) -> Any:
    """A batch as JSON."""
    return batch.tolist() if isinstance(batch, torch.Tensor) else [values_of(one) for one in batch]


def record(directory: Path) -> None:
    """Write all of it."""
    states: dict[str, Any] = {}
    for name, loader in loaders().items():
        batches = iter(loader)
        taken = [next(batches) for _ in range(2)]
        states[name] = {"taken": values_of(taken), "state": loader.state_dict(), "rest": values_of(list(batches))}
        getattr(loader, "close", lambda: None)()
    (directory / "loaders.json").write_text(json.dumps(states, indent=1))

    model, optimizer = training()
    loader = loaders()["map"]
    batches = iter(loader)
    next(batches)
    training_state = {"model": model, "optimizer": optimizer, "loader": loader, "note": {"epoch": 1, "lr": [0.5, None]}}
    with FlashCheckpointer(directory / "checkpoints") as checkpointer:
        checkpointer.restore(training_state)
        checkpointer.save(7, training_state, metrics={"loss": 0.5})
    loader.close()

    work = directory / "dispatcher"
    journal = Journal(work)
    journal.begin()
    journal.set_fact("keys", json.dumps(KEYS))
    journal.set_fact("port", "40123")
    journal.remember_pipeline(ProvidePipeline("d0", Program("/home/ada", []), b"", b"blob"))
    journal.remember_worker("w0")
    journal.remember_stats(LOADER, STATS)
    journal.commit()
    journal.close()
    write_address_file(directory / "address", ServiceAddress("tcp://10.0.0.1:40123", *KEYS[:4]))

    with Store(directory / "daemon") as store:
        store.save({"8123": REGISTERED})
    with History(directory / "history.sqlite") as history:
        history.append(SAMPLE)
    install(
        directory / "prefix", {directory / "prefix/share/hetstream/lua/cli_filter.lua": "-- text\n"}, {}, dry_run=False
    )
    (directory / "wire.json").write_text(
        json.dumps(
            {
                "data plane": encode(LOADER).hex(),
                "daemon question": encode_request(SiteRequest(1, 7, REPLY_KEY, REPORT)).decode(),
                "daemon answer": encode_answer(GrantLimit(4, "4 of 5", 10.0), REPLY_KEY).hex(),
            },
            indent=1,
        )
    )
    for lock in directory.rglob("lock"):
        lock.unlink()


def main() -> int:
    """Write the directory of this release, unless it is there."""
    release = ".".join(version("hetstream").split(".")[:2])
    directory = RECORDED / release
    if directory.exists():
        print(f"{directory} is there: what is recorded is not changed", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="hetstream-record-") as partial:
        record(Path(partial))
        shutil.copytree(partial, directory, symlinks=True)
    print(directory)
    return 0
