"""Programs that tests need beside Slurm, and Debian's packages of them. `make test` runs this file.

    python -m tests.programs [--all]

As root it installs those that are missing. What cannot be had is one line here; the tests behind it are skipped with
the same words, and `tests/skips.py` counts them at the end.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.devcluster.errors import InstallFailed, SlurmMissing
from tests.devcluster.install import Wanted, install

PACKAGES = {
    "bash": ("bash",),
    "chromium": ("chromium", "fonts-dejavu-core"),
    "dash": ("dash",),
    "g++": ("g++",),
    "gcc": ("gcc",),
    "groff": ("groff",),
    "ip": ("iproute2",),
    "ksh": ("ksh93u+m",),
    "lua5.1": ("lua5.1",),
    "lua5.3": ("lua5.3",),
    "lua5.4": ("lua5.4",),
    "make": ("make",),
    "sh": ("dash",),
    "systemd-analyze": ("systemd",),
    "tc": ("iproute2",),
    "zsh": ("zsh",),
}
# What slow tests alone need, and none of `make test` does.
PACKAGES_OF_SLOW_TESTS = {
    "/usr/share/lmod/lmod/init/bash": ("lmod",),
    "fish": ("fish",),
    "rpmbuild": ("rpm",),
}


def why_missing(program: str) -> str:
    """Why tests of a program cannot run here, and what would help; "" if it is there.

    Raises:
        KeyError: the program has no row above, so that nothing would install it.
    """
    packages = (PACKAGES | PACKAGES_OF_SLOW_TESTS)[program]
    if shutil.which(program) or (program.startswith("/") and Path(program).exists()):
        return ""
    return f"{program} is not here: apt-get install {' '.join(packages)}"


def needs(program: str) -> pytest.MarkDecorator:
    """The mark of a test that runs a program."""
    reason = why_missing(program)
    return pytest.mark.skipif(bool(reason), reason=reason)


def require(program: str) -> None:
    """Skip the test that runs if a program is missing."""
    reason = why_missing(program)
    if reason:
        pytest.skip(reason)


def main(arguments: list[str]) -> None:
    """Install what is missing, and say what stays so."""
    rows = PACKAGES | PACKAGES_OF_SLOW_TESTS if "--all" in arguments else PACKAGES
    missing = [program for program in rows if why_missing(program)]
    # All at once; where one cannot be had, each by itself.
    for group in ([missing] if missing else []) + [[program] for program in missing]:
        wanted = tuple(package for program in group for package in rows[program])
        absent = lambda group=group: [program for program in group if why_missing(program)]  # noqa: E731
        try:
            install(lambda line: print(f"tests: {line}", flush=True), Wanted(wanted, absent))
        except SlurmMissing:
            break  # neither root nor apt: each would end alike
        except InstallFailed as error:
            if len(group) == 1:
                print(f"tests: {error}", file=sys.stderr)
    for reason in filter(None, map(why_missing, rows)):
        print(f"tests: {reason}. Its tests are skipped", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
