"""Where the directories of jobs are: `.hetstream` where a job was submitted from, or a place of their own.

Two settings, each an option, else a variable of the environment, else a line in the site's file on the host that asks:

    HETSTREAM_JOBS_DIR      directories of jobs, on a file system that the job's hosts share (default: `.hetstream`)
    HETSTREAM_JOURNAL_DIR   journal of the dispatcher, also on a disk of the first node (default: the job's directory)

`%u` in them stands for the user. Reads the site's file and directories, asks nobody.

What lies in a job's directory names programs and holds keys. Where somebody else could swap it (a group's directory, a
colleague's), the default is `.hetstream` in the user's home directory instead; a place that was named is refused.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from hetstream.base.access import unsafe_below
from hetstream.base.errors import ConfigError
from hetstream.base.users import user_name
from hetstream.hetjob.site.address import SITE_FILE, in_site_file

JOBS_DIR, JOURNAL_DIR = "HETSTREAM_JOBS_DIR", "HETSTREAM_JOURNAL_DIR"
IN_SUBMIT_DIR = ".hetstream"
RULE = "an absolute path on one line, in which %u stands for the user, such as /scratch/%u/hetstream"


def is_directory_pattern(text: str) -> bool:
    """Whether a text has the form of these settings."""
    return text.startswith("/") and text.isprintable() and "%" not in text.replace("%u", "")


def setting(name: str, environ: Mapping[str, str], site_file: Path = SITE_FILE) -> str | None:
    """What the environment or the site's file says of a setting that is a directory; None if it is empty or not there.

    Raises:
        ConfigError: it has another form.
    """
    text, origin = environ.get(name), "environment variable "
    if text is None:
        text, origin = in_site_file(name, site_file), f"{site_file}: "
    if text and not is_directory_pattern(text):
        raise ConfigError(f"{origin}{name}={text!r}: must be {RULE}")
    return text or None


def for_user(pattern: str, user: str = "") -> Path:
    """The directory of a user; by default of whom this process runs as."""
    return Path(pattern.replace("%u", user or user_name(os.geteuid())))


def in_home() -> Path | None:
    """Where the directories of jobs are that are not safe where they were submitted; None without a home directory."""
    try:
        return Path.home() / IN_SUBMIT_DIR
    except RuntimeError:
        return None


def places(submit_dirs: Iterable[Path], jobs_dir: str | None) -> list[Path]:
    """Where directories of this user's jobs may be.

    Args:
        submit_dirs: that jobs may have been submitted from.
        jobs_dir: the setting, with `%u` for the user; None without it.
    """
    home = in_home()
    found = [*(path / IN_SUBMIT_DIR for path in submit_dirs), *([home] if home else [])]
    return [*dict.fromkeys([*found, *([for_user(jobs_dir)] if jobs_dir else [])])]


def choose(jobs_dir: str | None, submit_dir: Path) -> tuple[Path | None, str]:
    """The place of the directory of a job, where nobody else can put another one in its place.

    Args:
        jobs_dir: the one that was named, with `%u` for the user; None for the default.
        submit_dir: where the job is submitted.

    Returns:
        The place, None for `.hetstream` where the job is submitted; and one line for the user if that is not safe.

    Raises:
        ConfigError: the one that was named is not safe, or none is.
    """
    if jobs_dir:
        place = for_user(jobs_dir)
        if reason := unsafe_below(place):
            raise ConfigError(f"the place of jobs' directories {place} is not used: {reason}")
        return place, ""
    reason = unsafe_below(submit_dir / IN_SUBMIT_DIR)
    if not reason:
        return None, ""
    home = in_home()
    why_not_home = unsafe_below(home) if home else "there is no home directory"
    if home is None or why_not_home:
        raise ConfigError(
            f"no safe place for the job's directory. Where it is submitted: {reason}. In the home directory: "
            f"{why_not_home}. Name another one with --jobs-dir"
        )
    return home, f"the job's directory is below {home}, and not where it is submitted: {reason}"


def jobs_dir_in(script: str) -> str:
    """Which directory a converted script names for its job; "" if it names none.

    Args:
        script: text of a user, of which nothing is believed but that word.
    """
    for line in script.splitlines():
        if line.startswith("_hetstream=$(") and " --jobs-dir=" in line:
            try:
                arguments = shlex.split(re.sub(r"\) \|\|$", "", line.removeprefix("_hetstream=$(")))
            except ValueError:
                continue
            named = (word.removeprefix("--jobs-dir=") for word in arguments if word.startswith("--jobs-dir="))
            return next((text for text in named if is_directory_pattern(text)), "")
    return ""
