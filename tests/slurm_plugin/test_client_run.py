"""Running Slurm's commands: what comes back, and what every failure says."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from hetstream.hetjob.errors import SlurmCommandError
from hetstream.slurm_plugin.client import run
from hetstream.slurm_plugin.client.run import EXIT_NOT_FOUND, EXIT_TIMED_OUT, run_slurm


def test_returns_both_streams() -> None:
    done = run_slurm(["sh", "-c", "cat; echo warning >&2"], stdin="script")
    assert (done.argv, done.stdout, done.stderr) == (("sh", "-c", "cat; echo warning >&2"), "script", "warning\n")


def test_environment_is_the_given_one_alone() -> None:
    assert run_slurm(["/usr/bin/env"], env={"SLURM_CONF": "/x/slurm.conf"}).stdout == "SLURM_CONF=/x/slurm.conf\n"


def test_failure_holds_everything() -> None:
    argv = ["sh", "-c", "echo out; echo 'Invalid account' >&2; exit 3"]
    with pytest.raises(SlurmCommandError, match=r"sh exited with 3: 'Invalid account'.*Check: sacctmgr") as caught:
        run_slurm(argv, hint="Check: sacctmgr show assoc")
    error = caught.value
    assert (error.argv, error.returncode, error.stdout, error.stderr) == (argv, 3, "out\n", "Invalid account\n")


def test_a_missing_program_says_where_to_run_it() -> None:
    with pytest.raises(SlurmCommandError, match=r"No such file.*Run this where") as caught:
        run_slurm(["no-such-sbatch"])
    assert caught.value.returncode == EXIT_NOT_FOUND


def test_silence_is_an_error_that_keeps_what_was_printed() -> None:
    with pytest.raises(SlurmCommandError, match=r"no answer within 0\.2 s") as caught:
        run_slurm(["sh", "-c", "echo before; exec sleep 60"], timeout_s=0.2)
    assert (caught.value.returncode, caught.value.stdout) == (EXIT_TIMED_OUT, "before\n")


def test_bytes_that_are_no_text_do_not_hide_the_rest() -> None:
    assert run_slurm(["printf", r"a\377b"]).stdout == "a\N{REPLACEMENT CHARACTER}b"


def become(*argv: str) -> subprocess.CompletedProcess[str]:
    script = "import sys; from hetstream.slurm_plugin.client.run import become; become(sys.argv[1:])"
    return subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True, timeout=60)


def test_become_is_the_command() -> None:
    done = become("sh", "-c", "echo $PPID; exit 9")
    assert (done.returncode, done.stdout) == (9, f"{os.getpid()}\n")


def test_become_gives_back_the_signals_that_python_ignores() -> None:
    assert become("sh", "-c", "kill -PIPE $$").returncode == -13


def test_become_that_cannot_is_an_error() -> None:
    assert "no-such-program exited with 127" in become("no-such-program").stderr


def test_who_waits_long_for_a_command_is_told_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "_QUIET_S", 0.2)
    caplog.set_level(logging.INFO)
    assert run_slurm(["sh", "-c", "cat; sleep 0.9; echo done"], stdin="script", timeout_s=60).stdout == "scriptdone\n"
    assert caplog.messages[0].startswith("sh has not answered for 0 s; it is given 60 s")
    assert 2 <= len(caplog.messages) <= 5


def test_a_command_that_answers_soon_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run_slurm(["true"])
    assert caplog.messages == []
