"""Checkpoints of N ranks are read by M through torch.distributed.checkpoint's own planners."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings

from hetstream.checkpoint.convert.dcp import FlashStorageReader
from hetstream.checkpoint.convert.weights import write_state
from hetstream.checkpoint.disk.commit import commit
from hetstream.checkpoint.disk.rank_file import CHUNK_BYTES, PartSpec
from hetstream.checkpoint.errors import DamagedCheckpoint, MissingRanks, NoCheckpoint, UnsupportedState
from hetstream.checkpoint.record.layout import Generation
from hetstream.checkpoint.record.structure import Record, Shard, TensorRef
from hetstream.checkpoint.tensors.shards import Parts, RankPart, Whole, open_parts, overlap_of

# What torch says when a program without ranks loads, which is what most of these tests are.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
PROGRAM = Path(__file__).with_name("programs") / "reshard.py"
QUICK = ("1:2", "2:1", "flash:2:2", "flash:1:2", "reader:2:1")
SLOW = ("4:2", "2:3", "flash:3:2", "reader:2:3")


def pairs(is_wanted: Callable[[str], bool]) -> list[Any]:
    return [
        pytest.param(pair, marks=pytest.mark.slow if pair in SLOW else ())
        for pair in (*QUICK, *SLOW)
        if is_wanted(pair)
    ]


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the program printed: torch is loaded once for all ranks and all pairs that are tested."""
    directory = tmp_path_factory.mktemp("pairs")
    tested = [item.callspec.params.get("pair") for item in request.session.items if hasattr(item, "callspec")]
    pairs = [pair for pair in (*QUICK, *SLOW) if pair in tested]
    argv = [sys.executable, "-W", "error", str(PROGRAM), str(directory), *pairs]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, check=False)
    return done.stdout + done.stderr


@pytest.mark.shows("N ranks saved, M ranks loaded: FSDP2, tensor parallel, meshes, plain values")
@pytest.mark.parametrize("pair", pairs(lambda pair: pair[0].isdigit()))
def test_a_checkpoint_of_some_ranks_is_loaded_by_others(said: str, pair: str) -> None:
    """FSDP2, tensor parallel, two-dimensional meshes, replicas, plain tensors and objects; real gloo ranks."""
    assert f"ok {pair}\n" in said, said


@pytest.mark.shows("N ranks saved, M ranks loaded: FSDP2, tensor parallel, meshes, plain values")
@pytest.mark.parametrize("pair", pairs(lambda pair: not pair[0].isdigit()))
def test_a_sharded_program_is_restored_on_other_ranks(said: str, pair: str) -> None:
    """A fresh FSDP2 model, an optimizer without state yet and a DTensor go on as those that were saved."""
    assert f"ok {pair}\n" in said, said


@pytest.mark.shows("a model that FSDP2 has sharded, killed and begun again, ends with the same weights")
@pytest.mark.slow
def test_a_sharded_program_that_is_killed_goes_on(tmp_path: Path) -> None:
    program = Path(__file__).parent / "programs" / "train_sharded.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]

    def train(name: str, die_at: int = -1) -> list[list[str]]:
        argv = [*launch, str(tmp_path / name), str(die_at)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(argv, capture_output=True, text=True, timeout=140, env=environment)
        assert (done.returncode == 0) == (die_at < 0), done.stdout + done.stderr
        return sorted(line.split(maxsplit=3)[1:] for line in done.stdout.splitlines() if line.startswith("RESULT"))

    whole = train("whole")
    assert train("killed", 7) == []
    resumed = train("killed")
    assert [words[:2] for words in resumed] == [["0", "6"], ["1", "6"]]
    assert [words[2] for words in resumed] == [words[2] for words in whole]


def write(directory: Path, state: dict[str, Any]) -> Path:
    generation = Generation(1, 5)
    write_state(directory, PartSpec(generation, 0, 1), state)
    assert commit(directory, generation, 1) == ()
    return directory / generation.directory_name


def test_a_single_process_loads_without_a_process_group(tmp_path: Path) -> None:
    tied = torch.randn(4, 4)
    saved = {
        "a": {"w": tied, "v": tied, "t": tied.t(), "c": torch.randn(3, dtype=torch.complex128), "n": torch.tensor(7)},
        "list": [torch.ones(2), {"x": torch.zeros(0)}],
        "lr": 0.5,
        "betas": (0.9, 0.999),
        "rng": torch.arange(5000, dtype=torch.uint8).numpy(),
    }
    path = write(tmp_path, saved)
    state = {
        "a": {name: torch.empty_like(one) for name, one in saved["a"].items()},  # type: ignore[attr-defined]
        "list": [torch.empty(2), {"x": torch.empty(0)}],
        "lr": 0.0,
        "betas": None,
        "rng": None,
    }
    dcp.load(state, storage_reader=FlashStorageReader(path))
    for name, value in saved["a"].items():  # type: ignore[attr-defined]
        assert torch.equal(state["a"][name], value), name
    assert state["list"][0].tolist() == [1, 1]
    assert (state["lr"], state["betas"]) == (0.5, (0.9, 0.999))
    assert (state["rng"] == saved["rng"]).all()


def test_latest_is_a_checkpoint_too_and_other_paths_are_not(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.ones(2)})
    state = {"a": torch.zeros(2)}
    dcp.load(state, checkpoint_id=tmp_path / "latest", storage_reader=FlashStorageReader(tmp_path / "x"))
    assert state["a"].tolist() == [1, 1]
    for path in (tmp_path, tmp_path / "step-0000000099.1"):
        with pytest.raises(NoCheckpoint, match=r"step-0000000120\.2 or DIR/latest"):
            FlashStorageReader(path).read_metadata()


def test_only_what_is_used_is_compared_with_its_checksums(tmp_path: Path) -> None:
    """A rank that needs nothing of a file does not read it; one that does, finds the flipped bit."""
    generation = Generation(1, 5)
    for rank in range(2):
        part = PartSpec(generation, rank, 2)
        write_state(
            tmp_path, part, {"shared": torch.ones(4), f"own{rank}": torch.zeros(CHUNK_BYTES * rank + 64).byte()}
        )
    assert commit(tmp_path, generation, 2) == ()
    path = tmp_path / generation.directory_name
    file = path / "rank-00001-of-00002.safetensors"
    with file.open("r+b") as raw:
        raw.seek(CHUNK_BYTES + 1)
        raw.write(b"?")
    own = torch.ones(CHUNK_BYTES + 64, dtype=torch.uint8)
    state = {"shared": torch.zeros(4), "own0": own[:64]}
    dcp.load(state, storage_reader=FlashStorageReader(path))
    assert state["shared"].tolist() == [1] * 4
    assert not own[:64].any()
    with pytest.raises(dcp.api.CheckpointException, match=r"rank-00001-of-00002.*own1"):
        dcp.load({"own1": own}, storage_reader=FlashStorageReader(path))


@pytest.mark.shows("a checkpoint with missing ranks is passed over, and a log says which are missing")
def test_a_checkpoint_without_the_files_of_a_rank_is_refused(tmp_path: Path) -> None:
    generation = Generation(1, 5)
    for rank in range(2):
        write_state(tmp_path, PartSpec(generation, rank, 2), {"a": torch.ones(4)})
    commit(tmp_path, generation, 2)
    path = tmp_path / generation.directory_name
    (path / "rank-00001-of-00002.json").unlink()
    with pytest.raises(MissingRanks, match="1 of 2 ranks, first 1"):
        open_parts(path)


class Pair(NamedTuple):
    a: torch.Tensor
    b: int


def test_tensors_where_dcp_does_not_look_are_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": {"pair": Pair(torch.ones(2), 1)}})
    with pytest.raises(UnsupportedState, match=r"a\.pair is a Pair that holds tensors"):
        FlashStorageReader(path).read_metadata()


def piece(rank: int, shape: tuple[int, ...], offsets: tuple[int, ...], values: torch.Tensor) -> RankPart:
    record = Record({"x": {"w": {"$tensor": 0}}}, [TensorRef(0, shard=Shard(shape, offsets))], [])
    return RankPart(rank, record, [values])


def whole_of(parts: list[RankPart]) -> Whole:
    return Parts(parts).wholes["x.w"]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A shape, cut into boxes that cover it once."""
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    boxes = [(tuple(0 for _ in shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        index = draw(st.integers(0, len(boxes) - 1))
        dim = draw(st.integers(0, len(shape) - 1))
        offsets, size = boxes.pop(index)
        at = draw(st.integers(0, size[dim]))
        for begin, length in ((0, at), (at, size[dim] - at)):
            moved = tuple(o + begin if d == dim else o for d, o in enumerate(offsets))
            boxes.append((moved, tuple(length if d == dim else s for d, s in enumerate(size))))
    return shape, boxes


@pytest.mark.shows("N ranks saved, M ranks loaded: FSDP2, tensor parallel, meshes, plain values")
@settings(max_examples=100, deadline=None)
@given(tilings(), st.data())
def test_any_box_of_any_tiling_is_read(
    tiling: tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]], data: st.DataObject
) -> None:
    shape, boxes = tiling
    values = torch.arange(int(torch.tensor(shape).prod())).reshape(shape)

    def cut(box: tuple[tuple[int, ...], tuple[int, ...]]) -> torch.Tensor:
        return values[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))]

    whole = whole_of([piece(rank, shape, box[0], cut(box)) for rank, box in enumerate(boxes)])
    offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
    wanted = tuple(data.draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    assert torch.equal(whole.read(offsets, wanted), cut((offsets, wanted)))
    assert overlap_of((offsets, wanted), (offsets, wanted)) == ((offsets, wanted) if all(wanted) else None)


def test_copies_of_a_piece_count_once_and_a_hole_is_told() -> None:
    values = torch.arange(6.0)
    copies = [piece(rank, (6,), (0,), values[:3]) for rank in range(2)]
    with pytest.raises(MissingRanks, match=r"x\.w: .* hold 3 of the 6 elements"):
        whole_of(copies).read((0,), (6,))
    assert torch.equal(whole_of([*copies, piece(2, (6,), (3,), values[3:])]).read((0,), (6,)), values)


def _contradictions() -> Iterator[list[RankPart]]:
    yield [piece(0, (6,), (4,), torch.ones(3))]
    yield [piece(0, (6,), (-1,), torch.ones(3))]
    yield [piece(0, (6,), (0, 0), torch.ones(3))]
    yield [piece(0, (6,), (0,), torch.ones(3)), piece(1, (7,), (3,), torch.ones(3))]
    yield [piece(0, (6,), (0,), torch.ones(3)), piece(1, (6,), (3,), torch.ones(3).double())]


@pytest.mark.parametrize("parts", list(_contradictions()))
def test_pieces_that_do_not_fit_each_other_are_refused(parts: list[RankPart]) -> None:
    with pytest.raises(DamagedCheckpoint, match=r"x\.w"):
        Parts(parts)
