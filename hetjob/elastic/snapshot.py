"""What the elastic controller sees and says: a `Snapshot` of one moment, a `Decision` with its reason. Pure data.

Made by `hetstream.hetjob.master.elastic`, which asks the dispatcher and Slurm; read by `controller.py`. A data worker
here is a whole one, however many processes it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

DEFAULT_COOLDOWN_S = 10.0  # the rates show a change after 6 s


class CompanionState(Enum):
    """Where a companion job is in its life; one that has ended is no companion any more."""

    PENDING = "pending"  # in Slurm's queue
    STARTING = "starting"  # Slurm runs it, the dispatcher has not heard of it
    WORKING = "working"  # registered with the dispatcher
    DRAINING = "draining"  # it was told to leave


@dataclass(frozen=True, slots=True)
class Companion:
    """A companion job: one data worker.

    Attributes:
        job_id: its own id in Slurm.
        cpus: that it was submitted with.
        state: see `CompanionState`.
        since: when it came to this state, on the controller's clock.
        rate_per_s: steps that it would make per second if it were never idle; 0 while that is not known.
    """

    job_id: str
    cpus: int
    state: CompanionState
    since: float
    rate_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of a job.

    Attributes:
        reading: some loader is in a pass over its data.
        steps_per_s: taken by the training loops of all ranks together, over the last seconds.
        wait_share: of the last seconds in which a training loop waited for data, or computed features that more data
            workers could compute: of the rank that waited longest.
        fixed: data workers of component 1, which start and end with the job.
        fixed_rate_per_s: steps that all of them together would make per second if they were never idle.
        companions: see `Companion`.
        site_limit: data workers that the site lets this job have; None without a limit.
        trainer_cpus: CPUs that the trainer's processes use on the job master's host; None while that is not known.
        earlier_wait_share: of the last seconds in which the data workers themselves waited for the stage before.
        features_share: the part of `wait_share` in which features were computed.
        features_on_trainer: operators that all ranks compute of their feature graphs: another number is another cut.
    """

    reading: bool
    steps_per_s: float
    wait_share: float
    companions: tuple[Companion, ...] = ()
    fixed: int = 0
    fixed_rate_per_s: float = 0.0
    site_limit: int | None = None
    trainer_cpus: float | None = None
    earlier_wait_share: float = 0.0
    features_share: float = 0.0
    features_on_trainer: int = 0

    @property
    def waits(self) -> str:
        """How much the trainer waits, in words."""
        waits = f"the trainer waits {self.wait_share:.0%} of the time"
        if round(self.features_share, 2) <= 0:
            return waits
        return f"{waits}, {self.features_share:.0%} for features that it computes itself"

    def of(self, *states: CompanionState) -> list[Companion]:
        """Return the companions in one of these states."""
        return [companion for companion in self.companions if companion.state in states]

    @property
    def num_companions(self) -> int:
        """Companions that are there or will be; those that leave do not count."""
        return sum(companion.state is not CompanionState.DRAINING for companion in self.companions)

    @property
    def num_data_workers(self) -> int:
        """Data workers that are there or will be."""
        return self.fixed + self.num_companions


@dataclass(frozen=True, slots=True)
class Limits:
    """What the script allows, and how calmly the controller acts.

    Attributes:
        minimum, maximum: data workers in all, those of component 1 among them.
        smallest_cpus, largest_cpus: CPUs of one companion; where they differ, the size is searched.
        cooldown_s: from one change to the next at the least.

    Raises:
        ValueError: they contradict each other.
    """

    minimum: int
    maximum: int
    smallest_cpus: int = 1
    largest_cpus: int = 1
    cooldown_s: float = DEFAULT_COOLDOWN_S

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= self.maximum:
            raise ValueError(f"data workers {self.minimum}-{self.maximum}: 0 <= minimum <= maximum")
        if not 1 <= self.smallest_cpus <= self.largest_cpus:
            raise ValueError(f"CPUs {self.smallest_cpus}-{self.largest_cpus}: 1 <= smallest <= largest")
        if self.cooldown_s <= 0:
            raise ValueError(f"cooldown {self.cooldown_s:g} s: must be more than 0")


class Action(Enum):
    """What to do to a job's companions."""

    HOLD = "hold"
    GROW = "grow"  # submit more
    DRAIN = "drain"  # let some finish the step they are at, and leave
    CANCEL = "cancel"  # take back what waits in the queue, or does not leave


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and why.

    Attributes:
        count: how many companions it is about.
        reason: one line for the user.
        jobs: their job ids, where they have some.
        cpus: of each that is to be submitted.
    """

    action: Action
    count: int
    reason: str
    jobs: tuple[str, ...] = ()
    cpus: int = 0

    @property
    def is_change(self) -> bool:
        """Whether anything is to be done."""
        return self.action is not Action.HOLD


def job_ids(companions: Iterable[Companion]) -> tuple[str, ...]:
    """Their ids."""
    return tuple(companion.job_id for companion in companions)
