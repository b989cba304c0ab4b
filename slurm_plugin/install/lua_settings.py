"""Which files of ours slurm.conf asks for, and what becomes of jobs when one is not there. Reads files.

Called by `hetstream uninstall` and `hetstream doctor`. With `CliFilterPlugins=lua` and no cli_filter.lua beside
slurm.conf every sbatch, salloc and srun of that host fails; with `JobSubmitPlugins=lua` and no job_submit.lua slurmctld
does not start. A node whose Prolog or Epilog is not there is drained by its next job.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

# Slurm's file -> the option of slurm.conf that asks for it.
OPTIONS = {"cli_filter.lua": "CliFilterPlugins", "job_submit.lua": "JobSubmitPlugins"}
WITHOUT = {
    "cli_filter.lua": "every sbatch, salloc and srun on this host fails",
    "job_submit.lua": "slurmctld does not start",
}
_MOST_INCLUDED = 100


def asks_for_lua(text: str, option: str) -> bool:
    """Whether lines of slurm.conf, or of `scontrol show config`, name Lua plugins of a kind; the last one counts."""
    found = re.findall(rf"^[ \t]*{option}[ \t]*=[ \t]*([^#\s]*)", text, re.MULTILINE | re.IGNORECASE)
    return bool(found) and bool(re.search(r"(?:^|[,/])lua(?:,|$)", found[-1]))


def asked_for(directory: Path) -> frozenset[str]:
    """The Lua files that slurm.conf of this directory asks for, with the files that it includes."""
    text = "\n".join(_texts(directory))
    return frozenset(name for name, option in OPTIONS.items() if asks_for_lua(text, option))


def programs_asked_for(directory: Path) -> dict[str, str]:
    """The programs that slurm.conf of this directory has nodes run for each job: option by path."""
    text = "\n".join(_texts(directory))
    found = re.findall(r"^[ \t]*(Prolog|Epilog|TaskProlog)[ \t]*=[ \t]*([^#\s]+)", text, re.MULTILINE | re.IGNORECASE)
    return {path: option for option, path in found}


def missing_files(hook: Path) -> list[str]:
    """What a hook loads without which it fails: itself, and the site's own file that it names.

    Raises:
        OSError: the directory, or the hook, cannot be read here.
    """
    try:
        text = hook.read_text(errors="replace")
    except FileNotFoundError:
        hook.parent.stat()
        return [str(hook)]
    loaded = re.findall(r'^dofile\("([^"]+)"\)', text, re.MULTILINE)
    return [path for path in loaded if not Path(path).exists()]


def modules_of(hook: Path) -> list[str]:
    """hetstream's files that a hook loads; without them it does nothing."""
    try:
        text = hook.read_text(errors="replace")
    except OSError:
        return []
    return re.findall(r'pcall\(dofile, "([^"]+)"\)', text)


def missing_modules(hook: Path) -> list[str]:
    """Those of them that are not there."""
    return [path for path in modules_of(hook) if not Path(path).exists()]


def _texts(directory: Path) -> Iterator[str]:
    waiting, seen = [directory / "slurm.conf"], set[Path]()
    while waiting and len(seen) < _MOST_INCLUDED:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        yield text
        included = re.findall(r"^[ \t]*include[ \t]+(\S+)", text, re.MULTILINE | re.IGNORECASE)
        waiting += [directory / name for name in included]
