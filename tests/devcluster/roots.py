"""Debian roots: another release's Slurm with its own libraries, made once and cached.

Called by the command line for `--slurm VERSION`. A root is a directory of unpacked Debian packages. Nothing is ever
run "inside" it: patchelf makes each Slurm program name the root's own dynamic loader and libraries, and it then runs on
the host's file system like any other. Jobs therefore see the host as it is, with the user's Python and files at their
own paths, and there is no chroot, no namespace and no mount that could be left behind.

It changes nothing outside the cache directory: apt works on lists, archives and a package database of its own, and no
package script runs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hetstream.slurm_plugin.database import check_place, make_place
from hetstream.slurm_plugin.install.installation import readable_by_all
from tests.devcluster.apt import has_apt, run_quietly
from tests.devcluster.errors import InstallFailed, SlurmMissing
from tests.devcluster.install import PACKAGES, SLURMDBD_PACKAGES
from tests.devcluster.lock import locked
from tests.devcluster.programs import (
    SLURMDBD,
    SlurmPrograms,
    host_programs,
    missing_programs,
    slurm_version,
)
from tests.devcluster.spec import RootPaths

DEFAULT_CACHE_DIR = Path("/var/cache/hetstream")

# What `--slurm` calls the Slurm that is installed on the machine.
HOST = "host"

# Which Debian release carries which Slurm.
RELEASES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "forky"}

ROOT_PACKAGES = (*PACKAGES, "patchelf")

DEFAULT_MIRROR = "http://deb.debian.org/debian"
# The first name is Debian 13's.
KEYRINGS = (
    Path("/usr/share/keyrings/debian-archive-keyring.pgp"),
    Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
)
LOCK_TIMEOUT_S = 300.0

COMMANDS = "commands"
PLUGINS = "plugins"
PROGRAMS = (
    *("munged", "slurmctld", "slurmd", "slurmstepd"),
    *("munge", "sacct", "sacctmgr", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol", "sdiag", "sinfo"),
    *("sprio", "squeue", "sreport", "srun", "sshare", "sstat", "strigger", "unmunge"),
)
PARTIAL_PREFIX = ".partial-"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class SlurmRoot:
    """A Debian root on disk.

    Attributes:
        version: Slurm's release, for example `24.11`.
        directory: the unpacked packages.
        accounting: slurmdbd is among them.
    """

    version: str
    directory: Path
    accounting: bool = False

    @property
    def paths(self) -> RootPaths:
        """What a cluster's files need to know of it."""
        return RootPaths(plugin_dir=self.directory / PLUGINS, commands_dir=self.directory / COMMANDS)

    def programs(self) -> SlurmPrograms:
        """The root's Slurm, to be booted."""
        commands = self.paths.commands_dir
        return SlurmPrograms(
            version=slurm_version([str(commands / "slurmctld")]),
            munged=commands / "munged",
            slurmctld=commands / "slurmctld",
            slurmd=commands / "slurmd",
            root=self.paths,
            slurmdbd=commands / SLURMDBD if self.accounting else None,
        )


def needs_root(release: str) -> bool:
    """Whether a release comes from a Debian root: it was asked for by number, and the host has another or none."""
    if release == HOST:
        return False
    return bool(missing_programs()) or not host_programs().version.startswith(release)


def choose_programs(release: str, cache_dir: Path, progress: Progress, *, accounting: bool = False) -> SlurmPrograms:
    """The Slurm to boot: the host's own if it will do, else a Debian root's, which is made if it is not there.

    Args:
        release: a key of RELEASES, or HOST.
        cache_dir: where roots are.
        progress: told what takes long.
        accounting: with slurmdbd, where that is not on the host anyway.

    Raises:
        SlurmMissing, InstallFailed: see `host_programs` and `prepare_root`.
    """
    if not needs_root(release):
        return host_programs()
    return prepare_root(release, cache_dir, progress, accounting=accounting).programs()


def root_of(version: str, cache_dir: Path, *, accounting: bool = False) -> SlurmRoot:
    """Where the root of a release is, or would be: one with slurmdbd is a root of its own."""
    name = f"debian-{RELEASES[version]}-slurm-{version}{'-slurmdbd' if accounting else ''}"
    return SlurmRoot(version, cache_dir / name, accounting)


def prepare_root(version: str, cache_dir: Path, progress: Progress, *, accounting: bool = False) -> SlurmRoot:
    """Return the cached root of a release, made first if it is not there.

    Raises:
        SlurmMissing: the machine lacks apt or Debian's keys.
        InstallFailed: apt failed, or the Debian release carries another Slurm by now.
        UnsafePlace: somebody else than root and this user could have put programs there.
    """
    root = root_of(version, cache_dir, accounting=accounting)
    if root.directory.exists():
        check_place(root.directory)
        return root
    check_place(cache_dir)
    keyring = next((path for path in KEYRINGS if path.exists()), None)
    if not has_apt():
        raise SlurmMissing(f"Slurm {version} is made from Debian packages, and this machine has no apt-get")
    if keyring is None:
        raise SlurmMissing(f"Debian's keys are not in {KEYRINGS[-1]}: apt-get install debian-archive-keyring")
    with ExitStack() as held:
        held.enter_context(readable_by_all())
        make_place(cache_dir)
        held.enter_context(locked(cache_dir, LOCK_TIMEOUT_S, f"preparing Slurm {version}"))
        if root.directory.exists():
            return root
        for stale in cache_dir.glob(f"{PARTIAL_PREFIX}*"):
            shutil.rmtree(stale)
        scratch = Path(tempfile.mkdtemp(prefix=PARTIAL_PREFIX, dir=cache_dir))
        try:
            _build(root, scratch, keyring, progress)
        finally:
            shutil.rmtree(scratch)
    return root


def _build(root: SlurmRoot, scratch: Path, keyring: Path, progress: Progress) -> None:
    release = RELEASES[root.version]
    progress(f"fetching Slurm {root.version} from Debian {release} into {root.directory} (30 MB, once)")
    apt_dir, unpacked = scratch / "apt", scratch / "root"
    for directory in (apt_dir / "lists" / "partial", apt_dir / "archives" / "partial", unpacked):
        directory.mkdir(parents=True)
    # An empty package database: apt then fetches every dependency down to the C library.
    (apt_dir / "status").touch()
    (apt_dir / "sources.list").write_text(f"deb [signed-by={keyring}] {_mirror()} {release} main\n")
    options = _apt_options(apt_dir)
    packages = (*ROOT_PACKAGES, *(SLURMDBD_PACKAGES if root.accounting else ()))
    run_quietly(["apt-get", *options, "update"])
    run_quietly(["apt-get", *options, "install", "-y", "--no-install-recommends", "--download-only", *packages])
    for archive in sorted((apt_dir / "archives").glob("*.deb")):
        run_quietly(["dpkg-deb", "-x", str(archive), str(unpacked)])
    # The packages of Debian 12 still hold both /lib and /usr/lib, which are one on every machine.
    for name in ("bin", "lib", "lib64", "sbin"):
        if (unpacked / name).exists():
            shutil.copytree(unpacked / name, unpacked / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(unpacked / name)
    for unused in ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/perl", "usr/lib/systemd"):
        shutil.rmtree(unpacked / unused, ignore_errors=True)
    version = slurm_version(_start_argv(_find_program(unpacked, "slurmctld")))
    if not version.startswith(root.version):
        raise InstallFailed(
            f"Debian {release} carries Slurm {version} by now, not {root.version}. "
            "Use another --slurm version, or the host's own"
        )
    _adapt_programs(unpacked, root)
    # Debian puts Slurm's plugins beside the C library.
    (unpacked / PLUGINS).symlink_to(loader(unpacked).parent.relative_to(unpacked) / "slurm-wlm")
    os.rename(unpacked, root.directory)


def _apt_options(apt_dir: Path) -> list[str]:
    """Point apt at its own lists, archives and database, and at nothing of the host but its network settings."""
    settings = {
        "Dir::Etc::SourceList": apt_dir / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::Preferences": "/dev/null",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Dir::State": apt_dir,
        "Dir::State::Lists": apt_dir / "lists",
        "Dir::State::status": apt_dir / "status",
        "Dir::Cache": apt_dir,
        "Dir::Cache::Archives": apt_dir / "archives",
        # The user _apt cannot write to the scratch directory.
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
    }
    return ["-q", *(word for key, value in settings.items() for word in ("-o", f"{key}={value}"))]


def _mirror() -> str:
    """The Debian mirror of the host's own apt sources, or Debian's default one."""
    lines = run_quietly(["apt-get", "indextargets", "--format", "$(ORIGIN)|$(REPO_URI)|$(RELEASE)|$(COMPONENT)"])
    return mirror_from(lines)


def mirror_from(indextargets: str) -> str:
    """The mirror in what `apt-get indextargets` printed as ORIGIN|REPO_URI|RELEASE|COMPONENT lines."""
    for line in indextargets.splitlines():
        origin, uri, release, component = line.split("|")
        if origin == "Debian" and component == "main" and "-" not in release:
            return uri.rstrip("/")
    return DEFAULT_MIRROR


def loader(directory: Path) -> Path:
    """The dynamic loader of the root in `directory`."""
    found = sorted(directory.glob("usr/lib/*/ld-linux*.so.*"))
    if not found:
        raise InstallFailed(f"the packages in {directory} hold no dynamic loader (usr/lib/*/ld-linux*.so.*)")
    return found[0]


def _start_argv(program: Path) -> list[str]:
    """How to run a program of a root that has not been adapted yet."""
    unpacked = program.parents[2]
    return [str(loader(unpacked)), "--library-path", library_path(loader(unpacked)), str(program)]


def library_path(loader_path: Path) -> str:
    """Where the root's libraries are: beside its loader, and Slurm's own one in the directory of the plugins."""
    return f"{loader_path.parent}:{loader_path.parent}/slurm-wlm"


def _adapt_programs(unpacked: Path, root: SlurmRoot) -> None:
    """Make Slurm's programs use the root's loader and libraries at the final place, and link them by plain names.

    The search path goes into the programs alone (DT_RPATH, which their libraries and plugins inherit): a job's own
    programs run with the host's libraries.
    """
    patchelf = _start_argv(unpacked / "usr/bin/patchelf")
    final_loader = root.directory / loader(unpacked).relative_to(unpacked)
    for plugin in (loader(unpacked).parent / "slurm-wlm").glob("*.so"):
        if not plugin.is_symlink():
            # A search path of its own would be the host's, and hide the program's.
            run_quietly([*patchelf, "--remove-rpath", str(plugin)])
    (unpacked / COMMANDS).mkdir()
    for name in (*PROGRAMS, *((SLURMDBD,) if root.accounting else ())):
        program = _find_program(unpacked, name)
        adapt = ["--set-interpreter", str(final_loader), "--force-rpath", "--set-rpath", library_path(final_loader)]
        run_quietly([*patchelf, *adapt, str(program)])
        (unpacked / COMMANDS / name).symlink_to(Path("..") / program.relative_to(unpacked))


def _find_program(unpacked: Path, name: str) -> Path:
    # Debian calls the daemons slurmctld-wlm and so on; a script of the package would link the plain name to it.
    for directory in ("usr/bin", "usr/sbin"):
        for candidate in (unpacked / directory / f"{name}-wlm", unpacked / directory / name):
            if candidate.is_file():
                return candidate
    raise InstallFailed(f"the packages hold no program {name}: {', '.join(ROOT_PACKAGES)}")
