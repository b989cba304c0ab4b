"""Install Debian's Slurm packages on this machine. Called by `devcluster install` and `up --install`.

It starts no service: while apt runs, Debian's own switch for that (policy-rc.d) says no, and is put back afterwards.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.devcluster import programs
from tests.devcluster.apt import has_apt, run_quietly
from tests.devcluster.errors import InstallFailed, SlurmMissing
from tests.devcluster.lock import MACHINE, locked
from tests.devcluster.programs import missing_of, missing_programs

# Slurm's plugins for Lua need liblua, but nothing depends on it.
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "liblua5.1-0")
SLURMDBD_PACKAGES = ("slurmdbd", "slurm-wlm-mysql-plugin")
# The database as a program alone, without the service of mariadb-server; my_print_defaults is among the client's.
MARIADB_PACKAGES = ("mariadb-server-core", "mariadb-client-core")
# Another apt may be at work (unattended upgrades): wait for it.
APT_INSTALL = ("apt-get", "install", "-y", "-q", "-o", "DPkg::Lock::Timeout=120", "--no-install-recommends")
UPDATE_ARGV = ("apt-get", "update", "-q")

POLICY_FILE = Path("/usr/sbin/policy-rc.d")
SAVED_SUFFIX = ".before-hetstream"
# Exit status 101 means "action forbidden" (invoke-rc.d(8)).
POLICY_FORBIDS = 101
OUR_POLICY = f"#!/bin/sh\n# Put here by `devcluster install` while apt runs.\nexit {POLICY_FORBIDS}\n"
LOCK_TIMEOUT_S = 300.0

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """Programs, and the packages that hold them.

    Attributes:
        packages: Debian's.
        missing: says which of the programs are not there.
    """

    packages: tuple[str, ...]
    missing: Callable[[], list[str]]


SLURM = Wanted(PACKAGES, missing_programs)
SLURMDBD = Wanted(SLURMDBD_PACKAGES, lambda: missing_of((programs.SLURMDBD,)))
MARIADB = Wanted(MARIADB_PACKAGES, lambda: missing_of(programs.MARIADB))


def why_not_installable() -> str:
    """Why apt cannot be used here, or nothing if it can."""
    if not has_apt():
        return "this machine has no apt-get (Debian and Ubuntu only)"
    if os.geteuid() != 0:
        return f"user id {os.geteuid()} is not root"
    return ""


def install(progress: Progress, wanted: Wanted = SLURM) -> bool:
    """Make sure that programs are on this machine.

    Args:
        progress: told what takes long.
        wanted: which.

    Returns:
        whether anything was installed.

    Raises:
        SlurmMissing: programs are missing and apt cannot be used here.
        InstallFailed: apt failed.
    """
    missing = wanted.missing()
    if not missing:
        return False
    reason = why_not_installable()
    argv, names = (*APT_INSTALL, *wanted.packages), ", ".join(wanted.packages)
    if reason:
        raise SlurmMissing(
            f"not found: {', '.join(missing)}; and {reason}. Run as root on Debian or Ubuntu: {' '.join(argv)}"
        )
    with locked(MACHINE, LOCK_TIMEOUT_S, "installing Slurm"), no_service_starts(POLICY_FILE):
        if not wanted.missing():
            # Another process installed them while this one waited.
            return True
        progress(f"installing {names}")
        try:
            run_quietly(argv)
        except InstallFailed:
            # No package lists yet, or lists so old that their packages are gone.
            progress("updating apt's package lists")
            run_quietly(UPDATE_ARGV)
            run_quietly(argv)
    missing = wanted.missing()
    if missing:
        raise InstallFailed(f"apt installed {names}, but {', '.join(missing)} is still not on PATH")
    return True


@contextmanager
def no_service_starts(policy: Path) -> Iterator[None]:
    """Forbid package scripts to start services, unless the machine forbids it already."""
    saved = policy.with_name(policy.name + SAVED_SUFFIX)
    # What an earlier install left behind that was killed.
    if policy.exists() and policy.read_text(errors="replace") == OUR_POLICY:
        policy.unlink()
    if saved.exists():
        os.replace(saved, policy)
    if _forbids_starts(policy):
        yield
        return
    if policy.exists():
        os.replace(policy, saved)
    try:
        policy.write_text(f"#!/bin/sh\n# Put here by `devcluster install` while apt runs.\nexit {POLICY_FORBIDS}\n")
        policy.chmod(0o755)
        yield
    finally:
        policy.unlink(missing_ok=True)
        if saved.exists():
            os.replace(saved, policy)


def _forbids_starts(policy: Path) -> bool:
    if not os.access(policy, os.X_OK):
        return False
    try:
        asked = subprocess.run(
            [str(policy), "munge", "start"], stdin=subprocess.DEVNULL, capture_output=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == POLICY_FORBIDS
