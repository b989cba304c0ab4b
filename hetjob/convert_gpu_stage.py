"""What a stage on GPUs adds to a job: sbatch options of its data workers, and what is said about it. Pure.

Called by `convert.py`. All data workers of that stage are companion jobs with one GPU each: they come when the training
loop waits for them, so the trainer never waits in the queue for a second GPU.
"""

from __future__ import annotations

from hetstream.hetjob.plan import Change
from hetstream.hetjob.sbatch_options import SbatchOptions, megabytes, memory_words
from hetstream.hetjob.spec import JobSpec

# Of each CPU: torch with CUDA's libraries, and batches of the stage before.
_MB_PER_CPU = 4096
# A companion is a job of its own: of the trainer's options it has these.
_INHERITED = ("account", "qos", "time", "reservation", "exclude")


def gpu_companion_options(spec: JobSpec, options: SbatchOptions, default_partition: str | None) -> tuple[str, ...]:
    """sbatch options that every data worker with a GPU needs.

    Args:
        spec: what the directives ask for.
        options: of the script and the command line.
        default_partition: of the cluster; None where that is not known, and Slurm decides.
    """
    partition = spec.gpu_data_worker_partition or options.value("partition") or default_partition
    arguments = [f"--partition={partition}"] if partition else []
    arguments.append(f"--gres={spec.gpu_data_worker_gres}")
    if spec.gpu_data_worker_mem:
        size_mb = megabytes(spec.gpu_data_worker_mem) or 0.0
        arguments.append(f"--mem-per-cpu={memory_words(size_mb / spec.gpu_data_worker_cpus)}")
    elif options.has("mem", "mem-per-cpu", "mem-per-gpu"):
        arguments.append(f"--mem-per-cpu={memory_words(_MB_PER_CPU)}")
    return (*arguments, *(f"--{name}={options.value(name)}" for name in _INHERITED if options.value(name)))


def gpu_stage_changes(spec: JobSpec) -> list[Change]:
    """What is said about them; empty without such data workers."""
    if not spec.gpu_data_workers_max:
        return []
    low, high = spec.gpu_data_workers_min, spec.gpu_data_workers_max
    number = f"{low}" if low == high else f"{low} to {high}"
    return [
        Change(
            f"{number} companion job(s) with {spec.gpu_data_worker_gres} and {spec.gpu_data_worker_cpus} CPUs, "
            "one data worker each",
            f"--gpu-data-workers={low}-{high}: they run the gpu_stage of the program's loaders; each stage has a "
            "controller of its own",
        )
    ]
