"""The trainer keeps the CPUs that its script's steps ask for, and all of them where nobody can know what that is."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from hetstream.hetjob.convert.convert import convert
from hetstream.hetjob.convert.plan import HetPlan
from hetstream.hetjob.convert.spec import JobSpec
from hetstream.hetjob.convert.step_demand import SubmitContext
from hetstream.hetjob.ports import ClusterLimits, NodeSize, PartitionLimits

SPEC = JobSpec(2, 2, data_worker_partition="cpu")
# Each node has room for all tasks of the scripts here.
LARGE_NODES = ClusterLimits(frozenset({"gpu"}), "gpu", None, {"gpu": PartitionLimits((NodeSize(1024, 1 << 22, True),))})
ROOT = Path(__file__).parents[2]


def plan_of(
    options: str, body: str, files: Mapping[str, str] = {}, environ: Mapping[str, str] = {}
) -> HetPlan:  # fmt: skip
    around = SubmitContext(lambda path: files.get(path.removeprefix("./")), environ)
    text = f"#!/bin/bash\n#SBATCH {options}\n{body}\n"
    return convert(SPEC, text, "train.sbatch", cluster=LARGE_NODES, surroundings=around)


def cpus_of(plan: HetPlan) -> int | None:
    """CPUs per task or GPU that the trainer has now; None where they are unchanged."""
    words = [word for word in plan.components[0].options if word.startswith("--cpus-per-")]
    return int(words[0].partition("=")[2]) if words else None


ONE = "--gres=gpu:1 --cpus-per-task=8"  # keeps 2 unless more is needed
FOUR = "-N1 -n1 -c 16 --gres=gpu:4"  # keeps 8
RANKS = "-N2 --ntasks-per-node=2 -c 8 --gpus-per-node=2"  # keeps 2 for each rank


@pytest.mark.shows("the trainer keeps the CPUs that any step of its script asks for")
@pytest.mark.parametrize(
    ("options", "body", "cpus"),
    [
        # Ordinary scripts give CPUs away.
        (ONE, "srun python train.py", 2),
        (ONE, "python train.py", 2),
        (ONE, "module load cuda\nsource ~/venv/bin/activate\nsource /opt/conda/etc/profile.d/conda.sh\npython x.py", 2),
        (ONE, "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK\nsrun --cpus-per-task=$SLURM_CPUS_PER_TASK python x.py", 2),
        (ONE, 'srun -c "${SLURM_CPUS_PER_TASK:-1}" --jobid $SLURM_JOB_ID -o "$LOG" python x.py "$@"', 2),
        (ONE, "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\nsrun python x.py", 2),
        (ONE, 'echo "now srun -c 8 starts"; srun -K1 -l --wait 60 --cpu-bind=cores python x.py -c 8 -n 9', 2),
        (ONE, "# srun -c 8\nsrun python x.py # -c 8", 2),
        (RANKS, "torchrun --nnodes 2 --nproc_per_node 2 --rdzv_backend c10d x.py", 2),
        (RANKS, "head=$(srun --nodes=1 --ntasks=1 -w $first hostname --ip-address)\nsrun python x.py", 2),
        (RANKS, "for h in $(scontrol show hostnames); do srun -N1 -n1 -w $h hostname; done", 2),
        (RANKS, 'CMD="python x.py --batch 8"\nARGS=" --wait=60 --kill-on-bad-exit=1 "\nsrun $ARGS bash -c "$CMD"', 2),
        (RANKS, 'srun -N1 -n1 ray start --head --num-cpus "$SLURM_CPUS_PER_TASK" &\nsleep 5\npython x.py', 2),
        (RANKS, "mpirun -np $SLURM_NTASKS python x.py", 2),
        (RANKS, "srun $(which python) x.py", 2),
        (ONE, "cat > conf <<'E'\n$(launch 3) `launch`\nE\nsed -i 's/e/E/g; /e /d' conf; tar -xzf a.tgz -C x", 2),
        (ONE, "export PATH=$HOME/bin:/opt/x/bin:$PATH\nsort -u f | awk '{print $1}'", 2),
        (ONE, "case $1 in\n  a|b) python x.py ;;\n  (c) exit 1;;\n  *) python y.py;;\nesac", 2),
        (ONE, 'f() {\n  python x.py "$@"\n}\nfor ((i=0; i<3; i++)); do f $i; done', 2),
        (ONE, "if [[ -n $A && $B != c ]] && ! python x.py; then exit 1; fi", 2),
        (ONE, "(cd x && python x.py) 2>&1 | tee log; wait $!; exit ${PIPESTATUS[0]}", 2),
        (ONE, 'eval "$(conda shell.bash hook)"; $CONDA_PREFIX/bin/python x.py >& log', 2),
        (ONE, 'cat > conf <<E\nlaunch: 3\nE\nread -r a b <<< "$A"\npython - <<E\nprint(1)\nE', 2),
        (ONE, 'srun bash -c \'export R=$SLURM_PROCID; exec "$@"\' name python x.py "$@"', 2),
        (ONE, "timeout --signal=TERM 60 apptainer exec --nv -B /a:/b image.sif bash -c 'python x.py'", 2),
        (ONE, "mpirun -np 2 --bind-to core --mca btl tcp,self -x PATH python x.py", 2),
        (ONE, "torchrun --nproc_per_node=gpu x.py", 2),
        (FOUR, "for i in 0 1 2 3; do srun --exact -n1 -c $((SLURM_CPUS_PER_TASK / 4)) --gpus=1 true & done; wait", 8),
        # A step that asks for more keeps what it needs.
        (ONE, "srun --cpus-per-task=5 python x.py", 5),
        (ONE, "srun \\\n    --ntasks=1 \\\n    --cpus-per-task=5 \\\n    python x.py", 5),
        (ONE, "srun -c5 python x.py", 5),
        (ONE, "srun -lc 5 python x.py", 5),
        (ONE, "srun --cpus-per-t 5 python x.py", 5),
        (ONE, "srun -n 3 -c 2 hostname", 6),
        (ONE, "srun -c1 -n 7 hostname", 7),
        (ONE, "srun -n 7 hostname", None),  # since 23.11 each has SLURM_CPUS_PER_TASK
        (ONE, "srun --ntasks-per-node=7 -c 1 hostname", 7),
        (ONE, "srun > out.log -c 5 python x.py", 5),
        (ONE, "/usr/bin/srun -c 5 true", 5),
        (ONE, "exec time nohup env A=1 srun -c 5 true", 5),
        (ONE, 'cmd="srun -n 1 \\\n  -c 5 python x.py"\neval "$cmd"', 5),
        (ONE, "bash -c 'cd x && srun -c 5 python x.py'", 5),
        (ONE, "out=$(srun -c 5 hostname)", 5),
        (ONE, "out=`srun -c 5 hostname`", 5),
        (ONE, 'echo "host: $(srun -c 5 hostname)"', 5),
        (ONE, "run() {\n  srun -c 5 true\n}\nrun", 5),
        (ONE, "args=(srun -c 5 python x.py)\n${args[@]}", 5),
        (ONE, 'args=(-c 5 --mpi=none)\nsrun "${args[@]}" python x.py', 5),
        (ONE, 'OPTIONS="--mpi=none"\nOPTIONS+=" -c 5"\nsrun $OPTIONS python x.py', 5),
        (ONE, "LAUNCHER=srun\n$LAUNCHER -c 5 python x.py", 5),
        (ONE, 'LAUNCHER="srun -l"\n$LAUNCHER -c 5 python x.py', 5),
        (ONE, '"$(which srun)" -c 5 true', 5),
        (ONE, 'L="srun --jobid $SLURM_JOB_ID"\n$L -c 5 true', 5),
        (ONE, "C=1\nC+=2\nsrun -c $C true", None),
        (ONE, "unset SLURM_CPUS_PER_TASK\nsrun -c ${SLURM_CPUS_PER_TASK:-8} true", None),
        (ONE, "cmd=(srun)\ncmd+=(-c 5)\n${cmd[*]} true", 5),
        (ONE, "trap 'srun -c 5 true' EXIT", 5),
        (ONE, '"s"run -c 5 true', 5),
        (ONE, "\\srun -c 5 true", 5),
        (ONE, "case $1 in\n  a) command srun -c 5 true ;;\nesac", 5),
        (ONE, "function f { srun -c 5 true; }", 5),
        (ONE, "if eval srun -c 5 true; then true; fi", 5),
        (ONE, "export SLURM_CPUS_PER_TASK=5\nsrun -c $SLURM_CPUS_PER_TASK true", 5),
        (ONE, "N=5; srun -c $N true", 5),
        (ONE, "N=5; srun --cpus-per-task=${N} true", 5),
        (ONE, "for n in 1 3 5; do srun -c $n true; done", 5),
        (ONE, "A=2; N=$((A + 3)); srun -c $N true", 5),
        (ONE, "export SRUN_CPUS_PER_TASK=5\nsrun python x.py", 5),
        (ONE, "SRUN_CPUS_PER_TASK=5 srun python x.py", 5),
        (ONE, "export SLURM_NTASKS=5\nsrun -c1 hostname", 5),
        (ONE, "srun --tres-per-task=cpu:5 true", 5),
        (ONE, "srun --cpus-per-gpu=5 true", 5),
        (ONE, "cat > step.txt <<EOF\nsrun -c 5 python x.py\nit's an apostrophe\nEOF", 5),
        (ONE, "mpirun -np 5 python x.py", 5),
        (ONE, "torchrun --nproc_per_node=5 x.py", 5),
        (ONE, "srun --of-a-plugin value -c 5 true", 5),
        (RANKS, "srun -n 4 -c 5 true", 5),
        (RANKS, "srun -N 1 -n 2 -c 5 true", 5),
        (RANKS, "srun -N 1 -n 1 -c 6 true", 3),
        ("--gpus=4 -n 4 -c 8", "srun -n 1 -c 5 true", None),
        ("-N1 -n 4 --gres=gpu:4 --cpus-per-gpu=4", "srun --cpus-per-gpu=3 python x.py", 3),
        ("-N1 -n 4 --gres=gpu:4 --cpus-per-gpu=4", "srun --cpus-per-gpu=$SLURM_CPUS_PER_GPU python x.py", 2),
        (FOUR, "srun --exact -n1 -c 9 true\nsrun --exact -n1 -c 8 true", 9),
    ],
)
def test_the_trainer_keeps_what_a_step_needs(options: str, body: str, cpus: int) -> None:
    plan = plan_of(options, body)
    assert cpus_of(plan) == cpus, plan.changes[0]


@pytest.mark.shows("the trainer keeps the CPUs that any step of its script asks for")
@pytest.mark.parametrize(
    ("options", "body", "why"),
    [
        (FOUR, "for i in 0 1 2 3; do srun --exact -n1 -c4 --gpus=1 true & done; wait", "line 3 .* side by side"),
        (FOUR, "run() { srun -n1 -c4 true; }\nfor i in 0 1 2 3; do run & done; wait", "line 3 .* side by side"),
        (FOUR, "seq 4 | xargs -P 4 -I {} srun --exact -n1 true {}", "side by side"),
        (FOUR, "parallel -j 4 srun --exclusive -n1 -c4 true ::: 1 2 3 4", "side by side"),
        (FOUR, "( srun --exact -n1 -c4 true ) &\nsrun --exact -n1 -c4 true", "side by side"),
        (FOUR, "srun --exact -n1 -c4 true | srun --exact -n1 -c4 wc -c", "side by side"),
        (FOUR, "srun --exact -n1 -c4 true > >(srun --exact -n1 -c4 wc)", "side by side"),
        (ONE, "bash <<< 'srun -c 8 python x.py'", "8 CPUs per task"),
        (ONE, 'L=srun; CMD="-c 8 true"; eval "$L $CMD"', "has a launcher"),
        (ONE, "X=run; s$X -c 8 true", "has a launcher"),
        (ONE, "s$X -c 8 true", "runs what a variable says"),
        (ONE, "srun --mem-per-cpu=2G true", "less memory"),
        (ONE, "mpirun -np 1 a : -np 7 b", "several programs"),
        (ONE, "srun a : -n1 -c4 b", "several programs"),
        (ONE, "export SLURM_MEM_PER_CPU=2048\nsrun true", "sets SLURM_MEM_PER_CPU"),
        (ONE, "srun -c $CPUS true", r"line 3 .*\$CPUS is known only in the job"),
        (ONE, "srun -c $1 true", "known only in the job"),
        (ONE, "srun -c $(nproc) true", "known only in the job"),
        (ONE, "srun $OPTIONS python x.py", "known only in the job"),
        (ONE, 'srun "$@"', "known only in the job"),
        (ONE, "read n < file; srun -c $n true", "changes while the script runs"),
        (ONE, "n=1; while true; do srun -n $n true; ((n*=2)); done", "changes while the script runs"),
        (ONE, "n=1; for i in a b; do srun -n $n true; n=$((n*2)); done", "refers to itself|several values"),
        (ONE, "srun --cpu-bind=map_cpu:0,1,2,3 true", "by their numbers"),
        (ONE, "srun --ntasks-per-core=1 true", "hardware"),
        (ONE, "export SLURM_CPU_BIND=map_cpu:0,7\nsrun true", "sets SLURM_CPU_BIND"),
        (ONE, "taskset -c 0-7 python x.py", "runs taskset"),
        (ONE, "numactl --physcpubind=0-7 python x.py", "runs numactl"),
        (ONE, "mpirun --map-by ppr:1:node:pe=8 python x.py", "chooses CPUs"),
        (ONE, "alias s=srun\ns -c 8 true", "in an alias"),
        (
            ONE,
            "python - <<EOF\nimport subprocess\nsubprocess.run(['srun', '-c', '8', 'x'])\nEOF",
            "has srun|has a launcher",
        ),
        (ONE, "$(echo srun) -c 8 true", "has a launcher"),
        (ONE, "S=$(which srun)\n$S -c 8 true", "8 CPUs per task"),
        (ONE, 'srun() { command srun -c 8 "$@"; }\nsrun true', "known only in the job"),
        (ONE, "while read -r a; do srun -n1 -c4 --exact $a & done", "known only in the job"),
        (ONE, 'echo "srun -c 5 python x.py" | bash', "of whose standard input nobody knows"),
        # What is not understood keeps all, whatever it may be.
        (ONE, "dotrain 3", "line 3 runs dotrain, of which nobody knows"),
        (ONE, "./program", "runs ./program"),
        (ONE, "srun ./program", "runs ./program"),
        (ONE, "charmrun +p8 ./program", "runs charmrun"),
        (ONE, "horovodrun -np 8 python x.py", "runs horovodrun"),
        (ONE, "launcher srun -n1 hostname", "runs launcher"),
        (ONE, "x=$(launch 3)", "runs launch"),
        (ONE, 'echo "`launch 3`"', "runs launch"),
        (ONE, 'echo "${A:-$(launch 3)}"', "runs launch"),
        (ONE, "python x.py <(launch 3)", "runs launch"),
        (ONE, "bash -c 'cd x; launch 3'", "runs launch"),
        (ONE, "timeout -k 5 60 nice -n 5 env A=1 launch", "runs launch"),
        (ONE, "env -S 'launch 3'", "may start another"),
        (ONE, "trap 'launch 3' EXIT", "runs launch"),
        (ONE, 'eval "$(launch 3)"', "runs what a variable says"),
        (ONE, 'eval "$(conda shell.bash hook; launch 3)"', "runs what a variable says"),
        (ONE, 'L=srun; bash -c "$L -c 8 hostname"', "has a launcher"),
        (ONE, "A=sr; B=un; $A$B -c 8 hostname", "has a launcher"),
        (ONE, "source <(launch 3)", "reads commands from another|runs launch"),
        (ONE, "cat steps | sh", "standard input"),
        (ONE, "bash < steps", "standard input"),
        (ONE, "bash <<E\nlaunch 3\nE", "runs launch"),
        (ONE, "find . -exec ./launch {} +", "runs"),
        (ONE, "awk 'BEGIN { system(\"launch\") }'", "may start another"),
        (ONE, 'python -c \'import os; os.system("sr" + "un -c 8 x")\'', "starts a program"),
        (ONE, "apptainer run image.sif launch", "runs launch"),
        (ONE, "apptainer run image.sif", "runs apptainer"),
        (ONE, "function f { launch 3; }", "runs launch"),
        (ONE, "cat > conf <<E\n$(launch 3)\nE", "runs launch"),
        (ONE, "cat <<< $(launch 3)", "runs launch"),
        (ONE, "echo `echo \\`launch 3\\``", "runs launch"),
        (ONE, "echo [[ \nlaunch 3", "runs launch"),
        (ONE, "python - <<'E'\nimport os\nos.system('sr' + 'un -c8 x')\nE", "may start a program"),
        (ONE, "cat > x.py <<E\nfrom subprocess import run\nE\npython x.py", "may start a program"),
        (ONE, "python x.py > $(launch 3)", "runs launch"),
        (ONE, "torchrun --no-python ./launch", "may start another"),
        (ONE, "deepspeed --launcher slurm x.py", "may start another"),
        (ONE, "tar -xf a --to-command=./launch", "may start another"),
        (ONE, "sed 's/a/b/e' f", "may start another"),
        (ONE, "export PATH=$PWD/bin:$PATH\npython x.py", "in the working directory"),
        (ONE, "export BASH_ENV=x\nbash -c true", "run something first"),
        (ONE, "exec 3< f; source /dev/fd/3", "another one's output"),
        (ONE, "apptainer exec --nv image.sif launch", "runs launch"),
        (ONE, "srun --multi-prog steps.conf", "multi-prog"),
        (ONE, "python() { ./launch; }; python x.py", "runs ./launch"),
        (ONE, "mpirun -np 1 -bind-to core:8 python x.py", "chooses CPUs"),
        (ONE, "mpirun -np 1 --cpus-per-rank 8 python x.py", "may choose CPUs"),
        (ONE, "mpirun --mca rmaps_base_mapping_policy slot:PE=8 python x.py", "chooses CPUs"),
        (ONE, "export OMPI_MCA_rmaps_base_mapping_policy=slot:PE=8\nmpirun -np 1 python x.py", "how MPI chooses"),
        (ONE, "I_MPI_PIN_DOMAIN=8 mpirun -np 1 python x.py", "how MPI chooses"),
        (ONE, "NP=8; torchrun --nproc-per-node=$NP x.py", "starts 8 processes"),
        (ONE, "torchrun --nproc_per_node $(nproc) x.py", "starts processes on each node"),
        (ONE, "accelerate launch --num_processes 8 x.py", "starts 8 processes"),
        (ONE, "source activate\nsrun -c ${N:-2} hostname", "known only in the job"),
        (ONE, "((n = n * 8)); srun -n $n hostname", "no number"),
        (ONE, "bash steps.sh", "runs steps.sh, which cannot be read"),
        (ONE, "bash $DIR/steps.sh", "known only in the job"),
        (ONE, "source $PROJECT/env.sh", "known only in the job"),
        (ONE, "echo 'open\nsrun true", "cannot be split"),
        (ONE, "srun -c 8 true", "8 CPUs per task"),
        (ONE, "srun -n 4 -c 2 hostname\nsrun true", "4 tasks of 2 CPUs"),
        (ONE, "#PBS -l nodes=1:ppn=8\nsrun true", "another batch system"),
    ],
)
def test_what_nobody_can_know_leaves_all_cpus_and_says_so(options: str, body: str, why: str) -> None:
    plan = plan_of(options, body)
    assert cpus_of(plan) is None
    assert plan.changes[0].change == "trainer: CPUs unchanged"
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(plan.changes[0].why)


@pytest.mark.parametrize(
    ("body", "cpus"),
    [
        ("export SLURM_CPUS_PER_TASK=5\nsrun python x.py", 5),
        ("SLURM_CPUS_PER_TASK=5 srun python x.py", 5),
        ("env SLURM_CPUS_PER_TASK=8 srun python x.py", None),
        ("export SRUN_CPUS_PER_TASK=5 SLURM_CPUS_PER_TASK=6\nsrun python x.py", 6),
        ("export SRUN_CPUS_PER_TASK=6 SLURM_CPUS_PER_TASK=5\nsrun python x.py", 6),
        ("export SLURM_CPUS_PER_TASK=8\nsrun -c 2 python x.py", 2),
        ("export SLURM_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-8}\nsrun python x.py", 2),
        ("unset SLURM_CPUS_PER_TASK\nsrun python x.py", None),
        ("read SLURM_CPUS_PER_TASK < number\nsrun python x.py", None),
        ("for i in 1 2; do srun -n1 python x.py & done; wait", 2),
        ("export SLURM_CPUS_PER_TASK=4\nfor i in 1 2; do srun -n1 python x.py & done; wait", None),
    ],
)
def test_a_step_has_the_cpus_that_a_variable_says(body: str, cpus: int | None) -> None:
    """srun takes SRUN_CPUS_PER_TASK for -c on 22.05 and 23.02, and SLURM_CPUS_PER_TASK since 23.11."""
    plan = plan_of(ONE, body)
    assert cpus_of(plan) == cpus, plan.changes[0]


PER_GPU = "-N1 --gpus=2 --cpus-per-gpu=8"
LOOP = "for i in $(seq ${TASKS%%(*}); do python x.py; done"


@pytest.mark.parametrize("name", ["SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"])
@pytest.mark.parametrize(
    ("options", "cpus"),
    [
        # Without a number of tasks Slurm makes as many as there are CPUs.
        (PER_GPU, None),
        (f"{PER_GPU} -n2", 2),
        (f"{PER_GPU} --ntasks-per-node=2", 2),
        (f"{PER_GPU} --ntasks-per-gpu=1", 2),
        ("-N2 --gpus-per-node=2 --cpus-per-gpu=8", None),
        ("-N2 --gpus-per-node=2 --cpus-per-gpu=8 --ntasks-per-node=2", 2),
        (ONE, 2),
        (f"{ONE} -N2", 2),
        (FOUR, 8),
        (RANKS, 2),
        (f"{RANKS} -n4", 2),
        ("-N2 -n2 -c8 --gpus-per-node=1", 2),
    ],
)
def test_tasks_of_a_node_go_by_cpus_where_nothing_else_says_them(options: str, cpus: int | None, name: str) -> None:
    plan = plan_of(options, LOOP.replace("TASKS", name))
    assert cpus_of(plan) == cpus
    assert cpus is not None or "would be another number with fewer CPUs" in str(plan.changes)
    assert cpus_of(plan_of(options, f'echo "${name}"; [ -n "${name}" ]\npython x.py')) is not None


N = "SLURM_CPUS_PER_TASK"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        # What is started depends on the number of CPUs.
        (f"srun -c 1 -n ${N} hostname", "number of tasks depends"),
        (f"srun -c 1 -n $(({N}/2)) hostname", "number of tasks depends"),
        (f'TASKS="${{{N}}}"\nsrun -c1 -n "$TASKS" hostname', "number of tasks depends"),
        (f'O="-c1 -n ${N}"\nsrun $O hostname', "number of tasks depends"),
        ("srun -c1 --ntasks=$SLURM_CPUS_ON_NODE hostname", "number of tasks depends"),
        (f"export SLURM_NTASKS=${N}\nsrun -c1 hostname", "number of tasks depends"),
        (f"export SLURM_NPROCS=${N}\nsrun -c1 hostname", "number of tasks depends"),
        (f"srun -c1 --ntasks-per-node=${N} hostname", "number of tasks depends"),
        (f"srun -N ${N} -c1 hostname", "number of (tasks|nodes) depends"),
        (f"srun --mem=$(({N} * 1000)) python x.py", "--mem depends"),
        (f"srun --mem=${{{N}}}G python x.py", "--mem depends"),
        ("srun --mem=$((SLURM_MEM_PER_CPU * 2)) python x.py", "known only in the job"),
        (f"srun --gpus-per-task=$(({N}/4)) python x.py", "--gpus-per-task depends"),
        (f"srun -o log-${N} python x.py", "--output depends"),
        ("srun -n $(nproc) hostname", "known only in the job"),
        ("srun -c1 -n $SLURM_JOB_CPUS_PER_NODE hostname", "known only in the job"),
        (f"mpirun -np ${N} python x.py", "number of processes depends"),
        (f"torchrun --nproc_per_node=${N} x.py", "number of them depends"),
        (f"torchrun --nproc_per_node=2 --nnodes ${N} x.py", "in torchrun"),
        (f"accelerate launch --num_machines=${N} x.py", "in accelerate"),
        # How often, or whether, depends on it.
        (f"for i in $(seq ${N}); do srun --exact -n1 -c1 true; done", "in for"),
        (f"for ((i=0; i<{N}; i++)); do srun -n1 -c1 true; done", "in for"),
        (f"n=${N}\nfor ((i=0; i<n; i++)); do srun -n1 -c1 true; done", "in for"),
        (f"i=0; while [ $i -lt ${N} ]; do srun -n1 -c1 true; i=$((i+1)); done", r"in \["),
        (f"until (( i++ >= {N} )); do srun -c1 true; done", r"in \(\("),
        (f"if [ ${N} -lt 8 ]; then echo too few; exit 1; fi\nsrun python x.py", r"in \["),
        (f"[[ -n $A && ${N} -ge 8 ]] || exit 1\nsrun python x.py", r"in \[\["),
        (f"test ${N} = 8 && srun python x.py", "in test"),
        (f"(( {N} < 8 )) && exit 1\nsrun python x.py", r"in \(\("),
        (f"case ${N} in 8) srun python x.py;; *) exit 1;; esac", "in case"),
        (f"let 'x = {N} > 4' && srun python x.py", "in let"),
        (f"head -n ${N} list | while read a; do srun -c1 true; done", "in head"),
        (f"echo ${N} | xargs -n1 srun -c1 -n2 true", "side by side"),
        (f"echo ${N} | xargs -n1 python x.py", "in echo"),
        (f"out=$(for i in $(seq ${N}); do srun -c1 true; done)", "in (for|seq)"),
        (f"A=($(seq ${N}))\nfor i in ${{A[@]}}; do srun -c1 true; done", "in for"),
        ("N=$(nproc)\nif [ $N -lt 8 ]; then exit 1; fi\npython x.py", r"in \["),
        ("if [ `nproc` -lt 8 ]; then exit 1; fi\npython x.py", r"in \["),
        (
            "C=$(python -c 'import os; print(len(os.sched_getaffinity(0)))')\n[ $C -ge 8 ] || exit\npython x.py",
            r"in \[",
        ),
        ("[ $(scontrol show job $SLURM_JOB_ID | grep -o NumCPUs=8) ] || exit 1\npython x.py", r"in \["),
        ("[ $(squeue -h -o %C -j $SLURM_JOB_ID) -eq 8 ] || exit 1\npython x.py", r"in \["),
        ("[ $SLURM_CPUS_ON_NODE -eq 8 ] || exit 1\npython x.py", r"in \["),
        (f"f() {{ for i in $(seq $1); do srun -c1 true; done; }}\nf ${N}", "in f"),
        (f"set -- ${N}\nfor i in $(seq $1); do srun -c1 true; done", "in set"),
        (f'read n <<< "${N}"\n[ $n -lt 8 ] && exit 1\npython x.py', r"in \["),
        (f"bash -c 'for i in $(seq ${N}); do python x.py; done'", "in for"),
        (f"srun bash -c '[ ${N} -eq 8 ] && exec python x.py'", r"in \["),
        (f"timeout $(({N} * 60)) python x.py", "in timeout"),
        (f"seq 8 | xargs -P ${N} -I {{}} python x.py {{}}", "in xargs"),
        (f"echo host slots=${N} > hosts\nmpirun --hostfile hosts python x.py", "in echo"),
        (f"cat > hosts <<E\nhost slots=${N}\nE\nmpirun --hostfile hosts python x.py", "in a file"),
        (f"cpus() {{ echo ${N}; }}\n[ $(cpus) -ge 8 ] || exit 1\npython x.py", r"in \["),
        ("cpus() { nproc; }\nM=`cpus`\nfor i in $(seq $M); do srun -c1 true; done", "in for"),
        (f"V={N}\n[ ${{!V}} -lt 8 ] && exit 1\npython x.py", r"in \["),
        (f"[ $[{N} / 4] -eq 2 ] || exit 1\npython x.py", r"in \["),
        (f"n=${N}\ndeclare -i m=n+1\nwhile (( m-- > 0 )); do srun -c1 true; done", r"in \(\("),
        (f"while read i; do srun -c1 true; done < <(seq ${N})", "in seq"),
        (f'eval "for i in {{1..${N}}}; do srun -c1 true; done"', "in for"),
        (f"sbatch -c ${N} next.sh\npython x.py", "in sbatch"),
        (f"mpirun -H $(hostname):${N} python x.py", "depends on how many"),
        (f"srun -c1 --export=ALL,M=${N} bash -c 'for i in $(seq $M); do python x.py; done'", "in for"),
        (f": ${{P:=${N}}}\n[ $P -gt 4 ] || exit\npython x.py", r"in \["),
    ],
)
def test_what_would_be_another_number_with_fewer_cpus_leaves_all(body: str, why: str) -> None:
    plan = plan_of(ONE, body)
    assert cpus_of(plan) is None
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(plan.changes[0].why)


@pytest.mark.parametrize(
    "body",
    [
        f"python x.py --workers ${N} --fast",
        f"srun python x.py --workers=$(({N} - 1))",
        "python x.py --workers $(nproc)",
        f"export OMP_NUM_THREADS=${N} MKL_NUM_THREADS=$(nproc)\nsrun python x.py",
        f'echo "CPUs: ${N}, $(nproc)" >> log\nprintf "%s\\n" ${N}\npython x.py',
        f'if [ -z "${N}" ]; then export {N}=1; fi\npython x.py',
        f"[[ -n ${{{N}}} && -n $A ]] && export OMP_NUM_THREADS=${N}\npython x.py",
        f"accelerate launch --num_cpu_threads_per_process=${N} --num_processes=1 x.py --n ${N}",
        f"torchrun --nproc_per_node=1 x.py --workers ${N}",
        f"env OMP_NUM_THREADS=${N} srun python x.py",
        f"OMP_NUM_THREADS=${N} timeout 60 python x.py",
        f"cat > conf.yaml <<E\nworkers: ${N}\nE\npython x.py conf.yaml",
        f"srun -c ${N} --exact bash -c 'python x.py --workers ${N}'",
        "nproc\nlscpu | grep CPU\n[ $(nproc --all) -gt 8 ] && echo large\npython x.py",
        f"N=2\nfor i in $(seq $N); do python x.py --workers ${N}; done",
        "nproc=1\ntorchrun --nproc_per_node=$nproc x.py",
        f"srun --export=ALL,OMP_NUM_THREADS=${N} python x.py",
        f"apptainer exec --nv --env OMP_NUM_THREADS=${N} image.sif python x.py",
        f"singularity exec --env=OMP_NUM_THREADS=${N} image.sif python x.py",
        f"mpirun -np 1 -x OMP_NUM_THREADS=${N} python x.py",
        f"cpus() {{ echo ${N}; }}\npython x.py --workers $(cpus)",
        "cpus() { echo 4; }\nfor i in $(seq $(cpus)); do python x.py; done",
        f"# for i in $(seq ${N})\npython x.py",
    ],
)
def test_what_programs_are_told_may_follow_the_cpus(body: str) -> None:
    plan = plan_of(ONE, body)
    assert cpus_of(plan) == 2, plan.changes[0]


@pytest.mark.parametrize(
    ("options", "body", "cpus"),
    [
        # Slurm has SLURM_NTASKS in a job that says how many tasks it has, and in no other.
        (ONE, "srun -n ${SLURM_NTASKS:-5} -c1 hostname", 5),
        (f"{ONE} -n1", "srun -n ${SLURM_NTASKS:-5} -c1 hostname", 2),
        (ONE, "srun -n ${SLURM_NTASKS_PER_NODE-5} -c1 hostname", 5),
        (ONE, "export SLURM_NPROCS=5\nsrun -c1 hostname", 5),
        (ONE, "srun -c ${SLURM_CPUS_PER_TASK:-8} hostname", 2),
        (RANKS, "export SLURM_JOB_NUM_NODES=1\nsrun -n 2 hostname", None),
    ],
)
def test_a_variable_that_slurm_may_not_set_has_its_default(options: str, body: str, cpus: int | None) -> None:
    assert cpus_of(plan_of(options, body)) == cpus


@pytest.mark.shows("the trainer keeps the CPUs that any step of its script asks for")
@pytest.mark.parametrize(
    ("body", "files", "cpus"),
    [
        ("bash steps.sh 3", {"steps.sh": "srun -c 5 true\n"}, 5),
        ("srun ./steps.sh", {"steps.sh": "python x.py\n"}, 2),
        (". ./env.sh\nsrun python x.py", {"env.sh": "export A=1\nexport SRUN_CPUS_PER_TASK=5\n"}, 5),
        (". ./env.sh\nsrun -c $N python x.py", {"env.sh": "N=5\n"}, 5),
        ("sh a.sh", {"a.sh": "source b.sh", "b.sh": "srun -c 5 true"}, 5),
        ("./launch 4", {"launch": "#!/bin/bash\nsrun -c 5 true"}, 5),
        ("python run.py", {"run.py": '"""Usage: srun -c 8 python run.py"""\nimport torch\n'}, 2),
        ("python run.py", {"run.py": "import os\nos.system('srun -c 8 true')\n"}, None),
        ("python run.py", {"run.py": "import subprocess\nsubprocess.run(['srun', '-c', '8'])\n"}, None),
        ("python run.py", {"run.py": "import os\nos.system(f'{x}srun -c {n} y')\n"}, None),
        ("python run.py", {"run.py": "import os\nos.system(' '.join(['sr' + 'un', '-c8']))\n"}, None),
        ("python run.py", {"run.py": "import subprocess as s\nc = ['srun']\ns.Popen(c + ['x'])\n"}, None),
        ("python run.py", {"run.py": "from subprocess import run as r\nr(args=[name, 'x'])\n"}, None),
        ("python run.py", {"run.py": "import os\nos.execvp(name, [name])\n"}, None),
        ("python run.py", {"run.py": "import submitit\nlauncher = 'srun'\n"}, None),
        ("python run.py", {"run.py": "import subprocess\nsubprocess.check_output(['git', 'log'], text=True)\n"}, 2),
        ("python run.py", {"run.py": "import os, sys\nos.system('nvidia-smi -L')\nsys.stdout.write('x')\n"}, 2),
        ("python run.py", {"run.py": "p.add_argument('--x', help='as in srun -c 8, see its page')\n"}, 2),
        ("sh a.sh", {"a.sh": "sh b.sh", "b.sh": "sh a.sh"}, None),
        ("make -f jobs.mk train", {"jobs.mk": "train:\n\tsrun -c 8 true\n"}, None),
        ("make train", {"Makefile": "train:\n\tsrun -c 8 true\n"}, None),
        ("python -m launch", {"launch.py": "import os\nos.system('srun -c 8 true')\n"}, None),
        ("python a.py", {"a.py": "import lib\n", "lib.py": "import os\nos.system('srun -c 8 true')\n"}, None),
        ("python -c 'x = 1; import lib'", {"lib.py": "import os\nos.system('srun -c 8 x')\n"}, None),
        ("python - <<E\nimport lib\nE", {"lib.py": "import os\nos.system('srun -c 8 x')\n"}, None),
        ("python a.py", {"a.py": "from p import b as c\n", "p/b.py": "import os\nos.system('srun -c 8 true')\n"}, None),
        (". ./modules.sh\nsrun true", {"modules.sh": "export SRUN_CPUS_PER_TASK=5\n"}, 5),
        ("source ./activate\nsrun -c ${N:-2} true", {"activate": "N=5\n"}, 5),
        ("perl launch.pl", {"launch.pl": "system('srun -c 8 true');\n"}, None),
        ("PATH=$PWD:$PATH launch", {"launch": "#!/bin/bash\nsrun -c 8 true\n"}, None),
        ("python d.py cfg.yaml", {"d.py": "import sys\n", "cfg.yaml": "cmd: srun -c 8 true\n"}, None),
        ("python d.py", {"d.py": "open('cfg.yaml')\n", "cfg.yaml": "cmd: srun -c 8 true\n"}, None),
        ("srun python t.py --cfg cfg.yaml", {"t.py": "import torch\n", "cfg.yaml": "lr: 1\n"}, 2),
    ],
)
def test_what_a_script_calls_is_read_too(body: str, files: dict[str, str], cpus: int | None) -> None:
    assert cpus_of(plan_of(ONE, body, files)) == cpus


def test_a_variable_of_the_submission_counts() -> None:
    assert cpus_of(plan_of(ONE, "srun python x.py", environ={"SRUN_CPUS_PER_TASK": "5"})) == 5
    assert cpus_of(plan_of(ONE, "srun -c ${N:-3} python x.py", environ={"N": "5"})) == 5
    assert cpus_of(plan_of(ONE, "srun python x.py", environ={"SLURM_MEM_PER_CPU": "2000"})) is None
    assert (
        cpus_of(plan_of(ONE, "mpirun -np 1 python x.py", environ={"OMPI_MCA_hwloc_base_binding_policy": "x"})) is None
    )
    # From within another job: Slurm gives these to each job anew.
    assert cpus_of(plan_of(ONE, "srun python x.py", environ={"SLURM_CPUS_ON_NODE": "9", "SLURM_PROCID": "0"})) == 2


def test_a_user_who_says_how_many_cpus_is_told_what_a_step_needs() -> None:
    spec = JobSpec(2, 2, data_worker_partition="cpu", trainer_cpus=3)
    script = f"#!/bin/bash\n#SBATCH {ONE}\nsrun -c {{}} python x.py\n"
    assert cpus_of(convert(spec, script.format(5), "x")) == 5
    # What nobody else can know the user has said, and is told what it is.
    for words in ("-c $UNKNOWN", "-c1 -n $SLURM_CPUS_PER_TASK", "--mem-per-cpu=1G"):
        plan = convert(spec, f"#!/bin/bash\n#SBATCH {ONE}\nsrun {words} python x.py\n", "x")
        assert cpus_of(plan) == 3
        assert "line 3 runs srun: " in plan.changes[0].why


# They ask for no more than their trainers keep.
KEEPING = ("imagenet.sbatch", "nnunet.sbatch")


@pytest.mark.parametrize(
    "path",
    sorted({*(ROOT / "sbatch_templates").glob("*.sbatch")} - {ROOT / "sbatch_templates" / name for name in KEEPING}),
    ids=lambda path: path.name,
)
def test_the_templates_give_their_cpus_away(path: Path) -> None:
    plan = convert(SPEC, path.read_text(), path.name)
    assert "--cpus-per-" in " ".join(plan.components[0].options) or "no GPUs" in plan.changes[0].why


def test_any_text_is_read_in_time_and_without_an_error() -> None:
    draw = random.Random(7)
    pieces = [
        "srun",
        " ",
        " -c ",
        "8",
        "$N",
        "${N}",
        "N=",
        "$((",
        "))",
        "(",
        ")",
        "'",
        '"',
        "`",
        "\\",
        "\n",
        "<<E\n",
        "E\n",
        "&",
        "|",
    ]
    assert cpus_of(plan_of(ONE, "srun $N x", environ={"N": "$N"})) is None
    for _ in range(400):
        plan_of(ONE, "".join(draw.choices(pieces, k=draw.randint(1, 30))))
    for many in (
        "(" * 20_000,
        "$(" * 20_000,
        "srun -c 5 true\n" * 20_000,
        "N=$N$N\n" * 500 + "srun -c $N x",
        "'" * 99_999,
        "<<E\n" * 2_000,
        "nohup " * 20_000 + "x",
        "env srun " * 5_000 + "x",
        "case a in\n" * 2_000,
        "f() {\n" * 2_000,
        "((" * 20_000,
        "x=$(y)\n" * 5_000,
        "srun -c ${} x",
        "srun $ x",
        "N='$N'\nsrun $N x",
        "".join(f"A{level}=$A{level + 1}{number}\n" for level in range(7) for number in range(9)) + "srun -c $A0 x",
        f"srun -c $(({'*'.join(['9' * 4_000] * 2)})) x",
    ):
        plan_of(ONE, many)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 300_000,
        "((\n" * 100_000 + "))",
        "mpirun -np 4 " * 40_000,
        "A=srun;" + "$A x;" * 40_000,
        "A=$A$A;\n" * 40_000 + "srun -c $A x",
        "".join(f"A=srun{number};$A\n" for number in range(20_000)),
    ],
    ids=["parentheses", "arithmetic", "launchers", "uses of a variable", "assignments", "values"],
)
def test_a_text_of_twice_the_length_takes_twice_the_time(text: str) -> None:
    """Each took a minute or more, or all memory, as long as each part was compared with all that follow."""
    began_s = time.process_time()
    plan_of(ONE, text)
    assert time.process_time() - began_s < 20


def test_commands_in_documents_within_documents_are_found_however_deep() -> None:
    for depth in (1, 5, 20, 2_000):
        script = "\n".join([*("bash <<E" for _ in range(depth)), "srun -c 5 python x.py", *("E" for _ in range(depth))])
        assert cpus_of(plan_of(ONE, script)) in ((5,) if depth == 1 else (5, None))


@pytest.mark.parametrize(
    ("ending", "cpus"), [("", 4), (" &\nsrun -c 1 python y.py &\nwait", None)], ids=["alone", "side by side"]
)
def test_a_step_has_fewer_readings_where_two_of_them_come_to_the_same(ending: str, cpus: int | None) -> None:
    body = f'O="-c 2"\nO="-c $((SLURM_CPUS_PER_TASK/4))"\nsrun $O python x.py{ending}'
    assert cpus_of(plan_of(ONE, body)) == cpus


def test_each_value_of_a_variable_counts_however_often_another_is_assigned() -> None:
    assert cpus_of(plan_of(ONE, "N=1\n" * 100 + "N=5\nsrun -c $N python x.py")) == 5
    deep = "".join(f"A{level}=$A{level + 1}\nA{level}=x$A{level + 1}\n" * 4 for level in range(6))
    assert cpus_of(plan_of(ONE, f"{deep}A6=1\nsrun -c 5 python $A0 ${{}}")) == 5


def test_a_long_script_is_looked_at_once_for_all_numbers_of_cpus() -> None:
    begin_s = time.process_time()
    chain = "".join(f"A{number}=$A{number + 1}\n" for number in range(3_000))
    assert cpus_of(plan_of(ONE, f"{chain}A3000=$SLURM_CPUS_PER_TASK\n[ $A0 -lt 8 ] || python x.py")) is None
    body = "export A=1 B='x y' c d\n" * 3_000 + "srun -c 128 python x.py\ntorchrun --nproc-per-node=4 x.py"
    assert cpus_of(plan_of("--gres=gpu:1 --cpus-per-task=128", body)) is None
    assert time.process_time() - begin_s < 3  # 6 s when each number read the script anew, 0.3 s now
