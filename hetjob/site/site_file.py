"""The site's file: an environment file in which a site says what holds for all its jobs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

SITE_FILE = Path("/etc/hetstream/daemon.env")


def site_value(name: str, environ: Mapping[str, str]) -> str | None:
    """Return what the environment or the site's file says of a setting that is one word; None if neither does."""
    text = environ.get(name)
    return in_site_file(name, SITE_FILE) if text is None else text


def in_site_file(name: str, site_file: Path) -> str | None:
    """Return what the site's file says of a setting; None if it says nothing, or is not there."""
    try:
        return assignments(site_file.read_text(errors="replace")).get(name)
    except OSError:
        return None


def assignments(text: str) -> dict[str, str]:
    """NAME=VALUE lines of an environment file (systemd.exec(5)), as far as they are ours."""
    found = re.findall(r"^\s*(HETSTREAM_\w+)=(.*)$", text, re.MULTILINE)
    return {name: value.strip().strip("\"'") for name, value in found}
