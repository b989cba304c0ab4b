"""sbatch's environment as options: what counts beside a script's own, and what the job gets of it."""

from __future__ import annotations

import pytest

from hetstream.hetjob.convert.sbatch_options import (
    SbatchOptions,
    from_environment,
    handed_on,
    parse_words,
    taken_variables,
    words_of,
)

GPUS = {"SBATCH_CPUS_PER_GPU": "4"}


@pytest.mark.parametrize(
    ("environ", "script", "command_line", "expected"),
    [
        ({"SBATCH_PARTITION": "gpu", "SBATCH_EXCLUSIVE": ""}, "", "", "--exclusive --partition=gpu"),
        ({"SBATCH_EXCLUSIVE": "user", "SBATCH_TIMELIMIT": "5"}, "", "", "--exclusive=user"),
        # Memory of three kinds: what somebody wrote wins over what the environment says, whatever the kind.
        ({"SBATCH_MEM_PER_CPU": "3G"}, "--mem=16G", "", ""),
        ({"SBATCH_MEM_PER_GPU": "3G"}, "", "--mem=16G", ""),
        ({"SBATCH_MEM_PER_NODE": "3G"}, "--mem-per-gpu=16G", "", ""),
        ({"SBATCH_MEM_PER_NODE": "3G"}, "--mem=16G", "", "--mem=3G"),
        ({"SBATCH_MEM_PER_NODE": "3G", "SBATCH_MEM_PER_CPU": "1G"}, "--mem=16G", "", "--mem-per-cpu=1G --mem=3G"),
        ({"SBATCH_MEM_PER_NODE": "3G", "SBATCH_MEM_PER_CPU": "1G"}, "", "--mem=16G", "--mem=3G"),
        # The same for CPUs and for threads.
        (GPUS, "-c 8", "", ""),
        (GPUS, "--tres-per-task=cpu:8", "", ""),
        (GPUS, "--tres-per-task=gres/gpu:1", "", "--cpus-per-gpu=4"),
        ({"SLURM_HINT": "nomultithread"}, "--threads-per-core=1", "", ""),
        ({"SBATCH_THREADS_PER_CORE": "1"}, "", "--hint=nomultithread", ""),
        ({"SBATCH_EXCLUSIVE": "user"}, "", "-s", ""),
        ({"SBATCH_EXCLUSIVE": "user"}, "-s", "", "--exclusive=user"),
        # A flag's variable is a flag, or takes one back, which no option can say.
        ({"SBATCH_OVERCOMMIT": "1"}, "", "", "--overcommit"),
        ({"SBATCH_OVERCOMMIT": "no", "SBATCH_SPREAD_JOB": "0"}, "-O", "", ""),
        # Two variables for one option, and a variable of no option.
        ({"SBATCH_REQ_SWITCH": "1", "SBATCH_WAIT4SWITCH": "10:00"}, "", "", "--switches=1@10:00"),
        ({"SBATCH_WAIT4SWITCH": "10:00"}, "--switches=2@5", "", "--switches=2@10:00"),
        ({"SLURM_HOSTFILE": "hosts"}, "", "", "--nodelist=./hosts --distribution=arbitrary"),
        ({"SLURM_HOSTFILE": "hosts"}, "-w node1", "", ""),
    ],
)
def test_what_sbatch_takes_from_its_environment(
    environ: dict[str, str], script: str, command_line: str, expected: str
) -> None:
    given = [parse_words(words.split(), "x")[0] for words in (script, command_line)]
    assert words_of(from_environment(environ, *given)) == expected.split()


def test_sbatch_is_called_without_what_has_become_an_option() -> None:
    environ = {
        "SBATCH_GRES": "gpu:1",
        "SBATCH_TIMELIMIT": "5",
        "SBATCH_OVERCOMMIT": "no",
        "SLURM_HOSTFILE": "x",
        "A": "",
    }
    assert taken_variables(environ) == ["SBATCH_GRES", "SLURM_HOSTFILE"]


@pytest.mark.parametrize(
    ("script", "command_line", "taken"),
    [
        ("", "", True),
        ("-n 8", "", True),
        ("-c 8", "", False),
        ("", "-c 8", False),
        ("", "--tres-per-task=cpu:8", False),
    ],
)
def test_what_sbatch_may_refuse_beside_an_option_is_left_for_it_to_see(
    script: str, command_line: str, taken: bool
) -> None:
    given = [parse_words(words.split(), "x")[0] for words in (script, command_line)]
    assert taken_variables(GPUS, *given) == (["SBATCH_CPUS_PER_GPU"] if taken else [])


@pytest.mark.parametrize(
    ("script", "command_line", "setting", "expected"),
    [
        ("", "", "", "A B"), ("--export=ALL,X=1", "", "", "A B X"), ("--export=NONE", "", "", ""),
        ("--export=NONE", "--export=ALL", "", "A B"), ("--export=X,A", "", "", "A"), ("--export=A=5", "", "", "A"),
        ("--export-file=x", "", "", ""),
        # The environment's word wins over the script's, and the command line's over both.
        ("--export=ALL", "", "NONE", ""), ("--export=NONE", "", "B", "B"), ("", "--export=A", "NONE", "A"),
    ],
)  # fmt: skip
def test_the_job_has_what_sbatch_hands_on(script: str, command_line: str, setting: str, expected: str) -> None:
    given = [SbatchOptions(tuple(parse_words(words.split(), "x")[0])) for words in (script, command_line)]
    environ = {"A": "1", "B": "2", **({"SBATCH_EXPORT": setting} if setting else {})}
    found = handed_on(environ, *given)
    assert sorted(found.keys() - {"SBATCH_EXPORT"}) == expected.split()
    assert found.get("A") in (None, "5" if "A=5" in script else "1")
