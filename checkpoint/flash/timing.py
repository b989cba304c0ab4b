"""When to save: the schedule of `policy/interval.py` with the clock, the costs and the other ranks.

Called by `FlashCheckpointer.should_save`. Ranks exchange their decisions once after each save, and never in a save.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.flash.distributed import Communicator, gather
from hetstream.checkpoint.flash.stats import CheckpointStats
from hetstream.checkpoint.memory.store_files import WriterStatus
from hetstream.checkpoint.policy.interval import Adaptive, Decision, Every, FailureHistory, Schedule, agree_on_interval
from hetstream.checkpoint.record.generation import Generation

_log = logging.getLogger(__name__)


class Timing:
    """The schedule of all ranks, on one of them.

    Args:
        rule: how often.
        directory: of the checkpoints; its history of attempts says how often they failed.
        ranks: the ranks that have to agree.
    """

    def __init__(self, rule: Every | Adaptive, directory: CheckpointDirectory, ranks: Communicator) -> None:
        self._rule = rule
        self._directory = directory
        self._ranks = ranks
        self._schedule: Schedule | None = None
        self._due_step: int | None = None
        self._seen_persisted: Generation | None = None

    @property
    def reason(self) -> str:
        """Why the ranks save as often as they do, in words; "" before training."""
        return self._schedule.decision.reason if self._schedule else ""

    def begin(self, step: int) -> None:
        """Count from here on. Every rank calls it.

        Args:
            step: steps of training that are done.
        """
        history = FailureHistory()
        if self._ranks.rank == 0:
            history = FailureHistory.of(self._directory.past_attempts())
        history = gather(self._ranks, history)[0] if self._ranks.world_size > 1 else history
        self._schedule = Schedule(self._rule, step, time.monotonic(), history)
        self._due_step = None

    def is_due(self, step: int, stats: CheckpointStats, read_status: Callable[[], WriterStatus | None]) -> bool:
        """Whether to save after this step: the same answer on every rank. Every rank asks after each step.

        Args:
            step: steps of training that are done.
            stats: of the saves so far.
            read_status: what the checkpoint writer says.
        """
        now_s = time.monotonic()
        if self._schedule is None:
            self.begin(step - 1)
        assert self._schedule is not None
        schedule = self._schedule
        if self._due_step is not None:
            status = read_status()
            if status and status.persisted and status.persisted != self._seen_persisted:
                self._seen_persisted = status.persisted
                schedule.note_persist(status.persist_s)
            decision = schedule.propose(self._due_step, stats.blocked_s, now_s, stats.allocated_s)
            if not isinstance(self._rule, Every) or self._rule.num_steps is None:
                decision = agree_on_interval(gather(self._ranks, decision))
            if schedule.decision.bound_by == "first" and self._ranks.rank == 0:
                self._say_chosen(decision, schedule.history)
            schedule.adopt(decision, self._due_step, now_s)
            self._due_step = None
        return schedule.is_due(step, now_s, alone=self._ranks.world_size == 1)

    def _say_chosen(self, decision: Decision, history: FailureHistory) -> None:
        """Say once how often there will be saves and why: the program did not, or only in seconds."""
        known = ""
        if decision.bound_by == "failures":
            known = f" (counted: {history.num_failures} failures)" if history.num_failures else " (assumed: mtbf_s)"
        _log.warning(
            "hetstream: the first checkpoint is saved; from now on %s%s. FlashCheckpointer(interval=) changes that: a "
            "number of steps, Every(seconds=) or Adaptive(max_overhead=, mtbf_s=)",
            decision.reason,
            known,
        )

    def note_due(self, step: int) -> None:
        """The program is told to save after this step: the next `is_due` takes account of what that cost."""
        self._due_step = step
