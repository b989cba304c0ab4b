"""A prefix cache: the deterministic front of each sample (read, decode, resize) is made once and kept; what augments it
stays fresh.

A front is the loader of a torchvision folder dataset with the first of its transforms, as far as they are known to draw
nothing (`through`), or a function that the program calls deterministic (`generators.deterministic`). Its value is kept
under its code, parameters and libraries (the group), its arguments, and the identity of the files among them.

Nobody is believed: a front that draws random numbers is seen by the generators' states, one that leaves something
behind by what its objects and globals hold, and the first hits of each process, and some later ones, are made again and
compared.

Jobs that begin together make no sample twice: who makes one holds its claim, and who else would make it waits, not for
long.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import random
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.utils.data

from hetstream.base.text import shortened
from hetstream.mpi_dataworkers.generators import deterministic, states_of_sample, uncached
from hetstream.mpi_dataworkers.ops.cache_store import CacheStore, Claim, Damaged
from hetstream.mpi_dataworkers.ops.cached_values import NotKept, packed, unpacked
from hetstream.mpi_dataworkers.ops.changes import TooLarge, change_between, digest_of_state, state_of
from hetstream.mpi_dataworkers.ops.code_globals import Reached, is_own
from hetstream.mpi_dataworkers.ops.pickling import digest_of, pickle_apart, unpickle
from hetstream.mpi_dataworkers.ops.program import module_digests
from hetstream.mpi_dataworkers.process.config import parse_cache
from hetstream.mpi_dataworkers.process.handlers import others
from hetstream.mpi_dataworkers.wire.messages import CacheReport, Program

_log = logging.getLogger(__name__)

# Transforms of torchvision, of version 1 and 2, that draw no random numbers.
# fmt: off
_DRAW_NOTHING = frozenset((
    "Resize", "CenterCrop", "ToTensor", "PILToTensor", "ToPILImage", "ToImage", "ToPureTensor", "ToDtype",
    "ConvertImageDtype", "Normalize", "Grayscale", "RGB", "Pad", "Identity",
))
# fmt: on
_MODULES = ("torchvision.transforms.transforms", "torchvision.transforms.v2.")
_LOADERS = ("default_loader", "pil_loader")
# Settings of libraries that decide what a decoder gives, with what they are where the module is not loaded yet.
_SETTINGS = (
    ("PIL.ImageFile", "LOAD_TRUNCATED_IMAGES", False),
    ("PIL.Image", "MAX_IMAGE_PIXELS", (1 << 30) // 4 // 3),
    ("torchvision", "_image_backend", "PIL"),
)
# Globals of a front that say nothing about its values, or whose draws are seen.
_NO_MATTER = (logging.Logger, logging.Handler, random.Random, np.random.Generator, np.random.RandomState)
# Arguments that are told apart by their text.
_BY_TEXT = frozenset((type(None), bool, int, float, bytes))
# Of each process: its first hits are made again, and of the later ones one of so many, drawn. So it is seen whether
# making one changes what is held; the first time of all does that for a good reason, as opening a file.
_FIRST_PROVED, _PROVED_OF = 3, 256
# What reading back takes; a front that takes less is not kept.
_READ_S, _READ_BYTES_PER_S = 60e-6, 2e9
# Objects among the arguments, of which the digests are known.
_MOST_OBJECTS = 1000
# A file as young as this may change within one tick of its file system's clock, which may count whole seconds.
_YOUNG_S, _YOUNG_COARSE_S = 0.05, 2.1
_TRY_AGAIN_S = 60.0
# For another process that makes the same: so long, or what making took here before as many times, if that is longer.
_WAIT_S, _WAIT_TIMES = 1.0, 10


class PrefixCache:
    """The fronts of one pipeline's samples, in one process.

    Args:
        text: where they are kept, for `parse_cache`.
        dataset: of the pipeline.
        own_generators: what the pipeline's objects hold, as `OwnGenerators`; None where they hold none.

    Attributes:
        dataset: the same as it is read through the cache.
    """

    def __init__(self, text: str, dataset: Any, own_generators: Any) -> None:
        self._text, self._given, self._own_generators = text, dataset, own_generators
        self.dataset = through(dataset, self)
        self._begin()

    def __reduce__(self) -> Any:
        return PrefixCache, (self._text, self._given, self._own_generators)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._draws = random.Random()
        self._store: CacheStore | None = None
        self._is_open = False
        self._groups: dict[int, tuple[Any, str]] = {}  # of fronts by id, with them; "" of one that is not kept
        self._states_of: dict[int, tuple[Any, bytes]] = {}  # of objects whose methods are fronts
        self._num_made: dict[int, int] = {}  # of fronts by id
        self._num_proved = 0
        self._longest_s = 0.0
        self._full_until_s = self._alone_until_s = 0.0
        self._was_called = False
        self._said: dict[str, bool] = {}  # lines, and whether the loader was told
        self._counts = CacheReport(0, 0, 0, 0.0)

    def value(self, front: Any, name: str, make: Callable[..., Any], args: Sequence[Any], keywords: Any) -> Any:
        """What a front makes, from the store or made now.

        Args:
            front: what decides, beside the arguments, about its values; the same object each time.
            name: of it, for messages.
            make: makes it.
            args, keywords: what that is called with.
        """
        if self._pid != os.getpid():
            self._begin()
        self._was_called = True
        call = _Call(front, name, make, args, keywords)
        with self._lock:
            group = self._group_of(front, name)
        if not group or self._store is None:
            return call()
        try:
            arguments, files = self._key_of(call)
        except (NotKept, TooLarge) as error:
            self._refuse(call, f"its arguments make no key: {error}")
            return call()
        if any(map(_may_change_unseen, files)):
            return call()
        if not any(files):
            self._say(f"{name} is given no path of a file: changes of what it reads are not seen")
        key = hashlib.blake2b(arguments + repr(files).encode(), digest_size=16).hexdigest()
        entry = _Entry(self._store, group, key, arguments, files)
        began_s = time.thread_time()
        found = self._find(entry)
        if found is not None:
            return self._hit(call, entry, found, began_s)
        claim, was_held = self._claim(entry)
        try:
            if was_held:
                found = self._find(entry)
                if found is not None:
                    return self._hit(call, entry, found, began_s)
                # Its maker was stopped, or keeps nothing: who waited each time would make all at its pace.
                self._alone_until_s = time.monotonic() + _TRY_AGAIN_S
            return self._miss(call, entry)
        finally:
            if claim is not None:
                claim.give_back()

    def _claim(self, entry: _Entry) -> tuple[Claim | None, bool]:
        if time.monotonic() < max(self._alone_until_s, self._full_until_s):
            return None, False
        timeout_s = min(max(_WAIT_S, _WAIT_TIMES * self._longest_s), _TRY_AGAIN_S)
        try:
            return entry.store.wait_for_maker(entry.group, entry.key, timeout_s)
        except OSError as error:
            self._say(f"nobody is waited for: {error.strerror or error}")
            return None, False

    def _hit(self, call: _Call, entry: _Entry, found: tuple[Any, Any, float], began_s: float) -> Any:
        value, data, cost_s = found
        used_s = time.thread_time() - began_s
        if self._num_proved < _FIRST_PROVED or self._draws.randrange(_PROVED_OF) == 0:
            self._num_proved += 1
            made, why = self._compared(data, call)
            if why:
                self._end(call, entry, why)
                return made
        self._count(1, 0, data.nbytes, cost_s - used_s)
        return value

    def _end(self, call: _Call, entry: _Entry, why: str) -> None:
        """Keep nothing of a front any more, in this process and others."""
        line = f"{call.name}{shortened(repr(tuple(call.args)), 200)} {why}: its values are not kept any more"
        self._groups[id(call.front)] = call.front, ""
        self._say(line)
        try:
            entry.store.end(entry.group, line)
        except OSError as error:  # other processes find out by themselves
            self._say(f"that {call.name} is not to be kept cannot be written down: {error.strerror or error}")

    def _compared(self, data: Any, call: _Call) -> tuple[Any, str]:
        """What is made now, and how it differs from what was kept."""
        made, _, why = self._made(call)
        if why:
            return made, why
        try:
            again = _joined(packed(made))
        except NotKept as error:
            return made, f"gave another value when it was made again ({error})"
        return made, "" if again == data.tobytes() else "gave another value when it was made again"

    def _made(self, call: _Call) -> tuple[Any, float, str]:
        """A value, the CPU time that it took, and what else making it did."""
        number = self._num_made[id(call.front)] = self._num_made.get(id(call.front), -1) + 1
        looks = 1 <= number <= _FIRST_PROVED or self._draws.randrange(_PROVED_OF) == 0
        held = state_of(call.roots) if looks else {}
        before, began_s = self._states(), time.thread_time()
        with uncached():
            value = call()
        cost_s = time.thread_time() - began_s
        self._longest_s = max(self._longest_s, cost_s)
        if self._states() != before:
            return value, cost_s, "draws random numbers"
        change = change_between(held, state_of(call.roots)) if looks else ""
        return value, cost_s, f"leaves something behind: {change}" if change else ""

    def _find(self, entry: _Entry) -> tuple[Any, Any, float] | None:
        """What is kept: the value, its bytes and the CPU time that it took; None where nothing is."""
        try:
            found = entry.store.get(entry.group, entry.key)
            return None if found is None else (unpacked(found[0]), *found)
        except Damaged as error:
            self._say(f"an entry is made again: {error}")
        except others() as error:
            self._say(f"an entry cannot be read and is made again: {error}")
        return None

    def _miss(self, call: _Call, entry: _Entry) -> Any:
        value, cost_s, why = self._made(call)
        num_bytes = 0
        try:
            arguments, files = self._key_of(call)
            if arguments != entry.arguments:
                why = "changes its arguments"
            if why:
                self._end(call, entry, why)
                return value
            parts = packed(value)
            size = sum(memoryview(part).nbytes for part in parts)
            is_worth_it = cost_s > _READ_S + size / _READ_BYTES_PER_S
            if is_worth_it and files == entry.files and time.monotonic() >= self._full_until_s:
                num_bytes = size if entry.store.put(entry.group, entry.key, parts, cost_s) else 0
        except NotKept as error:
            self._refuse(call, str(error))
        except OSError as error:
            self._full_until_s = time.monotonic() + _TRY_AGAIN_S
            self._say(f"nothing is written for {_TRY_AGAIN_S:.0f} s: {error.strerror or error}")
        self._count(0, 1, num_bytes, 0.0)
        return value

    # --- what a value is kept under --------------------------------------------------------------------------------

    def _group_of(self, front: Any, name: str) -> str:
        known = self._groups.get(id(front))
        if known is None:
            group = ""
            try:
                if not self._is_open:
                    self._is_open = True
                    self._store = CacheStore(parse_cache(self._text))
                if self._store is not None:
                    group = digest_of_front(front)
                    if why := self._store.why_ended(group):
                        self._say(why)
                        group = ""
            except OSError as error:
                self._say(f"cache={self._text} is not used: {error}")
            except others() as error:
                self._say(f"{name} is made anew each time: its code makes no key: {error}")
            known = self._groups[id(front)] = front, group
        return known[1]

    def _key_of(self, call: _Call) -> tuple[bytes, list[list[int]]]:
        """Of its arguments, and the files that they name as they are now."""
        files: list[list[int]] = []
        plain: list[Any] = [list(call.keywords)]
        is_text = True
        for value in (*call.args, *call.keywords.values()):
            if isinstance(value, str | os.PathLike):
                files.append(_identity(os.fspath(value)))
                plain.append([type(value).__name__, str(value)])
            elif _is_object(value):
                if id(value) not in self._states_of:
                    if len(self._states_of) >= _MOST_OBJECTS:  # each sample brings its own
                        self._states_of.clear()
                    self._states_of[id(value)] = value, digest_of_state(value)
                plain.append(self._states_of[id(value)][1])
            else:
                is_text = is_text and type(value) in _BY_TEXT
                plain.append(value)
        text = repr(plain).encode(errors="surrogatepass") if is_text else _joined(packed(plain))
        return text, files

    def _states(self) -> tuple[Any, ...]:
        numpy_state: Any = np.random.get_state()
        _, numbers, *place = numpy_state
        own = None if self._own_generators is None else self._own_generators.digests()
        torchs = torch.get_rng_state().numpy().tobytes()
        return random.getstate(), numbers.tobytes(), place, torchs, states_of_sample(), own

    # --- what is said and counted ----------------------------------------------------------------------------------

    def _refuse(self, call: _Call, why: str) -> None:
        self._groups[id(call.front)] = call.front, ""
        self._say(f"{call.name} is made anew each time: {why}")

    def _say(self, line: str) -> None:
        kind = line.partition(": ")[0]  # of one kind the first
        with self._lock:
            if not any(known.startswith(kind) for known in self._said):
                self._said[line] = False
                _log.info("cache: %s", line)

    def _count(self, hits: int, misses: int, num_bytes: int, saved_s: float) -> None:
        with self._lock:
            now = self._counts
            self._counts = CacheReport(
                now.hits + hits, now.misses + misses, now.num_bytes + num_bytes, now.saved_s + saved_s
            )

    def take_report(self) -> CacheReport | None:
        """What happened since the last call; None where nothing did."""
        if not self._was_called:
            self._was_called = True
            self._say(f"cache={self._text} has no effect: {_why_no_front(self._given)}")
        with self._lock:
            said = [line for line, is_told in self._said.items() if not is_told]
            self._said.update(dict.fromkeys(said, True))
            counts, self._counts = self._counts, CacheReport(0, 0, 0, 0.0)
        happened = said or counts.hits or counts.misses
        return msgspec.structs.replace(counts, said=said) if happened else None


class _Call(NamedTuple):
    """A call of a front, as of `PrefixCache.value`."""

    front: Any
    name: str
    make: Callable[..., Any]
    args: Sequence[Any]
    keywords: Mapping[str, Any]

    def __call__(self) -> Any:
        return self.make(*self.args, **self.keywords)

    @property
    def roots(self) -> dict[str, Any]:
        """What it may change without a word: what the program's functions in it name, and the objects it is given."""
        found = {part.name: part.function for part in _parts(self.front) if isinstance(part, deterministic)}
        given = (*self.args, *self.keywords.values()) if found else ()
        return found | {type(value).__name__: value for value in given if _is_object(value)}


class _Entry(NamedTuple):
    """Where a value is kept, and for which arguments and files."""

    store: CacheStore
    group: str
    key: str
    arguments: bytes
    files: list[list[int]]


def _parts(front: Any) -> tuple[Any, ...]:
    return front if isinstance(front, tuple) else (front,)


def _is_object(value: Any) -> bool:
    """Whether it is known by what its attributes hold; of an image these have not the pixels."""
    is_data = isinstance(value, torch.Tensor | np.ndarray | np.generic) or type(value).__module__.startswith("PIL.")
    return hasattr(value, "__dict__") and not is_data


def _joined(parts: Sequence[Any]) -> bytes:
    return b"".join(memoryview(part).tobytes() for part in parts)


def _identity(path: str | bytes) -> list[int]:
    """A file as it is now; of what is no file nothing."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return []
    if not stat.S_ISREG(status.st_mode):
        return []
    # The change time, too: a copy that keeps the time of its model has another one.
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _may_change_unseen(identity: list[int]) -> bool:
    """Whether a file may become another one and look the same, for it has changed just now."""
    if not identity:
        return False
    changed_ns = identity[2]
    tick_s = _YOUNG_S if changed_ns % 1_000_000_000 else _YOUNG_COARSE_S
    return abs(time.time() - changed_ns / 1e9) < tick_s


def digest_of_front(front: Any) -> str:
    """Of all that decides about a front's values beside its arguments: code, parameters, libraries and settings.

    Raises:
        TooLarge: it reads a global that is too large to look at each time.
        Exception: it cannot be pickled.
    """
    pickled = pickle_apart(front)
    # Through pickle once: what Python shares between objects is then alike in all processes.
    pickled = pickle_apart(unpickle(pickled.blob, pickled.buffers)[0])
    functions = [part.function for part in _parts(front) if isinstance(part, deterministic)]
    reached = Reached([*pickled.met, *functions], is_own)
    values = {".".join(place): digest for place, digest in reached.digests.items() if digest is not None}
    unsent = reached.unsent | {place: reached.values[place] for place, sent in reached.digests.items() if sent is None}
    for place, value in unsent.items():
        if not isinstance(value, _NO_MATTER):
            values[".".join(place)] = digest_of_state(value)
    settings = {name: repr(getattr(sys.modules.get(module), name, default)) for module, name, default in _SETTINGS}
    settings |= {"dtype": str(torch.get_default_dtype()), "installed": _installed()}
    program = Program("", [], module_digests(reached.modules), True, {})
    known = msgspec.msgpack.encode([sorted(values.items()), sorted(settings.items())])
    return digest_of(pickled.blob, pickled.buffers, program, known)


@functools.cache
def _installed() -> str:
    """Digest of this environment's packages, of what they have installed, and of its Python."""
    known: list[Any] = [sys.version]
    for place in dict.fromkeys((*sys.path, os.path.join(sys.prefix, "conda-meta"))):
        for name in sorted(os.listdir(place or ".")) if os.path.isdir(place or ".") else ():
            if name.endswith((".dist-info", ".egg-info", ".json")):
                known += [name, _content(os.path.join(place, name, "RECORD"))]
    return hashlib.blake2b(repr(known).encode(), digest_size=16).hexdigest()


def _content(record: str) -> str:
    """Of a package that was installed anew under the same version."""
    with contextlib.suppress(OSError), open(record, "rb") as file:
        return hashlib.blake2b(file.read(), digest_size=16).hexdigest()
    return ""


# --- datasets of torchvision -----------------------------------------------------------------------------------------


def through(dataset: Any, cache: PrefixCache) -> Any:
    """A dataset as it is read through a cache: it shares all that it has with the one that is given.

    A folder dataset of torchvision, also as part of a `Subset`; another one is given back as it is.
    """
    if type(dataset) is torch.utils.data.Subset:
        inner = through(dataset.dataset, cache)
        return dataset if inner is dataset.dataset else _view(dataset, {"dataset": lambda _: inner})
    folder = getattr(sys.modules.get("torchvision.datasets.folder"), "DatasetFolder", None)
    if folder is None or not isinstance(dataset, folder) or type(dataset).__getitem__ is not folder.__getitem__:
        return dataset
    split = _Split(cache)
    return _view(dataset, {"loader": lambda held: split.of(held)[0], "transform": lambda held: split.of(held)[1]})


def _view(dataset: Any, attributes: Mapping[str, Callable[[dict[str, Any]], Any]]) -> Any:
    """An object of a dataset's class, with its attributes but for these, which are made of them."""

    def attribute(name: str, get: Callable[[dict[str, Any]], Any]) -> property:
        return property(lambda view: get(vars(view)), lambda view, value: vars(view).__setitem__(name, value))

    kind = type(dataset)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    made = type(kind.__name__, (kind,), names | {name: attribute(name, get) for name, get in attributes.items()})
    view: Any = object.__new__(made)
    view.__dict__ = dataset.__dict__
    return view


def _why_no_front(dataset: Any) -> str:
    while type(dataset) is torch.utils.data.Subset:
        dataset = dataset.dataset
    known: str | None = getattr(dataset, "why_no_front", None)
    return known or (
        f"samples of {type(dataset).__name__} have no front that is known to be deterministic. Put "
        "@hetstream.deterministic on the function that reads and decodes"
    )


class _Split:
    """The loader and the transform of a folder dataset, cut behind what is known to be deterministic."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._of: list[Any] = []
        self._cut: tuple[Any, Any] = None, None

    def of(self, held: Mapping[str, Any]) -> tuple[Any, Any]:
        """What the dataset is to have in the place of both; `held` are its attributes."""
        loader, transform = held["loader"], held["transform"]
        steps = _steps_of(transform)
        now = [loader, transform, *steps]
        if len(now) != len(self._of) or any(a is not b for a, b in zip(now, self._of, strict=True)):
            self._cut, self._of = self._made(loader, transform, steps), now
        return self._cut

    def _made(self, loader: Any, transform: Any, steps: list[Any]) -> tuple[Any, Any]:
        known = getattr(loader, "__module__", "") == "torchvision.datasets.folder" and loader.__name__ in _LOADERS
        if not known and not isinstance(loader, deterministic):
            return loader, transform
        num = next((place for place, step in enumerate(steps) if not _draws_nothing(step)), len(steps))
        front = (loader, *steps[:num])
        read = loader.function if isinstance(loader, deterministic) else loader
        names = [getattr(loader, "name", getattr(read, "__name__", "")), *(type(step).__name__ for step in front[1:])]
        if num == len(steps):
            behind = None if num or transform is None else transform
        else:
            behind = transform
            if num:
                behind = object.__new__(type(transform))
                behind.__dict__ = {**vars(transform), "transforms": steps[num:]}

        def make(path: Any) -> Any:
            sample = read(path)
            for step in front[1:]:
                sample = step(sample)
            return sample

        return lambda path: self._cache.value(front, ", ".join(names), make, (path,), {}), behind


def _steps_of(transform: Any) -> list[Any]:
    if _is_torchvisions(transform, {"Compose"}):
        return list(transform.transforms)
    return [] if transform is None else [transform]


def _draws_nothing(step: Any) -> bool:
    changed = vars(step).get("_forward_hooks") or vars(step).get("_forward_pre_hooks") or "forward" in vars(step)
    return _is_torchvisions(step, _DRAW_NOTHING) and not changed


def _is_torchvisions(value: Any, names: Any) -> bool:
    return type(value).__name__ in names and type(value).__module__.startswith(_MODULES)
