"""How this copy of hetstream came here, and so the command that installs it elsewhere, or with more.

Standard library alone, and nothing but this file: the start-up hook runs it in Pythons that lack hetstream.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from urllib.parse import unquote, urlsplit


def install_command(extra: str = "", python: str = "") -> str:
    """Return the command that installs this copy: from its checkout, its wheel or its repository, else by its version.

    Args:
        extra: a group of optional packages, such as `metrics`.
        python: the interpreter to install it for; default the `pip` of the environment.
    """
    pip = f"{shlex.quote(python)} -m pip" if python else "pip"
    return f"{pip} install {shlex.quote(_requirement(extra, Path(__file__).resolve().parents[2]))}"


def _requirement(extra: str, place: Path) -> str:
    """What pip is to install.

    Args:
        extra: as above.
        place: the directory that holds the packages: a checkout, or `site-packages`.
    """
    group = f"[{extra}]" if extra else ""
    if (place / "pyproject.toml").is_file():
        return f"{place}{group}"
    for metadata in sorted(place.glob("hetstream-*.dist-info")):
        # https://packaging.python.org/en/latest/specifications/direct-url/: absent where it came from an index
        try:
            direct = json.loads((metadata / "direct_url.json").read_text())
            url, commit = str(direct["url"]), str(direct.get("vcs_info", {}).get("commit_id", ""))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return f"hetstream{group}=={metadata.name.removesuffix('.dist-info').partition('-')[2]}"
        path = Path(unquote(urlsplit(url).path))
        if url.startswith("file:") and path.exists():
            return f"{path}{group}"
        if commit:
            return f"hetstream{group} @ git+{url}@{commit}"
        if not url.startswith("file:"):
            return f"hetstream{group} @ {url}"
    return f"hetstream{group}"
