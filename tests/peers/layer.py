"""Lay this environment over another one, whose packages it sees too: python layer.py OTHER_PYTHON"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def main() -> None:
    question = [sys.argv[1], "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(question, check=True, capture_output=True, text=True).stdout.strip()
    # addsitedir reads the other's .pth files, too: hetstream is installed there as one.
    line = f"import site; site.addsitedir({packages!r})\n"
    (Path(sysconfig.get_path("purelib")) / "base.pth").write_text(line)


if __name__ == "__main__":
    main()
