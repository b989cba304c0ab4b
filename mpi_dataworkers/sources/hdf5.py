"""Map-style dataset over one HDF5 file, for image arrays and for tables.

Called by the user's program; iterated by a loader or a data worker. It reads and never writes, holds no open handle in
a pickle or across a fork, and never imports torch.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetstream.base.access import others_can_write, unsafe_above
from hetstream.base.installed import install_command
from hetstream.mpi_dataworkers.errors import SourceError
from hetstream.mpi_dataworkers.sources import transforms_what_it_reads

try:
    import h5py
except ImportError as exc:
    raise ImportError(f"hetstream.mpi_dataworkers.sources.hdf5 needs h5py: {install_command('hdf5')}") from exc

# An h5py read call costs about as much as copying this many bytes, and so does each chunk more that a row is in: a
# smaller gap between two asked rows is read over.
READ_OVER_BYTES = 32 * 1024
# A value of variable length lies in a heap of its own: to read one over costs as much as copying this many bytes.
_HEAP_BYTES = 4 * 1024
# More than this is not read at once, however much of it was asked for.
_MOST_READ_BYTES = 64 * 1024 * 1024
_NAMES_IN_ERROR = 20
_MOST_LINKS = 16  # that HDF5 follows (H5Pset_nlinks)


class Hdf5Dataset:
    """Samples from named datasets of one HDF5 file; sample i is row i of each.

    The file is opened once per process, at the first read: the object can be pickled and forked at any time.

    Args:
        path: The HDF5 file.
        columns: What a sample holds. A string names one dataset, and a sample is its row. A sequence of names gives a
            tuple in that order, a mapping `{key: name}` a dict with those keys. A name is the path inside the file
            (`"images"`, `"train/images"`); a field of a compound dataset is one step deeper (`"table/age"`).
        transform: Called with each sample as above; what it returns is the sample. It may draw from `random`,
            `numpy.random` or torch: the loader seeds them for each sample. One that has `thread_safe = True` may be
            called by several threads at once and draws from `hetstream.sample_generator()`.

    A link to another file, data in another file and virtual datasets are followed in a file of this user (or of root)
    that nobody else can write to. Of another user's file nothing outside is read: it could name files that are private.

    Rows of an N-dimensional dataset are arrays of N-1 dimensions with the file's dtype; rows of a one-dimensional one
    are numpy scalars, or `str` for string datasets.

    Raises:
        SourceError: The file or a dataset is missing or unreadable, or leads out of a file that is not this user's;
            or the datasets differ in length.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        columns: str | Sequence[str] | Mapping[str, str],
        *,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        # Absolute, because a data worker may run in another directory.
        self.path = Path(path).absolute()
        self.columns = columns if isinstance(columns, str) else _plain(columns)
        self.transform = transform
        self._names = _names(self.columns)
        self._file: h5py.File | None = None
        self._readers: dict[str, _Column] = {}
        self._pid = 0
        if not self._names:
            raise SourceError.of(self.path, "columns is empty; name at least one dataset")
        with _open(self.path) as file:
            lengths = {name: len(_Column(file, self.path, name)) for name in self._names}
        self._length = next(iter(lengths.values()))
        if len(set(lengths.values())) > 1:
            listing = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise SourceError.of(self.path, f"datasets of one sample must have one length, these differ ({listing})")

    def __len__(self) -> int:
        return self._length

    def __init_subclass__(cls, **keywords: Any) -> None:
        """A subclass with a `__getitem__` of its own is read by it, though torch asks for `__getitems__` first."""
        super().__init_subclass__(**keywords)
        if "__getitem__" in vars(cls) and "__getitems__" not in vars(cls):
            cls.__getitems__ = _one_by_one  # type: ignore[method-assign,assignment]

    def __getitem__(self, index: int) -> Any:
        return Hdf5Dataset.__getitems__(self, [index])[0]

    @transforms_what_it_reads
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Samples at `indices`, in that order, repeats allowed; rows that lie together in the file are read together.

        Raises:
            IndexError, SourceError: As `read_samples`; and whatever `transform` raises.
        """
        samples = self.read_samples(indices)
        return samples if self.transform is None else [self.transform(sample) for sample in samples]

    def read_samples(self, indices: Sequence[int]) -> list[Any]:
        """The same before `transform`, for a caller that seeds each sample and transforms it itself.

        Raises:
            IndexError: An index is outside `-len(self) .. len(self) - 1`.
            SourceError: The file cannot be read, or has another length than when this object was made.
        """
        wanted = [*map(operator.index, indices)]
        rows = sorted(set(wanted))
        if rows and not (rows[0] >= 0 and rows[-1] < self._length):
            wanted = [self._checked(index) for index in wanted]
            rows = sorted(set(wanted))
        readers = self._open_columns()
        found = {name: readers[name].read(rows) for name in self._names}
        in_order = {name: [values[row] for row in wanted] for name, values in found.items()}
        if len(rows) < len(wanted):  # a repeated row gets memory of its own: a transform may work in place
            seen: set[int] = set()
            for place, row in enumerate(wanted):
                if row in seen:
                    for values in in_order.values():
                        values[place] = _copy(values[place])
                seen.add(row)
        if isinstance(self.columns, str):
            return in_order[self.columns]
        if isinstance(self.columns, dict):
            parts = zip(*(in_order[name] for name in self.columns.values()), strict=True)
            return [dict(zip(self.columns, sample, strict=True)) for sample in parts]
        return [*zip(*(in_order[name] for name in self.columns), strict=True)]

    @property
    def thread_safe(self) -> bool:
        """Whether several threads may transform a batch; one reads it, because HDF5 has a lock for all threads."""
        return getattr(self.transform, "thread_safe", False) is True

    def close(self) -> None:
        """Close this process's handle; the next read opens it again."""
        self._readers = {}
        if self._file is not None:
            self._file.close()
            self._file = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None, "_readers": {}, "_pid": 0}

    def __repr__(self) -> str:
        return f"Hdf5Dataset({str(self.path)!r}, {self.columns!r}, length={self._length})"

    def _checked(self, index: int) -> int:
        row = index
        if not -self._length <= row < self._length:
            raise IndexError(f"index {row} is outside 0..{self._length - 1}: {self.path} holds {self._length} samples")
        return row % self._length

    def _open_columns(self) -> dict[str, _Column]:
        if self._pid != os.getpid():
            # A handle that came through fork shares its file position with the parent: close this copy, open anew.
            self.close()
            self._pid = os.getpid()
        if self._file is None:
            file = _open(self.path)
            readers = {name: _Column(file, self.path, name) for name in self._names}
            for name, reader in readers.items():
                if len(reader) != self._length:
                    file.close()
                    raise SourceError.of(
                        self.path,
                        f"dataset {name} has {len(reader)} rows and had {self._length} when this "
                        "Hdf5Dataset was made; write a new file instead of changing one that is being read",
                    )
            self._file, self._readers = file, readers
        return self._readers


class _Column:
    """One dataset, or one field of a compound dataset, of an open file."""

    def __init__(self, file: h5py.File, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        dataset, fields = _find(file, path, name)
        if dataset.shape is None or dataset.ndim == 0:
            raise SourceError.of(path, f"dataset {name} holds a single value; a column needs one row per sample")
        dtype = dataset.dtype
        for field in fields:
            dtype = dtype.base[field]
        if dtype.base.names:
            deeper = ", ".join(f"{name}/{known}" for known in _field_names(dtype))
            raise SourceError.of(path, f"dataset {name} is compound; name its fields as columns: {deeper}")
        self._length = int(dataset.shape[0])
        self._inner = fields[1:]
        self._runs = _RunRule.of(dataset)
        self._is_back = False
        string = h5py.check_string_dtype(dtype.base)
        self._encoding: tuple[str, str] | None = None
        if fields:
            self._view = dataset.fields(fields[0])
            self._encoding = None if string is None else _encoding_of(string)
        else:
            self._view = dataset if string is None else dataset.asstr(*_encoding_of(string))

    def __len__(self) -> int:
        return self._length

    def read(self, rows: Sequence[int]) -> dict[int, Any]:
        """Values by row; `rows` ascend without repeats."""
        values: dict[int, Any] = {}
        view, first, last = self._view, -1, -1
        ends = self._runs.ends(rows)
        pieces = [*zip([0, *ends], ends)]  # noqa: B905, the last end begins nothing
        if self._is_back:  # as a lift goes: the chunks that were read last are in HDF5's cache, so they come first
            pieces.reverse()
        self._is_back = not self._is_back
        try:
            for start, end in pieces:
                first = last = rows[start]
                if end - start == 1:  # as a program would read it itself: h5py is fastest so
                    values[first] = view[first]
                else:
                    last = rows[end - 1]
                    block = view[first : last + 1]
                    for row in rows[start:end]:
                        values[row] = block[row - first]
            for field in self._inner:
                values = {row: value[field] for row, value in values.items()}
            if self._encoding is not None:  # strings that are fields come as bytes
                values = {row: _text(value, *self._encoding) for row, value in values.items()}
        except (OSError, UnicodeDecodeError) as exc:
            raise SourceError.of(
                self._path,
                f"cannot read rows {first}..{last} of dataset {self._name}: {exc}. "
                f"Check the file: h5dump -H {self._path}",
            ) from exc
        return values


@dataclass(frozen=True)
class _RunRule:
    """Which asked rows are read by one call, so that no chunk is read that has none of them, and none is read twice.

    Attributes:
        row_bytes: what reading over a row costs.
        block_rows: rows of a chunk; 0 where there are none.
        in_block: rows of a gap that is read over where both sides are in the same chunks.
        in_neighbours: the same where they are in the same or neighbouring chunks, or there are none.
    """

    row_bytes: int
    block_rows: int
    in_block: int
    in_neighbours: int

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> _RunRule:
        dtype, shape, chunks = dataset.dtype, dataset.shape, dataset.chunks
        row_bytes = int(dtype.itemsize * np.prod(shape[1:], dtype=np.int64))
        if dtype.hasobject:
            row_bytes += _HEAP_BYTES * int(np.prod(shape[1:], dtype=np.int64))
        row_bytes = max(1, row_bytes)
        if dataset.is_virtual:  # its parts may be of any layout
            return cls(row_bytes, 0, 0, 0)
        over = READ_OVER_BYTES // row_bytes
        if chunks is None:
            return cls(row_bytes, 0, over, over)
        chunks_per_row = math.prod(-(-size // chunk) for size, chunk in zip(shape[1:], chunks[1:], strict=True))
        # A compressed chunk is inflated as a whole by each call that reads of it, unless the last one has left it in
        # the cache; one that is not compressed is read as a whole if it fits there.
        is_whole = dataset.id.get_create_plist().get_nfilters() > 0
        return cls(row_bytes, chunks[0], chunks[0] if is_whole else over * chunks_per_row, over)

    def ends(self, rows: Sequence[int]) -> list[int]:
        """Where ascending `rows` are cut into pieces, each of which is one read: the index behind each piece."""
        if len(rows) < 2:
            return [len(rows)] * len(rows)
        at = np.asarray(rows)
        gaps = np.diff(at) - 1
        most_gaps: Any = self.in_neighbours
        if self.block_rows:
            blocks = np.diff(at // self.block_rows)
            most_gaps = np.where(blocks == 0, self.in_block, np.where(blocks == 1, self.in_neighbours, 0))
        # Pieces that are too large are cut once more, at multiples of the most that is read.
        is_cut = (gaps > most_gaps) | (np.diff(at // max(1, _MOST_READ_BYTES // self.row_bytes)) > 0)
        return [*(np.flatnonzero(is_cut) + 1).tolist(), len(rows)]


def _text(value: Any, encoding: str, errors: str) -> Any:
    if isinstance(value, bytes):
        return value.decode(encoding, errors)
    if isinstance(value, np.ndarray):
        return np.array([_text(item, encoding, errors) for item in value.ravel().tolist()], dtype=object).reshape(
            value.shape
        )
    return value


def _encoding_of(string: Any) -> tuple[str, str]:
    """How strings are decoded: encoding, and what becomes of bytes that are none of it.

    h5py declares ASCII for each numpy array of bytes, whatever is in it: UTF-8, or no text at all. Such bytes come as
    in `os.fsdecode`, and `text.encode("utf-8", "surrogateescape")` has them back.
    """
    return ("utf-8", "surrogateescape") if string.encoding == "ascii" else ("utf-8", "strict")


def _open(path: Path) -> h5py.File:
    if not path.is_file():
        raise SourceError.of(
            path, "no such file; data workers need the same path as the trainer (a shared file system)"
        )
    try:
        return h5py.File(path, "r")
    except OSError as exc:
        reason = str(exc)
        if "lock" in reason or "open for write" in reason:  # HDF5 has the same kind of error for all
            reason += (
                ". Another program writes it now (a file that grows, by SWMR, is not followed), or one died while it "
                "did: wait until it is closed, or mend it with `h5clear -s FILE`. Where the file system has no locks, "
                "HDF5_USE_FILE_LOCKING=FALSE opens it without"
            )
        raise SourceError.of(path, f"cannot be opened as HDF5: {reason}") from exc


def _find(file: h5py.File, path: Path, name: str) -> tuple[h5py.Dataset, tuple[str, ...]]:
    """The dataset that a name leads to, and the fields within it."""
    found = _reached(file, name)
    table, fields = found, ""
    above = name
    while table is None and "/" in above.strip("/"):
        above, _, field = above.rpartition("/")
        fields = f"{field}/{fields}" if fields else field
        table = _reached(file, above)
    if isinstance(table, h5py.Dataset):
        path_in_table = _fields_to(table.dtype, fields)
        if path_in_table is not None:
            _check_layout(table, above, checked={})
            return table, path_in_table
    names = _dataset_names(file)
    shown = ", ".join(names[:_NAMES_IN_ERROR]) + (
        f" and {len(names) - _NAMES_IN_ERROR} more" * (len(names) > _NAMES_IN_ERROR)
    )
    kind = "is a group" if isinstance(found, h5py.Group) else "does not exist"
    raise SourceError.of(path, f"dataset {name!r} {kind}; the file has: {shown or 'no dataset'}")


def _fields_to(dtype: np.dtype[Any], text: str) -> tuple[str, ...] | None:
    """Fields of a compound type, one in the other; None if there are no such ones. A field's name may have a `/`."""
    if not text:
        return ()
    for field in dtype.base.names or ():
        if text == field:
            return (field,)
        if text.startswith(f"{field}/"):
            deeper = _fields_to(dtype.base[field], text.removeprefix(f"{field}/"))
            if deeper is not None:
                return (field, *deeper)
    return None


def _field_names(dtype: np.dtype[Any]) -> list[str]:
    """Names of all fields that hold values."""
    names = []
    for field in dtype.base.names or ():
        deeper = _field_names(dtype.base[field])
        names += [f"{field}/{name}" for name in deeper] or [field]
    return names


def _reached(file: h5py.File, name: str, *, by_library: bool = False) -> Any:
    """What a name leads to, one link after the other; None if there is no such thing.

    HDF5 itself would follow every link, also into files of whoever asks. So each is looked at, and what was opened is
    asked which file it is in.

    Args:
        file: where the name begins.
        name: in it, with `/` between groups.
        by_library: HDF5 will go this way again by itself, when it reads: only through files that nobody can change.

    Raises:
        SourceError: it leads out of a file that is not this user's.
    """
    found: Any = file
    parts, num_links = [*reversed(name.split("/"))], 0
    while parts:
        part = parts.pop()
        if part in ("", "."):
            continue
        link = _link(found, part) if isinstance(found, h5py.Group) else None
        if link is None:
            return None
        here: h5py.File = found.file
        if isinstance(link, h5py.HardLink):
            found = found[part]
            if h5py.h5o.get_info(found.id).fileno != h5py.h5o.get_info(here.id).fileno:
                raise _leads_out(here, name, "in another file by now")
            continue
        num_links += 1
        if num_links > _MOST_LINKS:
            raise SourceError.of(file.filename, f"dataset {name!r}: more than {_MOST_LINKS} links, one after the other")
        if isinstance(link, h5py.ExternalLink):
            found = _next_file(here, name, link.filename, by_library)
        elif isinstance(link, h5py.SoftLink):
            found = here if link.path.startswith("/") else found
        else:
            raise _leads_out(here, name, f"a link of a kind that is not known ({link!r})")
        parts += reversed(link.path.split("/"))
    return found


def _link(group: h5py.Group, part: str) -> Any:
    try:
        return group.get(part, getlink=True)
    except TypeError as error:  # of h5py, for links that an application has defined
        return error


def _next_file(file: h5py.File, name: str, target: str, by_library: bool) -> h5py.File:
    """Another file that this one leads to, beside it or by an absolute path.

    Raises:
        SourceError: this one is not the user's; or the other one is not, and HDF5 will open it by its path.
    """
    path = Path(file.filename).parent / target
    if not _is_own(file):
        raise _leads_out(file, name, str(path))
    opened = _open(path)
    if by_library and not _is_own(opened):
        raise _leads_out(opened, name, "a part of a virtual dataset")
    if by_library and (reason := unsafe_above(path)):
        raise SourceError.of(path, f"dataset {name!r}: this file is a part of a virtual dataset, and {reason}")
    return opened


def _check_layout(
    dataset: h5py.Dataset, name: str, checked: dict[tuple[str, str, str], tuple[int, ...]], depth: int = 0
) -> None:
    """Refuse data outside of a file that is not this user's, or that are not there: HDF5 gives fill values for these.

    Args:
        dataset: as it was found.
        name: that was asked for.
        checked: shapes of parts of virtual datasets that need no other look: many mean one dataset, and so do theirs in
            turn.
        depth: of virtual datasets above it.

    Raises:
        SourceError: some are.
    """
    file: h5py.File = dataset.file
    if dataset.external and not _is_own(file):
        raise _leads_out(file, name, f"its data are in {dataset.external[0][0]!r}")
    for place, offset, size in dataset.external or ():
        _check_external(file, name, place, offset, size)
    if not dataset.is_virtual:
        return
    if not _is_own(file):
        raise _leads_out(file, name, "it is a virtual dataset, whose parts may be anywhere")
    for source in dataset.virtual_sources():
        part_of = file.filename, source.file_name, source.dset_name
        if part_of not in checked:
            if depth > _MOST_LINKS or "%" in source.file_name + source.dset_name:
                raise _leads_out(file, name, f"a virtual dataset of parts that a pattern names ({source.file_name!r})")
            other = file if source.file_name == "." else _next_file(file, name, source.file_name, by_library=True)
            part = _reached(other, source.dset_name, by_library=True)
            if not isinstance(part, h5py.Dataset):
                raise _is_missing(file, name, f"{other.filename} has no dataset {source.dset_name!r}")
            _check_layout(part, name, checked, depth + 1)
            checked[part_of] = part.shape
        if _reaches_beyond(source, checked[part_of]):
            what = f"dataset {source.dset_name!r} of {source.file_name!r} has only {checked[part_of]}"
            raise _is_missing(file, name, what)


def _reaches_beyond(source: Any, shape: tuple[int, ...]) -> bool:
    """Whether a virtual dataset takes more of a part than that has."""
    try:
        if source.src_space.get_select_type() == h5py.h5s.SEL_ALL:  # as a file has it: without the part's shape
            return bool(source.vspace.get_select_npoints() > math.prod(shape))
        _, last = source.src_space.get_select_bounds()
    except (RuntimeError, ValueError):  # of h5py, for a selection without limits or without elements
        return False
    return len(last) != len(shape) or any(index >= size for index, size in zip(last, shape, strict=True))


def _check_external(file: h5py.File, name: str, place: str, offset: int, size: int) -> None:
    """Refuse raw data of another file that end too early. Where HDF5 does not find the file, it says so itself."""
    path = Path(os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", str(Path(file.filename).parent)), place)
    if path.is_file() and size < 1 << 63 and path.stat().st_size < offset + size:
        raise _is_missing(file, name, f"{path} has {path.stat().st_size} bytes, and {offset + size} were written")


def _is_missing(file: h5py.File, name: str, what: str) -> SourceError:
    return SourceError.of(
        file.filename,
        f"dataset {name!r} has data in another file that are not there: {what}. HDF5 would give fill values",
    )


def _is_own(file: h5py.File) -> bool:
    """Whether nobody but this user and root has written an open file, or can: what it leads to, they have chosen."""
    descriptor = file.id.get_vfd_handle()
    status = os.fstat(descriptor)
    return status.st_uid in (0, os.geteuid()) and not others_can_write(status, descriptor)


def _leads_out(file: h5py.File, name: str, where: str) -> SourceError:
    return SourceError.of(
        file.filename,
        f"dataset {name!r} leads out of this file ({where}), and the file is not yours, or others can write to it: it "
        "could have you read what is private. Look at it (h5dump -pH), and make one file of it (h5copy, h5repack), or "
        "copy it to make it your own",
    )


def _dataset_names(file: h5py.File) -> list[str]:
    names: list[str] = []

    def visit(name: str, found: Any) -> None:
        if isinstance(found, h5py.Dataset):
            names.extend([f"{name}/{field}" for field in _field_names(found.dtype)] or [name])

    file.visititems(visit)
    return sorted(names)


def _one_by_one(dataset: Hdf5Dataset, indices: Sequence[int]) -> list[Any]:
    return [dataset[index] for index in indices]


def _plain(columns: Sequence[str] | Mapping[str, str]) -> tuple[str, ...] | dict[str, str]:
    return dict(columns) if isinstance(columns, Mapping) else tuple(columns)


def _names(columns: str | tuple[str, ...] | dict[str, str]) -> tuple[str, ...]:
    if isinstance(columns, str):
        return (columns,)
    return tuple(dict.fromkeys(columns.values() if isinstance(columns, dict) else columns))


def _copy(value: Any) -> Any:
    return np.array(value) if isinstance(value, np.ndarray) else value
