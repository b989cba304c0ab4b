"""What a data worker process takes over of the trainer's program: where it runs, what it imports, what it has set.

In the trainer `program_of` and `settings_of` describe the program of a pipeline, each time that the pipeline is
defined. In a data worker process `enter_program` runs once, because what Python has loaded stays loaded: a process
serves one program (`programs.py`). `SettingsInForce.apply` runs whenever the process turns to a pipeline
that was defined under other settings.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from hetstream.base.access import owners_of, strange_here, strange_value
from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.ops.changes import TooLarge, digest_of_state
from hetstream.mpi_dataworkers.ops.code_globals import OURS, Place, Reached, is_installed, is_own
from hetstream.mpi_dataworkers.ops.settings import put_in_force, settings_in_force
from hetstream.mpi_dataworkers.process.config import travelling_environment
from hetstream.mpi_dataworkers.wire.messages import Program

# The places that the variables of an environment name, and which of them may be a stranger's on this host.
#
# A library loads what it finds in its cache, and a program runs what it finds on a path. Which variables name such
# places nobody can list, so each value that is an absolute path, or several with colons between them, is looked at.


class LeftOut(NamedTuple):
    """A variable of which something is left out: what is kept of it, None for nothing; and why."""

    name: str
    kept: str | None
    why: str


def places_in(value: str) -> list[str]:
    """The absolute paths that a value consists of; none if it holds anything else."""
    entries = [entry for entry in value.split(os.pathsep) if entry]
    return entries if all(entry.startswith("/") for entry in entries) else []


def strange_variables(
    environ: Mapping[str, str], owners_there: Callable[[str], tuple[int, ...] | None]
) -> list[LeftOut]:
    """The variables of this process that name what may be a stranger's on this host.

    Args:
        environ: of this process.
        owners_there: of a place on the program's host, as `access.owners_of` has them; None for a place that its
            environment does not name: that is of this host's own set-up, and stays.
    """
    found = []
    for name, value in environ.items():
        owners = {path: owners_there(path) for path in places_in(value)}
        strange = {
            path: why for path, there in owners.items() if there is not None and (why := _strange_value(path, there))
        }
        if strange:
            kept = [entry for entry in value.split(os.pathsep) if entry not in strange]
            found.append(LeftOut(name, os.pathsep.join(kept) if any(kept) else None, next(iter(strange.values()))))
    return found


# Once in a process: settings are put in force again and again.
_strange_value = functools.lru_cache(maxsize=4096)(strange_value)


_log = logging.getLogger(__name__)

# Stands in `Program.sys_path` for the directories of the Python installation, each host's own.
INSTALLATION = ""

# Settings of libraries that programs are told to change, and that decide about samples. Other modules of installed
# packages are as they are when they are imported.
LIBRARY_SETTINGS = (
    ("PIL.ImageFile", "LOAD_TRUNCATED_IMAGES"),
    ("PIL.Image", "MAX_IMAGE_PIXELS"),
    ("torch.utils.data._utils.collate", "default_collate_fn_map"),
)


_CODE = (FunctionType, type, staticmethod, classmethod)
_NOTHING = object()


# --- in the trainer: where it runs and what it imports --------------------------------------------------------------


def program_of(reached: Reached, knows_hetstream: bool = True) -> Program:
    """The program of this process, for a pipeline that reaches these modules.

    Args:
        reached: what the pipeline's code reads.
        knows_hetstream: the pipeline's loader is hetstream's own.
    """
    working_dir, sys_path = _working_dir(), _sys_path()
    named = (path for value in os.environ.values() for path in places_in(value))
    owners = {_as_text(place): _owners_of(place) for place in (working_dir, *sys_path, *named) if place}
    texts = list(map(_as_text, sys_path))
    return Program(_as_text(working_dir), texts, module_digests(reached.modules), knows_hetstream, owners)


# Looked at once: pipelines are defined again and again.
_owners_of = functools.lru_cache(maxsize=4096)(owners_of)


def _as_text(path: str) -> str:
    """A path as it travels: one that is not in UTF-8 byte by byte, behind a NUL, which no path has."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return "\0" + os.fsencode(path).decode("latin-1")
    return path


def _as_path(text: str) -> str:
    return os.fsdecode(text[1:].encode("latin-1")) if text.startswith("\0") else text


def _working_dir() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # the program has removed it
        return os.readlink("/proc/self/cwd")


def _sys_path() -> list[str]:
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    script_dir = [os.path.dirname(os.path.abspath(main_file))] if main_file else []
    entries = [os.path.normpath(os.path.join(_working_dir(), entry)) for entry in sys.path]
    entries = [entry for entry in entries if not entry.startswith(OURS + os.sep)]  # the start-up hook's
    named = [INSTALLATION if is_installed(entry) else entry for entry in entries]
    # The script's directory is first anyway, unless the program took it out.
    return list(dict.fromkeys(named if script_dir and script_dir[0] in entries else [*script_dir, *named]))


@dataclass(frozen=True)
class _Source:
    """The source of a module as it was when it was first looked at.

    Attributes:
        spec: of the module; `importlib.reload` gives it a new one.
        digest: of its bytes.
        imports: names of modules, some of which may not exist.
    """

    spec: Any
    digest: str
    imports: frozenset[str]


_sources: dict[str, _Source] = {}


def module_digests(reached: Iterable[str]) -> dict[str, str]:
    """Digests of the program's own modules among the reached ones and those that they import."""
    found: dict[str, str] = {}
    waiting = list(reached)
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if name in found or module is None or not is_own(module):
            continue
        if name in ("__main__", "__mp_main__"):
            continue  # it travels by value
        source = _source_of(name, module)
        found[name] = source.digest
        waiting += source.imports
    return dict(sorted(found.items()))


def _source_of(name: str, module: ModuleType) -> _Source:
    known = _sources.get(name)
    if known is not None and known.spec is module.__spec__:
        return known  # the file may have been edited since, but the program runs what it loaded
    try:
        text = Path(str(module.__file__)).read_bytes()
    except OSError:
        text = b""
    digest = hashlib.blake2b(text, digest_size=8).hexdigest()
    source = _Source(module.__spec__, digest, frozenset(_imports(text, module)))
    _sources[name] = source
    return source


def _imports(text: bytes, module: ModuleType) -> Iterator[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    package = getattr(module, "__package__", None) or ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                try:
                    base = importlib.util.resolve_name("." * node.level + base, package)
                except ImportError:
                    continue
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


# --- in the trainer: what it has set --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Settings:
    """What the program has set, as it travels.

    Attributes:
        argv: `sys.argv`.
        environment: variables with their values.
        removed: variables that the program started with and has removed.
        in_force: settings of the whole process.
        digests: of the values in `values`, by module and name.
        values: the values, pickled together, so that what was one object stays one.
        unsent: digests of what does not travel, by module and name: a network, a large table.
    """

    argv: list[str]
    environment: dict[str, str]
    removed: list[str]
    in_force: dict[str, Any]
    digests: dict[Place, bytes]
    values: bytes
    unsent: dict[Place, bytes]


def settings_of(reached: Reached, knows_hetstream: bool = True) -> bytes:
    """What this process has set that a pipeline's code may read.

    Args:
        reached: what the pipeline's code reads.
        knows_hetstream: see `Program`. Of another program data workers compare what does not travel.
    """
    environment, removed = travelling_environment()
    for module, name in LIBRARY_SETTINGS:
        if module in sys.modules:
            reached.add((module, name), getattr(sys.modules[module], name, None))
    kept, digests, unsent = {}, {}, dict(reached.unsent)
    for place, value in sorted(reached.values.items(), key=lambda item: item[0]):
        digest = reached.digests[place]
        if digest is not None:
            kept[place], digests[place] = value, digest
        else:
            unsent[place] = value
    try:
        values = reached.pickled(kept) if kept else b""
    except Exception as error:  # noqa: BLE001, user code runs, and does now what it did not a moment ago
        _log.warning("hetstream: values that the program has set do not travel: %s: %s", type(error).__name__, error)
        digests, values = {}, b""
        unsent |= kept
    compared = [] if knows_hetstream else sorted(unsent)
    states = {place: _state_digest(place, unsent[place]) for place in compared}
    return pickle.dumps(_Settings(list(sys.argv), environment, removed, settings_in_force(), digests, values, states))


def _state_digest(place: Place, value: Any) -> bytes:
    try:
        return digest_of_state(value)
    except TooLarge as error:
        raise PipelineError(
            f"{'.'.join(place)} is too large to be sent to data workers, and to be compared with theirs: give it to "
            "the dataset"
        ) from error


# --- in a data worker -----------------------------------------------------------------------------------------------


def enter_program(program: Program) -> None:
    """Work where the program works and import from where it imports; once in a process.

    Not in a directory that is a stranger's on this host, or not there, where a stranger could make it later.
    """
    places = [_as_path(text) for text in (program.working_dir, *program.sys_path)]
    compiled = sys.pycache_prefix or ""  # code that Python has compiled is run from there
    owners = program.owners
    strange = {place: strange_here(place, owners.get(_as_text(place), [])) for place in (*places, compiled) if place}
    if compiled and strange[compiled]:
        sys.pycache_prefix = None
    for place, why in strange.items():
        if why and os.path.exists(place):
            _log.warning("hetstream: not used for the program of pipelines: %s", why)
    working_dir, *sys_path = places
    if not strange[working_dir]:
        with contextlib.suppress(OSError):  # a relative path then fails with its own error
            os.chdir(working_dir)
    own = [entry for entry in sys.path if entry not in sys_path]
    entries: list[str] = []
    for entry in sys_path:
        entries += own if entry == INSTALLATION else [entry] if not strange[entry] else []
    sys.path[:] = dict.fromkeys([*entries, *own])
    importlib.invalidate_caches()  # of what the program has written a moment ago


def changed_since(program: Program) -> list[str]:
    """Loaded modules of the program whose files here are not what the trainer has loaded."""
    changed = []
    for name, digest in program.modules.items():
        module = sys.modules.get(name)
        if module is not None and is_own(module) and _source_of(name, module).digest != digest:
            changed.append(name)
    return changed


@dataclass
class SettingsInForce:
    """The settings of a program as they are in force in this process.

    Attributes:
        blob: what was applied last.
        program: whose settings they are; None if nobody knows.
    """

    blob: bytes = b""
    program: Program | None = None
    _in_force: dict[str, Any] = field(default_factory=dict)  # of what was applied last
    _pipeline_id: str = ""  # that is entered
    # What user code of a pipeline had changed when another was entered. Pipelines of one program share a process, and
    # torch gives each loader processes of its own.
    _left: dict[str, dict[str, Any]] = field(default_factory=dict)
    _environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))  # of this process before all
    _names: set[str] = field(default_factory=set)  # variables that were set or removed
    _digests: dict[Place, bytes] = field(default_factory=dict)
    # What stood where the program had put a function or class of its own, for when it takes it away again.
    _replaced: dict[Place, Any] = field(default_factory=dict)

    def apply(self, blob: bytes) -> None:
        """Set what the program had set when it defined a pipeline; what did not change since the last time stays.

        Raises:
            BaseException: a module of the program cannot be imported, or ends the process when it is.
        """
        if blob == self.blob or not blob:
            return
        settings: _Settings = pickle.loads(blob)
        self.blob = b""  # what is cut off by an error is applied again
        sys.argv[:] = settings.argv
        self._set_environment(settings)
        self._in_force = settings.in_force
        put_in_force(settings.in_force)
        self._set_values(settings)
        self.blob = blob

    def other_than_sent(self) -> str:
        """What of the program's modules does not travel and is another one here, in a process that has made no sample;
        "" for nothing."""
        settings: _Settings | None = pickle.loads(self.blob) if self.blob else None
        for place, digest in settings.unsent.items() if settings else ():
            importlib.import_module(place[0])
            try:
                is_same = digest_of_state(_standing_at(place)) == digest
            except TooLarge:
                is_same = False
            if not is_same:
                return ".".join(place)
        return ""

    def is_entered(self, pipeline_id: str, blob: bytes) -> bool:
        """Whether `enter` has nothing to do."""
        return pipeline_id == self._pipeline_id and blob == self.blob

    def enter(self, pipeline_id: str, blob: bytes) -> None:
        """Apply a pipeline's settings; those of the process are as its own user code left them, once that has run here.

        Raises:
            BaseException: as `apply`.
        """
        if self.is_entered(pipeline_id, blob):
            return
        if self._pipeline_id:
            self._left[self._pipeline_id] = settings_in_force()
            self._pipeline_id = ""
        self.apply(blob)
        put_in_force(self._left.pop(pipeline_id, self._in_force))
        self._pipeline_id = pipeline_id

    def forget(self, pipeline_id: str) -> None:
        """A pipeline will not be entered again."""
        self._left.pop(pipeline_id, None)
        if self._pipeline_id == pipeline_id:
            self._pipeline_id = ""

    def _set_environment(self, settings: _Settings) -> None:
        names = {*settings.environment, *settings.removed}
        for name in names | self._names:
            value = settings.environment.get(name)
            if value is None and name not in settings.removed:
                value = self._environment.get(name)
            if value is None:
                os.environ.pop(name, None)
            elif os.environ.get(name) != value:
                os.environ[name] = value
        self._names = names | self._leave_out_strangers()

    def _leave_out_strangers(self) -> set[str]:
        """Take out of the environment what leads into what may be a stranger's on this host; its names."""
        program = self.program
        if program is None:
            return set()
        owners = {_as_path(text): tuple(found) for text, found in program.owners.items()}
        left_out = strange_variables(os.environ, owners.get)
        for name, kept, why in left_out:
            if kept is None:
                del os.environ[name]
            else:
                os.environ[name] = kept
            _say_left_out(name, why)
        return {name for name, _, _ in left_out}

    def _set_values(self, settings: _Settings) -> None:
        for place in self._replaced.keys() - settings.digests.keys():
            _put_back(place, self._replaced.pop(place))
            del self._digests[place]
        new = {place for place, digest in settings.digests.items() if self._digests.get(place) != digest}
        if not new:
            return
        for module in dict.fromkeys(module for module, _ in sorted(new)):
            importlib.import_module(module)
        try:
            values: Mapping[Place, Any] = pickle.loads(settings.values)
        except Exception as error:  # noqa: BLE001, user classes are rebuilt here: any exception may come
            _log.warning("values that the program has set cannot be rebuilt here: %s: %s", type(error).__name__, error)
            return
        for place in new - self._replaced.keys():
            if isinstance(values[place], _CODE):
                self._replaced[place] = _standing_at(place)
        _overwrite({place: values[place] for place in sorted(new)}, settings.digests)
        self._digests |= settings.digests


@functools.cache
def _say_left_out(name: str, why: str) -> None:
    _log.warning("hetstream: left out of %s in the environment of pipelines: %s", name, why)


def _holder_of(place: Place) -> tuple[Any, str]:
    """The module or class in which something stands, and under which name.

    Raises:
        AttributeError: the class is not there.
    """
    module, path = place
    *owners, name = path.split(".")
    holder: Any = sys.modules[module]
    for owner in owners:
        holder = getattr(holder, owner)
    return holder, name


def _standing_at(place: Place) -> Any:
    """What stands there now; `_NOTHING` where nothing does."""
    try:
        holder, name = _holder_of(place)
    except AttributeError:
        return _NOTHING
    return vars(holder).get(name, _NOTHING)


def _put_back(place: Place, value: Any) -> None:
    with contextlib.suppress(AttributeError):
        holder, name = _holder_of(place)
        if value is _NOTHING:
            delattr(holder, name)
        else:
            setattr(holder, name, value)


def _overwrite(values: Mapping[Place, Any], digests: Mapping[Place, bytes]) -> None:
    """Give modules and classes the program's values where they have others.

    A container is changed in place, because other modules may have it under names of their own; but where the trainer
    has two objects and this process has one, the second gets one of its own.
    """
    kept: set[int] = set()
    different: list[tuple[Any, str, Any]] = []
    for place, value in values.items():
        try:
            holder, name = _holder_of(place)
        except AttributeError:
            continue
        here = vars(holder).get(name)
        if name in vars(holder) and Reached.digest(here) == digests[place]:
            kept.add(id(here))
        else:
            different.append((holder, name, value))
    became: dict[int, Any] = {}
    for holder, name, value in different:
        here = vars(holder).get(name)
        taken = id(here) in kept or became.get(id(here), value) is not value
        if not taken and _changed_in_place(here, value):
            became[id(here)] = value
        else:
            setattr(holder, name, value)


def _changed_in_place(here: Any, value: Any) -> bool:
    if type(here) is not type(value) or not isinstance(here, dict | list | set):
        return False
    if isinstance(here, dict):
        dict.clear(here)
        dict.update(here, value)
    elif isinstance(here, list):
        here[:] = value
    else:
        set.clear(here)
        set.update(here, value)
    if hasattr(here, "__dict__"):
        vars(here).clear()
        vars(here).update(vars(value))
    return True
