"""The rendered script: compared as a whole with golden files, and run by real shells."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetstream.base.errors import UsageError
from hetstream.hetjob.convert.convert import convert
from hetstream.hetjob.convert.directives import read_directives
from hetstream.hetjob.convert.plan import Component, HetPlan
from hetstream.hetjob.convert.render import render
from hetstream.hetjob.convert.spec import JobSpec, read_spec
from hetstream.hetjob.ports import ClusterLimits
from tests.programs import require

GOLDEN = Path(__file__).parent / "golden"
PROGRAM = ("/opt/het stream's/bin/hetstream",)


def rendered(script: str) -> str:
    spec = read_spec(read_directives(script, "train.sbatch"), "train.sbatch")
    assert spec is not None
    return render(
        script, convert(spec, script, "train.sbatch", cluster=ClusterLimits(frozenset(), "batch", None)), PROGRAM
    )


def read(path: Path) -> str:
    return path.read_bytes().decode(errors="surrogateescape")


@pytest.mark.parametrize("source", sorted(GOLDEN.glob("*.in.sbatch")), ids=lambda path: path.name)
def test_golden_scripts(source: Path) -> None:
    result = rendered(read(source))
    golden = source.with_name(source.name.replace(".in.", ".out."))
    assert golden.exists(), f"write {golden} by hand from:\n{result}"
    assert result == read(golden)
    subprocess.run(["bash", "-n"], input=result, text=True, errors="surrogateescape", check=True)


@given(st.binary(), st.booleans())
def test_the_users_bytes_survive(body: bytes, newline: bool) -> None:
    script = b"#!/bin/bash -l\n#HETSTREAM --data-workers=1\n# caf\xe9\n" + body + (b"\n" if newline else b"")
    text = script.decode(errors="surrogateescape")
    try:
        result = rendered(text).encode(errors="surrogateescape")
    except UsageError:
        return  # the random bytes wrote an option line; tests of convert.py cover those
    begin = result.index(b"# >>> hetstream >>>\n")
    end = result.index(b"# <<< hetstream <<<") + len(b"# <<< hetstream <<<\n")
    assert result[:begin] + result[end:] == script


def test_a_backslash_in_an_option_is_one_for_slurm() -> None:
    """Slurm reads a backslash as an escape within quotes, too; real sbatch reads it in test_hostile_options.py."""
    plan = HetPlan((Component(0, "trainer", ("--comment=it's a\\",)),), (), None)
    assert "#SBATCH '--comment=it'\"'\"'s a\\\\'\n" in render("#!/bin/sh\ntrue\n", plan, ("hetstream",))


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "ksh"])
@pytest.mark.parametrize("flags", ["", "e", "eu"])
@pytest.mark.parametrize("master", ["works", "fails", "is missing"])
def test_the_block_in_real_shells(tmp_path: Path, shell: str, flags: str, master: str) -> None:
    """With a master that works the program sees its variables; without one it runs all the same, with one note."""
    require(shell)
    program = tmp_path / "het stream" / "hetstream"
    if master != "is missing":
        program.parent.mkdir()
        answer = "echo \"export SERVICE='file:a b'\"" if master == "works" else "exit 1"
        program.write_text(f"#!/bin/sh\n{answer}\n")
        program.chmod(0o755)
    script = '#!/bin/sh\necho "service=${SERVICE:-none} args=$*"\nexit 7'
    text = render(
        script, convert(JobSpec(1, 1), script, "x", cluster=ClusterLimits(frozenset(), "p", None)), (str(program),)
    )
    path = tmp_path / "script"
    path.write_text(text)
    done = subprocess.run(
        [shell, *([f"-{flags}"] if flags else []), str(path), "1", "2"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 7
    assert done.stdout == f"service={'file:a b' if master == 'works' else 'none'} args=1 2\n"
    assert done.stderr.count("the trainer loads its own data") == (master != "works")
