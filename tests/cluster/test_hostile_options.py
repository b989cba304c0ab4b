"""What users write into options, through sbatch with the cli_filter and without it: the same job, or one error."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clusters import Devcluster, running_cluster
from tests.devcluster.spec import ClusterShape

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


class Cluster(Devcluster):
    """A cluster with the plugins, and a slurm.conf beside its own that asks for no cli_filter."""

    @property
    def plain(self) -> dict[str, str]:
        """Variables with which there is no cli_filter."""
        return {"SLURM_CONF": str(Path(self.env["SLURM_CONF"]).with_name("plain.conf"))}

    def fields(self, job_id: str) -> str:
        """Name and comment of a job, or of its first component."""
        shown = self.attempt(
            "squeue", "--noheader", f"--jobs={job_id}", "--sort=i",
            "-O", f"Name:{FIELD_END},Comment:{RECORD_END}",
        )  # fmt: skip
        return shown.stdout.split(RECORD_END)[0]


@pytest.fixture(scope="module")
def cluster(release: str) -> Iterator[Cluster]:
    """This module's cluster of a release."""
    with running_cluster("hostile", ClusterShape(1, 2, 1), release, wrapper=Cluster, lua_plugins=True) as cluster:
        lines = Path(cluster.env["SLURM_CONF"]).read_text().splitlines(keepends=True)
        kept = [line for line in lines if not line.startswith("CliFilterPlugins")]
        Path(cluster.plain["SLURM_CONF"]).write_text("".join(kept))
        yield cluster


def script_of(*lines: str) -> str:
    return "\n".join(("#!/bin/bash", *lines, DIRECTIVE, "true", ""))


def check_alike(cluster: Cluster, directory: Path, words: list[str], what: str) -> None:
    """Submit with and without the filter: the same answer, or the plain job and one line that says why."""
    seen = []
    for plain in (True, False):
        variables = cluster.plain if plain else {}
        done = cluster.attempt("sbatch", "--parsable", "--hold", *words, cwd=directory, **variables)
        job_id = done.stdout.strip()
        # A job of whatever name is looked at by its number, and goes.
        fields = cluster.fields(job_id) if done.returncode == 0 else ""
        if done.returncode == 0:
            assert job_id.isdigit(), (what, done)
            cluster.run("scancel", job_id)
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
    watched = cluster.submit("--hold", "--job-name=watched", "--wrap=true")
    before = cluster.fields(watched)
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
    assert cluster.fields(watched) == before, "nobody else's job is another one"
    cluster.run("scancel", watched)
    assert (directory / "keep" / "work").read_text() == "of somebody"
    assert not [*cluster.out_dir.glob("**/broken-out")]
    assert not [*Path("/tmp").glob("hetstream-*/job.sbatch")], "a converted script is left"
    wait_until(lambda: not cluster.run("squeue", "--noheader"), 60, "an empty queue")
