"""Hatchling's hook: a wheel brings man pages and completion, so that they are there after `pip install`."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Documents(BuildHookInterface):
    """Writes them to a directory of its own, from which the wheel takes them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Have hetstream of this source tree describe its own commands."""
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        import hetstream

        hetstream.__path__.append(self.root)  # an unpacked source archive has no links
        os.environ["COLUMNS"] = "100"  # as wide as argparse makes its lines, wherever the wheel is built
        from hetstream.slurm_plugin.cli.completion import SHELLS, completion, man_pages

        self._directory = tempfile.TemporaryDirectory()
        files = {path: completion(shell) + "\n" for shell, path in SHELLS.items()}
        files |= {f"share/man/man1/{name}": text for name, text in man_pages(self.metadata.version).items()}
        for number, (path, text) in enumerate(sorted(files.items())):
            made = Path(self._directory.name, str(number))
            made.write_text(text)
            build_data["shared_data"][str(made)] = path

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The wheel is written."""
        if version != "editable":
            self._directory.cleanup()
