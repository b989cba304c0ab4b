"""How the programs of the table of pairs are started: forked for each rank, or by the real launchers."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from checkpoint import faults
from tests.checkpoint.pairs import trainer
from tests.checkpoint.pairs.trainer import Job

# The program that a launcher starts.
_LAUNCHED = Path(__file__).parent / "launched.py"
# Of each framework, the module with its program.
_PROGRAMS = {
    **dict.fromkeys(trainer.MODELS, trainer.__name__),
    "Lightning": "tests.checkpoint.pairs.with_lightning",
    "Hugging Face": "tests.checkpoint.pairs.with_huggingface",
}
# Of each launcher, the module behind its command.
_LAUNCHERS = {"torchrun": "torch.distributed.run", "accelerate launch": "accelerate.commands.launch"}
FRAMEWORKS = (*_PROGRAMS,)
# What is to be installed for some.
NEEDS = {"Lightning": "lightning", "Hugging Face": "transformers", "accelerate launch": "accelerate"}


def warm_up(framework: str) -> None:
    """Import here, once, what each rank needs."""
    importlib.import_module(_PROGRAMS[framework])
    if framework in _LAUNCHERS:
        importlib.import_module(_LAUNCHERS[framework])


def start(job: Job, said: Path, environment: Mapping[str, str]) -> list[int]:
    """Start all ranks of a job, or their launcher; the children.

    Args:
        job: of rank 0.
        said: with `.RANK.said` behind it, where each rank's output goes.
        environment: more of it.
    """
    if job.framework in _LAUNCHERS:
        return [_fork(lambda: _launch(job), Path(f"{said}.0.said"), environment)]
    train = importlib.import_module(_PROGRAMS[job.framework]).train
    return [
        _fork(lambda rank=rank: train(job._replace(rank=rank)), Path(f"{said}.{rank}.said"), environment)
        for rank in range(job.size)
    ]


def _launch(job: Job) -> None:
    """Be a launcher. Where it forks, ranks have all modules at once."""
    argv = [str(_LAUNCHED), json.dumps(job._asdict(), default=str)]
    if job.framework == "torchrun":
        launcher = ["--standalone", f"--nproc-per-node={job.size}"]
    else:
        launcher = [f"--num_processes={job.size}", *(["--multi_gpu"] if job.size > 1 else ["--cpu"])]
    os.environ |= {"PET_RUN_PATH": "1", "PET_START_METHOD": "fork"}
    sys.argv = ["launch", *launcher, *argv]
    importlib.import_module(_LAUNCHERS[job.framework]).main()


def _fork(be: Callable[[], None], said: Path, environment: Mapping[str, str]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for number in (1, 2):
            os.dup2(descriptor, number)
        os.environ |= environment
        faults._faults.clear()
        be()
        code = 0
    except BaseException:  # noqa: BLE001, the end of a process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
