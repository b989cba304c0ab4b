"""Files of other projects' test suites by their addresses: collects them into a folder that is not committed.

    python tests/peers/suite_files.py [--into DIR] [--clones DIR]

`suite_files.txt` has the form of `sbatch_scripts.txt`, and files come from git in the same way. They keep their
licences and are no part of this project. A file lies at NAME/PATH: the repository's name, and its path there. What is
gone, or is another text than it was, is counted and named; exit code 1 if anything is. Suites that lack a file are left
out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # for the import below when this file is run as a script

from tests.peers import sbatch_corpus  # noqa: E402

ADDRESSES = HERE / "suite_files.txt"
FOLDER = HERE.parents[1] / "build" / "peers"  # git ignores it


@dataclass(frozen=True)
class SuiteFile(sbatch_corpus.Address):
    """Where a file of a suite is published."""

    def file(self, folder: Path) -> Path:
        """Where it is in the folder: as in its repository, so that what a test imports beside it is found."""
        return folder / self.repository.partition("/")[2] / self.path


def stored_addresses() -> list[SuiteFile]:
    """Those of the list beside this file."""
    return [SuiteFile(**vars(address)) for address in sbatch_corpus.read_addresses(ADDRESSES.read_text())]


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect, and say what is missing."""
    what = "Collect files of other projects' test suites."
    _, missing = sbatch_corpus.collect_as_asked(what, stored_addresses(), FOLDER, "files", arguments)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
