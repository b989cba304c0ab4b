"""The environments that need a tool: a real conda environment and a real Apptainer, each made where it can be had."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.devcluster.apt import has_apt, run_quietly
from tests.devcluster.errors import InstallFailed
from tests.devcluster.roots import KEYRINGS, _apt_options, _mirror, loader
from tests.environment import share_packages

# Debian has it in no stable release.
APPTAINER_RELEASE = "sid"
MAKE_CONDA = Path(__file__).with_name("cluster") / "programs" / "make_conda_environment.py"


def make_conda_environment(directory: Path) -> Path:
    """A conda environment, by py-rattler; returns its directory. Its Python is this machine's, see the program."""
    tools = directory / "tools"
    venv.create(tools, with_pip=False, symlinks=True)
    pip = Path(sys.executable).with_name("pip")
    argv = [pip, "--python", tools / "bin/python", "install", "-q", "--disable-pip-version-check", "py-rattler==0.28.0"]
    if subprocess.run(argv, check=False, timeout=300).returncode:
        pytest.skip("py-rattler cannot be installed: pip install py-rattler")
    prefix = directory / "environment"
    subprocess.run([tools / "bin/python", MAKE_CONDA, directory, prefix], check=True, timeout=120)
    share_packages(prefix)
    return prefix


def make_apptainer(directory: Path) -> Path:
    """Debian's Apptainer with its own C library below a directory; returns the command."""
    keyring = next((path for path in KEYRINGS if path.exists()), None)
    if not has_apt() or keyring is None:
        pytest.skip("Apptainer is unpacked from Debian's package, and this machine has no apt-get or not its keys")
    apt, root = directory / "apt", directory / "root"
    for place in (apt / "lists" / "partial", apt / "archives" / "partial", root):
        place.mkdir(parents=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(f"deb [signed-by={keyring}] {_mirror()} {APPTAINER_RELEASE} main\n")
    try:
        run_quietly(["apt-get", *_apt_options(apt), "update"])
        wanted = ["--no-install-recommends", "--download-only", "apptainer", "patchelf"]
        run_quietly(["apt-get", *_apt_options(apt), "install", "-y", *wanted])
    except InstallFailed as error:
        pytest.skip(f"Debian {APPTAINER_RELEASE} gives no Apptainer: {error}")
    for archive in sorted((apt / "archives").glob("*.deb")):
        run_quietly(["dpkg-deb", "-x", str(archive), str(root)])
    start = loader(root)
    (starter,) = root.glob("usr/lib/*/apptainer/bin/starter")
    command = root / "usr/bin/apptainer"
    patchelf = [str(start), "--library-path", str(start.parent), str(root / "usr/bin/patchelf")]
    for program in (command, starter):
        adapt = ["--set-interpreter", str(start), "--force-rpath", "--set-rpath", str(start.parent), str(program)]
        run_quietly([*patchelf, *adapt])
    # It looks for these beside itself.
    (root / "usr/etc").symlink_to("../etc")
    for place in ("usr/var/lib/apptainer/mnt/session", "usr/lib/var/lib/apptainer/mnt/session"):
        (root / place).mkdir(parents=True, exist_ok=True)
    # A machine may withhold a capability from root, and Apptainer gives root all of them unless it is told otherwise.
    settings = root / "etc/apptainer/apptainer.conf"
    text = settings.read_text()
    assert text.count("root default capabilities = full") == 1
    settings.write_text(text.replace("root default capabilities = full", "root default capabilities = no"))
    return command


def make_image(directory: Path) -> Path:
    """An image in the form of a directory, with a Python environment at /opt/environment that no host has."""
    environment = directory / "opt/environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=60)
    share_packages(environment)
    for name in ("bin", "dev", "etc", "home", "lib", "lib64", "proc", "root", "sys", "tmp", "usr", "var/tmp"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    for name in ("passwd", "group"):
        (directory / "etc" / name).touch()
    return directory


def bound_paths() -> str:
    """What an image of this kind takes from the host: the system, this Python and the packages of this environment."""
    here = Path(__file__).resolve().parents[1]
    wanted = [Path(sys.base_prefix), Path(sysconfig.get_path("purelib")), here]
    system = {Path(name) for name in ("/usr", "/lib", "/lib64", "/bin")}
    return ",".join(map(str, [*sorted(system), *(path for path in wanted if Path("/usr") not in path.parents)]))
