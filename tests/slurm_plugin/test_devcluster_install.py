"""Installing: what is said where it cannot be done, and that no service is ever started."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.devcluster import install
from tests.devcluster.__main__ import main
from tests.devcluster.errors import InstallFailed, SlurmMissing
from tests.devcluster.roots import RELEASES, prepare_root, root_of


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A PATH without Slurm and apt; returns its directory, to put programs in."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tests.devcluster.programs.SYSTEM_PATH", str(tmp_path))
    return tmp_path


def put(directory: Path, name: str, script: str) -> Path:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def forbids(policy: Path) -> bool:
    return subprocess.run([str(policy), "munge", "start"]).returncode == install.POLICY_FORBIDS


def test_without_apt_it_says_exactly_what_is_missing(bare_machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(bare_machine, "munged", "exit 0")
    assert main(["install"]) == 1
    said = capsys.readouterr().err
    assert "slurmctld, slurmd, sbatch" in said
    assert "munged" not in said
    assert "no apt-get" in said
    assert "apt-get install -y" in said


def test_without_root_it_says_so(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(bare_machine, "apt-get", "exit 0")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["install"]) == 1
    assert "user id 1000 is not root" in capsys.readouterr().err


def test_up_without_slurm_names_the_command(
    bare_machine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--state-dir", str(tmp_path / "c")]) == 1
    assert "devcluster install" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_apt_that_fails_twice_shows_the_end_of_what_it_said(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(bare_machine, "apt-get", 'echo "$1: no network"; exit 100')
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(install, "POLICY_FILE", bare_machine / "policy-rc.d")
    with pytest.raises(InstallFailed, match=r"apt-get update -q exited with 100:\n    update: no network"):
        install.install(print)
    assert not (bare_machine / "policy-rc.d").exists()


def test_old_package_lists_are_updated_once(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = " ".join(("munged", "slurmctld", "slurmd", "sbatch", "srun", "salloc", "sinfo", "squeue", "scancel"))
    script = f"""\
echo "$1" >> {bare_machine}/calls
[ "$1" = update ] && : > {bare_machine}/updated && exit 0
[ -e {bare_machine}/updated ] || exit 100
for p in {programs} scontrol; do printf '#!/bin/sh\\n' > {bare_machine}/$p; /bin/chmod 755 {bare_machine}/$p; done"""
    put(bare_machine, "apt-get", script)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(install, "POLICY_FILE", bare_machine / "policy-rc.d")
    assert install.install(print) is True
    assert (bare_machine / "calls").read_text().split() == ["install", "update", "install"]
    assert install.install(print) is False


def test_services_are_forbidden_meanwhile_and_the_machines_own_policy_comes_back(tmp_path: Path) -> None:
    policy = put(tmp_path, "policy-rc.d", "exit 0 # mine")
    before = (policy.read_text(), policy.stat().st_mode)

    def interrupted() -> None:
        with install.no_service_starts(policy):
            assert forbids(policy)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (policy.read_text(), policy.stat().st_mode) == before
    assert os.listdir(tmp_path) == ["policy-rc.d"]


def test_a_policy_that_forbids_already_is_not_touched(tmp_path: Path) -> None:
    policy = put(tmp_path, "policy-rc.d", "exit 101")
    before = policy.stat()
    with install.no_service_starts(policy):
        assert policy.stat() == before


def test_without_a_policy_none_is_left(tmp_path: Path) -> None:
    with install.no_service_starts(tmp_path / "policy-rc.d"):
        assert forbids(tmp_path / "policy-rc.d")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("had_own", [True, False])
def test_after_an_install_that_was_killed_the_next_one_puts_things_right(tmp_path: Path, had_own: bool) -> None:
    own = "exit 0 # mine"
    if had_own:
        put(tmp_path, "policy-rc.d" + install.SAVED_SUFFIX, own)
    (tmp_path / "policy-rc.d").write_text(install.OUR_POLICY)
    with install.no_service_starts(tmp_path / "policy-rc.d"):
        assert forbids(tmp_path / "policy-rc.d")
    assert os.listdir(tmp_path) == (["policy-rc.d"] if had_own else [])
    assert not had_own or own in (tmp_path / "policy-rc.d").read_text()


def test_a_root_needs_apt(bare_machine: Path, tmp_path: Path) -> None:
    with pytest.raises(SlurmMissing, match="no apt-get"):
        prepare_root("24.11", tmp_path / "cache", print)


def test_a_root_that_fails_leaves_nothing(bare_machine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put(bare_machine, "apt-get", "echo no network; exit 100")
    keyring = bare_machine / "keyring.gpg"
    keyring.touch()
    monkeypatch.setattr("tests.devcluster.roots.KEYRINGS", (keyring,))
    cache = tmp_path / "cache"
    (cache / ".partial-old").mkdir(parents=True)
    with pytest.raises(InstallFailed, match="no network"):
        prepare_root("24.11", cache, print)
    assert os.listdir(cache) == []


def test_a_root_that_is_there_is_used_as_it_is(bare_machine: Path, tmp_path: Path) -> None:
    for release in RELEASES:
        root_of(release, tmp_path).directory.mkdir()
        assert prepare_root(release, tmp_path, print) == root_of(release, tmp_path)
