"""How the programs of the table of pairs are started: forked for each rank, or by the real launchers."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from hetstream.checkpoint import errors
from tests.checkpoint.pairs import trainer
from tests.checkpoint.pairs.trainer import Job
from tests.checkpoint.processes import be_and_end

_ROOT = Path(__file__).parents[3]
# The program that a launcher starts.
_LAUNCHED = Path(__file__).parent / "launched.py"
_HOROVODRUN = Path(__file__).parent / "patient_horovodrun.py"
# Of each framework, the module with its program.
_PROGRAMS = {
    **dict.fromkeys(trainer.MODELS, trainer.__name__),
    "Lightning": "tests.checkpoint.pairs.with_lightning",
    "Hugging Face": "tests.checkpoint.pairs.with_huggingface",
    "Horovod": "tests.checkpoint.pairs.with_horovod",
}
# Of each launcher in Python, the module behind its command.
_LAUNCHERS = {"torchrun": "torch.distributed.run", "accelerate launch": "accelerate.commands.launch"}
FRAMEWORKS = (*_PROGRAMS,)
# What is to be installed for some.
_NEEDS = {
    "Lightning": "lightning",
    "Hugging Face": "transformers",
    "accelerate launch": "accelerate",
    "Horovod": "horovod",
}


def python_of(framework: str) -> str:
    """The Python that has a framework: this one, or for Horovod that of `.ci/install-horovod`; "" if none has."""
    if importlib.util.find_spec(_NEEDS.get(framework, "torch")):
        return sys.executable
    built = Path(os.environ.get("HETSTREAM_HOROVOD_VENV", _ROOT / ".venv-horovod")) / "bin" / "python"
    return str(built) if framework == "Horovod" and built.exists() else ""


def warm_up(framework: str) -> None:
    """Import here, once, what each rank needs. Not what Horovod's need: each of them is started anew."""
    if framework == "Horovod":
        return
    importlib.import_module(_PROGRAMS[framework])
    if framework in _LAUNCHERS:
        importlib.import_module(_LAUNCHERS[framework])


def train(job: Job) -> None:
    """Be one rank."""
    importlib.import_module(_PROGRAMS[job.framework]).train(job)


def start(job: Job, said: Path, environment: Mapping[str, str]) -> list[int]:
    """Start all ranks of a job, or their launcher; the children.

    Args:
        job: of rank 0.
        said: with `.RANK.said` behind it, where each rank's output goes.
        environment: more of it.
    """
    if job.framework in _LAUNCHERS or job.framework == "Horovod":
        return [_fork(lambda: _launch(job), Path(f"{said}.0.said"), environment)]
    return [
        _fork(lambda rank=rank: train(job._replace(rank=rank)), Path(f"{said}.{rank}.said"), environment)
        for rank in range(job.size)
    ]


def _launch(job: Job) -> None:
    """Be a launcher. Where it forks, ranks have all modules at once."""
    os.environ["PYTHONPATH"] = str(_ROOT)
    argv = [str(_LAUNCHED), json.dumps(job._replace(launcher=os.getpid())._asdict(), default=str)]
    if job.framework == "Horovod":
        ranks = ["--gloo", "-np", str(job.size), "-H", f"localhost:{job.size}"]
        os.execv(sys.executable, [sys.executable, str(_HOROVODRUN), *ranks, sys.executable, *argv])
    if job.framework == "torchrun":
        launcher = ["--standalone", f"--nproc-per-node={job.size}"]
    else:
        # Without one, all launchers of a host have the same port.
        several = ["--multi_gpu", "--main_process_port=0"]
        launcher = [f"--num_processes={job.size}", *(several if job.size > 1 else ["--cpu"])]
    os.environ |= {"PET_RUN_PATH": "1", "PET_START_METHOD": "fork"}
    sys.argv = ["launch", *launcher, *argv]
    importlib.import_module(_LAUNCHERS[job.framework]).main()


def _fork(be: Callable[[], None], said: Path, environment: Mapping[str, str]) -> int:
    child = os.fork()
    if child:
        return child

    def begin() -> None:
        descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for number in (1, 2):
            os.dup2(descriptor, number)
        os.environ |= environment
        errors.FAULTS.clear()
        be()

    be_and_end(begin)
