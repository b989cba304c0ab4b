"""A directory of wheels -> hetstream.spec and hetstream-VERSION.eb beside them. Called by `make packages`.

    python slurm_plugin/packaging/recipes.py DIST PYTHON

Name, version and summary are those of hetstream's wheel in DIST; the other wheels there are what it needs. PYTHON is
the interpreter that the wheels were gathered for, which the RPM requires.
"""

from __future__ import annotations

import hashlib
import re
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    """Write both recipes."""
    # By its own name: the wheels are for one version of Python, which `python3` need not stay.
    dist, python = Path(sys.argv[1]), str(Path(sys.argv[2]).resolve())
    if Path(python).is_relative_to("/root") or Path(python).is_relative_to("/home"):
        print(f"{python} is in a home directory: name an interpreter of the system, as in PYTHON=/usr/bin/python3.12")
        return 1
    wheels = sorted(dist.glob("*.whl"), key=lambda wheel: (wheel.name.startswith("hetstream-"), wheel.name))
    if not wheels or not wheels[-1].name.startswith("hetstream-"):
        print(f"{dist} holds no wheel of hetstream: make packages")
        return 1
    metadata = _metadata(wheels[-1])
    values = {
        "VERSION": metadata["Version"],
        "SUMMARY": metadata["Summary"],
        "PYTHON": python,
        "SOURCES": "\n".join(f"Source{place}: {wheel.name}" for place, wheel in enumerate(wheels)),
        "FILES": " ".join(f"%{{SOURCE{place}}}" for place in range(len(wheels))),
        "WHEELS": "\n".join(f"    '{wheel.name}'," for wheel in wheels),
        "CHECKSUMS": "\n".join(f"    '{hashlib.sha256(wheel.read_bytes()).hexdigest()}'," for wheel in wheels),
    }
    _fill("hetstream.spec.in", dist / "hetstream.spec", values)
    _fill("hetstream.eb.in", dist / f"hetstream-{values['VERSION']}.eb", values)
    return 0


def _metadata(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        return dict(Parser().parsestr(archive.read(name).decode(), headersonly=True).items())


def _fill(template: str, path: Path, values: dict[str, str]) -> None:
    text = re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], (HERE / template).read_text())
    path.write_text(text)
    print(path)


if __name__ == "__main__":
    sys.exit(main())
