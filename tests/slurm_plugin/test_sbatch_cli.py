"""`hetstream sbatch` and `hetstream convert` with a recording sbatch: what it is given, and what the user sees."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hetstream.hetjob.convert.directives import OPTIONS
from hetstream.slurm_plugin.cli import main

SCRIPT = """#!/bin/bash
#SBATCH --gres=gpu:1 --cpus-per-task=16
#HETSTREAM --data-workers=2 --data-worker-partition=cpu
srun python train.py
"""
SBATCH = f"""#!{sys.executable}
import json, os, sys
words = sys.argv[1:]
script = next((word for word in words if os.path.isfile(word)), None)
record = {{"words": words, "script": open(script).read() if script else sys.stdin.read(),
          "partition": os.environ.get("SBATCH_PARTITION")}}
json.dump(record, open(os.environ["RECORD"], "w"))
print("Submitted batch job 17")
print("sbatch: a warning", file=sys.stderr)
sys.exit(int(os.environ.get("SBATCH_RC", 0)))
"""
WAITING_SBATCH = '#!/bin/sh\necho $$ > "$RECORD.new"; mv "$RECORD.new" "$RECORD"\nexec sleep 600\n'
SINFO = '#!/bin/sh\nprintf "gpu*\\ncpu\\n"\n'
SCONTROL = '#!/bin/sh\necho "SchedulerType           = ${SCHEDULER:-sched/backfill}"\n'


class Shell:
    """A directory with a script, and a PATH whose Slurm only records."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.record = directory / "record.json"
        tools = directory / "tools"
        tools.mkdir()
        for name, text in (("sbatch", SBATCH), ("sinfo", SINFO), ("scontrol", SCONTROL)):
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        (directory / "train.sbatch").write_text(SCRIPT)
        self.environ = {"PATH": f"{tools}:/usr/bin:/bin", "RECORD": str(self.record)}

    def run(self, *words: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
        program = Path(sys.executable).with_name("hetstream")
        return subprocess.run(
            [program, *words], cwd=self.directory, env=self.environ | environ, input=stdin, capture_output=True,
            text=True, check=False,
        )  # fmt: skip

    def given(self) -> dict[str, object]:
        given: dict[str, object] = json.loads(self.record.read_text())
        return given


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_a_script_with_directives_is_converted(shell: Shell) -> None:
    done = shell.run("sbatch", "-c", "12", "--parsable", "train.sbatch", "--epochs", "3", "-c", "x")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Submitted batch job 17\n", "sbatch: a warning\n")
    given = shell.given()
    words, script = given["words"], given["script"]
    assert isinstance(words, list)
    assert words[0] == "--parsable", "what is said of one component is not for sbatch's command line"
    assert "\n#SBATCH --cpus-per-task=2" in str(script)
    assert os.path.basename(words[1]) == "train.sbatch"
    assert not os.path.exists(words[1])
    assert words[2:] == ["--epochs", "3", "-c", "x"]
    assert "#SBATCH hetjob\n#SBATCH --partition=cpu --cpus-per-task=4 --ntasks=2\n" in str(script)
    assert f"{Path(sys.executable).with_name('hetstream')} internal master start" in str(script)


def test_the_exit_code_is_sbatchs(shell: Shell) -> None:
    assert shell.run("sbatch", "--wait", "train.sbatch", SBATCH_RC="7").returncode == 7


@pytest.mark.parametrize(
    "words",
    [
        ["plain.sbatch"],
        ["-p", "gpu", "--wait", "plain.sbatch", "argument", "--data-workers=2"],
        ["--wrap=hostname"],
        ["no-such-file"],
        ["--of-a-site", "plain.sbatch"],
        ["-N1", ":", "-N2", "plain.sbatch"],
    ],
)
def test_everything_else_goes_to_sbatch_untouched(shell: Shell, words: list[str]) -> None:
    text = SCRIPT.replace("#HETSTREAM", "#NOT")
    (shell.directory / "plain.sbatch").write_text(text)
    done = shell.run("sbatch", *words, SBATCH_RC="3", SBATCH_PARTITION="gpu")
    assert done.returncode == 3
    assert shell.given()["words"] == words
    assert shell.given()["partition"] == "gpu"
    misplaced = (
        "hetstream: --data-workers=2 is an argument of plain.sbatch: options of hetstream stand before the script\n"
    )
    assert done.stderr == (misplaced if "--data-workers=2" in words else "") + "sbatch: a warning\n"


def test_a_script_from_standard_input(shell: Shell) -> None:
    assert shell.run("sbatch", "-Jx", stdin=SCRIPT).returncode == 0
    words = shell.given()["words"]
    assert isinstance(words, list)
    assert words[0] == "--job-name=x"
    assert os.path.basename(words[-1]) == "sbatch"
    assert "hetjob" in str(shell.given()["script"])


def test_variables_for_every_component_become_options_of_the_trainer(shell: Shell) -> None:
    assert shell.run("sbatch", "train.sbatch", SBATCH_PARTITION="gpu").returncode == 0
    words = shell.given()["words"]
    assert isinstance(words, list)
    assert len(words) == 1
    assert "\n#SBATCH --partition=gpu --cpus-per-task=2" in str(shell.given()["script"])
    assert shell.given()["partition"] is None


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        (
            ["--data-worker=3", "train.sbatch"],
            {},
            "train.sbatch command line: --data-worker is unknown",
        ),
        (["--data-worker-partition=big", "train.sbatch"], {}, "--data-worker-partition=big"),
        (["train.sbatch"], {"SCHEDULER": "sched/builtin"}, "this cluster runs SchedulerType=sched/builtin"),
        (["-a", "0-3", "train.sbatch"], {}, "train.sbatch command line: --array=0-3"),
        (["train.sbatch"], {"SBATCH_ARRAY_INX": "1-2"}, "train.sbatch SBATCH_ARRAY_INX"),
        (["-N1", ":", "-N2", "train.sbatch"], {}, "':' on the command line"),
        (["--data-workers=2", "--wrap=hostname"], {}, "--wrap"),
        (["--data-workers=2", "no-such-file"], {}, "no-such-file cannot be read"),
        (["train.sbatch", "-J"], {}, None),
        (["-J"], {}, "command line: option -J needs a value"),
    ],
)
def test_errors_are_one_line_and_exit_with_2(
    shell: Shell, words: list[str], environ: dict[str, str], said: str | None
) -> None:
    done = shell.run("sbatch", *words, **environ)
    if said is None:  # an argument of the script
        assert done.returncode == 0
        return
    assert done.returncode == 2
    assert done.stderr.startswith(f"hetstream sbatch: {said}")
    assert done.stderr.count("\n") == 1
    assert not shell.record.exists()


def test_dos_line_ends(shell: Shell) -> None:
    (shell.directory / "dos.sbatch").write_bytes(SCRIPT.replace("\n", "\r\n").encode())
    done = shell.run("sbatch", "dos.sbatch")
    assert done.returncode == 2
    assert "CR LF" in done.stderr


@pytest.mark.shows("what a dry run of `sbatch` or `migrate` prints works when pasted")
def test_a_dry_run_submits_nothing(shell: Shell) -> None:
    done = shell.run("sbatch", "--dry-run", "--time=5", "train.sbatch", "x")
    assert done.returncode == 0
    assert not shell.record.exists()
    assert "#SBATCH hetjob" in done.stdout
    assert done.stderr == "would run, on the script above: sbatch --time=5 train.sbatch x\n"
    done = shell.run("sbatch", "--dry-run", "--comment=a b", stdin="#!/bin/sh\nhostname\n")
    assert done.stderr == "would run, on the script above: sbatch '--comment=a b' < SCRIPT\n"


@pytest.mark.shows("a script that asks Slurm about its own job, or means a step by its number, is told what differs")
@pytest.mark.parametrize(
    "line",
    [
        'left=$(squeue -h -j "$SLURM_JOB_ID" -o %L)',
        "scontrol show job ${SLURM_JOB_ID} | grep StdOut",
        "scontrol -o show job $SLURM_JOBID",
    ],
)
def test_a_script_that_asks_about_its_own_job_is_told_of_two_answers(shell: Shell, line: str) -> None:
    script = shell.directory / "train.sbatch"
    number = script.read_text().count("\n") + 1
    script.write_text(f"{script.read_text()}{line}\n")
    assert f"line {number}: Slurm answers for each component" in shell.run("sbatch", "train.sbatch").stderr
    assert "each component" not in shell.run("sbatch", "--data-workers=0-2", "train.sbatch").stderr


@pytest.mark.shows("a script that asks Slurm about its own job, or means a step by its number, is told what differs")
@pytest.mark.parametrize(
    "line", ["trap 'scancel -s USR1 \"${SLURM_JOB_ID}.0\"' USR1", "sstat -j $SLURM_JOBID.0 -o MaxRSS"]
)
def test_a_script_that_means_a_step_by_its_number_is_told_of_other_steps(shell: Shell, line: str) -> None:
    script = shell.directory / "train.sbatch"
    number = script.read_text().count("\n") + 1
    script.write_text(f"{script.read_text()}echo job.$SLURM_JOB_ID.out\n{line}\n")
    said = shell.run("sbatch", "--data-workers=0-2", "train.sbatch").stderr
    assert f"line {number + 1}: the first steps of the job are hetstream's" in said


@pytest.mark.parametrize(
    "line",
    [
        "env -i PATH=$PATH SLURM_JOB_ID=$SLURM_JOB_ID srun -n1 python train.py",
        "env -i PATH=$PATH \\\n  srun -n1 python train.py",
        "unset ${!SLURM_@}; srun hostname",
        "unset $(env | grep -o SLURM_HET_SIZE)",
        "exec -c srun hostname",
    ],
)
def test_a_script_that_empties_the_environment_of_srun_is_told_what_to_add(shell: Shell, line: str) -> None:
    script = shell.directory / "train.sbatch"
    number = script.read_text().count("\n") + 1
    script.write_text(f"{script.read_text()}{line}\n")
    assert f"line {number}: without SLURM_HET_SIZE" in shell.run("sbatch", "train.sbatch").stderr
    assert "SLURM_HET_SIZE" not in shell.run("sbatch", "--data-workers=0-2", "train.sbatch").stderr
    script.write_text(script.read_text().replace(line, "env A=-i x; unset A; srun env -u B hostname"))
    assert "SLURM_HET_SIZE" not in shell.run("sbatch", "train.sbatch").stderr


@pytest.mark.timeout(60)
def test_a_script_of_any_size_is_converted_in_time(shell: Shell) -> None:
    script = shell.directory / "train.sbatch"
    for words in ("scontrol show job ", "env -i ", "unset "):
        script.write_text(f"{script.read_text()}: {words * 2000}\n")
    script.write_text(f"{script.read_text()}python train.py\n")
    (shell.directory / "train.py").write_text("\n".join(f"import lib{number}" for number in range(10_000)))
    done = shell.run("convert", "train.sbatch")
    assert done.returncode == 0
    assert "because it names more than 10,000 paths, too many to look at" in done.stderr


@pytest.mark.parametrize("verb", ["convert", "sbatch"])
def test_a_script_may_be_a_pipe_or_a_link_but_has_an_end(shell: Shell, verb: str) -> None:
    (shell.directory / "link").symlink_to("train.sbatch")
    assert "--data-workers" in shell.run(verb, "--dry-run" if verb == "sbatch" else "--json", "link").stdout
    given = shell.run(verb, "--dry-run" if verb == "sbatch" else "--json", "/dev/stdin", stdin=SCRIPT)
    assert "--data-workers" in given.stdout
    endless = shell.run(verb, "/dev/zero")
    assert endless.returncode == 2
    assert "/dev/zero: more than 67,108,864 bytes are no batch script" in endless.stderr


def test_directives_that_come_too_late_are_noted(shell: Shell) -> None:
    (shell.directory / "late.sbatch").write_text("#!/bin/bash\nset -e\n#HETSTREAM --data-workers=2\n")
    done = shell.run("sbatch", "late.sbatch")
    assert done.returncode == 0
    assert "hetstream: late.sbatch line 3: a #HETSTREAM line after the first command has no effect" in done.stderr


@pytest.mark.parametrize("line", ["#HETSTREAM: --data-workers=2", "#HETSTREAM--x", "#hetstream x", "  #HETSTREAM x"])
def test_comments_that_were_meant_as_directives_are_noted(shell: Shell, line: str) -> None:
    (shell.directory / "near.sbatch").write_text(f"#!/bin/bash\n{line}\nhostname\n")
    done = shell.run("sbatch", "near.sbatch")
    assert done.returncode == 0
    assert "hetstream: near.sbatch line 2: a comment, not a directive. A directive begins the line as:" in done.stderr


@pytest.mark.parametrize(
    ("word", "meant", "taken"),
    [
        ("-tasks-per-node=5", "--tasks-per-node=5", "--time=asks-per-node=5"),
        ("-output=x.log", "--output=x.log", "--output=utput=x.log"),
        ("-nodes=1", "--nodes=1", "--ntasks=odes=1"),
        ("-hold", "--hold", "--help"),
    ],
)
def test_a_long_option_behind_one_dash_is_noted(shell: Shell, word: str, meant: str, taken: str) -> None:
    script = f"#!/bin/bash\n#SBATCH -c16 {word}\n#HETSTREAM --data-workers=4\nsrun python train.py\n"
    (shell.directory / "dash.sbatch").write_text(script)
    done = shell.run("convert", "dash.sbatch")
    assert f"line 2: sbatch takes {word} for letters, the first of them {taken}. Did you mean {meant}?" in done.stderr
    (shell.directory / "dash.sbatch").write_text(script.replace(word, "-J train -ptest -Ho out"))
    assert "sbatch takes" not in shell.run("convert", "dash.sbatch").stderr


def test_help_lists_the_options(shell: Shell) -> None:
    done = shell.run("sbatch", "--help")
    assert done.returncode == 0
    lines = [line for line in done.stdout.splitlines() if line.startswith("  --")]
    assert "  --data-worker-partition=NAME      Slurm partition of the data workers" in lines
    assert len(lines) == len(OPTIONS)
    assert all(re.match(r"  --\S+ +$", line[:36]) and line[36] != " " for line in lines)


@pytest.mark.parametrize(
    "words", [["--data-workers=4", "train.sbatch", "--epochs=3"], ["train.sbatch", "--", "--data-workers=4"]]
)
def test_convert_prints_the_script_and_says_why(shell: Shell, words: list[str]) -> None:
    done = shell.run("convert", *words)
    assert done.returncode == 0
    assert "--ntasks=4" in done.stdout
    assert "trainer: --cpus-per-task=2 (was 16, line 2)\n    because data workers do the preprocessing" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no script is named"),
        (["none.sbatch"], "none.sbatch cannot be read"),
        (["train.sbatch", "--", "data-workers=4"], "'data-workers=4' is not an option"),
        (["--data-workers=0", "train.sbatch"], "train.sbatch command line: --data-workers=0: MIN is"),
    ],
)
def test_convert_refuses(shell: Shell, words: list[str], said: str) -> None:
    done = shell.run("convert", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"hetstream convert: {said}")


def test_convert_notes_options_behind_the_script(shell: Shell) -> None:
    done = shell.run("convert", "train.sbatch", "--data-workers=4", "--trainer-cpus", "1")
    assert "--ntasks=2" in done.stdout
    assert (
        "note: --data-workers=4 --trainer-cpus are arguments of train.sbatch: options of hetstream stand before"
        in done.stderr
    )


def test_convert_has_help(shell: Shell) -> None:
    done = shell.run("convert", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: hetstream convert")


@pytest.mark.parametrize("words", [["--json", "train.sbatch"], ["train.sbatch", "--json"]])
def test_convert_as_json(shell: Shell, words: list[str]) -> None:
    report = json.loads(shell.run("convert", *words).stdout)
    assert report["meta"] == {"version": 1}
    assert [component["role"] for component in report["components"]] == ["trainer", "data_workers"]
    assert report["components"][1]["options"] == ["--partition=cpu", "--cpus-per-task=4", "--ntasks=2"]
    assert "#SBATCH hetjob" in report["script"]


def test_convert_leaves_a_plain_script_byte_for_byte(shell: Shell) -> None:
    text = b"#!/bin/sh\n# caf\xe9\r\nhostname"
    (shell.directory / "plain.sbatch").write_bytes(text)
    program = Path(sys.executable).with_name("hetstream")
    done = subprocess.run([program, "convert", "plain.sbatch"], cwd=shell.directory, capture_output=True, check=True)
    assert done.stdout == text
    assert b"unchanged" in done.stderr


def test_convert_works_without_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "train.sbatch"
    path.write_text(SCRIPT)
    assert main(["convert", str(path)]) == 0
    path.write_text(SCRIPT.replace(" --data-worker-partition=cpu", ""))
    assert main(["convert", str(path)]) == 2
    said = capsys.readouterr().err
    assert "--data-worker-partition=NAME" in said
    assert "Slurm was asked: sinfo exited with 127" in said


def test_options_behind_a_script_that_uses_no_arguments_are_sbatchs(shell: Shell) -> None:
    done = shell.run("sbatch", "train.sbatch", "--parsable", "--data-worker-cpus=2", "-t", "5")
    assert (done.returncode, done.stdout) == (0, "Submitted batch job 17\n")
    words = shell.given()["words"]
    assert isinstance(words, list)
    assert words[:-1] == ["--parsable", "--time=5"]
    assert words[-1].endswith("/train.sbatch"), "nothing is left for the script"
    assert "--data-worker-cpus=2" in str(shell.given()["script"])


@pytest.mark.parametrize(
    "use",
    ['"$@"', "$1", "${2:-x}", "shift", "$#", "${@:2}", "$(for x; do echo; done)", "\n. ./more.sh", "\nsource more.sh"],
)
def test_a_script_that_uses_its_arguments_gets_them_all(shell: Shell, use: str) -> None:
    (shell.directory / "train.sbatch").write_text(SCRIPT + f"echo {use}\n")
    assert shell.run("sbatch", "train.sbatch", "--parsable", "-t", "5").returncode == 0
    words = shell.given()["words"]
    assert isinstance(words, list)
    assert words[1:] == ["--parsable", "-t", "5"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_while_it_waits_ends_sbatch_and_leaves_nothing(
    shell: Shell, name: str, wait_until: Callable[..., None]
) -> None:
    place = shell.directory / "tmp"
    place.mkdir()
    (shell.directory / "tools" / "sbatch").write_text(WAITING_SBATCH)
    # What nohup or a shell's background ignores for the tests is not ignored by the program.
    program = ["env", "--default-signal", Path(sys.executable).with_name("hetstream")]
    environ = shell.environ | {"TMPDIR": str(place)}
    with subprocess.Popen([*program, "sbatch", "--wait", "train.sbatch"], cwd=shell.directory, env=environ) as waiting:
        wait_until(shell.record.exists, timeout_s=30, what="sbatch")
        (directory,) = place.iterdir()
        assert (directory / "train.sbatch").exists()
        waiting.send_signal(signal.Signals[name])
        assert waiting.wait(timeout=30) == 128 + signal.Signals[name]
    assert list(place.iterdir()) == []
    assert not Path(f"/proc/{shell.record.read_text().strip()}").exists(), "sbatch is no orphan"


def test_sbatch_ends_with_a_hetstream_that_is_killed_and_the_next_one_cleans_up(
    shell: Shell, wait_until: Callable[..., None]
) -> None:
    place = shell.directory / "tmp"
    place.mkdir()
    real = (shell.directory / "tools" / "sbatch").read_text()
    (shell.directory / "tools" / "sbatch").write_text(WAITING_SBATCH)
    program = Path(sys.executable).with_name("hetstream")
    environ = shell.environ | {"TMPDIR": str(place)}
    with subprocess.Popen([program, "sbatch", "--wait", "train.sbatch"], cwd=shell.directory, env=environ) as waiting:
        wait_until(shell.record.exists, timeout_s=30, what="sbatch")
        waiting.kill()
    pid = shell.record.read_text().strip()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), timeout_s=30, what="the end of sbatch")
    assert list(place.iterdir())
    (shell.directory / "tools" / "sbatch").write_text(real)
    assert shell.run("sbatch", "train.sbatch", TMPDIR=str(place)).returncode == 0
    assert list(place.iterdir()) == []


def test_what_is_said_of_the_partition_nobody_chose_and_of_what_no_node_holds(shell: Shell) -> None:
    (shell.directory / "tools" / "sinfo").write_text(
        "#!/bin/sh\nprintf 'gpu*|16|64000|2|gpu:4|1\\ncpu|8|32000|4|(null)|1\\nmixed|8+|32000+|4|(null)|1+\\n'\n"
    )
    script = shell.directory / "train.sbatch"
    script.write_text(SCRIPT.replace(" --data-worker-partition=cpu", ""))
    done = shell.run("sbatch", "train.sbatch")
    assert "hetstream: the data workers go to the default partition gpu, whose nodes have GPUs" in done.stderr
    script.write_text(SCRIPT)
    assert "default partition" not in shell.run("sbatch", "train.sbatch").stderr
    refused = shell.run("sbatch", "train.sbatch", "--data-worker-cpus=9")
    assert refused.returncode == 2
    assert "train.sbatch: a data worker of 9 CPUs fits no node of partition cpu" in refused.stderr
    many = shell.run("sbatch", "train.sbatch", "--data-worker-cpus=9", "--data-worker-partition=mixed")
    assert many.returncode == 0, "nobody knows the largest node there"


def test_the_plan_of_the_filter_has_the_bytes_of_the_command_line(tmp_path: Path) -> None:
    """A job's name need be no text; escaped for a reader's eyes it would be another one."""
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\n#HETSTREAM --data-workers=1 --data-worker-partition=cpu\ntrue\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "hetstream.slurm_plugin.cli",
            "internal",
            "filter",
            "",
            "job.sbatch",
            b"--job-name=caf\xe9",
            "job.sbatch",
        ],
        cwd=tmp_path,
        env={**os.environ, "HETSTREAM_FILTER_NONCE": "abc", "TMPDIR": str(tmp_path)},
        capture_output=True,
        check=True,
    )
    assert b"'--job-name=caf\xe9'" in done.stdout


def filtered(shell: Shell, directives: str, script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return shell.run("internal", "filter", directives, script, script, HETSTREAM_FILTER_NONCE="abc", **environ)


def test_the_filter_converts_what_is_asked_for_and_nothing_else(shell: Shell) -> None:
    plain, late = shell.directory / "plain.sbatch", shell.directory / "late.sbatch"
    plain.write_text("#!/bin/bash\nsrun python train.py\n")
    late.write_text("#!/bin/bash\nsrun python train.py\n#HETSTREAM --data-workers=2\n")
    done = filtered(shell, "", str(plain))
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
    done = filtered(shell, "", str(late))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "hetstream: late.sbatch line 3: a #HETSTREAM line after the first command has no effect\n"
    for directives, script in (("", "train.sbatch"), ("--data-workers=1 --data-worker-partition=cpu", "plain.sbatch")):
        done = filtered(shell, directives, str(shell.directory / script))
        assert done.returncode == 0, done.stderr
        assert "\nhetstream-plan-abc\ntrap : INT TERM\n" in done.stdout


def test_a_script_that_asks_for_nothing_waits_for_few_files(shell: Shell) -> None:
    """Where a site has data workers by its policy, or a script says so too late, each sbatch waits for this."""
    (shell.directory / "plain.sbatch").write_text("#!/bin/bash\nsrun python train.py\n")
    program = (
        "import sys; from hetstream.slurm_plugin.cli import main\n"
        "assert main(['internal', 'filter', '', 'plain.sbatch', 'plain.sbatch']) == 3\n"
        "print(*(name for name in sys.modules if name.split('.')[0] in ('hetstream', 'msgspec')))"
    )
    environ = {**shell.environ, "HETSTREAM_FILTER_NONCE": "abc"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=shell.directory, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert len(loaded) <= 20, loaded
