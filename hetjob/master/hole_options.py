"""What a site says of companions in backfill holes: a line in its file, which no user can change.

HETSTREAM_HOLES=no                                 none; companions are as without `--data-worker-time-min`
HETSTREAM_HOLES=--partition=scavenge --qos=holes   sbatch options that put them last there, in the place of --nice
"""

from __future__ import annotations

import shlex
from pathlib import Path

from hetstream.base.errors import ConfigError
from hetstream.hetjob.elastic.holes import NICE
from hetstream.hetjob.sbatch_options import parse_words, words_of
from hetstream.hetjob.site.address import SITE_FILE, assignments

HOLES_VARIABLE = "HETSTREAM_HOLES"
_ALLOWED = ("account", "constraint", "nice", "partition", "qos", "reservation")


def hole_options(site_file: Path = SITE_FILE) -> tuple[str, ...] | None:
    """The sbatch options that put companions behind everybody else; None where the site wants none in holes.

    Raises:
        ConfigError: the line has another form.
    """
    try:
        text = assignments(site_file.read_text(errors="replace")).get(HOLES_VARIABLE, "")
    except OSError:
        text = ""
    if not text:
        return (f"--nice={NICE}",)
    if text == "no":
        return None
    try:
        options, others = parse_words(shlex.split(text), str(site_file))
    except ValueError as error:
        raise ConfigError(f"{site_file}: {HOLES_VARIABLE}={text!r}: {error}") from error
    other = [*(f"--{option.name}" for option in options if option.name not in _ALLOWED), *others]
    if other:
        raise ConfigError(
            f"{site_file}: {HOLES_VARIABLE}={text!r}: must be no, or of --{', --'.join(_ALLOWED)}, not {other[0]}"
        )
    return tuple(words_of(options))
