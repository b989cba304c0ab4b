"""Conversion against real sbatch: what it accepts is accepted, and the trainer's component is the plain job's.

Jobs are submitted held, plain and converted, and what slurmctld has of them is compared.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hetstream.base.errors import UsageError
from hetstream.hetjob.errors import SlurmCommandError
from hetstream.slurm_plugin.client.slurm import CommandSlurm, sbatch_takes_value
from hetstream.slurm_plugin.submit.conversion import convert_script
from hetstream.slurm_plugin.submit.request import parse_command_line
from tests.programs import require

pytestmark = [pytest.mark.slurm, pytest.mark.every_release]

HETSTREAM = Path(sys.executable).with_name("hetstream")
OWN = ["--data-workers=1", "--data-worker-cpus=1", "--data-worker-partition=cpu"]
# Of a job's description; the words of conversion itself, such as the CPUs, are compared apart, and memory as a whole.
FIELDS = (
    *("JobName", "Comment", "TresPerNode", "TresPerJob", "MinMemoryNode", "memory"),
    *("Dependency", "Reboot", "OverSubscribe", "Features", "NumTasks"),
)


def described(cluster: Any, job_id: str) -> list[dict[str, str]]:
    """What slurmctld has of each component, by field, and the job is gone."""
    shown = cluster.run("scontrol", "show", "job", "-o", job_id).splitlines()
    cluster.run("scancel", job_id)
    return [
        dict(re.findall(r"(\S+?)=(.*?)(?= [A-Za-z/:]+=|$)", line))
        | {"line": line, "memory": "".join(re.findall(r"TRES=\S*?mem=([^,\s]+)", line))}
        for line in sorted(filter(None, shown), key=lambda text: int(re.findall(r"\d+", text)[0]))
    ]


def submit(cluster: Any, script: str, *words: str, environ: Mapping[str, str] = {}) -> list[dict[str, str]] | None:
    """Held by sbatch itself; None if it refuses."""
    try:
        command = [*words, "sbatch"] if words[:1] == ("env",) else ["sbatch", *words]
        env = {**cluster.env, **environ}
        done = subprocess.run(
            [*command, "--hold", "--parsable"], input=script, env=env, capture_output=True, text=True, check=True
        )
    except subprocess.CalledProcessError:
        return None
    return described(cluster, done.stdout.strip())


def submit_converted(
    cluster: Any, script: str, *words: str, environ: Mapping[str, str] = {}
) -> list[dict[str, str]] | None:  # fmt: skip
    """The same by `hetstream sbatch`, without its start-up time."""
    env = {**cluster.env, **environ}
    given, unread = parse_command_line([*OWN, *words], env)
    assert not unread
    try:
        conversion = convert_script(script.encode(), "sbatch", given, env, CommandSlurm(env), [str(HETSTREAM)])
    except UsageError:
        return None
    assert conversion.plan is not None
    taken = {name: value for name, value in environ.items() if name not in conversion.plan.exports}
    return submit(cluster, conversion.script.decode(), *conversion.plan.sbatch_options, environ=taken)


PIECES = (
    *("--comment=a", "--comment", "b", "-J", "name", "-Jx", "--gres=gpu:1", "-c", "4", "-n2", "--mem=1G", "--mem 2G"),
    *("\\", "\\ ", " \\", '"a b"', "'c # d'", "#", "#x", " ", "\t", "\v", "\f", "''", '""', "a\\#b", '\\"', "\u00e4"),
    *(
        "--hold",
        "--reboot",
        "-H",
        "-c4 -n",
        "--exclu=hetjob",
        "hetjobs",
        "--nice",
        "--nice=5",
        "-k",
        "--reb",
        "-Ga100:1",
    ),
)


def odd_script(seed: int) -> str:
    """Lines of options as nobody would write them, and many that sbatch takes all the same."""
    draw = random.Random(seed)
    lines = ["#!/bin/bash"]
    for _ in range(draw.randint(1, 4)):
        joint = draw.choice([" ", " ", "  ", "\v", "\t", ""])
        mark = draw.choice(["#SBATCH ", "#SBATCH ", "#SBATCH ", "#SLURM ", "#SBATCH", " #SBATCH ", "# SBATCH "])
        lines.append(mark + joint.join(draw.choices(PIECES, k=draw.randint(1, 4))))
    return "\n".join([*lines, "hostname", ""])


@pytest.mark.shows("a trailing backslash, vertical tabs and empty words are read as sbatch reads them")
def test_odd_lines_are_read_as_sbatch_reads_them(devcluster: Any) -> None:
    accepted = 0
    for seed in range(60):
        script = odd_script(seed)
        plain = submit(devcluster, script)
        if plain is not None:
            accepted += 1
            converted = submit_converted(devcluster, script)
            assert converted is not None, script
            assert len(converted) == 2
            for field in FIELDS:
                assert converted[0].get(field) == plain[0].get(field), (field, script)
    assert accepted > 10


@pytest.mark.shows("`#PBS` lines, `SBATCH_MEM_PER_CPU` beside `--mem`, `--reboot`: the trainer is the plain job")
@pytest.mark.parametrize(
    ("lines", "words", "environ"),
    [
        ("--mem=1G -c 4", (), {"SBATCH_MEM_PER_CPU": "1500M"}),
        ("--mem-per-cpu=1G -c 4", (), {"SBATCH_MEM_PER_NODE": "3G"}),
        ("--mem=1G", (), {"SBATCH_MEM_PER_NODE": "3G"}),
        ("-c 4", ("--mem=2G",), {"SBATCH_MEM_PER_CPU": "1500M"}),
        ("-c 4", (), {"SBATCH_GRES": "gpu:1", "SBATCH_PARTITION": "gpu", "SBATCH_CONSTRAINT": ""}),
        ("-c 4 --threads-per-core=1", (), {"SLURM_HINT": "nomultithread"}),
        ("-c 4", (), {"SBATCH_SPREAD_JOB": "1", "SBATCH_OVERCOMMIT": "yes", "SBATCH_USE_MIN_NODES": ""}),
        ("-c 4", (), {"SBATCH_OVERCOMMIT": "0", "SBATCH_SIGNAL": "USR1@90", "SBATCH_REQ_SWITCH": "1"}),
        ("-c 4 -d singleton", ("--reboot", "--comment=x y"), {}),
        ("-c 4", ("--dependency=singleton", "--network=a"), {"SBATCH_WAIT4SWITCH": "5"}),
        ("-c 2\n#PBS -l nodes=1:ppn=4,mem=1gb", (), {}),
        ("-c 2 --gpus=1\n#PBS -N named", (), {"SBATCH_IGNORE_PBS": "1"}),
        ("-c 2\n#BSUB -n 3\n#BSUB -J named", (), {}),
    ],
)
def test_the_trainer_is_the_plain_job_whatever_says_so(
    devcluster: Any, lines: str, words: tuple[str, ...], environ: dict[str, str]
) -> None:
    script = f"#!/bin/bash\n#SBATCH {lines}\nhostname\n"
    plain = submit(devcluster, script, *words, environ=environ)
    converted = submit_converted(devcluster, script, *words, environ=environ)
    assert plain is not None
    assert converted is not None
    trainer, data_workers = converted
    assert [trainer.get(field) for field in FIELDS] == [plain[0].get(field) for field in FIELDS]
    # Nothing of the trainer's reaches the data workers, but for what sbatch carries there.
    assert (data_workers["NumTasks"], data_workers["CPUs/Task"], data_workers["Partition"]) == ("1", "1", "cpu")
    assert "gpu" not in data_workers["line"]
    assert data_workers["Reboot"] == ("1" if "--reboot" in words else "0")


@pytest.mark.shows("`--dependency=singleton`: of two jobs with one name the second starts when the first has ended")
@pytest.mark.parametrize("dependency", ["singleton", pytest.param("afterany:JOB,singleton", marks=pytest.mark.slow)])
def test_a_chain_of_jobs_with_one_name_goes_on(
    devcluster: Any, wait_until: Callable[..., None], dependency: str
) -> None:
    """The second waits for the first, and not for itself."""
    name = f"chain-{os.getpid()}-{len(dependency)}"
    log = devcluster.out_dir / f"{name}.log"
    if "JOB" in dependency:
        before = devcluster.run("sbatch", "--parsable", "-o", "/dev/null", "--wrap=true")
        dependency = dependency.replace("JOB", before)
    script = f"#!/bin/bash\n#SBATCH -J {name} -d {dependency} -o /dev/null\necho $SLURM_JOB_ID >> {log}\nsleep 1\n"
    log.touch(mode=0o666)
    jobs = []
    for _ in range(2):
        path = devcluster.out_dir / f"{name}.sh"
        path.write_text(script)
        argv = [str(HETSTREAM), "sbatch", "--parsable", *OWN, f"--jobs-dir={devcluster.out_dir}/jobs", str(path)]
        jobs.append(devcluster.run(*argv))
    wait_until(lambda: log.read_text().split() == jobs, 120, "both jobs have run, one after the other")
    wait_until(lambda: not devcluster.run("squeue", "-h", f"--name={name}"), 60, "the queue is empty")


PLUGIN = """
typedef struct spank_handle *spank_t;
struct spank_option {
  char *name; char *arginfo; char *usage; int has_arg; int val; int (*cb)(int, const char *, int);
};
extern int spank_option_register(spank_t, struct spank_option *);
const char plugin_name[] = "containers", plugin_type[] = "spank";
const unsigned int plugin_version = RELEASE, spank_plugin_version = 1;
static int take(int value, const char *argument, int remote) { return 0; }
int slurm_spank_init(spank_t spank, int argc, char **argv) {
  struct spank_option options[] = {
    {"container-image", "IMAGE", "an image", 1, 0, take}, {"container-mounts", 0, "without a word of help", 1, 0, take},
    {"container-writable", 0, "a flag", 0, 0, take}, {"container-save", "PATH", "an optional value", 2, 0, take} };
  for (int i = 0; i < 4; i++) spank_option_register(spank, &options[i]);
  return 0;
}
"""


@pytest.fixture
def with_plugin(devcluster: Any, tmp_path: Path) -> dict[str, str]:
    """The environment of a site whose sbatch has options of a SPANK plugin."""
    require("gcc")
    said = devcluster.run("sbatch", "--version")
    major, minor, micro = (int(part) for part in re.findall(r"\d+", said)[:3])
    source, library, stack = (tmp_path / name for name in ("plugin.c", "plugin.so", "plugstack.conf"))
    source.write_text(PLUGIN)
    release = f"-DRELEASE={major << 16 | minor << 8 | micro}"
    subprocess.run(["gcc", "-shared", "-fPIC", release, "-o", library, source], check=True)
    stack.write_text(f"required {library}\n")
    config = tmp_path / "slurm.conf"
    config.write_text(Path(devcluster.env["SLURM_CONF"]).read_text() + f"\nPlugStackConfig={stack}\n")
    return {**devcluster.env, "SLURM_CONF": str(config)}


@pytest.mark.shows("options of SPANK plugins may have a blank before the value")
def test_options_of_a_sites_plugins_have_their_values(with_plugin: dict[str, str], tmp_path: Path) -> None:
    taking = {
        name: sbatch_takes_value(name, with_plugin)
        for name in ("container-image", "container-mounts", "container-writable", "container-save", "no-such")
    }
    assert [name for name, takes in taking.items() if takes] == ["container-image", "container-mounts"]
    script = tmp_path / "train.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --container-image ghcr.io\\#org/img:v5 --container-writable\n"
        "#SBATCH --container-mounts /a:/b\n#SBATCH -c 2\nhostname\n"
    )
    for words in (
        [],
        ["--container-image", "foo", "--container-writable"],
        ["--container-mounts", "-x", "--container-save"],
        ["--container-im", "--comment=eaten"],
    ):
        for command in (["sbatch"], [str(HETSTREAM), "sbatch", *OWN]):
            argv = [*command, "--test-only", *words, str(script)]
            done = subprocess.run(argv, env=with_plugin, capture_output=True, text=True, check=False)
            assert done.returncode == 0, (argv, done.stderr)


@pytest.mark.shows("options of SPANK plugins may have a blank before the value")
def test_nothing_is_submitted_when_sbatch_is_asked(devcluster: Any) -> None:
    before = devcluster.run("squeue", "-h", "-a")
    for name in ("wra", "wrap", "wrap=x", "gpus", "", "-", "hold"):
        sbatch_takes_value(name, devcluster.env)
    assert devcluster.run("squeue", "-h", "-a") == before
    with pytest.raises(SlurmCommandError):
        devcluster.run("sbatch", "--no-such")


# What a step says of itself: CPUs and memory, as slurmctld has them.
SHOWS = {"show.sh": "scontrol -o show step $SLURM_JOB_ID.$SLURM_STEP_ID\n"}
SHOW = "bash show.sh"
HALF = "srun --immediate=30 --exact --gres=none -n1 -c2"
# Each asks for all CPUs or for memory by CPUs, in a way that a script's text hardly shows. Of the first, the files.
KINDS: dict[str, tuple[dict[str, str], str]] = {
    "make": ({"Makefile": f"train:\n\tsrun -c 4 {SHOW}\n"}, "make train"),
    "python": (
        {"lib.py": "import subprocess\nsubprocess.run(['sr' + 'un', '-c4', 'bash', 'show.sh'])\n"},
        f"{sys.executable} -c 'import lib'",
    ),
    "path": ({"dotrain": f"#!/bin/bash\nsrun -c 4 {SHOW}\n"}, "export PATH=$PWD:$PATH\ndotrain"),
    "program": ({"launch": f"#!/usr/bin/env bash\nx=srun\n$x -c 4 {SHOW}\n"}, "nohup ./launch"),
    "settings": ({"activate": "NC=4\n"}, f"source ./activate\nsrun -c ${{NC:-2}} {SHOW}"),
    "unread settings": ({}, f"echo NC=4 > activate\nsource ./activate\nsrun -c ${{NC:-2}} {SHOW}"),
    "here-string": ({}, f"bash <<< 'srun -c 4 {SHOW}'"),
    "eval": ({}, f'L=srun; C="-c 4 {SHOW}"; eval "$L $C"'),
    "name": ({}, f"X=run; s$X -c 4 {SHOW}"),
    "text": ({}, f'export L=srun; bash -c "$L -c 4 {SHOW}"'),
    "pipe": ({}, f"printf 'srun -c 4 {SHOW}' | tee x | bash"),
    "subshell": ({}, f"( {HALF} {SHOW} ) &\n{HALF} {SHOW}; wait"),
    "pipeline": ({}, f"{HALF} {SHOW} | {HALF} cat"),
    "memory": ({}, f"srun --mem-per-cpu=1G {SHOW}"),
    "variable": ({}, f"export SLURM_MEM_PER_CPU=1024\nsrun {SHOW}"),
    # What depends on how many CPUs there are.
    "CPUs of a task": ({}, f"export SLURM_CPUS_PER_TASK=4\nsrun {SHOW}"),
    "tasks": ({}, f"srun -c1 -n $SLURM_CPUS_PER_TASK {SHOW}"),
    "steps": ({}, f"for i in $(seq $SLURM_CPUS_ON_NODE); do srun -n1 -c1 {SHOW}; done"),
    # What srun reads of its own job, and what a script makes of that.
    "number of tasks": ({}, f"export SLURM_NTASKS=2\nsrun -c1 --mem=1G {SHOW}"),
    "no number of tasks": ({}, f"unset SLURM_NTASKS\nexport SLURM_NPROCS=2\nsrun -c1 --mem=1G {SHOW}"),
    "less memory": ({}, f"export SLURM_MEM_PER_CPU=512\nsrun {SHOW}"),
    "memory of a step": (
        {},
        f"srun --exact -c1 --mem=3G {SHOW}\nsrun -c1 --mem=0 {SHOW}\nsrun -c1 --mem-per-gpu=3G {SHOW}",
    ),
    "memory side by side": ({}, f"for i in 1 2; do srun -n1 -c1 --mem=2G {SHOW} & done; wait"),
    "memory by CPUs": ({}, f"srun -n1 -c1 --mem=$((SLURM_CPUS_PER_TASK * 512)) {SHOW}"),
    "test": ({}, f"N=$SLURM_CPUS_ON_NODE\nif (( N < 4 )); then echo done; exit 1; fi\nsrun -c1 {SHOW}"),
}
# Of the job master, which would stay, only what the script's own lines get from it.
EXPORTS = [
    sys.executable,
    "-c",
    "import os; from hetstream.hetjob.job.job import *; print(script_lines(os.environ))",
]


def test_steps_of_every_kind_have_what_they_have_in_a_plain_job(
    devcluster: Any, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converted without the job master, which has its own tests: what counts is the trainer's component."""
    given, _ = parse_command_line(OWN, devcluster.env)
    logs: dict[str, list[Path]] = {}
    for kind, (files, body) in KINDS.items():
        script = f"#!/bin/bash\n#SBATCH --gres=gpu:1 -n1 -c4 --mem-per-cpu=1G -t5\n{body}\necho done\n"
        for form in ("plain", "converted"):
            directory = devcluster.out_dir / "kinds" / kind.replace(" ", "-") / form
            directory.mkdir(parents=True)
            for name, text in (SHOWS | files).items():
                (directory / name).write_text(text)
                (directory / name).chmod(0o755)
            monkeypatch.chdir(directory)
            text = script.encode()
            if form == "converted":
                text = convert_script(text, "x", given, devcluster.env, CommandSlurm(devcluster.env), EXPORTS).script
            argv = ["sbatch", "--parsable", f"--job-name=kinds-{os.getpid()}", "--output=log"]
            subprocess.run(argv, input=text, env=devcluster.env, capture_output=True, check=True)
            logs.setdefault(kind, []).append(directory / "log")
    wait_until(
        lambda: all(log.exists() and "done\n" in log.read_text() for pair in logs.values() for log in pair),
        180,
        "all scripts have ended",
    )
    wait_until(lambda: not devcluster.run("squeue", "-h"), 60, "the queue is empty")

    def steps(log: Path) -> list[str]:
        return sorted(re.findall(r"\bTRES=(\S*)", log.read_text()))

    for kind, (plain, converted) in logs.items():
        assert steps(plain), (kind, plain.read_text())
        assert steps(converted) == steps(plain), (kind, converted.read_text())


# Ways to say how many tasks there are, with as many CPUs as the trainer keeps.
TASKS = (
    *("-N2", "-n3", "-N2 -n3", "-N2 -c2", "-N2 --ntasks-per-node=2", "-N2 --ntasks-per-node=2 -c2"),
    *("--gpus=2 --ntasks-per-gpu=1", "-N2 --gpus-per-node=2 --ntasks-per-node=2", "--gpus=2 --cpus-per-gpu=2"),
    *("-N2 --gpus-per-node=2 --ntasks-per-node=2 --cpus-per-gpu=2", "--ntasks-per-node=3"),
)


def test_a_script_reads_as_many_tasks_as_in_a_plain_job(
    devcluster: Any, wait_until: Callable[..., None], tmp_path: Path
) -> None:
    given, _ = parse_command_line(OWN, devcluster.env)
    # Of another job, in the shell that submits.
    env = {**devcluster.env, "SLURM_NTASKS": "99", "SLURM_CPUS_PER_TASK": "9"}
    logs: dict[str, list[Path]] = {}
    for options in TASKS:
        body = "set -u; env | grep -E '^SLURM_(N?TASKS|NPROCS|CPUS_PER)' | grep -v _GROUP_ | sort; echo done"
        text = f"#!/bin/bash\n#SBATCH {options} --mem=1G -t5\n{body}\n".encode()
        converted = convert_script(text, "x", given, devcluster.env, CommandSlurm(devcluster.env), EXPORTS).script
        for form, script in (("plain", text), ("converted", converted)):
            log = tmp_path / f"{len(logs)}-{form}"
            argv = ["sbatch", f"--job-name=tasks-{os.getpid()}", f"--output={log}", f"--chdir={tmp_path}"]
            subprocess.run(argv, input=script, env=env, capture_output=True, check=True)
            logs.setdefault(options, []).append(log)
    wait_until(
        lambda: all(log.exists() and "done\n" in log.read_text() for pair in logs.values() for log in pair),
        180,
        "all scripts have ended",
    )
    wait_until(lambda: not devcluster.run("squeue", "-h"), 60, "the queue is empty")
    found = {options: [log.read_text() for log in pair] for options, pair in logs.items()}
    assert {options: converted for options, (_, converted) in found.items()} == {
        options: plain for options, (plain, _) in found.items()
    }
    assert "SLURM_NTASKS=4\n" in found["-N2 --ntasks-per-node=2"][1]


STEPS = """#!/bin/bash
#SBATCH {options} --gres=gpu:1 -o {log}
{body}
echo done $?
"""


@pytest.mark.shows("the trainer keeps the CPUs that any step of its script asks for")
@pytest.mark.parametrize(
    ("options", "body"),
    [
        ("-c 8", "srun \\\n  --cpus-per-task=8 \\\n  true"),
        pytest.param("-c 8", 'cmd="srun \\\n -c 8 true"\neval "$cmd"', marks=pytest.mark.slow),
        pytest.param("-c 8", "export SRUN_CPUS_PER_TASK=8\nsrun true", marks=pytest.mark.slow),
        ("-c 8", "N=8; srun -c $N true && srun -n 4 -c 2 true"),
        pytest.param("-n 2 --cpus-per-gpu=4", "srun --cpus-per-gpu=4 true", marks=pytest.mark.slow),
        ("-c 8", "for i in 1 2; do srun --immediate=20 --exact -n1 -c4 sleep 1 & done; wait -n && wait -n"),
    ],
)
def test_steps_have_room_in_a_converted_job(
    devcluster: Any, wait_until: Callable[..., None], request: pytest.FixtureRequest, options: str, body: str
) -> None:
    name = f"steps-{os.getpid()}-{abs(hash(request.node.name))}"
    log, path = (devcluster.out_dir / f"{name}.{end}" for end in ("log", "sh"))
    path.write_text(STEPS.format(options=options, log=log, body=body))
    devcluster.run(str(HETSTREAM), "sbatch", *OWN, f"--jobs-dir={devcluster.out_dir}/jobs", str(path))
    wait_until(lambda: log.exists() and "done" in log.read_text(), 120, "the script has ended")
    assert "done 0" in log.read_text()
    wait_until(lambda: not devcluster.run("squeue", "-h", f"--name={path.name}"), 60, "the job is over")


@pytest.mark.every_release
@pytest.mark.parametrize("options", ["--gpus-per-node=2", pytest.param("--gpus=4", marks=pytest.mark.slow)])
def test_a_job_that_names_no_number_of_nodes_is_divided_as_a_plain_one(
    devcluster: Any, wait_until: Callable[..., None], tmp_path: Path, options: str
) -> None:
    """Nodes have 16 CPUs: 2 tasks with 8 go to each, and share what it asks for of a node."""
    script = tmp_path / "train.sbatch"
    script.write_text(f"#!/bin/bash\n#SBATCH -n4 -c8 {options} --mem=1000 --time=10 -o /dev/null\nsrun sleep 600\n")

    def nodes_and_memory(component: str, *argv: str) -> tuple[str, str]:
        done = subprocess.run([*argv, script], env=devcluster.env, capture_output=True, text=True, timeout=60)
        job = done.stdout.strip().split(";")[0]

        def shown() -> str:
            return str(devcluster.run("scontrol", "show", "job", f"{job}{component}"))

        wait_until(lambda: "JobState=RUNNING" in shown(), 90, "its start")
        running = shown()
        devcluster.run("scancel", job)
        wait_until(lambda: "JobState=CANCELLED" in shown(), 60, "its end")
        return re.findall(r"\bNumNodes=(\d+) ", running)[0], re.findall(r"mem=(\w+),node=\d+", running)[-1]

    plain = nodes_and_memory("", "sbatch", "--parsable", f"--chdir={tmp_path}")
    converted = nodes_and_memory("+0", str(HETSTREAM), "sbatch", "--parsable", f"--chdir={tmp_path}", *OWN)
    assert converted == plain == ("2", "2000M")
