"""A real Chromium without a window, for tests of pages."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.programs import require

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--enable-logging=stderr",
)  # fmt: skip


class Browser:
    """Opens pages, each time with a profile of its own.

    Args:
        directory: where profiles and pictures go.
    """

    def __init__(self, directory: Path) -> None:
        require("chromium")
        self._directory = directory
        self._num_runs = 0

    def dump(self, url: str, width: int) -> tuple[str, list[str]]:
        """The document after its scripts ran, and what was written to the console."""
        done = self._run("--dump-dom", f"--window-size={width},900", url)
        return done.stdout, re.findall(r":CONSOLE.*", done.stderr)

    def picture(self, url: str, width: int, height: int) -> bytes:
        """A PNG of the page."""
        path = self._directory / f"{width}.png"
        self._run(f"--screenshot={path}", f"--window-size={width},{height}", url)
        return path.read_bytes()

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        self._num_runs += 1
        profile = self._directory / f"profile-{self._num_runs}"
        profile.mkdir()
        argv = ["chromium", *FLAGS, f"--user-data-dir={profile}", *words]
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=True)
