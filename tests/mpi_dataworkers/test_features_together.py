"""Features with what else a program uses: mixtures, ranks, compiled models, resume, hostile values, lost data workers.

Each test compares bytes with those of the whole graph, computed in the program.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from random_features import as_bytes

from hetstream import DataLoader, mix
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.batches import Jagged, Nullable
from hetstream.mpi_dataworkers.features.cut import CutGraph
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, dense, jagged
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.gpu_features.hybrid import HybridFeatures

TABLE = (7, 8, 9)
GRAPH = FeatureGraph.of(
    {
        "dense": [
            dense("price", is_nullable=True) >> ops.FillNull(1.0, nan=True) >> ops.Clamp(0.0, 50.0) >> ops.Logit(1e-3),
            dense("price", is_nullable=True) >> ops.FillNull(1.0) >> ops.BoxCox(0.5),
        ],
        "mapped": dense("row", "int64") >> ops.MapId(TABLE),
        "ids": [jagged("ids") >> ops.Ngram(2) >> ops.SigridHash(1, 1000)],
    }
)
OTHER_GRAPH = FeatureGraph.of({"ids": jagged("ids") >> ops.FirstX(1) >> ops.MapId(TABLE), "row": dense("row", "int64")})
NAMES = [step.name for step in GRAPH.steps]
CUTS = [GRAPH, CutGraph(GRAPH, tuple(NAMES[1::2])), CutGraph(GRAPH, tuple(NAMES)), HybridFeatures(GRAPH)]
LENGTH = 80
LOADER_OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 5}
WILD = (math.nan, math.inf, -math.inf, -0.0, 1e30, -1e-30)


def collate(rows: list[int]) -> dict[str, Any]:
    """Numbers that are none, ids beyond tables, empty lists; and of some batches no row at all."""
    if rows[0] % 9 == 0:
        rows = []
    prices = torch.tensor([WILD[row % 7] if row % 7 < len(WILD) else row * 0.7 for row in rows], dtype=torch.float32)
    ids = [(2**62 + row) * (-1) ** at for row in rows for at in range(row % 4)]
    return {
        "row": torch.tensor([row - LENGTH // 2 for row in rows], dtype=torch.int64),
        "price": Nullable(prices, torch.tensor([row % 5 > 0 for row in rows], dtype=torch.bool)),
        "ids": Jagged(torch.tensor(ids, dtype=torch.int64), torch.tensor([row % 4 for row in rows], dtype=torch.int64)),
    }


class KilledAt:
    """Kills its data worker at some steps exactly: before their batches are made, each once."""

    def __init__(self, flags: Path, first_rows: list[int]) -> None:
        self.flags, self.first_rows, self.trainer = flags, first_rows, os.getpid()

    def __call__(self, rows: list[int]) -> dict[str, Any]:
        if rows[0] in self.first_rows and os.getpid() != self.trainer:
            try:
                os.close(os.open(self.flags / str(rows[0]), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return collate(rows)
            os.kill(os.getpid(), signal.SIGKILL)
        return collate(rows)


def loader_of(loaders: Any, **options: Any) -> Any:
    return loaders([*range(LENGTH)], shuffle=True, **{"collate_fn": collate, **options})


@pytest.fixture(name="whole", scope="module")
def whole_fixture() -> list[Any]:
    stage = FeatureTransform(GRAPH)
    with DataLoader([*range(LENGTH)], shuffle=True, collate_fn=collate, batch_stage=stage, **LOADER_OPTIONS) as loader:
        found = [*map(as_bytes, loader)]
    assert any(batch["mapped"][1] == (0,) for batch in found), "no batch is empty"
    return found


@pytest.mark.shows("NaN, ids beyond tables and empty batches are computed alike everywhere")
@pytest.mark.parametrize("features", CUTS, ids=str)
def test_numbers_that_are_none_ids_beyond_tables_and_empty_batches(
    three: Any, loaders: Any, whole: list[Any], features: Any
) -> None:
    assert [*map(as_bytes, loader_of(loaders, features=features, service=three.name))] == whole


@pytest.mark.shows("features work in mixtures, under DDP, and on hosts with and without a compiler")
def test_loaders_with_features_of_their_own_are_mixed(three: Any, loaders: Any) -> None:
    """One of them is cut elsewhere meanwhile; the mixture is that of plain stages."""

    def parts_of(*stages: dict[str, Any], **place: Any) -> list[Any]:
        return [loader_of(loaders, job_name=f"part{at}", **stage, **place) for at, stage in enumerate(stages)]

    plain = parts_of({"batch_stage": FeatureTransform(GRAPH)}, {"batch_stage": FeatureTransform(OTHER_GRAPH)})
    parts = parts_of({"features": CUTS[1]}, {"features": OTHER_GRAPH}, service=three.name)
    mixed: Any = mix(parts, [2, 1], 3)
    found, halfway, state = [], LENGTH // 4, None
    for step, batch in enumerate(mixed):
        found.append(as_bytes(batch))
        if step == 7:
            parts[0].set_features(CUTS[2])
        if step == halfway:
            state = json.loads(json.dumps(mixed.state_dict()))
    assert found == [*map(as_bytes, mix(plain, [2, 1], 3))]
    others = parts_of({"features": CUTS[3]}, {"features": CutGraph(OTHER_GRAPH, ("ids.FirstX",))})
    resumed: Any = mix(others, [2, 1], 3)
    resumed.load_state_dict(state)
    assert [*map(as_bytes, resumed)] == found[halfway + 1 :]


@pytest.mark.shows("data workers are killed while a feature graph is cut")
def test_killed_data_workers_and_resume_with_another_number_of_them(
    service_in: Any, loaders: Any, whole: list[Any], tmp_path: Path
) -> None:
    """Killed at exact steps on both sides of the position; two data workers before it, one and three behind it."""
    order = [*DataLoader([*range(LENGTH)], shuffle=True, collate_fn=list, **LOADER_OPTIONS)]
    at = 9
    killed = KilledAt(tmp_path, [order[step][0] for step in (2, 5, at - 1, at, at + 1, 15)])
    state: Any = None
    for number, features in ((2, CUTS[3]), (1, CUTS[1]), (3, CUTS[3])):
        directory = tmp_path / f"service{number}"
        directory.mkdir()
        service = service_in(directory)
        service.start_dispatcher()
        try:
            service.start_workers(number)
            loader = loader_of(loaders, features=features, service=service.name, max_attempts=10, collate_fn=killed)
            if state is None:
                batches = iter(loader)
                assert [as_bytes(next(batches)) for _ in range(at)] == whole[:at]
                state = json.loads(json.dumps(loader.state_dict()))
            else:
                loader.load_state_dict(state)
                assert [*map(as_bytes, loader)] == whole[at:], number
            loader.close()
        finally:
            service.stop()
    assert sum(file.name.isdigit() for file in tmp_path.iterdir()) >= 5, "they were not killed"


def ranks(tmp_path: Path, **request: Any) -> list[dict[str, Any]]:
    program = Path(__file__).parent / "programs" / "features_ranks.py"
    processes = []
    for rank in range(2):
        told = json.dumps({"store": str(tmp_path / f"store{request['features']}"), "rank": rank, **request})
        processes.append(
            subprocess.Popen(
                [sys.executable, str(program), told], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        said = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "".join(error for _, error in said)
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


@pytest.mark.shows("features work in mixtures, under DDP, and on hosts with and without a compiler")
@pytest.mark.slow
def test_two_ranks_train_a_compiled_model_on_features_and_learn_the_same(three: Any, tmp_path: Path) -> None:
    """DDP over gloo in two processes, each of which cuts the graph for itself; one learns from the other."""
    plain = ranks(tmp_path, features="")
    assert plain[0]["learned"] == plain[1]["learned"]
    assert plain[0]["seen"] != plain[1]["seen"]
    found = ranks(tmp_path, features="hybrid", service=three.name)
    assert [(each["seen"], each["learned"]) for each in found] == [(each["seen"], each["learned"]) for each in plain]
    assert all(each["num_cuts"] > 1 for each in found)
