"""What a process knows of itself: whether it was forked, what it imports, its job, and how far its training loop is.

Asked at each step: whether this process was forked from the one that made something, so without a system call. How far
training is, the callbacks for frameworks tell (`checkpoint/integrations`), and loaders send it along with their own
progress. Neither may import the other, so what both speak of is here.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import msgspec

from hetstream.base.posix import realtime_signal, register_at_fork, signals

_generation = 0


def generation() -> int:
    """Grows with each fork: what an ancestor of this process made, it made in another generation."""
    return _generation


def _begin_as_child() -> None:
    global _generation
    _generation += 1


register_at_fork(after_in_child=_begin_as_child)


# Calls a function when a module has been imported, in processes that know nothing of it. For start-up hooks.
#
# Imports nothing but the standard library: it runs at the start of every Python process of a job.


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Have a function called with a module as soon as that is complete: now, if it has been imported already.

    A program may look whether there is such a module (`importlib.util.find_spec`) as often as it likes before.
    """
    if name in sys.modules:
        then(sys.modules[name])
    elif not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one module as Python would, until it has been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self._then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._complete)
        return spec

    def _complete(self, module: ModuleType) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._then(module)


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, complete: Callable[[ModuleType], None]) -> None:
        self._loader, self._complete = loader, complete

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._complete(module)


# How many processes a launcher has started beside this one, as its variables say it. Pure.

# torchrun and horovodrun. What they start are the ranks of one training.
OF_ONE_TRAINING = ("WORLD_SIZE", "HOROVOD_SIZE")
# Open MPI's mpirun, MPICH's mpiexec and Slurm's PMI-2, srun (SLURM_STEP_NUM_TASKS in
# https://slurm.schedmd.com/srun.html; SLURM_NTASKS is the batch script's, too, in which one process runs).
OF_ANY_PROGRAM = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def one_of_several(names: tuple[str, ...], environ: Mapping[str, str]) -> str:
    """Return which of the variables says that this process is one of several, as in "WORLD_SIZE=2"; "" if none does."""
    for name in names:
        size = environ.get(name, "")
        if size.isascii() and size.isdecimal() and int(size) > 1:
            return f"{name}={size}"
    return ""


def lone_horovod(size: int, environ: Mapping[str, str]) -> str:
    """Return why a Horovod of one rank cannot be meant; "" if it can.

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


# Which signals end a process, and for whom one is meant that Slurm sends to a whole step.
#
# Used by the processes of a job's own steps. `sbatch --signal` and `scancel --signal` signal every step of a job, and
# proctrack/linuxproc every process of a step: what warns a trainer must not end what serves it.

# Those of an error in this process, those that cannot be held, and those that end nothing by themselves (signal(7)).
_OTHERS = (
    *("SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS", "SIGPIPE"),
    *("SIGCHLD", "SIGCONT", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG", "SIGWINCH"),
)
# Whatever else may come ends a process that does not expect it.
FATAL = frozenset(signal.valid_signals()) - {*signals(*_OTHERS)}
# Beside SIGTERM, from a parent in a step to its child: of two SIGTERM on their way only the first is seen.
STOP_OF_PARENT = realtime_signal(2)
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SLURMSTEPD = "slurmstepd"


def is_in_step() -> bool:
    """Return whether this process is part of a Slurm step."""
    return "SLURM_STEP_ID" in os.environ


def is_of_step(received: signal.struct_siginfo) -> bool:
    """Return whether Slurm has sent a signal, as it does to all of a step or of a job.

    That it warns or that it ends the job cannot be seen from the signal.
    """
    try:
        return Path(f"/proc/{received.si_pid}/comm").read_text().strip() == _SLURMSTEPD
    except OSError:
        return False  # whoever sent it is gone, or hidden: then it is meant


def stop_requests() -> Callable[[], bool]:
    """Hold all signals that would end this process, and give a function that says whether one asks for its end.

    What Slurm sends is for the step's task, which is its child, and decides for those below it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, FATAL)
    is_asked = False

    def ask() -> bool:
        nonlocal is_asked
        while (received := signal.sigtimedwait((*_STOP_SIGNALS, STOP_OF_PARENT), 0)) is not None:
            is_asked |= received.si_pid == os.getppid() or not is_of_step(received)
        return is_asked

    return ask


def hold_warnings() -> None:
    """Let what would warn this process wait until `pass_over_warnings`, also where it becomes another program first.

    A program that begins has no handlers yet, and one that replaces another keeps what is held.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, FATAL - {*_STOP_SIGNALS})


def pass_over_warnings() -> None:
    """Let nothing but SIGTERM and SIGINT end this process and those that it forks.

    The signals have handlers and are not ignored, because ignored ones would stay so in programs that are started.
    """
    for number in FATAL - {*_STOP_SIGNALS}:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FATAL - {*_STOP_SIGNALS})


def sleep_in_parts(seconds: float) -> None:
    """Sleep, and hear of a signal a second later at the most.

    One that comes after Python has looked for signals, and before the system call, does not end `time.sleep`.
    """
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(1.0, left_s))


# Which Slurm job a process runs in, and what of its environment is another job's.
#
# `sbatch`, `salloc` and an `srun` outside of a job hand on the whole environment (`--export=ALL`). So a job that is
# submitted from another one's script finds what that script exported, and those of Slurm's variables of a heterogeneous
# job that it does not get itself. What hetstream exports therefore comes with the job that it is meant for.
#
# Source: `env_array_merge` in src/sbatch/sbatch.c, and seen on Slurm 22.05 to 26.05.

# Behind the name of a variable: the job that it is for and its value, so that another value is nobody's but the user's.
_MARK = "_OF_JOB"
_OF_COMPONENTS = re.compile(r"SLURM_(?:\w+_(?:HET|PACK)_GROUP_\d+|HET_SIZE|HET_GROUP_ID|PACK_SIZE)")
_COMPONENT_ID = re.compile(r"SLURM_JOB_ID_HET_GROUP_\d+")


def of_own_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what another, heterogeneous job has left in it of Slurm's variables."""
    components = _components(environ)
    if not components or environ.get("SLURM_JOB_ID", "") in {"", *components}:
        return dict(environ)
    return {name: value for name, value in environ.items() if not _OF_COMPONENTS.fullmatch(name)}


def own_job(environ: Mapping[str, str]) -> str:
    """Slurm's id of the job that a process runs in, that of the leader in a heterogeneous job; "" outside of Slurm."""
    return of_own_job(environ).get("SLURM_JOB_ID_HET_GROUP_0") or environ.get("SLURM_JOB_ID", "")


def with_job(variables: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to be exported, each of ours with the job that it is for: the one of this environment, or none."""
    job = own_job(environ)
    marks = {f"{name}{_MARK}": f"{job} {value}" for name, value in variables.items() if name.startswith("HETSTREAM_")}
    return {**variables, **marks}


def other_job(name: str, environ: Mapping[str, str]) -> str:
    """Return why a variable is not for this job: whose it is, in words; "" if it is for this one, or nobody has said.

    A process that does not know its job, as in a container without Slurm's variables, takes what it finds.
    """
    job, _, value = environ.get(f"{name}{_MARK}", "").partition(" ")
    own = {environ.get("SLURM_JOB_ID", ""), *_components(of_own_job(environ))} - {""}
    if f"{name}{_MARK}" not in environ or value != environ.get(name) or not own or job in own:
        return ""
    return f"of job {job}" if job else "of a program outside of Slurm"


def _components(environ: Mapping[str, str]) -> set[str]:
    return {value for name, value in environ.items() if _COMPONENT_ID.fullmatch(name)}


# A framework's word for "for ever" is a larger number.
_MOST_STEPS = 10**12


class TrainingProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps of a loader, that is batches of one rank.

    Attributes:
        done: that the training loop has taken, those before a restart among them.
        total: that it takes in all.
    """

    done: Annotated[int, msgspec.Meta(ge=0, le=_MOST_STEPS)]
    total: Annotated[int, msgspec.Meta(ge=1, le=_MOST_STEPS)]


_told: TrainingProgress | None = None


def tell(done: float, total: float) -> None:
    """Say how far this process is. Numbers that say nothing, such as an infinite total, mean that nobody knows."""
    global _told
    is_known = math.isfinite(done) and done >= 0 and 1 <= total <= _MOST_STEPS
    _told = TrainingProgress(min(int(done), int(total)), int(total)) if is_known else None


def forget() -> None:
    """The training loop has ended: what comes now, nobody has planned."""
    global _told
    _told = None


def told() -> TrainingProgress | None:
    """Return what was said last; None if nobody knows."""
    return _told
