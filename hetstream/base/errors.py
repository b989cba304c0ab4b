"""The root of every error that hetstream raises on purpose, and those that each of its packages raises.

    HetstreamError
    ├── UsageError          the command line, a keyword or a script is wrong: exit code 2
    └── ConfigError         an option or environment value breaks its rule
        └── OptionsError    keywords of a class or a call: all their problems at once; also a ValueError

`hetstream.mpi_dataworkers.errors`, `hetstream.checkpoint.errors`, `hetstream.hetjob.errors` and
`hetstream.slurm_plugin.errors` add theirs.
"""

from __future__ import annotations

from hetstream.base.text import printable

__all__ = [
    "ConfigError",
    "HetstreamError",
    "OptionsError",
    "UsageError",
]


class HetstreamError(Exception):
    """Base of all: the message says what failed, the value seen, the rule and the next step.

    Whatever logs or prints it, nothing in it is more to a terminal than text: names and values are others' words.
    """

    def __str__(self) -> str:
        """The message, with escapes in the place of what is not printed."""
        return "\n".join(map(printable, super().__str__().split("\n")))


class UsageError(HetstreamError):
    """The command line, a keyword argument or a script is wrong."""


class ConfigError(HetstreamError):
    """An option or environment value breaks its rule."""


class OptionsError(ConfigError, ValueError):
    """Keywords break their rules; the message names every problem. torch raises ValueError for the like."""
