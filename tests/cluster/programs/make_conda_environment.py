"""Make a conda environment without a conda channel. Usage: make_conda_environment.py DIRECTORY PREFIX

It runs in an environment with py-rattler, the implementation of conda that pixi uses: the package `python` is made of
this machine's own Python, put into a channel on disk, solved for, installed into PREFIX and linked as any other package
is. PREFIX/activate.sh is what activation runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import platform
import sys
import sysconfig
import tarfile
from pathlib import Path

import rattler
from rattler.index import index_fs
from rattler.shell import ActivationVariables, Shell, activate

VERSION = platform.python_version()
SUBDIR = "linux-64"


def files_of_python() -> dict[str, Path]:
    """Interpreter and standard library, by their place in an environment."""
    short = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    stdlib = Path(sysconfig.get_path("stdlib"))
    found = {f"bin/{name}": Path(sys.executable).resolve() for name in ("python", short)}
    for path in stdlib.rglob("*"):
        inside = path.relative_to(stdlib)
        unused = {"site-packages", "dist-packages", "test", "__pycache__", "idlelib", "ensurepip", "lib2to3"} & set(
            inside.parts
        )
        if path.is_file() and not path.is_symlink() and not unused and not inside.parts[0].startswith("config-"):
            found[f"lib/{short}/{inside}"] = path
    return found


def write_package(channel: Path) -> None:
    """The package `python` in its first form, a tar of the files with a description of each."""
    index = {"name": "python", "version": VERSION, "build": "0", "build_number": 0, "depends": [], "subdir": SUBDIR,
             "arch": "x86_64", "platform": "linux", "license": "PSF-2.0"}  # fmt: skip
    files = files_of_python()
    listed = [
        {"_path": name, "path_type": "hardlink", "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
         "size_in_bytes": path.stat().st_size}
        for name, path in files.items()
    ]  # fmt: skip
    info = {"index.json": index, "paths.json": {"paths": listed, "paths_version": 1}, "about.json": {}}
    scratch = channel / "info"
    scratch.mkdir(parents=True)
    (channel / SUBDIR).mkdir()
    with tarfile.open(channel / SUBDIR / f"python-{VERSION}-0.tar.bz2", "w:bz2", compresslevel=1) as archive:
        for name, content in info.items():
            (scratch / name).write_text(json.dumps(content))
            archive.add(scratch / name, f"info/{name}")
        (scratch / "files").write_text("\n".join(files))
        archive.add(scratch / "files", "info/files")
        for name, path in files.items():
            archive.add(path, name)


async def main() -> None:
    """Make package, channel and environment."""
    directory, prefix = Path(sys.argv[1]), Path(sys.argv[2])
    channel = directory / "channel"
    write_package(channel)
    await index_fs(channel)
    records = await rattler.solve([channel.as_uri()], ["python"], platforms=[SUBDIR])
    await rattler.install(records, prefix, cache_dir=directory / "cache", show_progress=False)
    script = activate(prefix, ActivationVariables(), Shell.bash, SUBDIR).script
    (prefix / "activate.sh").write_text(script)


if __name__ == "__main__":
    asyncio.run(main())
