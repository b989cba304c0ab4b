"""Place files on a machine and take them away again. Called by `hetstream site` and the devcluster.

Only what it placed itself, and nobody has changed since, is ever replaced or removed: a record beside the files holds
their checksums. A site's own Lua file is moved aside, loaded first by the hook that takes its name, and moved back.
It never touches slurm.conf and starts no daemon. Root runs it, and what it places is run by slurmctld and by jobs: so
nobody but root and this user may be able to change anything where files and record are, and the record cannot name
what `install` does not place.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetstream.base.errors import UsageError
from hetstream.base.files import Directory, UntrustedFile
from hetstream.slurm_plugin.database import check_place, make_place
from hetstream.slurm_plugin.errors import DamagedRecord, StillInUse, UnsafePlace
from hetstream.slurm_plugin.install.doctor import OPTIONS, WITHOUT, asked_for, programs_asked_for

# Files that users other than root must read: those of an installation, and those of a devcluster.


@contextmanager
def readable_by_all() -> Iterator[None]:
    """Make files 0644 and directories 0755 inside, whatever the user's umask: jobs of every user read them."""
    previous = os.umask(0o022)
    try:
        yield
    finally:
        os.umask(previous)


LUA_DIR = Path(__file__).parents[1] / "lua"
HOOKS = {
    "cli_filter.lua": ("slurm_cli_setup_defaults", "slurm_cli_pre_submit", "slurm_cli_post_submit"),
    "job_submit.lua": ("slurm_job_submit", "slurm_job_modify"),
}
RECORD = "share/hetstream/install.json"
RECORD_VERSION = 1
WAS_THERE = "was there already"
_MOST_RECORD_BYTES = 1 << 20
# What belongs to /usr has its settings in /etc: https://refspecs.linuxfoundation.org/FHS_3.0/fhs/ch03s07.html
SETTINGS_OF_USR = Path("/etc/hetstream")
_LUA_PATH_FORBIDS = set('"\\\n\r\0')


@dataclass(frozen=True)
class Action:
    """One step, done or planned.

    Attributes:
        what: create, replace, keep, move, remove, restore, or leave.
        path: the file.
        why: for those that the user may not expect.
    """

    what: str
    path: str
    why: str = ""


@dataclass(frozen=True)
class Record:
    """What an installation placed.

    Attributes:
        files: SHA-256 by path.
        moved: where a site's own file went, by its own path.
        directories: those that were made, outermost first.
    """

    files: Mapping[str, str]
    moved: Mapping[str, str]
    directories: tuple[str, ...]


def site_name(hook: Path) -> Path:
    """Return where a site's own file goes when a hook takes its name."""
    return hook.with_name(f"{hook.stem}.site.lua")


def hook_text(name: str, lua_dir: Path, policy: Path, program: str, site: Path | None) -> str:
    """Return the file that Slurm loads: what the site had, or functions that do nothing; then hetstream's module.

    Args:
        name: `cli_filter.lua` or `job_submit.lua`.
        lua_dir: where the modules are.
        policy: the site's policy.
        program: the `hetstream` command.
        site: the site's own file.

    Raises:
        UsageError: a path that a Lua string cannot hold as it is.
    """
    for path in (str(lua_dir), str(policy), program, str(site or "")):
        if _LUA_PATH_FORBIDS & set(path):
            raise UsageError(f"{path!r}: quotes, backslashes and line ends cannot stand in the paths of Lua files")
    functions = [f"function {function}() return slurm.SUCCESS end" for function in HOOKS[name]]
    before = [f'dofile("{site}")  -- the site\'s own file, as it was'] if site else functions
    return "\n".join(
        [
            "-- Placed by `hetstream site install`; `hetstream site uninstall` takes it away.",
            *before,
            *hook_lines(name, lua_dir, policy, program),
            "return slurm.SUCCESS",
            "",
        ]
    )


def hook_lines(name: str, lua_dir: Path, policy: Path, program: str) -> tuple[str, ...]:
    """Return what a site adds to its own file, before the last return. Nothing in them can fail.

    Hosts may share Slurm's directory and not all have hetstream. There the cli_filter is silent: it runs in every srun,
    and would write to its user's terminal. slurmctld, which is one, says in its log what is missing.
    """
    module = lua_dir / name
    loads = (
        f'local ok, hetstream = pcall(dofile, "{module}")',
        f'if ok then ok, hetstream = pcall(hetstream, select(2, pcall(dofile, "{policy}")), "{program}") end',
        'if not ok then slurm.log_info("hetstream: %s", tostring(hetstream)) end',
    )
    if name != "cli_filter.lua":
        return loads
    return (f'local present = io.open("{module}")', "if present then", "present:close()", *loads, "end")


def read_record(prefix: Path) -> Record | None:
    """Return what is installed below a prefix.

    Raises:
        DamagedRecord: the record is not what install writes.
        UnsafePlace: somebody else than root and this user could have written it, or changed what it names.
    """
    path = prefix / RECORD
    _check_place(prefix, path)
    try:
        with Directory.open_safe(path.parent) as directory:
            text = directory.read(path.name, _MOST_RECORD_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UntrustedFile as error:
        raise UnsafePlace(f"{error}. Nothing was changed") from error
    try:
        fields: dict[str, Any] = json.loads(text)
        if fields["version"] != RECORD_VERSION:
            raise DamagedRecord(
                f"{path} has version {fields['version']}, this release reads version {RECORD_VERSION}. Nothing was "
                "changed: uninstall with the release of hetstream that installed, then install this (docs/upgrade.md)"
            )
        files, moved = ({str(key): str(fields[name][key]) for key in fields[name]} for name in ("files", "moved"))
        record = Record(files, moved, tuple(str(directory) for directory in fields["directories"]))
        _check_record(record, prefix)
        return record
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedRecord(
            f"{path} is not a record of hetstream site install ({error}). Nothing was changed; compare the files by "
            "hand"
        ) from error


def _check_record(record: Record, prefix: Path) -> None:
    """Whether it names only what `install` places: files below the prefix, settings, and hooks.

    Raises:
        ValueError: it names something else.
        UnsafePlace: somebody else could have a hand in what it names.
    """
    roots = [prefix, *([SETTINGS_OF_USR] if prefix == Path("/usr") else [])]
    for name in (*record.files, *record.moved.values(), *record.directories):
        if name != os.path.normpath(name) or not name.startswith("/"):
            raise ValueError(f"{name!r} is no path that install writes")
    for name, aside in record.moved.items():
        if name not in record.files or Path(name).name not in HOOKS or aside != str(site_name(Path(name))):
            raise ValueError(f"{aside!r} is no place of what was moved from {name!r}")
    for path in map(Path, record.files):
        if path.name not in HOOKS and not any(path.is_relative_to(root) for root in roots):
            raise ValueError(f"{str(path)!r} is not below {prefix}")
        _check_place(prefix, path)
    for directory in map(Path, record.directories):
        if not any(directory.is_relative_to(root) or root.is_relative_to(directory) for root in roots):
            raise ValueError(f"{str(directory)!r} is not below {prefix}")


def _check_place(prefix: Path, path: Path) -> None:
    """Refuse the directory of a file in which somebody else could do something, or that a link takes out of the prefix.

    Raises:
        UnsafePlace: it is such a one.
    """
    check_place(path.parent)
    root = Path(os.path.realpath(prefix))
    if path.is_relative_to(prefix) and not Path(os.path.realpath(path.parent)).is_relative_to(root):
        raise UnsafePlace(
            f"{path.parent} leads by a link to {os.path.realpath(path.parent)}, out of {prefix}: nothing is placed or "
            "removed there. Give the directory as --prefix in which the files are to be"
        )


def install(
    prefix: Path, files: Mapping[Path, str], hooks: Mapping[Path, tuple[str, str]], *, dry_run: bool
) -> list[Action]:
    """Place files.

    Args:
        prefix: where the record goes.
        files: texts by path.
        hooks: of the Lua files in Slurm's directory, the text without and with a site's own file.
        dry_run: only say what would be done.

    Returns:
        What was done, or would be.

    Raises:
        DamagedRecord: the record of an earlier installation is not what install writes.
        UnsafePlace: somebody else than root and this user could change something where a file is to be.
    """
    record = read_record(prefix) or Record({}, {}, ())
    for path in {path.parent: path for path in (*files, *hooks)}.values():
        _check_place(prefix, path)
    actions, texts, moved = _plan(record, files, hooks)
    if dry_run:
        return actions
    writes = [action.path for action in actions if action.what in ("create", "replace")]
    with readable_by_all():
        above = [parent for path in (*writes, str(prefix / RECORD)) for parent in reversed(Path(path).parents)]
        parents = [parent for parent in above if not parent.exists()]
        directories = tuple(dict.fromkeys((*record.directories, *map(str, parents))))
        for parent in parents:
            make_place(parent)
        # The record comes first: whatever interrupts the rest, uninstall knows what to look for.
        digests = {**record.files, **{path: _sha256(texts[path]) for path in writes}}
        _write(prefix / RECORD, _record_text(Record(digests, moved, directories)))
        for name in writes:
            if name in moved and name not in record.moved:
                os.link(name, moved[name], follow_symlinks=False)
            _write(Path(name), texts[name])
    return actions


def _plan(
    record: Record, files: Mapping[Path, str], hooks: Mapping[Path, tuple[str, str]]
) -> tuple[list[Action], dict[str, str], dict[str, str]]:
    """What `install` does, with the texts of all files and where sites' own files go, by path."""
    actions: list[Action] = []
    placed: dict[Path, str] = {}
    moved = dict(record.moved)
    for path, (alone, chained) in hooks.items():
        ours = _digest(path) in (record.files.get(str(path)), _sha256(alone), _sha256(chained))
        if os.path.lexists(path) and not ours:
            aside = site_name(path)
            if str(path) in record.files or os.path.lexists(aside) or not path.exists():
                actions.append(
                    Action(
                        "keep", str(path), f"changed since it was placed, or {aside.name} is taken, or a broken link"
                    )
                )
                continue
            actions.append(Action("move", str(path), f"to {aside}, which the hook loads first"))
            moved[str(path)] = str(aside)
        placed[path] = chained if str(path) in moved else alone
    for path, text in {**files, **placed}.items():
        present = _digest(path) if path.exists() or not os.path.lexists(path) else ""  # of a broken link
        if (str(path) in moved and str(path) not in record.moved) or present is None:
            actions.append(Action("create", str(path)))
        elif present == _sha256(text):
            actions.append(Action("keep", str(path), "" if str(path) in record.files else WAS_THERE))
        elif present == record.files.get(str(path)):
            actions.append(Action("replace", str(path)))
        else:
            actions.append(Action("keep", str(path), "not placed by hetstream, or changed since"))
    return actions, {str(path): text for path, text in {**files, **placed}.items()}, moved


def put_below(destdir: Path, files: Mapping[Path, str], *, dry_run: bool) -> list[Action]:
    """Place files below another root, for a package manager that keeps its own record of them.

    Args:
        destdir: what stands for `/`.
        files: texts by path, as they will be when the package is installed.
        dry_run: only say what would be done.
    """
    texts = {destdir / path.relative_to("/"): text for path, text in files.items()}
    if not dry_run:
        with readable_by_all():
            for path, text in texts.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                _write(path, text)
    return [Action("create", str(path)) for path in texts]


def uninstall(prefix: Path, *, dry_run: bool, force: bool = False) -> list[Action]:
    """Take away what `install` placed, and put back what it moved.

    Args:
        prefix: where the record is.
        dry_run: only say what would be done.
        force: also take away a hook that slurm.conf beside it still asks for.

    Returns:
        What was done, or would be; nothing when nothing is installed.

    Raises:
        StillInUse: slurm.conf still asks for a hook that would be gone. Nothing was changed.
        DamagedRecord, UnsafePlace: as `read_record`.
    """
    record = read_record(prefix)
    if record is None:
        return []
    actions = []
    left: dict[str, str] = {}
    for path, digest in record.files.items():
        present, aside = _digest(Path(path)), record.moved.get(path)
        if present is not None and present != digest:
            if aside and _digest(Path(aside)) == present:  # install was interrupted between its two steps
                actions.append(Action("remove", aside))
                continue
            actions.append(Action("leave", path, "changed since it was placed"))
            if aside and Path(aside).exists():
                actions.append(Action("leave", aside, f"the site's own file; {path} is not hetstream's any more"))
                left[path] = aside
        elif aside and Path(aside).exists():
            actions.append(Action("restore", path, f"from {aside}"))
        elif present is not None:
            actions.append(Action("remove", path))
    gone = [Path(action.path) for action in actions if action.what == "remove"]
    if not force:
        _check_unused(gone)
    if dry_run:
        return actions
    for action in actions:
        if action.what == "restore":
            os.replace(record.moved[action.path], action.path)
            os.utime(action.path)  # slurmctld reads a file again when it is newer than the one it has
        elif action.what == "remove":
            os.unlink(action.path)
    if left:
        _write(prefix / RECORD, _record_text(Record({path: record.files[path] for path in left}, left, ())))
    else:
        os.unlink(prefix / RECORD)
    for directory in reversed(record.directories):
        if Path(directory).is_dir() and not os.listdir(directory):
            os.rmdir(directory)
    return actions


def _check_unused(gone: Sequence[Path]) -> None:
    """Refuse to remove what slurm.conf beside a hook still asks for."""
    in_use = [path for path in gone if path.name in asked_for(path.parent)]
    if in_use:
        raise StillInUse(_still_in_use(in_use))
    programs = {path: option for hook in gone for path, option in programs_asked_for(hook.parent).items()}
    run = [f"{programs[str(path)]}={path}" for path in gone if str(path) in programs]
    if run:
        raise StillInUse(
            f"nothing was removed: slurm.conf has {', '.join(run)}, without which a node is drained by its next job. "
            "First take that out on all hosts, then run: scontrol reconfigure, then this again. --force removes the "
            "files all the same"
        )


def _still_in_use(hooks: Iterable[Path]) -> str:
    users = "; ".join(
        f"{hook.parent / 'slurm.conf'} has {OPTIONS[hook.name]}=lua, and without {hook.name} {WITHOUT[hook.name]}"
        for hook in hooks
    )
    return (
        f"nothing was removed: {users}. First take lua out of that line on all hosts that have it, then run: scontrol "
        "reconfigure (for JobSubmitPlugins restart slurmctld), then this again. --force removes the files all the same"
    )


def as_json(verb: str, actions: Iterable[Action], notes: Iterable[str], *, dry_run: bool) -> str:
    """Return the report as one JSON document."""
    return json.dumps(
        {
            "meta": {"verb": verb, "version": 1, "dry_run": dry_run},
            "actions": [asdict(action) for action in actions],
            "notes": list(notes),
        },
        indent=1,
    )


def _record_text(record: Record) -> str:
    return json.dumps({"version": RECORD_VERSION, **asdict(record)}, indent=1) + "\n"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return None


def _write(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one."""
    partial = path.with_name(f".{path.name}.hetstream-{os.getpid()}")
    try:
        with open(partial, "x") as stream:
            stream.write(text)
            if text.startswith("#!"):
                os.fchmod(stream.fileno(), 0o755)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
