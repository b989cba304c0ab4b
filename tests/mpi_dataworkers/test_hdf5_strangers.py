"""HDF5 files that lead out of themselves: followed in one's own, refused in a stranger's. As root: two users."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from hetstream.mpi_dataworkers.errors import SourceError
from hetstream.mpi_dataworkers.sources.hdf5 import Hdf5Dataset
from tests.base.users import STRANGER, VICTIM, needs_root, run_as

ROWS = 4


def external_link(file: h5py.File, secret: Path) -> str:
    file["x"] = h5py.ExternalLink(secret, "/secret")
    return "x"


def behind_a_soft_link(file: h5py.File, secret: Path) -> str:
    file["outer/link"] = h5py.ExternalLink(secret, "/")
    file["inner"] = h5py.SoftLink("/outer/link")
    file["group/x"] = h5py.SoftLink("../inner/secret")
    file["group/y"] = h5py.SoftLink("/inner/secret")
    return "group/y"


def external_storage(file: h5py.File, secret: Path) -> str:
    file.create_dataset("x", (ROWS,), "i8", external=[(str(secret), 0, ROWS * 8)])
    return "x"


def virtual(file: h5py.File, secret: Path) -> str:
    layout = h5py.VirtualLayout((ROWS,), "i8")
    layout[:] = h5py.VirtualSource(str(secret), "secret", (ROWS,))
    file.create_virtual_dataset("x", layout)
    return "x"


def virtual_of_a_link(file: h5py.File, secret: Path) -> str:
    file["link"] = h5py.ExternalLink(secret, "/secret")
    layout = h5py.VirtualLayout((ROWS,), "i8")
    layout[:] = h5py.VirtualSource(".", "link", (ROWS,))
    file.create_virtual_dataset("x", layout)
    return "x"


WAYS_OUT = (external_link, behind_a_soft_link, external_storage, virtual, virtual_of_a_link)


def write_secret(path: Path) -> None:
    """A file of numbers that nobody else may read."""
    with h5py.File(path, "w") as file:
        file["secret"] = np.arange(ROWS, dtype="i8") + 77
    path.chmod(0o600)


def write_leading_out(path: Path, secret: Path, way: Callable[[h5py.File, Path], str]) -> str:
    """A file that all may read, and the name in it that leads to the secret."""
    with h5py.File(path, "w") as file:
        file["own"] = np.arange(ROWS)
        name = way(file, secret)
    path.chmod(0o644)
    return name


@pytest.mark.shows("a state that JSON and pickle would read differently is refused; a stranger's HDF5 leads nowhere")
@needs_root
@pytest.mark.parametrize("way", WAYS_OUT)
def test_a_strangers_file_leads_nowhere(common_place: Path, way: Callable[[h5py.File, Path], str]) -> None:
    secret, file = common_place / "secret.h5", common_place / "file.h5"
    names = common_place / "names"
    run_as(VICTIM, lambda: write_secret(secret))
    run_as(STRANGER, lambda: names.write_text(write_leading_out(file, secret, way)) and None)

    def read() -> None:
        assert [int(value) for value in Hdf5Dataset(file, "own")] == [0, 1, 2, 3], "what is in the file is read"
        with pytest.raises(SourceError, match="leads out of this file"):
            Hdf5Dataset(file, names.read_text())

    run_as(VICTIM, read)


@needs_root
@pytest.mark.parametrize("way", WAYS_OUT)
@pytest.mark.parametrize("mode", [0o644, 0o666], ids=["one's own", "one's own, open to all"])
def test_ones_own_file_leads_where_one_wants(
    common_place: Path, way: Callable[[h5py.File, Path], str], mode: int
) -> None:
    secret, file = common_place / "secret.h5", common_place / "file.h5"

    def read() -> None:
        write_secret(secret)
        name = write_leading_out(file, secret, way)
        file.chmod(mode)
        if mode == 0o666:
            with pytest.raises(SourceError, match="or others can write to it"):
                Hdf5Dataset(file, name)
            return
        with h5py.File(file) as opened:
            expected = opened[name][:].tolist()
        assert [int(value) for value in Hdf5Dataset(file, name)] == expected

    run_as(VICTIM, read)


@needs_root
@pytest.mark.parametrize("way", WAYS_OUT)
def test_ones_own_file_leads_into_a_strangers_and_no_further(
    common_place: Path, way: Callable[[h5py.File, Path], str]
) -> None:
    secret, theirs, index = common_place / "secret.h5", common_place / "theirs.h5", common_place / "index.h5"
    names = common_place / "names"
    run_as(VICTIM, lambda: write_secret(secret))
    run_as(STRANGER, lambda: names.write_text(write_leading_out(theirs, secret, way)) and None)

    def read() -> None:
        with h5py.File(index, "w") as file:
            file["shard"] = h5py.ExternalLink("theirs.h5", "/own")
            file["further"] = h5py.ExternalLink("theirs.h5", f"/{names.read_text()}")
            layout = h5py.VirtualLayout((ROWS,), "i8")
            layout[:] = h5py.VirtualSource(str(theirs), "own", (ROWS,))
            file.create_virtual_dataset("virtual", layout)
        assert [int(value) for value in Hdf5Dataset(index, "shard")] == [0, 1, 2, 3]
        for name in ("further", "virtual"):  # what HDF5 itself opens later, the stranger could change until then
            with pytest.raises(SourceError, match="leads out of this file"):
                Hdf5Dataset(index, name)

    run_as(VICTIM, read)


def test_links_in_a_circle_are_an_error(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "file.h5", "w") as file:
        file["a"], file["b"] = h5py.SoftLink("/b"), h5py.SoftLink("/a")
        file["group/x"] = np.arange(ROWS)
        file["c"] = h5py.SoftLink("group")
    with pytest.raises(SourceError, match="more than 16 links"):
        Hdf5Dataset(tmp_path / "file.h5", "a")
    assert len(Hdf5Dataset(tmp_path / "file.h5", "c/x")) == ROWS


@pytest.mark.timeout(60)
def test_what_many_parts_lead_to_is_looked_at_once(tmp_path: Path) -> None:
    """Each of 16 virtual datasets has four parts, which all are the next one: 4 ** 16 ways to the last."""
    with h5py.File(tmp_path / "file.h5", "w") as file:
        file["16"] = np.arange(ROWS)
        for number in range(16):
            layout = h5py.VirtualLayout((ROWS,), "i8")
            for row in range(ROWS):
                layout[row] = h5py.VirtualSource(".", str(number + 1), (ROWS,))[0]
            file.create_virtual_dataset(str(number), layout)
        layout[0] = h5py.VirtualSource(".", "circle", (ROWS,))[0]
        file.create_virtual_dataset("circle", layout)
    assert len(Hdf5Dataset(tmp_path / "file.h5", "0")) == ROWS
    with pytest.raises(SourceError, match="a virtual dataset of parts"):
        Hdf5Dataset(tmp_path / "file.h5", "circle")
