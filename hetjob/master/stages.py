"""The elastic controllers of one job: one for the data workers of each stage. Called by `server.py`.

The stage without GPUs has a controller if its number of data workers may change, the stage on GPUs always: its data
workers are companions, and come when a loader with a `gpu_stage` waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hetstream.hetjob.elastic.controller import Controller
from hetstream.hetjob.elastic.snapshot import Limits
from hetstream.hetjob.job_environment import JobEnvironment
from hetstream.hetjob.master.companion_time import CompanionTime
from hetstream.hetjob.master.companions import CompanionJobs
from hetstream.hetjob.master.controller_state_file import ControllerStateFile
from hetstream.hetjob.master.elastic import Elastic, Steering
from hetstream.hetjob.ports import SlurmClient


@dataclass(frozen=True)
class GpuStage:
    """Data workers with a GPU: one process, one GPU and one companion job each.

    Attributes:
        minimum, maximum: of them.
        cpus: of each.
        options: sbatch options of each.
    """

    minimum: int
    maximum: int
    cpus: int
    options: tuple[str, ...]


def elastic_of_gpu_stage(
    stage: GpuStage,
    cooldown_s: float,
    client: SlurmClient,
    job: JobEnvironment,
    worker_words: Callable[[int], Sequence[str]],
    connect: Callable[[], Steering],
    end_s: float | None,
) -> Elastic:
    """The controller of a job's stage on GPUs.

    Args:
        stage: what the script asks for.
        cooldown_s: from one change to the next at the least.
        client: Slurm.
        job: this job.
        worker_words: the command of a data worker with so many CPUs.
        connect: to the dispatcher.
        end_s: when the job ends at the latest, in seconds since the epoch; None where that is not known.
    """
    state_file = ControllerStateFile(job.gpu_controller_state_file)
    time = CompanionTime(None, state_file.tally, end_s)
    companions = CompanionJobs(client, job, stage.options, worker_words, time, device="gpu")
    limits = Limits(stage.minimum, stage.maximum, stage.cpus, stage.cpus, cooldown_s)
    return Elastic(Controller(limits, state_file.memory), companions, 0, connect, state_file)


@dataclass(frozen=True)
class ElasticStages:
    """The controllers that a job has.

    Attributes:
        cpu: of the stage without GPUs, which each job has; None if its number of data workers is fixed.
        gpu: of the stage on GPUs; None without one.
    """

    cpu: Elastic | None = None
    gpu: Elastic | None = None

    @property
    def all(self) -> list[Elastic]:
        """Those that there are."""
        return [elastic for elastic in (self.cpu, self.gpu) if elastic is not None]

    def summary(self, trainer_cpus: int | None) -> dict[str, Any]:
        """What they did and found out, for the job's summary.

        Args:
            trainer_cpus: that each trainer task has; None where that is not known.
        """
        found = {"elastic": self.cpu, "elastic_gpu": self.gpu}
        # What the trainer itself needs is known to the stage that it takes its batches from.
        return {
            name: {**elastic.summary(), "trainer_cpus": trainer_cpus}
            for name, elastic in found.items()
            if elastic is not None
        }
