"""What checkpoints change in a job's request: memory for the slots, and the permission to requeue. Pure.

Called by `convert.py` for a script with `--checkpoint`. A slot is a file in /dev/shm, and Slurm counts its pages
against the memory of the job that writes them: without more memory in the request, the first saves would end the job.

No `--signal` is added. Slurm gives `--signal=B:...` to the batch shell alone, which ends of it, or holds a trap back
until its `srun` has ended; without `B:` every process of every step gets it, and the user's helper processes end of it.
The checkpoint writers know when the job ends and need no signal (`slurm_plugin/cli/ckpt_writer.py`).
"""

from __future__ import annotations

from fractions import Fraction

from hetstream.hetjob.plan import Change
from hetstream.hetjob.request import gpus_per_task, tasks_per_node
from hetstream.hetjob.sbatch_options import SbatchOption, SbatchOptions, megabytes, memory_words
from hetstream.hetjob.spec import JobSpec

# One slot is written while one is persisted and one holds the newest: then no save ever waits.
NUM_SLOTS = 3
# What a host keeps for a rank of another: the newest whole one, and the one that comes.
NUM_REPLICA_SLOTS = 2


def checkpoint_overrides(spec: JobSpec, options: SbatchOptions) -> tuple[list[SbatchOption], list[Change]]:
    """What component 0 gets beside what it asks for.

    Args:
        spec: with `checkpoint` and `checkpoint_size`.
        options: of the script, with what conversion has changed in it so far.
    """
    assert spec.checkpoint_size is not None
    size_mb, shared_mb = megabytes(spec.checkpoint_size), megabytes(spec.checkpoint_shared or "") or 0.0
    assert size_mb is not None
    overrides: list[SbatchOption] = []
    changes: list[Change] = []
    tasks = tasks_per_node(options)
    num_slots = NUM_SLOTS + NUM_REPLICA_SLOTS * spec.checkpoint_replicas
    of_others = f", {NUM_REPLICA_SLOTS} of them for another host's replicas" if spec.checkpoint_replicas else ""
    why = f"{num_slots} slots of {spec.checkpoint_size} in /dev/shm for each of {tasks} trainer task(s) of a node"
    why += f"; the {spec.checkpoint_shared} that all share once" if shared_mb else ""
    why += of_others
    node_mb = num_slots * (tasks * (size_mb - shared_mb) + shared_mb)
    # The part of it that one unit of the option must hold more. There are at least as many units as tasks need.
    cpus = Fraction(
        options.number("cpus-per-task") or (options.number("cpus-per-gpu") or 1) * gpus_per_task(options) or 1
    )
    shares = {
        "mem": Fraction(1),
        "mem-per-cpu": 1 / (cpus * tasks),
        "mem-per-gpu": 1 / ((gpus_per_task(options) or Fraction(1)) * tasks),
    }
    asked = next((item for item in reversed(options.items) if item.name in shares), None)
    present_mb = megabytes(asked.value or "") if asked else None
    if asked and present_mb:
        value = memory_words(present_mb + node_mb * float(shares[asked.name]))
        overrides.append(SbatchOption(asked.name, value, "hetstream", (f"--{asked.name}={value}",)))
        changes.append(Change(f"trainer: --{asked.name}={value} (was {asked.value}, {asked.origin})", why))
    else:
        held = "--mem=0 is all memory of the node" if asked else "the script asks for none; the partition's must hold"
        changes.append(Change("trainer: memory unchanged", f"{held}: {why}"))
    if options.has("no-requeue"):
        changes.append(Change("trainer: not requeued", "the script says --no-requeue; else it would go on by itself"))
    elif not options.has("requeue"):
        overrides.append(SbatchOption("requeue", None, "hetstream", ("--requeue",)))
        changes.append(Change("trainer: --requeue", "after a node fails, the job starts again from its checkpoint"))
    changes.append(
        Change(
            "a line before the first command starts the checkpoint writers, a step of its own on each node",
            f"--checkpoint={spec.checkpoint}: they outlive a trainer that crashes, and write its last state to disk",
        )
    )
    return overrides, changes
