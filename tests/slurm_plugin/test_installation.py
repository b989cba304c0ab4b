"""`hetstream site install` and `uninstall`: a machine that was used before is byte for byte what it was."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hetstream.base.errors import ConfigError
from hetstream.hetjob.job.job import JOBS_DIR, JOURNAL_DIR, setting
from hetstream.hetjob.site.client import read_settings
from hetstream.slurm_plugin.cli import VERBS, main
from hetstream.slurm_plugin.cli.completion import SHELLS, completion
from hetstream.slurm_plugin.cli.install import closed_notes
from hetstream.slurm_plugin.install.installation import RECORD, read_record
from tests.programs import needs

SITE = (
    b"-- the site's own, \xff not UTF-8\nfunction slurm_job_submit() return slurm.SUCCESS end\r\nreturn slurm.SUCCESS"
)


class Machine:
    """A prefix and Slurm's directory, empty but for what the site has."""

    def __init__(self, directory: Path) -> None:
        self.prefix, self.slurm = directory / "usr", directory / "slurm"
        self.root = directory
        self.slurm.mkdir()
        (self.slurm / "slurm.conf").write_text("ClusterName=x\nJobSubmitPlugins=all_partitions,lua\n")

    def install(self, *words: str) -> int:
        return main(["site", "install", "--prefix", str(self.prefix), "--slurm-dir", str(self.slurm), *words])

    def uninstall(self, *words: str) -> int:
        return main(["site", "uninstall", "--force", "--prefix", str(self.prefix), *words])

    def state(self) -> dict[str, tuple[int, str]]:
        """Every file and directory with its mode and content."""
        return {
            str(path.relative_to(self.root)): (
                path.stat().st_mode,
                hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
            )
            for path in sorted(self.root.rglob("*"))
        }


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_scripts_that_nodes_run_are_executable_and_stay_while_slurm_runs_them(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    conf = machine.slurm / "slurm.conf"
    conf.write_text("ClusterName=x\n")
    machine.install()
    prolog = machine.prefix / "share/hetstream/prolog/prolog.sh"
    assert prolog.stat().st_mode & 0o777 == 0o755
    assert f"settings={machine.prefix}/etc/hetstream/packing.env" in prolog.read_text()
    conf.write_text(f"ClusterName=x\nProlog={prolog}\n")
    before = machine.state()
    assert main(["site", "uninstall", "--prefix", str(machine.prefix)]) == 1
    assert f"slurm.conf has Prolog={prolog}" in capsys.readouterr().err
    assert machine.state() == before
    conf.write_text("ClusterName=x\n")
    assert main(["site", "uninstall", "--prefix", str(machine.prefix)]) == 0
    assert not prolog.exists()


@pytest.mark.shows("`install` and `uninstall` are idempotent, with dry run, JSON, man pages and completion")
@pytest.mark.shows("the hook composes with a site's own Lua, and uninstall restores its files byte for byte")
def test_install_and_uninstall_leave_nothing(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    (machine.slurm / "job_submit.lua").write_bytes(SITE)
    (machine.slurm / "job_submit.lua").chmod(0o640)
    before = machine.state()
    assert machine.install("--dry-run") == 0
    assert machine.state() == before
    planned = capsys.readouterr().out.replace("would ", "")
    assert machine.install() == 0
    out, err = capsys.readouterr()
    assert out == planned
    # A Python below /root, as this may be, has a note of its own.
    told = [line for line in err.splitlines() if "cannot reach" not in line]
    assert told == ["hetstream: slurm.conf needs CliFilterPlugins=lua"]
    assert (machine.slurm / "job_submit.site.lua").read_bytes() == SITE
    assert f'dofile("{machine.slurm}/job_submit.site.lua")' in (machine.slurm / "job_submit.lua").read_text()
    installed = machine.state()
    assert machine.install() == 0
    assert machine.state() == installed
    assert capsys.readouterr().out == "all is in its place\n"
    assert machine.uninstall("--dry-run") == 0
    assert machine.state() == installed
    assert machine.uninstall() == 0
    assert machine.state() == before
    capsys.readouterr()
    assert machine.uninstall() == 0
    assert "nothing is installed" in capsys.readouterr().err


def test_what_slurm_conf_still_asks_for_stays(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """Without cli_filter.lua every sbatch and srun fails while the line stands, with job_submit.lua slurmctld does."""
    conf = machine.slurm / "slurm.conf"
    machine.install()
    installed = machine.state()

    def refused() -> str:
        capsys.readouterr()
        for words in ((), ("--dry-run",)):
            assert main(["site", "uninstall", "--prefix", str(machine.prefix), *words]) == 1
        assert machine.state() == {**installed, "slurm/slurm.conf": machine.state()["slurm/slurm.conf"]}
        return capsys.readouterr().err

    told = refused()
    assert f"{conf} has JobSubmitPlugins=lua, and without job_submit.lua slurmctld does not start" in told
    assert "scontrol reconfigure" in told
    assert "cli_filter" not in told
    conf.write_text("ClusterName=x\n  cliFilterPlugins = user_defaults,lua # ours\nJobSubmitPlugins=all_partitions\n")
    assert "without cli_filter.lua every sbatch, salloc and srun on this host fails" in refused()
    (machine.slurm / "more.conf").write_text("CliFilterPlugins=cli_filter/lua\n")
    installed = machine.state()
    conf.write_text("include more.conf\n#JobSubmitPlugins=lua\n")
    assert "CliFilterPlugins=lua" in refused()
    conf.write_text("include more.conf\nCliFilterPlugins=user_defaults\n#CliFilterPlugins=lua\n")
    (machine.slurm / "more.conf").unlink()
    assert main(["site", "uninstall", "--prefix", str(machine.prefix)]) == 0
    assert sorted(path.name for path in machine.slurm.iterdir()) == ["slurm.conf"]


@pytest.mark.shows("the hook composes with a site's own Lua, and uninstall restores its files byte for byte")
def test_what_is_not_ours_stays(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = machine.prefix / "share/man/man1/hetstream-frag.1"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("somebody else's")
    before = machine.state()
    machine.install()
    assert foreign.read_text() == "somebody else's"
    assert f"keep {foreign} (not placed by hetstream, or changed since)" in capsys.readouterr().out
    machine.uninstall()
    assert machine.state() == before


@pytest.mark.shows("the hook composes with a site's own Lua, and uninstall restores its files byte for byte")
def test_links_stay_links(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    (machine.root / "kept-elsewhere.lua").write_bytes(SITE)
    (machine.slurm / "job_submit.lua").symlink_to("../kept-elsewhere.lua")
    (machine.slurm / "cli_filter.lua").symlink_to("../broken")
    machine.install()
    assert (machine.slurm / "job_submit.site.lua").is_symlink()
    assert "cli_filter.lua was not placed" in capsys.readouterr().err
    machine.uninstall()
    assert os.readlink(machine.slurm / "job_submit.lua") == "../kept-elsewhere.lua"
    assert os.readlink(machine.slurm / "cli_filter.lua") == "../broken"
    assert (machine.root / "kept-elsewhere.lua").read_bytes() == SITE


@pytest.mark.shows("the hook composes with a site's own Lua, and uninstall restores its files byte for byte")
def test_what_was_changed_since_stays(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.install()
    policy = machine.prefix / "etc/hetstream/policy.lua"
    policy.write_text("return {convert = false}\n")
    machine.install()
    assert policy.read_text() == "return {convert = false}\n"
    machine.uninstall()
    assert f"leave {policy} (changed since it was placed)" in capsys.readouterr().out
    assert [path for path in machine.prefix.rglob("*") if path.is_file()] == [policy]


@pytest.mark.shows("the hook composes with a site's own Lua, and uninstall restores its files byte for byte")
def test_a_site_that_puts_its_own_file_back_loses_neither(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    hook, aside = machine.slurm / "job_submit.lua", machine.slurm / "job_submit.site.lua"
    hook.write_bytes(SITE)
    machine.install()
    hook.write_text("-- from the site's configuration management\n")
    capsys.readouterr()
    machine.install()
    out, err = capsys.readouterr()
    assert f"keep {hook}" in out
    assert "Yours loads the module with these lines" in err
    machine.uninstall()
    assert f"leave {aside}" in capsys.readouterr().out
    assert (hook.read_text(), aside.read_bytes()) == ("-- from the site's configuration management\n", SITE)
    aside.unlink()
    assert machine.uninstall() == 0
    assert not (machine.prefix / RECORD).exists()


@pytest.mark.shows("the hook composes with a site's own Lua, and uninstall restores its files byte for byte")
def test_an_interrupted_installation_is_undone(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine.slurm / "job_submit.lua").write_bytes(SITE)
    before = machine.state()
    whole = os.replace

    def replace(source: str, target: object) -> None:
        if str(target).endswith("slurm/job_submit.lua"):
            raise KeyboardInterrupt
        whole(source, str(target))

    monkeypatch.setattr(os, "replace", replace)
    assert machine.install() == 130
    monkeypatch.undo()
    assert (machine.slurm / "job_submit.site.lua").exists()
    assert machine.uninstall() == 0
    assert machine.state() == before


@pytest.mark.shows("`install` and `uninstall` are idempotent, with dry run, JSON, man pages and completion")
def test_an_upgrade_replaces_what_nobody_changed(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.install()
    page = machine.prefix / "share/man/man1/hetstream.1"
    new = page.read_bytes()
    page.write_text("an older version's")
    record = machine.prefix / RECORD
    fields = json.loads(record.read_text())
    fields["files"][str(page)] = hashlib.sha256(b"an older version's").hexdigest()
    record.write_text(json.dumps(fields))
    capsys.readouterr()
    machine.install()
    assert capsys.readouterr().out == f"replace {page}\n"
    assert page.read_bytes() == new


@pytest.mark.shows("`install` and `uninstall` are idempotent, with dry run, JSON, man pages and completion")
def test_json_says_the_same(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.install("--json")
    report = json.loads(capsys.readouterr().out)
    assert report["meta"] == {"verb": "install", "version": 1, "dry_run": False}
    record = read_record(machine.prefix)
    assert record is not None
    assert {action["path"] for action in report["actions"]} == set(record.files)
    # Where this Python is closed to others, as below /root, there is a note on that, too.
    assert [note for note in report["notes"] if "cannot reach" not in note] == ["slurm.conf needs CliFilterPlugins=lua"]
    machine.uninstall("--json")
    report = json.loads(capsys.readouterr().out)
    assert {action["what"] for action in report["actions"]} == {"remove"}


@pytest.mark.shows("`install` and `uninstall` are idempotent, with dry run, JSON, man pages and completion")
def test_bad_input_is_one_line(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["site", "install", "--prefix", str(machine.prefix), "--slurm-dir", "/none"]) == 2
    assert "--slurm-dir=/none: no such directory" in capsys.readouterr().err
    assert main(["site", "install", "--prefix", '/tmp/a"b', "--slurm-dir", str(machine.slurm)]) == 2
    assert "cannot stand in the paths of Lua files" in capsys.readouterr().err
    assert main(["site", "install", "--prefix", "/dev/null/x"]) == 1
    said = capsys.readouterr().err
    assert "Not a directory. Check: namei -l /dev/null/x" in said
    assert said.count("\n") == 1
    machine.install()
    (machine.prefix / RECORD).write_text("{}")
    capsys.readouterr()
    assert machine.uninstall() == 1
    assert "is not a record of hetstream site install" in capsys.readouterr().err


@needs("groff")
def test_groff_has_nothing_to_say_of_the_pages(machine: Machine) -> None:
    machine.install()
    pages = sorted((machine.prefix / "share/man/man1").iterdir())
    done = subprocess.run(["groff", "-man", "-ww", "-Tutf8", *pages], capture_output=True, check=True)
    assert (len(pages), done.stderr) == (len(VERBS) + 1, b"")


@pytest.mark.shows("`install` and `uninstall` are idempotent, with dry run, JSON, man pages and completion")
def test_every_verb_has_a_page_and_a_completion(machine: Machine) -> None:
    machine.install()
    pages = machine.prefix / "share/man/man1"
    assert {path.name for path in pages.iterdir()} == {"hetstream.1", *(f"hetstream-{verb}.1" for verb in VERBS)}
    assert r"\-\-data\-workers\fR \fI\,MIN[\-MAX]" in (pages / "hetstream-sbatch.1").read_text()
    assert r"hetstream\-why \- say what a pending job waits for" in (pages / "hetstream-why.1").read_text()
    for shell, path in SHELLS.items():
        assert (machine.prefix / path).read_text() == completion(shell) + "\n"


def test_without_what_makes_man_pages_the_others_are_placed_and_a_note_says_so(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "argparse_manpage.manpage", None)
    machine.install()
    assert not (machine.prefix / "share/man").exists()
    assert (machine.prefix / SHELLS["zsh"]).exists()
    assert "no man pages were made: pip install argparse-manpage, and install again" in capsys.readouterr().err


@pytest.mark.shows("`install` and `uninstall` are idempotent, with dry run, JSON, man pages and completion")
@needs("systemd-analyze")
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("hetstream-exporter", "exporter"),
        ("hetstreamd", "daemon"),
        ("hetstream-gpu", "packing"),
        ("hetstream-gpu-report", "packing"),
        ("hetstream-packer", "packing"),
    ],
)
def test_systemd_understands_the_units(machine: Machine, name: str, file: str) -> None:
    machine.install()
    unit = machine.prefix / f"lib/systemd/system/{name}.service"
    argv = ["systemd-analyze", "verify", "--man=no", unit]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if "hetstream" in line]
    assert (done.returncode, said) == (0, [])
    assert f"EnvironmentFile=-{machine.prefix}/etc/hetstream/{file}.env" in unit.read_text()
    # Of 100: what it takes from the service without which it could do its work. 92 is a unit that takes nothing.
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", unit],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert judged.returncode == 0, judged.stdout + judged.stderr


@pytest.mark.shows("the packer alone is an administrator in Slurm; what speaks with jobs runs as another user")
def test_what_speaks_with_jobs_is_not_who_slurm_makes_an_administrator(machine: Machine) -> None:
    machine.install()
    units = {path.stem: path.read_text() for path in (machine.prefix / "lib/systemd/system").iterdir()}
    users = {name: set(re.findall("^User=(.*)$", text, re.M)) for name, text in units.items()}
    assert users.pop("hetstream-packer") == {"hetstream-packer"}
    assert set().union(*users.values()) == {"hetstream"}


def test_what_other_users_cannot_reach_is_said(tmp_path: Path) -> None:
    closed, other = tmp_path / "home" / "bin", tmp_path / "opt" / "bin"
    for path in (closed, other):
        path.mkdir(parents=True)
        (path / "hetstream").touch(mode=0o755)
    for parent in tmp_path.parents:
        if not parent.stat().st_mode & 0o001 and parent.stat().st_uid == os.geteuid():
            parent.chmod(0o711)
    tmp_path.chmod(0o755)
    (tmp_path / "home").chmod(0o700)
    (note,) = closed_notes([closed / "hetstream", closed, other / "hetstream"])
    assert f"cannot reach {closed / 'hetstream'}: {tmp_path / 'home'} is closed to them (mode 700)" in note


@pytest.mark.shows("`install` and `uninstall` are idempotent, with dry run, JSON, man pages and completion")
def test_jobs_read_the_address_from_the_daemons_environment_file(machine: Machine) -> None:
    machine.install()
    file = machine.prefix / "etc/hetstream/daemon.env"
    assert read_settings({}, file).address is None
    file.write_text(file.read_text().replace("#HETSTREAM_", "HETSTREAM_"))
    settings = read_settings({}, file)
    assert str(settings.address) == "tcp://hetstream@controller:9420"
    assert str(settings.munge_socket) == "/run/munge/munge.socket.2"
    assert setting(JOBS_DIR, {}, file) == "/scratch/%u/hetstream"
    assert setting(JOURNAL_DIR, {}, file) == "/tmp"
    assert setting(JOBS_DIR, {JOBS_DIR: ""}, file) is None, "the environment wins; empty means .hetstream"
    file.write_text(f"{JOBS_DIR}=here\n")
    with pytest.raises(ConfigError, match=r"daemon.env: HETSTREAM_JOBS_DIR='here': must be an absolute path"):
        setting(JOBS_DIR, {}, file)


def test_the_command_starts_without_the_data_plane() -> None:
    code = "import sys; from hetstream.slurm_plugin.cli import filter, install;"
    code += "sys.exit(len({'torch', 'zmq'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
