"""Public sbatch scripts by their addresses: collects them into a folder that is not committed, and checks them.

    python tests/peers/sbatch_corpus.py [--into DIR] [--clones DIR]

`sbatch_scripts.txt` has a line `REPOSITORY COMMIT` for each repository of GitHub, and below it a line `SHA-256  PATH`
for each script. The scripts keep their licences and are no part of this project. They are read from git: from a clone
in the folder that --clones names (`OWNER+NAME`, `OWNER/NAME` or `NAME`, with or without a work tree), or else from
GitHub. What is gone, or is another text than it was, is counted and named; exit code 1 if it is more than a tenth.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ADDRESSES = HERE / "sbatch_scripts.txt"
# Below `build`, which git ignores. SBATCH_CORPUS names another folder.
FOLDER = Path(os.environ.get("SBATCH_CORPUS") or HERE.parents[1] / "build" / "sbatch_corpus")
COLLECT = "python tests/peers/sbatch_corpus.py"
# Addresses die: with fewer scripts than this share of the list, a run says little.
LEAST_SHARE = 0.9
_CLONE_LIMIT_S = 600


@dataclass(frozen=True)
class Address:
    """Where a script is published.

    Attributes:
        repository: `owner/name` on GitHub.
        commit: 40 hexadecimal digits.
        path: below the root of the repository.
        sha256: of the script's bytes.
    """

    repository: str
    commit: str
    path: str
    sha256: str

    def file(self, folder: Path) -> Path:
        """Where the script is in the folder; scripts of one name are apart."""
        return folder / self.repository / self.sha256[:8] / Path(self.path).name

    def is_in(self, folder: Path) -> bool:
        """Whether the folder has the script, and it is the one that is meant."""
        file = self.file(folder)
        return file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == self.sha256


def read_addresses(text: str) -> list[Address]:
    """The addresses of a list.

    Raises:
        ValueError: a line of another form; it is named.
    """
    addresses: list[Address] = []
    repository = commit = ""
    for number, line in enumerate(text.splitlines(), start=1):
        first, _, path = line.partition("  ")
        if path and len(first) == 64 and commit:
            addresses.append(Address(repository, commit, path, first))
        elif len(words := line.split(" ")) == 2 and "/" in words[0] and len(words[1]) == 40:
            repository, commit = words
        elif line and not line.startswith("#"):
            raise ValueError(f"line {number} is neither `REPOSITORY COMMIT` nor `SHA-256  PATH`: {line!r}")
    return addresses


def stored_addresses() -> list[Address]:
    """Those of the list beside this file."""
    return read_addresses(ADDRESSES.read_text())


def collect(addresses: Sequence[Address], folder: Path, clones: Path | None) -> list[str]:
    """Put the scripts into the folder; what could not be had is returned, a line each."""
    missing: list[str] = []
    for repository in dict.fromkeys(address.repository for address in addresses):
        wanted = [item for item in addresses if item.repository == repository and not item.is_in(folder)]
        if wanted:
            with _clone_of(repository, clones) as (git_dir, problem):
                missing += [
                    f"{item.repository} {item.path}: {why}"
                    for item in wanted
                    if (why := problem or _copy(item, git_dir, folder))
                ]
    return missing


@contextmanager
def _clone_of(repository: str, clones: Path | None) -> Iterator[tuple[Path, str]]:
    """A git directory of a repository, and what is wrong if there is none."""
    names = (repository.replace("/", "+"), repository, repository.partition("/")[2])
    places = [clones / name / inner for name in names for inner in (".git", "repo", "")] if clones else []
    found = next((place for place in places if (place / "HEAD").is_file()), None)
    if found is not None:
        yield found, ""
        return
    with tempfile.TemporaryDirectory() as directory:
        url = f"https://github.com/{repository}"
        command = ["git", "clone", "-q", "--bare", "--filter=blob:none", url, directory]
        # A repository that is gone or private would ask for a password.
        environ = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
        try:
            done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_CLONE_LIMIT_S)
            problem = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["git clone failed"])[-1]
        except subprocess.TimeoutExpired:
            problem = f"git clone took more than {_CLONE_LIMIT_S} s"
        yield Path(directory), problem


def _copy(address: Address, git_dir: Path, folder: Path) -> str:
    """Copy one script; what is wrong, or nothing."""
    command = ["git", f"--git-dir={git_dir}", "show", f"{address.commit}:{address.path}"]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        return f"commit {address.commit[:12]} or the path is gone"
    if hashlib.sha256(done.stdout).hexdigest() != address.sha256:
        return "its text is another one than it was"
    file = address.file(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(done.stdout)
    return ""


def collect_as_asked(
    description: str, addresses: Sequence[Address], folder: Path, what: str, arguments: Sequence[str] | None
) -> tuple[int, int]:
    """Collect as the command line says, and print what is missing.

    Returns:
        How many are in the folder, and how many could not be had.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--into", type=Path, default=folder, metavar="DIR", help=f"the folder ({folder})")
    parser.add_argument("--clones", type=Path, metavar="DIR", help="a folder with clones of the repositories")
    options = parser.parse_args(arguments)
    missing = collect(addresses, options.into, options.clones)
    for line in missing:
        print(f"missing: {line}")
    there = sum(address.is_in(options.into) for address in addresses)
    print(f"{there} of {len(addresses)} {what} are in {options.into}, {len(missing)} could not be had")
    return there, len(missing)


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect, and say what is missing."""
    addresses = stored_addresses()
    there, _ = collect_as_asked("Collect public sbatch scripts.", addresses, FOLDER, "scripts", arguments)
    return 0 if there >= LEAST_SHARE * len(addresses) else 1


if __name__ == "__main__":
    sys.exit(main())
