"""States whose values are more than their tensors: what fits into no file's header is payload, or refused in time."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import torch

from hetstream import CheckpointReader
from hetstream.checkpoint.disk import safetensors
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.errors import UnsupportedState
from hetstream.checkpoint.record import tree
from hetstream.checkpoint.record.layout import Entry, TensorSpec, lay_out
from hetstream.slurm_plugin.cli import main


@pytest.mark.slow
def test_a_samplers_millions_of_indices_come_back_from_disk(make: Any, tmp_path: Path) -> None:
    first, count = 1 << 60, 6_000_000  # 120 MB of digits
    weights = {f"sample {number}": number / 3 for number in range(1_000_000)}
    state = {"sampler": {"seen": [*range(first, first + count)], "weights": weights}, "w": torch.ones(3)}
    with make() as checkpointer:
        assert checkpointer.save(1, state)
        assert checkpointer.wait(120)
        assert checkpointer.stats().num_bytes > 8 * count
    directory = CheckpointDirectory(tmp_path / "ckpt")
    assert directory.verify(directory.scan()[0].generation) == []
    fresh: dict[str, Any] = {"sampler": {}, "w": torch.zeros(3)}
    with make() as checkpointer:
        assert checkpointer.restore(fresh) == 1
    assert fresh["sampler"]["weights"] == weights
    assert fresh["sampler"]["seen"] == state["sampler"]["seen"]
    assert fresh["w"].sum() == 3


def test_a_list_that_grows_is_saved_into_the_same_memory(make: Any, memory: Path) -> None:
    seen = [*range(100_000)]
    slots = set()
    with make() as checkpointer:
        for step in range(40):
            seen += range(100)
            checkpointer.save(step, {"seen": seen, "w": torch.ones(1000)})
            slots |= {file.stat().st_ino for file in memory.glob("*/slot-*")}
        assert checkpointer.load().state["seen"] == seen
    assert len(slots) <= 2 * 3


def test_containers_in_the_payload_are_converted(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "MAX_INLINE_VALUES", 10)
    seen = [*range(20)]
    state = {
        "containers": {
            "set": {*seen},
            "frozen": frozenset(seen),
            "tuple": tuple(seen),
            "mixed": (*seen, "a", None),
            "deque": deque([*seen, 0.5], 30),
            "ordered": OrderedDict((str(one), one) for one in seen),
            "by number": {one: str(one) for one in seen},
            "counter": Counter(seen),
            "default": defaultdict(list, {one: one for one in seen}),
            "big": [1 << 70, *seen],
        },
        "w": torch.ones(3),
    }
    with make() as checkpointer:
        checkpointer.save(1, state)
    assert main(["ckpt", "convert", str(tmp_path / "ckpt"), str(tmp_path / "all.pt"), "--to", "torch"]) == 0
    again = str(tmp_path / "again")
    assert main(["ckpt", "convert", str(tmp_path / "all.pt"), again, "--to", "flash", "--as-step", "1"]) == 0
    for directory in (tmp_path / "ckpt", tmp_path / "again"):
        loaded = CheckpointReader(directory).load().state["containers"]
        assert loaded["by number"] == state["containers"]["by number"]
        assert loaded["big"] == state["containers"]["big"]
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert loaded["containers"]["ordered"] == state["containers"]["ordered"]
    assert loaded["containers"]["set"] == {*seen}


def test_what_no_reader_takes_is_refused_before_anything_is_saved(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 100_000)
    state = {f"layer {number}": torch.ones(1) for number in range(2000)}
    with make() as checkpointer:
        checkpointer.save(1, {"w": torch.ones(1)})
        with pytest.raises(UnsupportedState, match=r"20\d\d tensors .* no reader of safetensors takes more"):
            checkpointer.save(2, state)
        assert checkpointer.save(3, {"w": torch.ones(1)})
    steps = [one.generation.step for one in CheckpointDirectory(tmp_path / "ckpt").scan()]
    assert steps[0] == 3
    assert 2 not in steps


def test_the_longest_header_that_is_written_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 16384)
    entries = lay_out([TensorSpec("w", "U8", (0,))]).entries
    length = 12_000
    while len(data := _header(entries, length)) > 0:
        assert safetensors.read_header(memoryview(data), "x")[1] == {"text": "x" * length}
        length += 1
    assert length > 12_100


def _header(entries: tuple[Entry, ...], length: int) -> bytes:
    """The header with a text of this length; nothing where it is refused."""
    try:
        [data] = safetensors.plan_file(entries, {"text": "x" * length}).pieces
    except UnsupportedState:
        return b""
    assert isinstance(data, bytes)
    return data
