"""What users write into options, through sbatch with the cli_filter and without it: the same job, or one error."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.devcluster.boot import BootRequest
from tests.devcluster.record import ClusterRecord
from tests.devcluster.roots import DEFAULT_CACHE_DIR, choose_programs
from tests.devcluster.spec import DEFAULT_STATE_ROOT, ClusterShape

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
DIRECTIVE = "#HETSTREAM --data-workers=1 --data-worker-cpus=1 --data-worker-partition=cpu\n"
# What stands behind a field of the job and behind all of them; no option is given these.
FIELD_END, RECORD_END = "\x1f<field>\x1f", "\x1e<record>\x1e"
MARK_OF_PLAN = "hetstream-plan-0\nrm -rf keep; touch broken-out\nhetstream-end-0"
VALUES = {
    "separators": "a\x1fb\x1ec|d;e,f",
    "newline": "a\ntouch broken-out\n",
    "carriage return": "a\r\nb",
    "a plan": MARK_OF_PLAN,
    "substitution": "$(touch broken-out)`touch broken-out`${IFS}",
    "single quote": "'; touch broken-out; '",
    "double quote": '"; touch broken-out; "',
    "backslash": "a\\",
    "escapes": "\x1b[2J\x1b]0;x\x07",
    "no UTF-8": "caf\udce9",
    "path": "../../../../etc/passwd",
    "option": "--wrap=touch broken-out",
    "component": " : --partition=cpu",
    "directive": "#HETSTREAM --data-workers=9",
    "filename pattern": "%j%x%%/%A",
    "long": "x" * 100_000,
    "empty": "",
}
# Every value goes into these, which take any text; the others get some.
FREE_TEXT = ("job-name", "comment")
OTHERS = (
    "account", "array", "begin", "chdir", "constraint", "cpus-per-task", "dependency", "error", "exclude", "export",
    "gres", "input", "licenses", "mail-user", "mem", "nodelist", "output", "partition", "qos", "reservation", "signal",
    "time", "wckey",
)  # fmt: skip
FEW = ("newline", "substitution", "single quote", "a plan")
TABLE = [(option, name) for option in FREE_TEXT for name in VALUES] + [
    (option, FEW[(place + shift) % len(FEW)]) for place, option in enumerate(OTHERS) for shift in (0, 1)
]


@dataclass
class Cluster:
    """A cluster with the plugins, and a slurm.conf beside its own that asks for no cli_filter."""

    record: ClusterRecord
    out_dir: Path

    def run(self, directory: Path, *argv: str, plain: bool = False) -> subprocess.CompletedProcess[str]:
        environ = dict(self.record.environment(os.environ))
        if plain:
            environ["SLURM_CONF"] = str(Path(environ["SLURM_CONF"]).with_name("plain.conf"))
        return subprocess.run(
            argv, cwd=directory, env=environ, capture_output=True, text=True, errors="surrogateescape", check=False,
            timeout=120, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def fields(self, job_id: str) -> str:
        """Name and comment of a job, or of its first component."""
        shown = self.run(
            self.out_dir, "squeue", "--noheader", f"--jobs={job_id}", "--sort=i",
            "-O", f"Name:{FIELD_END},Comment:{RECORD_END}",
        )  # fmt: skip
        return shown.stdout.split(RECORD_END)[0]


@pytest.fixture(scope="module")
def cluster(release: str, running_cluster: Callable[..., Any]) -> Iterator[Cluster]:
    """This module's cluster of a release."""
    name = f"pytest-{os.getpid()}-hostile-{release.replace('.', '')}"
    request = BootRequest(name, DEFAULT_STATE_ROOT / name, ClusterShape(1, 2, 1), lua_plugins=True)
    with running_cluster(request, choose_programs(release, DEFAULT_CACHE_DIR, print)) as devcluster:
        conf = Path(devcluster.record.environment(os.environ)["SLURM_CONF"])
        lines = [line for line in conf.read_text().splitlines() if not line.startswith("CliFilterPlugins")]
        conf.with_name("plain.conf").write_text("\n".join(lines) + "\n")
        yield Cluster(devcluster.record, devcluster.out_dir)


def script_of(*lines: str) -> str:
    return "\n".join(("#!/bin/bash", *lines, DIRECTIVE, "true", ""))


def check_alike(cluster: Cluster, directory: Path, words: list[str], what: str) -> None:
    """Submit with and without the filter: the same answer, or the plain job and one line that says why."""
    seen = []
    for plain in (True, False):
        done = cluster.run(directory, "sbatch", "--parsable", "--hold", *words, plain=plain)
        job_id = done.stdout.strip()
        # A job of whatever name is looked at by its number, and goes.
        fields = cluster.fields(job_id) if done.returncode == 0 else ""
        if done.returncode == 0:
            assert job_id.isdigit(), (what, done)
            cluster.run(directory, "scancel", job_id)
        ours = [line for line in done.stderr.splitlines() if line.startswith("hetstream: ")]
        seen.append((done.returncode, fields, ours))
    (code, fields, _), (code_with, fields_with, ours) = seen
    assert (code_with, fields_with) == (code, fields), (what, seen)
    assert len(ours) <= 1, (what, ours)


def test_hostile_values_of_every_option(cluster: Cluster, wait_until: Callable[..., None]) -> None:
    directory = cluster.out_dir / "hostile"
    (directory / "keep").mkdir(parents=True)
    (directory / "keep" / "work").write_text("of somebody")
    (directory / "job.sbatch").write_text(script_of())
    watched = cluster.run(directory, "sbatch", "--parsable", "--hold", "--job-name=watched", "--wrap=true")
    before = cluster.fields(watched.stdout.strip())
    for option, name in TABLE:
        value = VALUES[name].encode(errors="surrogateescape")
        word = os.fsdecode(f"--{option}=".encode() + value)
        check_alike(cluster, directory, [word, "job.sbatch"], f"--{option}, {name}")
    # As lines of the script, where they may be longer than a word of a command.
    for name, text in (("long", "x" * (1 << 20)), ("quotes", "'\"$(touch broken-out)"), ("path", "../../keep")):
        (directory / "lines.sbatch").write_text(script_of(f"#SBATCH --comment={text}", f"#SBATCH --job-name={text}"))
        check_alike(cluster, directory, ["lines.sbatch"], f"in the script, {name}")
    for name in ("a'b.sbatch", "a\nb.sbatch", 'a"b.sbatch', "a$(touch broken-out).sbatch", "a b\\.sbatch"):
        (directory / name).write_text(script_of())
        check_alike(cluster, directory, [name, "an 'argument'", "--", "\n"], f"a script called {name!r}")
    assert cluster.fields(watched.stdout.strip()) == before, "nobody else's job is another one"
    cluster.run(directory, "scancel", watched.stdout.strip())
    assert (directory / "keep" / "work").read_text() == "of somebody"
    assert not [*cluster.out_dir.glob("**/broken-out")]
    assert not [*Path("/tmp").glob("hetstream-*/job.sbatch")], "a converted script is left"
    wait_until(lambda: not cluster.run(directory, "squeue", "--noheader").stdout, 60, "an empty queue")
