"""Steps of a converted script on real Slurm: their tasks have the variables and files that they have in a plain job.

One script runs as a plain job and with data workers; what its tasks find in their environment, and every file that its
steps write, is compared.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

HOST = os.uname().nodename.partition(".")[0]
HETSTREAM = Path(sys.executable).with_name("hetstream")
pytestmark = [pytest.mark.slurm, pytest.mark.every_release]

OWN = ["--data-workers=1", "--data-worker-cpus=1", "--data-worker-partition=cpu", "--trainer-cpus=2"]
# Variables that are another job's or another process's in any two jobs, or that no converted job can have as a plain
# one has them, with the reason.
EXEMPT = {
    r"SLURM_JOB_?ID|SLURM_JOB_SLUID|SLURM_JOB_NAME": "they are two jobs, of two names",
    r"SLURM_JOB_(START|END)_TIME": "at two times",
    r"SLURM_TASK_PID|SLURM_(STEP_LAUNCHER|SRUN_COMM)_PORT|SLURM_SRUN_COMM_HOST": "of this step's processes",
    r"SLURM_STEP_?ID": "the job master is a step, too, and the first",
    r"SLURM_(HET|PACK)_SIZE|SLURM_\w+_(HET|PACK)_GROUP_\d+": "hetstream and MPI look for the components in them",
    r"SLURM_HET_GROUP_ID": "Slurm's number of the component",
    r"HETSTREAM_\w+|PATH|PYTHONHASHSEED": "what hetstream adds",
    r"_|SHLVL|OLDPWD": "of the shells in between",
    r"PYTHONPATH": "hetstream's hook finds its DataLoaders by it",
    r"SLURM_SCRIPT_CONTEXT": "22.05 sets it where a task has a prolog",
    r"TMPDIR": "slurmstepd sets it for the first task of a node alone",
}
STEPS = """
{directory}/show batch
step() { name=$1; shift; "$@" {directory}/show $name; }
first=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1)
last=$(scontrol show hostnames $SLURM_JOB_NODELIST | tail -1)
step whole srun
step part srun -N1 -n1 -w $first
step last srun --nodes=1 --ntasks=1 --nodelist=$last
step relative srun -r $((SLURM_NNODES - 1)) -N1 -n1
step few srun -n1 -w $first
step none srun --export=NONE,PATH=$PATH -N1 -n1 -w $first
step list srun --export=PATH,A=1 -N1 -n1 -w $first
step preserved srun -E -N1 -n1 -w $first
step of_node srun -N1 --ntasks-per-node=2 -w $first
step own env SLURM_JOB_NUM_NODES=1 SLURM_NTASKS=1 srun -w $first
step arbitrary env SLURM_HOSTFILE=hosts srun -n2 -m arbitrary
step script bash -c 'srun -N1 -n1 -w $1 "${@:2}"' x $first
step cyclic srun -m cyclic -n2
step exact srun --exact -N1 -n1 -c1 -w $first
step gpu srun -N1 -n1 --gres=gpu:1 -w $first
step prolog srun --task-prolog={directory}/prolog -N1 -n1 -w $first
step name srun -J other -N1 -n1 -w $first
srun --overlap -N1 -n1 -w $first sleep 3 &
step beside srun --overlap -N1 -n1 -w $first
step nested srun --overlap -N1 -n1 -w $first srun --overlap -w $first
wait
echo "0-$((SLURM_NTASKS - 1)) {directory}/show several" > several.conf
srun --multi-prog several.conf
"""
FILES = """
run() { rank=$SLURM_PROCID; [ $# = 0 ] || rank="$rank $*"; echo out $rank; echo err $rank >&2; }
export -f run
srun -o simple-%t.txt bash -c run
srun --output=both-%t.out --error=both-%t.err bash -c run
srun -o common.txt -e of-tasks.%t bash -c run
srun -obundled.%t -n1 bash -c run
srun -K1 --outp width-%4t-%2n.txt bash -c run
mkdir -p new/directory
srun -o new/directory/%x-%u-%N-%t-%j-%J.txt bash -c run
srun -o "a b 'c' %t.txt" bash -c run
srun -o 'escaped\\%t' bash -c run
srun -o unknown-%z-%t bash -c run
srun -o nothing-%n-%N bash -c run
srun -o 3 bash -c run > third
srun -o 99 bash -c run > none
srun -e 1 -o all bash -c run > first 2> first.err
srun -o none -e errors-%t bash -c run
srun --label bash -c run 2>&1 | sort > labels
printf 'old\\n' | tee appended-0 appended-1 > written-0
srun -n2 --open-mode=append -o appended-%t bash -c run
srun -n2 --open-mode=truncate -o written-%t bash -c run
SLURM_STDOUTMODE=by-variable-%t srun bash -c run
SLURM_STDOUTMODE=by-variable-%t srun -o by-option-%t bash -c run
echo input | srun --input=1 bash -c 'run $(cat)' 2>&1 | sort > input-1
echo input | srun -i0 bash -c 'run $(cat)' 2>&1 | sort > input-0
echo input | srun -i none bash -c 'run $(cat)' 2>&1 | sort > input-none
echo input | srun bash -c 'run $(cat)' 2>&1 | sort > input-all
srun -o code-%t bash -c 'exit 7' 2> /dev/null; echo $? > code
srun -n1 -o missing-%t no-such-program 2> /dev/null; echo $? > missing
srun -o gone-%t false 2> /dev/null; echo $? > gone
cat > several.conf <<'X'
0 bash -c 'echo first %t %o'
* bash -c 'echo other %t %o'
X
srun --multi-prog several.conf | sort > several
srun -n1 -N1 --pty -o pty-%t true < /dev/null > pty 2>&1
true
"""


def in_both(
    devcluster: Any, directory: Path, options: str, steps: str, own: Sequence[str] = OWN
) -> tuple[Path, Path]:  # fmt: skip
    """The directories in which the script has run as a plain job and with data workers."""
    script = f"#!/bin/bash\n#SBATCH {options} --time=15 -J name -o {directory}/%j.job\n"
    kinds = {"plain": ["sbatch"], "converted": [str(HETSTREAM), "sbatch", *own]}
    for kind, command in kinds.items():
        place = directory / kind
        place.mkdir(parents=True)
        (place / "prolog").write_text("#!/bin/sh\necho export B=$SLURM_JOB_NUM_NODES/$SLURM_JOB_NODELIST\n")
        (place / "show").write_text(f"#!/bin/bash -p\nenv -0 | tr '\\n\\0' '~\\n' > {place}/$1.$SLURM_PROCID\n")
        for name in ("prolog", "show"):
            (place / name).chmod(0o755)
        (place / "hosts").write_text("gpu1\ngpu0\n")
        (place / "job.sbatch").write_text(script + steps.replace("{directory}", str(place)))
        done = subprocess.run(
            [*command, "--wait", "job.sbatch"], cwd=place, env=dict(devcluster.env), capture_output=True, text=True,
            check=False, timeout=900,
        )  # fmt: skip
        said = "".join(path.read_text() for path in sorted(directory.glob("*.job")))
        assert done.returncode == 0, done.stderr + said
        assert "hetstream:" not in said, said
    return directory / "plain", directory / "converted"


def variables(directory: Path) -> dict[str, dict[str, str]]:
    """Of each task, by the step's name and the task's number."""
    return {
        path.name: dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)
        for path in directory.glob("*.[0-9]*")
    }


def differences(plain: Path, converted: Path) -> Iterator[str]:
    of_plain, of_converted = variables(plain), variables(converted)
    assert of_plain.keys() == of_converted.keys()
    assert len(of_plain) > 20, "every step has run"
    for task, environ in sorted(of_plain.items()):
        other = of_converted[task]
        for name in sorted(environ.keys() | other.keys()):
            had, has = environ.get(name), other.get(name)
            is_same = had == has or (had and has and had.replace(str(plain), str(converted)) == has)
            if not is_same and not any(re.fullmatch(pattern, name) for pattern in EXEMPT):
                yield f"{task}: {name} is {has!r}, and {had!r} in a plain job"


@pytest.mark.parametrize(
    "options",
    [
        "-N2 --ntasks-per-node=2 -c2 --gres=gpu:2 --mem=4G",
        pytest.param("-N2 -n3 --gres=gpu:1 --mem-per-cpu=100", marks=pytest.mark.slow),
        pytest.param("-N2 -n2 --gpus-per-node=2 --cpus-per-gpu=1 --mem=4G", marks=pytest.mark.slow),
        pytest.param("-N1 -n4 -c2 --gres=gpu:4 --mem=4G --hint=nomultithread", marks=pytest.mark.slow),
        pytest.param("-N2 --ntasks-per-node=2 -c2 --mem=4G --export=NONE", marks=pytest.mark.slow),
    ],
)
def test_tasks_of_every_kind_of_step_have_the_variables_of_a_plain_job(devcluster: Any, options: str) -> None:
    directory = devcluster.out_dir / f"variables{abs(hash(options))}"
    found = list(differences(*in_both(devcluster, directory, options, STEPS)))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "options",
    ["-N2 --ntasks-per-node=2 -c2 --gres=gpu:2 --mem=4G", pytest.param("-N1 -n4 --mem=4G", marks=pytest.mark.slow)],
)
def test_files_of_tasks_are_those_of_a_plain_job(devcluster: Any, options: str) -> None:
    compare_files(*in_both(devcluster, devcluster.out_dir / f"files{abs(hash(options))}", options, FILES))


def compare_files(plain: Path, converted: Path) -> None:
    def files(directory: Path) -> dict[str, list[str]]:
        found = {}
        for path in directory.rglob("*"):
            name = str(path.relative_to(directory))
            if path.is_file() and not name.startswith((".hetstream", "job.sbatch", "missing-", "show")):
                # Jobs, steps and what a release calls the host; tasks write in any order.
                name = re.sub(r"\d+-\d+\.\d+\.txt", "J.txt", re.sub(rf"{HOST}|gpu\d", "N", name))
                found[name] = sorted(line for line in path.read_text().splitlines() if not line.startswith("srun: "))
        return found

    expected, other = files(plain), files(converted)
    assert sorted(other) == sorted(expected)
    assert {name: lines for name, lines in other.items() if lines != expected[name]} == {}, expected


@pytest.mark.parametrize("options", ["-N2 -n4 -c8 --gpus-per-node=2 --mem=1G", "-N2 -n3 -c6 --gres=gpu:1 --mem=1G"])
def test_tasks_are_divided_over_nodes_as_in_a_plain_job(devcluster: Any, options: str) -> None:
    steps = "srun printenv SLURMD_NODENAME | sort > tasks\n"
    directory = devcluster.out_dir / f"divided{abs(hash(options))}"
    plain, converted = in_both(devcluster, directory, options, steps, OWN[:-1])
    assert (converted / "tasks").read_text() == (plain / "tasks").read_text()
