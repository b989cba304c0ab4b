"""Every setting that the data plane reads from the environment, in one place. No other module reads `os.environ`.

HETSTREAM_SERVICE        file:PATH of the dispatcher's address file
HETSTREAM_JOB_NAME       name under which the ranks of one program meet (default: from Slurm or torchrun)
HETSTREAM_BUFFER_BYTES   bytes of finished batches a loader holds ahead of the training loop (default 512 MiB)
HETSTREAM_CACHE_BYTES    bytes of finished batches a data worker process keeps for loaders that share (default 256 MiB)
HETSTREAM_CACHE          memory:SIZE or DIR[:SIZE]: where the deterministic front of samples is kept (default: nowhere)
HETSTREAM_TRANSPORT      transports on which batches may come, with commas: mpi, shm, ipc, tcp (default: all but mpi)
HETSTREAM_METRICS_PORT   [HOST:]PORT at which a dispatcher serves Prometheus metrics (default: nowhere)
HETSTREAM_COMPRESSION    zstd: data workers that deliver over TCP compress what shrinks well (default: none)
HETSTREAM_OFFLOAD        auto or all: move the stateless part of models' forwards to the data workers (default: off)
HETSTREAM_IN_PROCESS_LOADERS  1: the start-up hook streams loaders with num_workers=0, too (default: not)
HETSTREAM_SEED           from which the batches of batchgenerators' augmenters follow (default: another one in each run)
HETSTREAM_EMBEDDING_SERVERS  embedding servers that the job has from its start (default: none)
HETSTREAM_EXPLAIN        of `hetstream run --explain`: where to write what was found of a forward; the program then ends
HETSTREAM_HOOK           1 while the start-up hook is active
*_OF_JOB                 of a variable that a script has exported: the job that it is for, see `base/process.py`
HETSTREAM_FAULT          for tests: where a process is to die, see `faults.py`
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import multiprocessing
import os
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hetstream.base.errors import ConfigError
from hetstream.base.installed import install_command
from hetstream.base.process import of_own_job, other_job, own_job
from hetstream.mpi_dataworkers.transports.registry import ALL_NAMES, DEFAULT_NAMES

_log = logging.getLogger(__name__)

DEFAULT_BUFFER_BYTES = 512 << 20
DEFAULT_CACHE_BYTES = 256 << 20
MEMORY, DISK = "memory", "disk"
OFFLOADS = ("off", "auto", "all")
# What a program's environment says of its own process, host, launcher or session; data workers keep theirs. A name
# that ends in * stands for all that begin so.
_NOT_SENT = (
    # launchers, and where a process is among others
    *("SLURM_*", "SLURMD_*", "SRUN_*", "SBATCH_*", "SALLOC_*", "PBS_*", "LSB_*", "FLUX_*", "KUBERNETES_*"),
    *("OMPI_*", "PMI_*", "PMIX_*", "PRTE_*", "MPI_*", "HYDI_*", "HOROVOD_*", "TORCHELASTIC_*", "PET_*", "ACCELERATE_*"),
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "JOB_COMPLETION_INDEX"),
    # what a process reads when it starts, its accelerators, its threads, its network
    *("HETSTREAM_*", "PYTHON*", "LD_PRELOAD", "MALLOC_*", "GLIBC_*"),
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_*", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
    *("ZE_AFFINITY_MASK", "OMP_*", "KMP_*", "GOMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "VECLIB_*"),
    *("NCCL_*", "GLOO_*", "UCX_*", "FI_*", "TORCH_NCCL_*"),
    # the session and the shell
    *("_", "PWD", "OLDPWD", "SHLVL", "HOST", "HOSTNAME", "MAIL", "TMPDIR", "TMP", "TEMP", "DISPLAY", "WINDOWID"),
    *("XDG_*", "DBUS_*", "SSH_*", "GPG_*", "TERM", "TERM_*", "COLORTERM", "COLUMNS", "LINES", "TMUX", "TMUX_*", "STY"),
    *("XAUTHORITY", "WAYLAND_*", "KRB5CCNAME", "INVOCATION_ID", "JOURNAL_STREAM", "DESKTOP_*", "BASH_*", "PS1"),
    # names of one run
    *("WANDB_*", "MLFLOW_*", "PYTEST_*"),
)
# Of these, what says which of its job's processes a trainer is.
_OF_RANK = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_LOCALID"),
    *("SLURM_NODEID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
)
# What a host's own set-up decides; it is sent when the program itself has changed it.
_SENT_IF_CHANGED = (
    *("PATH", "MANPATH", "INFOPATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "LD_*"),
    *("CONDA_*", "_CE_*", "VIRTUAL_ENV", "VIRTUAL_ENV_*", "PYENV_*", "LS_COLORS", "LESS", "LESS_*", "PAGER", "EDITOR"),
    *("MODULE", "MODULES_*", "MODULEPATH", "MODULEPATH_*", "MODULESHOME", "LOADEDMODULES", "LMOD_*", "_LMFILES_*"),
    *("PKG_CONFIG_PATH", "CPATH", "LIBRARY_PATH", "CMAKE_PREFIX_PATH"),
)
# What makes a Python environment: a virtual or conda environment, modules, and where Python and the loader look.
_PYTHON_ENVIRONMENT = (
    *("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_*", "_CE_*", "PYENV_*"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE", "PYTHONUSERBASE"),
    *("LOADEDMODULES", "MODULEPATH", "_LMFILES_", "EBROOT*", "SPACK_ENV"),
)
# Python orders sets of text, and gives `hash()` of text, by a number that it draws at its start, unless this names one.
# In a data worker of a local run: its name, as a companion job has its id.
COMPANION = "HETSTREAM_COMPANION"
EMBEDDING_SERVERS = "HETSTREAM_EMBEDDING_SERVERS"
_HASH_SEED = "PYTHONHASHSEED"
# Of these, those that are lists of directories, and those that are one.
PATH_LISTS, PATHS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH"), ("PYTHONHOME", "PYTHONUSERBASE")
# What the loader and Python follow before any code of a program runs.
_READ_AT_START = ("LD_*", "PYTHON*")
# What some installation of hetstream puts before a program's search paths: its start-up hook, and its `srun` in a job.
_OWN_PLACES = {
    "PYTHONPATH": os.path.join("mpi_dataworkers", "hook", "path"),
    "PATH": os.path.join("hetjob", "commands"),
}


@dataclass(frozen=True)
class TrainerIdentity:
    """Who this process is among the trainers.

    Attributes:
        rank: 0-based rank.
        world_size: number of ranks.
        job_name: common to all ranks of one program run, and to no other run.
        is_named: the user gave the name; else it was made from Slurm's or torchrun's variables.
    """

    rank: int
    world_size: int
    job_name: str
    is_named: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} of world size {self.world_size}: rank must be in [0, world size)")
        if not self.job_name or not self.job_name.isprintable():
            raise ConfigError(f"job name {self.job_name!r}: must be non-empty printable text")


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name)
    if value is None or value == "":
        return None
    try:
        return int(value)
    except ValueError as error:
        raise ConfigError(f"environment variable {name}={value!r}: must be a whole number") from error


def service_from_environment(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the service to connect to, or None to work in process."""
    if environ.get("HETSTREAM_SERVICE") and (whose := other_job("HETSTREAM_SERVICE", environ)):
        _say_local(whose, own_job(environ))
        return None
    return environ.get("HETSTREAM_SERVICE") or None


@functools.cache
def _say_local(whose: str, own: str) -> None:
    # Once in a program: not in its workers, and in one of its ranks.
    if multiprocessing.parent_process() is None and os.environ.get("SLURM_PROCID", "0") == "0":
        _log.warning(
            "the data service in the environment is that %s, from which this job %s was submitted: DataLoaders stay "
            "local. To use that service all the same: unset HETSTREAM_SERVICE_OF_JOB",
            *(whose, own),
        )


def num_embedding_servers_from_environment(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many embedding servers this job has from its start; 0 without any.

    Raises:
        ConfigError: HETSTREAM_EMBEDDING_SERVERS is no number.
    """
    value = ("" if other_job(EMBEDDING_SERVERS, environ) else environ.get(EMBEDDING_SERVERS)) or "0"
    if not value.isdecimal():
        raise ConfigError(f"environment variable {EMBEDDING_SERVERS}={value!r}: must be a number from 0 on")
    return int(value)


def offload_from_environment(environ: Mapping[str, str] = os.environ) -> str:
    """Return what of a model's forward may move to the data workers: `off`, `auto` or `all`."""
    value = ("" if other_job("HETSTREAM_OFFLOAD", environ) else environ.get("HETSTREAM_OFFLOAD")) or "off"
    if value not in OFFLOADS:
        raise ConfigError(f"environment variable HETSTREAM_OFFLOAD={value!r}: must be one of {', '.join(OFFLOADS)}")
    return value


def streams_in_process_loaders(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the start-up hook streams loaders with `num_workers=0`, too."""
    return environ.get("HETSTREAM_IN_PROCESS_LOADERS") == "1"


def explain_file_from_environment(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return where `hetstream run --explain` wants what was found of a forward; None in other runs."""
    return Path(environ["HETSTREAM_EXPLAIN"]) if environ.get("HETSTREAM_EXPLAIN") else None


def memory_of_task_from_environment(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return bytes that a task of this Slurm job has on this node; None where Slurm does not say, or sets no limit.

    SLURM_MEM_PER_NODE, SLURM_MEM_PER_CPU and SLURM_MEM_PER_GPU are in megabytes (sbatch(1), 22.05).
    """
    megabytes = _number(environ, "SLURM_MEM_PER_NODE") or 0
    for kind, number in (("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"), ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE")):
        megabytes = megabytes or (_number(environ, kind) or 0) * (_number(environ, number) or 0)
    # As in `2(x3),1`: of nodes with other numbers of tasks, the most.
    tasks = [int(part.partition("(")[0]) for part in environ.get("SLURM_TASKS_PER_NODE", "1").split(",")]
    return (megabytes << 20) // max(1, *tasks) if megabytes else None


def slurm_job_from_environment(environ: Mapping[str, str] = os.environ) -> str:
    """Id of the Slurm job that this process belongs to, or the name that a local run gave it; "" for neither."""
    return environ.get(COMPANION) or environ.get("SLURM_JOB_ID", "")


def _is_named(name: str, names: tuple[str, ...]) -> bool:
    return any(name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])) for pattern in names)


def environment_at_start() -> dict[str, str]:
    """Return the environment that this process was started with (environ in proc(5)); empty where that cannot
    be read.
    """
    try:
        lines = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(line).partition("=") for line in lines if line)
    return {name: value for name, _, value in pairs}


def travelling_environment(
    environ: Mapping[str, str] = os.environ, at_start: Mapping[str, str] | None = None
) -> tuple[dict[str, str], list[str]]:
    """Return what data workers take over of a trainer's environment.

    Args:
        environ: the trainer's.
        at_start: as it was when the trainer started; None to find out.

    Returns:
        Variables with their values, and the names of those that the program has removed.
    """
    at_start = environment_at_start() if at_start is None else at_start
    sent = {
        name: value
        for name, value in sorted(environ.items())
        if not _is_named(name, _NOT_SENT) and (at_start.get(name) != value or not _is_named(name, _SENT_IF_CHANGED))
    }
    return sent, [name for name in sorted(at_start.keys() - environ.keys()) if not _is_named(name, _NOT_SENT)]


def hash_seed(environ: Mapping[str, str] = os.environ) -> str:
    """PYTHONHASHSEED of all processes that make a program's samples: the program's own, where it names one, else 0."""
    named = environ.get(_HASH_SEED, "")
    return "0" if named in ("", "random") else named


def environment_with_hash_seed(environ: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """Return the environment in which this process would have it; None if it has."""
    return None if environ.get(_HASH_SEED) == hash_seed(environ) else {**environ, _HASH_SEED: hash_seed(environ)}


def with_whole_paths(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with search paths that begin at the root, for a process that works somewhere else.

    An entry may begin where this process works, and an empty one is that. A step works in /tmp on a node that lacks
    the job's directory ("going to /tmp instead", src/slurmd/slurmstepd/mgr.c), and anybody can put modules there.
    """
    try:
        here = os.getcwd()
    except FileNotFoundError:
        here = ""  # it has been removed: nothing is there
    whole = dict(environ)
    for name in PATH_LISTS:
        entries = [os.path.join(here, entry) for entry in environ.get(name, "").split(os.pathsep)]
        kept = [os.path.normpath(entry) if entry.endswith(("/", "/.")) else entry for entry in entries]
        if environ.get(name):
            whole[name] = os.pathsep.join(entry for entry in kept if os.path.isabs(entry))
    return whole


def without_places_in_common(environ: Mapping[str, str], in_common: Callable[[str], bool]) -> dict[str, str]:
    """Return the environment without what a process on another node would load at its start from a place in common
    there.

    The loader and Python follow their variables before any code of ours can look at whose the place is. What the
    program needs of it comes later, and is looked at then (`ops/program.py`).

    Args:
        environ: of this process.
        in_common: whether all can make names on the way to a path.
    """
    kept = dict(environ)
    for name, value in environ.items():
        if _is_named(name, _READ_AT_START) and value.strip():
            entries = re.split(r"[:\s]+" if name == "LD_PRELOAD" else os.pathsep, value)  # see ld.so(8)
            left = [entry for entry in entries if not (entry.startswith("/") and in_common(entry))]
            if left == entries:
                continue
            _log.info("data workers start without %s=%s: on their nodes it may be a stranger's", name, value)
            if any(left):
                kept[name] = os.pathsep.join(left)
            else:
                del kept[name]
    return kept


def python_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that make the Python environment of this process, without what hetstream adds."""
    found = {name: value for name, value in sorted(environ.items()) if _is_named(name, _PYTHON_ENVIRONMENT)}
    for name in PATH_LISTS:
        # An entry may begin where the process works, which is another place in another process; an empty one is that.
        entries = [os.path.abspath(entry) for entry in found.pop(name, "").split(os.pathsep)] if found.get(name) else []
        own_place = _OWN_PLACES.get(name)
        if kept := [entry for entry in entries if own_place is None or not entry.endswith(own_place)]:
            found[name] = os.pathsep.join(kept)
    return found | {_HASH_SEED: hash_seed(environ)}


def environment_of_python(wanted: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of this process with another one's Python environment in the place of its own."""
    own = python_environment(environ).keys() | {"PYTHONPATH"}
    return {name: value for name, value in environ.items() if name not in own} | dict(wanted)


def container_from_environment(environ: Mapping[str, str] = os.environ) -> str:
    """Return the image of the container that this process runs in, as Apptainer and enroot (pyxis) name it; ""
    outside.
    """
    names = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "ENROOT_ROOTFS")
    return next((environ[name] for name in names if environ.get(name)), "")


def faults_from_environment(environ: Mapping[str, str] = os.environ) -> str:
    """Requests of a test to hurt this process, as `faults.py` reads them; empty without."""
    return environ.get("HETSTREAM_FAULT", "")


def buffer_bytes_from_environment(environ: Mapping[str, str] = os.environ) -> int:
    """Return bytes a loader may hold ahead of the training loop."""
    value = _number(environ, "HETSTREAM_BUFFER_BYTES")
    if value is None:
        return DEFAULT_BUFFER_BYTES
    if value <= 0:
        raise ConfigError(f"environment variable HETSTREAM_BUFFER_BYTES={value}: must be positive")
    return value


def cache_bytes_from_environment(environ: Mapping[str, str] = os.environ) -> int:
    """Return bytes of finished batches that a data worker process keeps for loaders that share them; 0 keeps none."""
    value = _number(environ, "HETSTREAM_CACHE_BYTES")
    if value is None:
        return DEFAULT_CACHE_BYTES
    if value < 0:
        raise ConfigError(f"environment variable HETSTREAM_CACHE_BYTES={value}: must be at least 0")
    return value


def metrics_address(value: str, name: str) -> tuple[str, int]:
    """Host and port of `[HOST:]PORT`; the host is 127.0.0.1 where none is given, and port 0 finds a free one.

    Args:
        value: the text.
        name: of the option or variable that it comes from.

    Raises:
        ConfigError: another form.
    """
    host, colon, port = value.rpartition(":")
    if not port.isdigit() or int(port) > 65535 or (colon and not host):
        raise ConfigError(f"{name} {value!r}: the form is [HOST:]PORT, for example 9400 or 0.0.0.0:9400")
    return host or "127.0.0.1", int(port)


def metrics_from_environment(environ: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Return where the dispatcher serves metrics, or None for nowhere."""
    value = environ.get("HETSTREAM_METRICS_PORT")
    return metrics_address(value, "environment variable HETSTREAM_METRICS_PORT") if value else None


class CachePlace(NamedTuple):
    """Where the deterministic front of samples is kept.

    Attributes:
        kind: `MEMORY`, or `DISK`.
        path: a directory on a disk of the host.
        bound_bytes: of all entries; 0: half of what is free there.
    """

    kind: str
    path: str = ""
    bound_bytes: int = 0


def parse_cache(text: str) -> CachePlace:
    """Read where a prefix cache is to be, as `memory:8G`, `/local/dir` or `/local/dir:50G`.

    Raises:
        ConfigError: it is none of these.
    """
    where, _, size = text.rpartition(":") if re.search(r":\d+(\.\d+)?[KMGT]$", text) else (text, "", "")
    bound_bytes = int(float(size[:-1]) * (1 << {"K": 10, "M": 20, "G": 30, "T": 40}[size[-1]])) if size else 0
    if where == MEMORY and bound_bytes:
        return CachePlace(MEMORY, "", bound_bytes)
    if os.path.isabs(where) and where.isprintable() and (bound_bytes or not size):
        return CachePlace(DISK, where, bound_bytes)
    raise ConfigError(
        f"cache={text!r}: must be memory:SIZE (memory:8G) or an absolute directory on the hosts' own disk, with or "
        "without a bound (/local/cache:50G), or off; a size is a number with K, M, G or T"
    )


def checked_cache(text: str) -> str:
    """Return where a prefix cache is to be, for `parse_cache`; "" for `off`.

    Raises:
        ConfigError: it is no such place.
    """
    if text == "off":
        return ""
    parse_cache(text)
    return text


def cache_from_environment(environ: Mapping[str, str] = os.environ) -> str:
    """Where the deterministic front of samples is kept, for `parse_cache`; "" where it is not.

    Raises:
        ConfigError: it is no such place.
    """
    return checked_cache(environ.get("HETSTREAM_CACHE") or "off")


def transports_from_environment(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Return the transports on which a loader takes batches; each data worker uses the best that it can reach."""
    value = environ.get("HETSTREAM_TRANSPORT") or ",".join(DEFAULT_NAMES)
    names = [name.strip() for name in value.split(",")]
    if unknown := [name for name in names if name not in ALL_NAMES]:
        raise ConfigError(
            f"environment variable HETSTREAM_TRANSPORT={value!r}: {', '.join(map(repr, unknown))} is no transport; "
            f"the transports are {', '.join(ALL_NAMES)}, and several are separated by commas"
        )
    return frozenset(names)


def compression_from_environment(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether batches that come over TCP are to be compressed."""
    value = environ.get("HETSTREAM_COMPRESSION") or "none"
    if value not in ("none", "zstd"):
        raise ConfigError(f"environment variable HETSTREAM_COMPRESSION={value!r}: must be none or zstd")
    if value == "zstd" and importlib.util.find_spec("zstandard") is None:
        raise ConfigError(f"HETSTREAM_COMPRESSION=zstd needs the zstandard library: {install_command('zstd')}")
    return value == "zstd"


def seed_from_environment(environ: Mapping[str, str] = os.environ) -> int | None:
    """From which the batches of a program follow that gives none itself; None where it is not set."""
    value = environ.get("HETSTREAM_SEED")
    if not value:
        return None
    if not value.isdecimal() or int(value) >= 1 << 63:
        raise ConfigError(f"environment variable HETSTREAM_SEED={value!r}: must be a whole number from 0 to 2**63 - 1")
    return int(value)


def rank_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """Return the variables that say which of its job's processes this is; None for one that is not set."""
    return {name: environ.get(name) for name in _OF_RANK}


def _trainers_of(num_tasks: int, environ: Mapping[str, str]) -> int:
    """Trainers among the tasks of a job step.

    All of them, but in a step over the components of a heterogeneous job whose batches come by MPI: there the tasks of
    component 0 are the trainers and have the first ranks, and the others are data workers (docs/mpi.md).
    """
    leaders = _number(of_own_job(environ), "SLURM_NTASKS_HET_GROUP_0")
    return leaders if leaders is not None and "mpi" in transports_from_environment(environ) else num_tasks


def _numbers(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int] | None:
    rank, size = _number(environ, rank_name), _number(environ, size_name)
    return None if rank is None or size is None else (rank, size)


def identity_from_environment(
    known: tuple[int, int] | None,
    job_name: str | None = None,
    environ: Mapping[str, str] = os.environ,
    of_mpi_world: Callable[[], tuple[int, int] | None] = lambda: None,
) -> TrainerIdentity:
    """Find rank, world size and job name.

    Args:
        known: (rank, world size) when torch.distributed or Horovod is initialised; it wins.
        job_name: an explicit name; it wins over the environment.
        environ: the environment; torchrun's RANK and WORLD_SIZE come before Slurm's SLURM_PROCID and
            SLURM_STEP_NUM_TASKS (https://slurm.schedmd.com/srun.html, OUTPUT ENVIRONMENT VARIABLES).
        of_mpi_world: counts the trainers where batches may come by MPI; asked after torchrun, before Slurm, which knows
            of tasks only, and not which of them are trainers.
    """
    known = known or _numbers(environ, "RANK", "WORLD_SIZE")
    if known is None and "mpi" in transports_from_environment(environ):
        known = of_mpi_world()
    # SLURM_STEP_NUM_TASKS and not SLURM_NTASKS, which the batch script has too, where one process runs.
    if known is None and (task := _numbers(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")) is not None:
        known = task[0], _trainers_of(task[1], environ)
    rank, world_size = known or (0, 1)
    given = job_name if job_name is not None else environ.get("HETSTREAM_JOB_NAME")
    if given is not None:
        return TrainerIdentity(rank, world_size, given, is_named=True)
    variables = ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "MASTER_PORT")
    name = ".".join(environ[key] for key in variables if environ.get(key)) or "local"
    if world_size == 1:
        name = f"{name}.{uuid.uuid4().hex[:12]}"  # nobody has to meet here, so nobody can collide
    return TrainerIdentity(rank, world_size, name)
