"""Lay this environment over another one, whose packages it sees too, with hetstream's command: layer.py OTHER_PYTHON"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

_COMMAND = """#!{python}
import sys

from hetstream.slurm_plugin.cli import main

sys.exit(main())
"""


def main() -> None:
    question = [sys.argv[1], "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(question, check=True, capture_output=True, text=True).stdout.strip()
    # addsitedir reads the other's .pth files, too: hetstream is installed there as one.
    line = f"import site; site.addsitedir({packages!r})\n"
    (Path(sysconfig.get_path("purelib")) / "base.pth").write_text(line)
    # Libraries that a package puts beside Python's, as MPICH does, are looked for in this environment's own folder.
    libraries = Path(packages).parents[1]
    for library in set(libraries.iterdir()) - {Path(packages).parent}:
        link = Path(sys.prefix, "lib", library.name)
        link.unlink(missing_ok=True)
        link.symlink_to(library)
    command = Path(sysconfig.get_path("scripts")) / "hetstream"
    command.write_text(_COMMAND.format(python=sys.executable))
    command.chmod(0o755)


if __name__ == "__main__":
    main()
