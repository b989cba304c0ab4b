"""`hetstream ckpt convert`: what each format's own tools then read, what comes back, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import struct
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from hetstream.checkpoint.convert.dcp import detect
from hetstream.checkpoint.convert.weights import (
    Content,
    load_safetensors,
    load_torch,
    plain,
    read_dcp,
    reading,
    write_state,
)
from hetstream.checkpoint.disk.commit import commit
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.ownership import JobIdentity
from hetstream.checkpoint.disk.rank_file import PartSpec
from hetstream.checkpoint.errors import DamagedCheckpoint, NoCheckpoint, UnsupportedState
from hetstream.checkpoint.flash.checkpointer import FlashCheckpointer
from hetstream.checkpoint.record.layout import Generation
from hetstream.checkpoint.tensors.shards import open_parts
from hetstream.slurm_plugin.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
LOADER = {"version": 2, "epoch": 1, "step": 40, "shards": "null", "pipeline": {"seed": "7"}, "quarantined": [3, 5]}


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def state_of(rank: int = 0) -> dict[str, Any]:
    model, optimizer = trained()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "loader": LOADER,
        "rng": {"torch": torch.full((5056,), rank, dtype=torch.uint8), "numpy": np.arange(4) + rank},
    }


def save(directory: Path, step: int = 120, num_ranks: int = 2, attempt: int = 1) -> Path:
    generation = Generation(attempt, step)
    shared = ("model", "optimizer", "loader")
    directory.mkdir(exist_ok=True)
    for rank in range(num_ranks):
        part = PartSpec(generation, rank, num_ranks, metrics={"loss": 1 / step})
        write_state(directory, part, state_of(rank), shared=shared, keys=None if rank == 0 else ["rng"])
    assert commit(directory, generation, num_ranks) == ()
    return directory / generation.directory_name


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    """A directory with a checkpoint of two ranks."""
    save(tmp_path / "ckpt")
    return tmp_path / "ckpt"


def assert_same(left: Any, right: Any, path: str = "") -> None:
    if isinstance(right, torch.Tensor | np.ndarray):
        assert torch.equal(torch.as_tensor(left), torch.as_tensor(right)), path
    elif isinstance(right, dict):
        assert list(left) == list(right), path
        for key, one in right.items():
            assert_same(left[key], one, f"{path}.{key}")
    elif isinstance(right, list | tuple):
        assert len(left) == len(right), path
        for index, one in enumerate(right):
            assert_same(left[index], one, f"{path}.{index}")
    else:
        assert left == right, path


def convert(*argv: Any) -> int:
    return main(["ckpt", "convert", *map(str, argv)])


def restored(state: dict[str, Any]) -> None:
    """A program takes it: keys of optimizers are numbers again."""
    model, optimizer = trained()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer.state.clear()
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert_same(model.state_dict(), trained()[0].state_dict())
    assert_same(optimizer.state_dict(), trained()[1].state_dict())


@pytest.mark.shows("checkpoints are converted to and from torch.distributed.checkpoint, torch and safetensors")
def test_to_torch(ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(ckpt, tmp_path / "all.pt", "--to", "torch") == 0
    back = torch.load(tmp_path / "all.pt", weights_only=True)
    assert_same(back, state_of())
    restored(back)
    out, err = capsys.readouterr()
    assert "wrote" in out
    assert "the ranks differ in rng: rank 0's values go along" in err


@pytest.mark.shows("checkpoints are converted to and from torch.distributed.checkpoint, torch and safetensors")
def test_to_safetensors_and_back(ckpt: Path, tmp_path: Path) -> None:
    target = tmp_path / "all.safetensors"
    assert convert(ckpt / "latest", target, "--to", "safetensors") == 0
    assert_same(load_safetensors(target), state_of())
    assert convert(target, tmp_path / "again.pt", "--to", "torch") == 0
    assert_same(torch.load(tmp_path / "again.pt", weights_only=True), state_of())


@pytest.mark.shows("checkpoints are converted to and from torch.distributed.checkpoint, torch and safetensors")
def test_to_dcp_and_plain_torch_reads_it(ckpt: Path, tmp_path: Path) -> None:
    target = tmp_path / "dcp"
    assert convert(ckpt, target, "--to", "dcp") == 0
    state = state_of(rank=1)
    for tensor in state["model"].values():
        tensor.zero_()
    state["loader"] = dict.fromkeys(LOADER)
    state["loader"]["pipeline"] = {"seed": ""}
    dcp.load(state, checkpoint_id=target)
    assert_same(state["model"], state_of()["model"])
    assert_same(state["optimizer"], state_of()["optimizer"])
    assert_same(state["loader"], LOADER)
    assert not [name for name in os.listdir(tmp_path) if "tmp" in name]


@pytest.mark.shows("checkpoints are converted to and from torch.distributed.checkpoint, torch and safetensors")
def test_from_dcp_of_plain_torch(tmp_path: Path) -> None:
    source, target = tmp_path / "dcp", tmp_path / "ckpt"
    dcp.save(state_of(), checkpoint_id=source)
    assert convert(source, target, "--to", "flash", "--as-step", "300") == 0
    assert CheckpointDirectory(target).checkpoints()[0].generation == Generation(1, 300)
    with open_parts(target / "latest") as parts:
        state = parts.tree(lambda whole: whole.read((0,) * len(whole.shape), whole.shape))
    assert_same(state, state_of())
    restored(state)
    # One more of the same directory is newer than all there.
    assert convert(source, target, "--to", "flash", "--as-step", "200") == 0
    assert os.readlink(target / "latest") == "step-0000000200.2"


def test_a_checkpointer_restores_what_was_dcp(tmp_path: Path) -> None:
    dcp.save(state_of(), checkpoint_id=tmp_path / "dcp")
    assert convert(tmp_path / "dcp", tmp_path / "ckpt", "--to", "flash", "--as-step", "300") == 0
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    state = {"model": model, "optimizer": optimizer, "loader": {}, "rng": {}}
    with FlashCheckpointer(tmp_path / "ckpt") as checkpointer:
        assert checkpointer.restore(state) == 300
        assert_same(model.state_dict(), state_of()["model"])
        assert_same(optimizer.state_dict(), state_of()["optimizer"])
        assert state["loader"] == LOADER


def test_from_torch_and_from_safetensors_of_others(tmp_path: Path) -> None:
    model, _ = trained()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert convert(tmp_path / "model.pt", tmp_path / "a", "--to", "flash", "--as-step", "0", "--under", "model") == 0
    with reading(detect(tmp_path / "a")) as content:
        assert_same(content.state, {"model": dict(model.state_dict())})
    # By hand: the safetensors package is no dependency of ours.
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1, 2))
    assert convert(tmp_path / "x.safetensors", tmp_path / "x.pt", "--to", "torch") == 0
    assert torch.load(tmp_path / "x.pt", weights_only=True)["w"].tolist() == [1, 2]


def test_stages_of_a_pipeline_are_merged_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generation = Generation(1, 1)
    for rank, layer in enumerate(("first", "second")):
        state = {"model": {layer: torch.full((2,), rank)}, "lr": {"groups": [{"lr": 0.1}]}}
        write_state(tmp_path, PartSpec(generation, rank, 2), state)
    commit(tmp_path, generation, 2)
    assert convert(tmp_path, tmp_path / "x.pt", "--to", "torch") == 0
    back = torch.load(tmp_path / "x.pt", weights_only=True)["model"]
    assert {name: one.tolist() for name, one in back.items()} == {"first": [0, 0], "second": [1, 1]}
    assert capsys.readouterr().err == ""


def test_tied_tensors_stay_tied_through_formats(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    write_state(tmp_path, PartSpec(Generation(1, 1), 0, 1), {"model": {"a": weight, "b": weight, "c": weight[1]}})
    commit(tmp_path, Generation(1, 1), 1)
    for kind in ("torch", "safetensors"):
        target = tmp_path / f"x.{kind}"
        assert convert(tmp_path, target, "--to", kind) == 0
        with reading(detect(target)) as content:
            back = content.state["model"]
        assert len({one.untyped_storage().data_ptr() for one in back.values()}) <= 2
        assert back["a"].data_ptr() == back["b"].data_ptr()
        assert torch.equal(back["c"], weight[1])
        assert target.stat().st_size < 20_000


@pytest.mark.parametrize("kind", ["torch", "safetensors", "dcp", "flash"])
def test_a_dry_run_writes_nothing(ckpt: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    assert convert(ckpt, tmp_path / "out", "--to", kind, "--dry-run", "--json") == 0
    told = json.loads(capsys.readouterr().out)["conversion"]
    assert (told["from"], told["to"], told["dry_run"], told["target"]) == ("flash", kind, True, str(tmp_path / "out"))
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def refused(capsys: pytest.CaptureFixture[str], code: int, words: str, *argv: Any) -> None:
    assert convert(*argv) == code
    assert words in capsys.readouterr().err


@pytest.mark.shows("`ckpt convert` refuses what is not there, and options that would change nothing")
def test_what_is_wrong_with_the_command_is_said(ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there.pt").touch()
    torch.save({"a": 1}, tmp_path / "a1.pt")
    (tmp_path / "x.h5").write_bytes(b"\x89HDF\r\n\x1a\n more")
    refused(capsys, 1, "No such file", tmp_path / "none", tmp_path / "a.pt", "--to", "torch")
    refused(capsys, 1, "is no checkpoint", tmp_path, tmp_path / "a.pt", "--to", "torch")
    refused(capsys, 1, "neither of torch.save", tmp_path / "there.pt", tmp_path / "a.pt", "--to", "torch")
    refused(capsys, 2, "a conversion overwrites nothing", ckpt, tmp_path / "there.pt", "--to", "torch")
    refused(capsys, 2, "is no directory", ckpt, tmp_path / "no" / "a.pt", "--to", "torch")
    refused(capsys, 1, "neither of torch.save nor safetensors", tmp_path / "x.h5", tmp_path / "a", "--to", "flash")
    refused(capsys, 1, "has no good checkpoint of step 7", ckpt, tmp_path / "a.pt", "--to", "torch", "--step", "7")
    torch.save([1, 2], tmp_path / "list.pt")
    refused(capsys, 1, "holds a list", tmp_path / "list.pt", tmp_path / "a.pt", "--to", "torch")
    for dry in ((), ("--dry-run",)):
        refused(capsys, 2, "--as-step N", tmp_path / "a1.pt", tmp_path / "new", "--to", "flash", *dry)


@pytest.mark.shows("`ckpt convert` refuses what is not there, and options that would change nothing")
def test_options_that_would_change_nothing_are_refused(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"a": 1}, tmp_path / "a.pt")
    out = tmp_path / "out"
    refused(capsys, 2, "--as-step=3: only with --to flash", ckpt, out, "--to", "torch", "--as-step", "3")
    refused(capsys, 2, "--as-step=-3: a step is 0", tmp_path / "a.pt", out, "--to", "flash", "--as-step", "-3")
    refused(capsys, 2, "--step=3: SRC is torch", tmp_path / "a.pt", out, "--to", "dcp", "--step", "3")
    refused(capsys, 2, "--under: a key", ckpt, out, "--to", "torch", "--under", "")
    assert not out.exists()


@pytest.mark.shows("two jobs cannot have one checkpoint directory")
def test_a_running_job_keeps_its_directory(ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a": 1}, tmp_path / "a.pt")
    job = CheckpointDirectory(ckpt)
    job.acquire(JobIdentity.of_this_process("123"))
    try:
        refused(capsys, 1, "is in use by", tmp_path / "a.pt", ckpt, "--to", "flash", "--as-step", "1")
    finally:
        job.release()


# Bad input


class Bomb:
    """What runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.shows("nothing of a checkpoint file is run; damaged and hostile files are refused")
def test_a_pickle_that_runs_something_is_refused(tmp_path: Path) -> None:
    bomb = Bomb(tmp_path / "exploded")
    torch.save({"a": bomb}, tmp_path / "bomb.pt")
    with pytest.raises(UnsupportedState, match=r"nothing of it was run: .*posix.mkdir"):
        load_torch(tmp_path / "bomb.pt")
    dcp.save({"a": bomb, "b": torch.ones(2)}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(UnsupportedState, match=r"nothing of it was run: .*posix.mkdir"):
        read_dcp(tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(bomb))
    with pytest.raises(DamagedCheckpoint, match=r"nothing of it was run: UnpicklingError: it names posix\.mkdir"):
        read_dcp(tmp_path / "dcp")
    assert not bomb.path.exists()


def test_dcp_metadata_that_point_outside_are_refused(tmp_path: Path) -> None:
    dcp.save({"b": torch.ones(2)}, checkpoint_id=tmp_path / "dcp")
    path = tmp_path / "dcp" / ".metadata"
    found = pickle.loads(path.read_bytes())
    (info,) = found.storage_data.values()
    for name in ("../secret", "/etc/passwd", 3):
        info.relative_path = name
        path.write_bytes(pickle.dumps(found))
        with pytest.raises(DamagedCheckpoint, match="outside its directory"):
            read_dcp(tmp_path / "dcp")


def test_dcp_metadata_that_lack_an_attribute_are_refused(tmp_path: Path) -> None:
    dcp.save({"b": torch.ones(2)}, checkpoint_id=tmp_path / "dcp")
    path = tmp_path / "dcp" / ".metadata"
    found = pickle.loads(path.read_bytes())
    del found.state_dict_metadata["b"].size
    path.write_bytes(pickle.dumps(found))
    with pytest.raises(DamagedCheckpoint, match="its metadata lack what they should have: AttributeError"):
        read_dcp(tmp_path / "dcp")


def _cuts(data: bytes) -> Iterator[bytes]:
    for size in (0, 5, len(data) // 3, len(data) - 1):
        yield data[:size]
    for at in range(0, len(data), max(1, len(data) // 25)):
        yield data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]


@pytest.mark.shows("nothing of a checkpoint file is run; damaged and hostile files are refused")
def test_damaged_files_of_others_are_refused_or_read_and_nothing_else(tmp_path: Path) -> None:
    dcp.save({"a": {"b": torch.ones(2)}, "c": [1, "x"]}, checkpoint_id=tmp_path / "dcp")
    torch.save({"a": torch.arange(9), "b": OrderedDict(x=1)}, tmp_path / "a.pt")
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    (data,) = (tmp_path / "dcp").glob("*.distcp")
    for path, read in [
        (tmp_path / "dcp" / ".metadata", lambda: read_dcp(tmp_path / "dcp")),
        (data, lambda: read_dcp(tmp_path / "dcp")),
        (tmp_path / "a.pt", lambda: load_torch(tmp_path / "a.pt")),
        (tmp_path / "a.safetensors", lambda: load_safetensors(tmp_path / "a.safetensors")),
    ]:
        whole = path.read_bytes()
        num_refused = 0
        for changed in _cuts(whole):
            path.write_bytes(changed)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    read()
            except (DamagedCheckpoint, UnsupportedState, NoCheckpoint):
                num_refused += 1
        assert num_refused >= 4, path
        path.write_bytes(whole)
        read()


def test_a_damaged_checkpoint_of_ours_is_passed_over_or_refused(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = save(ckpt, step=150)
    file = newest / "rank-00000-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    refused(capsys, 1, "in 1 of 1 chunks", ckpt, tmp_path / "a.pt", "--to", "torch")
    assert not (tmp_path / "a.pt").exists()
    assert CheckpointDirectory(ckpt).verify(Generation(1, 150))  # marks it
    assert convert(ckpt, tmp_path / "again", "--to", "flash") == 0
    assert CheckpointDirectory(tmp_path / "again").checkpoints()[0].generation.step == 120


@pytest.mark.shows("the disk is full: the old checkpoint is whole, and training goes on")
def test_a_full_disk_leaves_nothing(ckpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr("hetstream.checkpoint.convert.weights.write_file", full)
    monkeypatch.setattr("hetstream.checkpoint.convert.weights.save_torch", full)
    monkeypatch.setattr("hetstream.checkpoint.convert.weights.dcp_save", lambda *_, **__: full())
    before = sorted(os.listdir(tmp_path))
    for kind in ("torch", "safetensors", "dcp"):
        assert convert(ckpt, tmp_path / "out", "--to", kind) == 1
        assert sorted(os.listdir(tmp_path)) == before


def test_plain_trees_have_no_classes_of_their_own() -> None:
    tree = {"a": Generation(1, 2), "b": Content({"x": 1}), "c": [torch.Size([1])]}
    assert plain(tree) == {
        "a": (1, 2, 0),
        "b": {"state": {"x": 1}, "step": None, "metrics": {}, "notes": []},
        "c": [(1,)],
    }
    pickle.dumps(plain(tree))
