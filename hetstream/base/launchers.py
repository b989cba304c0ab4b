"""How many processes a launcher has started beside this one, as its variables say it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

# torchrun and horovodrun. What they start are the ranks of one training.
OF_ONE_TRAINING = ("WORLD_SIZE", "HOROVOD_SIZE")
# Open MPI's mpirun, MPICH's mpiexec and Slurm's PMI-2, srun (SLURM_STEP_NUM_TASKS in
# https://slurm.schedmd.com/srun.html; SLURM_NTASKS is the batch script's, too, in which one process runs).
OF_ANY_PROGRAM = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def one_of_several(names: tuple[str, ...], environ: Mapping[str, str]) -> str:
    """Which of the variables says that this process is one of several, as in "WORLD_SIZE=2"; "" if none does."""
    for name in names:
        size = environ.get(name, "")
        if size.isascii() and size.isdecimal() and int(size) > 1:
            return f"{name}={size}"
    return ""


def lone_horovod(size: int, environ: Mapping[str, str]) -> str:
    """Why a Horovod of one rank cannot be meant; "" if it can.

    Args:
        size: `hvd.size()`. Without MPI it is HOROVOD_SIZE, or 1 where nobody has set that: srun and mpirun do not
            (horovod 0.28.1, horovod/common/gloo/gloo_context.cc).
        environ: of the process.
    """
    others = one_of_several((*OF_ONE_TRAINING, *OF_ANY_PROGRAM), environ)
    if size != 1 or not others or "HOROVOD_SIZE" in environ:
        return ""
    return (
        f"hvd.size() is 1, and this process is one of several ({others}): each would train a model of its own on all "
        "the data. A Horovod that was built without MPI (horovodrun --check-build) knows only ranks that horovodrun "
        "starts, or a script that does the same, as sbatch_templates/horovod.sbatch. Start it so, or build it with MPI"
    )
