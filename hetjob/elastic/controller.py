"""Decides how many companions a job has: (snapshot, now) -> Decision with its reason. Pure; the clock is an argument.

Called by `hetstream.hetjob.master.elastic` about once a second; it never asks Slurm or the dispatcher itself.

    BASELINE --local loading keeps up--------> LOCAL
       |                                       |   ^
       +--the trainer waits--> SIZE --best--> COUNT --data workers do not pay--+

BASELINE and LOCAL have no data workers, SIZE has one or two, COUNT as many as pay. A job with data workers in component
1 begins in COUNT: it cannot be measured without them. In every stage there is at most one change per cooldown, and none
before the last one shows in the rates. Growth follows the need of now, shrinking the greatest need of some time: so a
load that alternates keeps what it needs at its worst. Companions that wait in Slurm's queue hold nothing up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from hetstream.hetjob.elastic.snapshot import Action, Companion, CompanionState, Decision, Limits, Snapshot, job_ids
from hetstream.hetjob.elastic.step_terms import StepTerm
from hetstream.hetjob.elastic.tuning import (
    LEAST_GAIN,
    LoadingPoints,
    LocalLoading,
    SizeProgress,
    SizeSearch,
    growth_paid,
    remote_pays,
    trainer_cpus_needed,
)

# What the elastic controller has found out, for the next job master of the same job: one that was killed. Pure data.
#
# Kept by `hetstream.hetjob.master.controller_state_file`. Without it a controller
# that finds companions could not measure local loading any more, and would never know that they do not pay.


class Stage(Enum):
    """What the controller is finding out."""

    BASELINE = "measuring local loading"
    LOCAL = "loading locally"
    SIZE = "finding the size of a data worker"
    COUNT = "finding the number of data workers"


@dataclass(frozen=True, slots=True)
class ControllerState:
    """What was found out. Times are on the host's monotonic clock, which goes on when a process ends.

    Attributes:
        stage: see the drawing at `Controller`.
        local: what local loading was seen to cost; None if it was not measured.
        size: of a data worker, as far as it was searched; None before that.
        changed_at: when companions were last submitted, drained or cancelled; None if never.
        retry_at: what did not pay is not tried again before.
        ceiling: data workers beyond which more did not pay; None if that was not seen.
        num_disappointments: how often something did not pay.
    """

    stage: Stage = Stage.BASELINE
    local: LocalLoading | None = None
    size: SizeProgress | None = None
    changed_at: float | None = None
    retry_at: float = 0.0
    ceiling: int | None = None
    num_disappointments: int = 0


# How many data workers a trainer needs: measured rates in, numbers out. Pure.
#
# A trainer that never waited would take `steps_per_s / (1 - wait_share)`; a data worker that is never idle makes what
# its busy time says. The quotient is the number of data workers, before anything is tried.

# A trainer that waits nearly all of its time does not show how fast it could be: this factor at most is believed.
_MOST_SPEED_UP = 20.0


def demand_per_s(snapshot: Snapshot) -> float:
    """Return steps per second that the training loops would take if they never waited for data."""
    return snapshot.steps_per_s / max(1.0 - snapshot.wait_share, 1.0 / _MOST_SPEED_UP)


def rate_of_one(snapshot: Snapshot, cpus: int) -> float:
    """Return steps per second of one data worker with this number of CPUs; 0 while none was measured."""
    measured = [companion for companion in snapshot.of(CompanionState.WORKING) if companion.rate_per_s > 0]
    same = [companion.rate_per_s for companion in measured if companion.cpus == cpus]
    if same:
        return sum(same) / len(same)
    if snapshot.fixed and snapshot.fixed_rate_per_s > 0:
        return snapshot.fixed_rate_per_s / snapshot.fixed
    total_cpus = sum(companion.cpus for companion in measured)
    return cpus * sum(companion.rate_per_s for companion in measured) / total_cpus if total_cpus else 0.0


def capacity_per_s(snapshot: Snapshot) -> float:
    """Return steps per second that all data workers would make if none were ever idle, however fast the trainer is."""
    return snapshot.fixed_rate_per_s + sum(companion.rate_per_s for companion in snapshot.of(CompanionState.WORKING))


def needed(snapshot: Snapshot, cpus: int, headroom: float) -> int | None:
    """Data workers that would make `headroom` times what the trainer could take; None while their rate is not known."""
    rate = rate_of_one(snapshot, cpus)
    return max(1, math.ceil(demand_per_s(snapshot) * headroom / rate - 1e-9)) if rate > 0 else None


def slowest(companions: Sequence[Companion], count: int) -> list[Companion]:
    """So many of them, those that help least first: the slowest, of equal ones the youngest."""
    return sorted(companions, key=lambda companion: (companion.rate_per_s, -companion.since, companion.job_id))[:count]


# A trainer that waits for more than this share of its time is starving; the aim is to stay below it.
STARVING_SHARE = 0.05
# Growth goes a little beyond the need, and shrinking leaves more: in between nothing happens (hysteresis).
GROW_HEADROOM, SHRINK_HEADROOM = 1.1, 1.3
# The rates are those of the last 5 s: a change shows in them whole after that.
MEASURE_S = 6.0
# Longest wait for a first step, which may take longer than the rates look back.
_LONGEST_BASELINE_S = 60.0
# Largest factor of one change: a first rate may be wrong by much.
_MOST_GROWTH = 8
# Below this share of what data workers can make, more of them would be no help.
_BUSY_SHARE = 0.7
# Cooldowns without need after which data workers go.
_CALM_COOLDOWNS = 3
# After data workers have come, a loader that computes features takes up to this long to cut its graph elsewhere.
_RECUT_S = 15.0
# Python and torch from a busy file system; and what a step may take that a leaving data worker is at.
_START_LIMIT_S, _DRAIN_LIMIT_S = 60.0, 60.0
# What the trainer's own CPUs do is looked at over this long: work comes in bursts.
_TRAINER_S = 60.0
# A program without a loader for this time does something else than training.
_IDLE_S = 300.0
# What did not pay is tried again after this long, then twice as long, and so on.
_RETRY_S, _LONGEST_RETRY_S = 600.0, 7200.0
# Refused submissions are tried again after this long, then twice as long, and so on.
_BACKOFF_S, _LONGEST_BACKOFF_S = 10.0, 600.0


class RefusalBackoff:
    """When Slurm is asked again for a companion after it has refused one.

    Attributes:
        until: not before.
    """

    def __init__(self) -> None:
        self.until = float("-inf")
        self._num_refusals = 0

    def refused(self, now: float) -> float:
        """Slurm refused a submission; returns after how many seconds the next one may be tried."""
        delay_s: float = min(_LONGEST_BACKOFF_S, _BACKOFF_S * 2**self._num_refusals)
        self._num_refusals += 1
        self.until = now + delay_s
        return delay_s

    def accepted(self) -> None:
        """Slurm took a submission."""
        self._num_refusals = 0


class Controller:
    """The elastic controller of one job.

    Args:
        limits: of the script.
        memory: of a controller of before; None at the beginning of a job.

    Attributes:
        stage: see the module's drawing.
        cpus: of the next companion.
        local: what local loading was seen to cost; None if it was not measured.
        trainer_cpus: CPUs that the trainer needs besides its data workers; None while that is not known.
    """

    def __init__(self, limits: Limits, memory: ControllerState | None = None) -> None:
        known = memory or ControllerState()
        self.limits = limits
        self.stage = known.stage
        self.local = known.local
        self.trainer_cpus: int | None = None
        self._size = SizeSearch(limits.smallest_cpus, limits.largest_cpus, known.size)
        self._changed_at = known.changed_at
        self._retry_at = known.retry_at
        self._ceiling = known.ceiling
        self._num_disappointments = known.num_disappointments
        # Before the first look, whatever the clock says.
        self._seen: tuple[bool, frozenset[str], int] | None = None
        self._steady_since = 0.0
        self._moving_since: float | None = None  # when the first step of these readers was seen
        self._needs: deque[tuple[float, int]] = deque()
        self._trainer_used: deque[tuple[float, float]] = deque()
        self._grown_from: Snapshot | None = None
        self._loading = LoadingPoints()
        self._refusals = RefusalBackoff()

    @property
    def cpus(self) -> int:
        """CPUs of the next companion."""
        return self._size.probing or self._size.best

    def loading_term(self, num_data_workers: int) -> StepTerm:
        """Time that this number of data workers takes for a step's data, as far as that is known."""
        return self._loading.term(num_data_workers)

    def memory(self) -> ControllerState:
        """Return what the controller of the next job master needs to know, should this one be killed."""
        return ControllerState(
            self.stage, self.local, self._size.progress,
            self._changed_at, self._retry_at, self._ceiling, self._num_disappointments,
        )  # fmt: skip

    def decide(self, snapshot: Snapshot, now: float) -> Decision:
        """Return what to do now. The caller does it, and says so with `refused` if Slurm does not let it."""
        working = frozenset(job_ids(snapshot.of(CompanionState.WORKING)))
        seen = (snapshot.reading, working, snapshot.features_on_trainer)
        if seen != self._seen:
            if self._seen is not None and seen[2] != self._seen[2]:
                self._loading.forget()  # data workers do more or less for a step than before
            self._seen, self._steady_since = seen, now
        if not snapshot.reading:
            self._moving_since = None
        elif snapshot.steps_per_s > 0 and self._moving_since is None:
            self._moving_since = now
        decision = self._decide(snapshot, now)
        if decision.is_change:
            self._changed_at = now
        return decision

    def wanted(self, snapshot: Snapshot, now: float) -> int:
        """Data workers that the job would have if the site did not limit it."""
        starving = snapshot.reading and snapshot.wait_share > STARVING_SHARE
        if self.stage in (Stage.BASELINE, Stage.LOCAL):
            return max(self.limits.minimum, int(starving and now >= self._retry_at))
        have, (need, _) = snapshot.num_data_workers, self._need(snapshot)
        if need is not None and snapshot.reading:
            have = max(have, need) if starving else min(have, need)
        most = self.limits.maximum if self._ceiling is None else self._ceiling
        return max(self.limits.minimum, min(have, most))

    def refused(self, now: float) -> float:
        """Slurm refused a submission; returns after how many seconds the next one may be tried."""
        self._grown_from = None
        return self._refusals.refused(now)

    def accepted(self) -> None:
        """Slurm took a submission."""
        self._refusals.accepted()

    def _decide(self, snapshot: Snapshot, now: float) -> Decision:
        overdue = [
            companion for companion in snapshot.of(CompanionState.DRAINING) if now - companion.since > _DRAIN_LIMIT_S
        ]
        if overdue:
            return _cancel(overdue, f"told to leave more than {_DRAIN_LIMIT_S:g} s ago")
        if self._changed_at is not None and now - self._changed_at < self.limits.cooldown_s:
            return _hold(f"cooldown of {self.limits.cooldown_s:g} s after the last change")
        maximum = self._maximum(snapshot)
        if snapshot.num_data_workers < self.limits.minimum and now >= self._refusals.until:
            missing = self.limits.minimum - snapshot.num_data_workers
            return self._grow(snapshot, missing, f"the script asks for {self.limits.minimum} data workers at the least")
        if snapshot.num_data_workers > maximum and snapshot.num_companions:
            return self._shrink_to(snapshot, maximum, f"at most {maximum} data workers are allowed")
        if not snapshot.reading:
            if snapshot.num_companions and now - self._steady_since > _IDLE_S:
                return self._shrink_to(snapshot, 0, f"no loader has read for {_IDLE_S:g} s")
            return _hold("no loader reads")
        if snapshot.of(CompanionState.DRAINING):
            return _hold("data workers are leaving")
        starting = [
            companion for companion in snapshot.of(CompanionState.STARTING) if now - companion.since < _START_LIMIT_S
        ]
        if starting:
            return _hold(f"{len(starting)} data workers start")
        if now - self._steady_since < MEASURE_S:
            return _hold(f"measuring for {MEASURE_S:g} s")
        if snapshot.fixed and self.stage is Stage.BASELINE:
            self.stage = Stage.COUNT
            self._size.stop()
        if self.stage in (Stage.BASELINE, Stage.LOCAL):
            return self._local(snapshot, now)
        if self.stage is Stage.SIZE:
            return self._find_size(snapshot, now)
        return self._find_count(snapshot, now)

    # --- without data workers ---------------------------------------------------------------------------------------

    def _local(self, snapshot: Snapshot, now: float) -> Decision:
        if snapshot.num_companions and now < self._retry_at:  # what waited in the queue was taken back first
            return self._shrink_to(snapshot, 0, "data workers did not pay")
        if snapshot.num_companions:  # of a job master of before
            self.stage = Stage.COUNT
            return _hold("companions are there already")
        if self._moving_since is None and now - self._steady_since < _LONGEST_BASELINE_S:
            return _hold("no step was taken yet")
        if self._moving_since is not None and now - self._moving_since < MEASURE_S:
            return _hold("measuring local loading")  # without the wait for the first step
        waits = snapshot.waits
        if snapshot.steps_per_s > 0 and snapshot.wait_share <= STARVING_SHARE:
            self.stage = Stage.LOCAL
            return _hold(f"local loading keeps up: {waits}")
        if now < self._retry_at:
            return _hold(f"local loading: data workers did not pay, next try in {self._retry_at - now:.0f} s")
        if now < self._refusals.until:
            return self._backing_off(now)
        if self._maximum(snapshot) == 0:
            return _hold("the site allows no data workers")
        self.local = LocalLoading.seen(snapshot.steps_per_s, snapshot.wait_share)
        self.stage = Stage.SIZE if self._size.probing else Stage.COUNT
        return self._grow(snapshot, 1, f"{waits} with local loading, at {snapshot.steps_per_s:.1f} steps/s")

    # --- the size of a data worker ----------------------------------------------------------------------------------

    def _find_size(self, snapshot: Snapshot, now: float) -> Decision:
        probe = next(
            (companion for companion in snapshot.of(CompanionState.WORKING) if companion.cpus == self._size.probing),
            None,
        )
        if snapshot.num_companions == 0:
            self.stage = Stage.BASELINE
            return _hold("the data worker that was measured is gone")
        waiting = [
            companion for companion in snapshot.of(CompanionState.PENDING) if now - companion.since > _START_LIMIT_S
        ]
        if snapshot.wait_share <= STARVING_SHARE or waiting or self._maximum(snapshot) <= snapshot.num_data_workers:
            self._size.stop()
            self.stage = Stage.COUNT
            return _hold(f"data workers have {self.cpus} CPUs: the search ends here")
        if probe is None:
            return _hold(f"{snapshot.num_companions} companions wait in Slurm's queue")
        if probe.rate_per_s <= 0:
            return _hold("the new data worker has made no step yet")
        why = self._size.measured(probe.rate_per_s)
        if self._size.probing:
            if now < self._refusals.until:
                return self._backing_off(now)
            return self._grow(snapshot, 1, why)
        self.stage = Stage.COUNT
        others = [companion for companion in snapshot.of(CompanionState.WORKING) if companion.cpus != self._size.best]
        if others and len(others) < snapshot.num_companions:
            return Decision(Action.DRAIN, len(others), why, job_ids(others))
        return _hold(why)

    # --- the number of data workers ---------------------------------------------------------------------------------

    def _find_count(self, snapshot: Snapshot, now: float) -> Decision:
        have, starving = snapshot.num_data_workers, snapshot.wait_share > STARVING_SHARE
        pending = snapshot.of(CompanionState.PENDING)
        waits = snapshot.waits
        if snapshot.trainer_cpus is not None and not starving:
            self._note_trainer(snapshot.trainer_cpus, now)
        if have == 0:
            self.stage = Stage.BASELINE
            return _hold("all data workers are gone")
        if self._grown_from is not None and not pending:
            before = self._grown_from
            if before.features_share > STARVING_SHARE and now - self._steady_since < _RECUT_S:
                return _hold(f"{waits}, and more of them may go to the data workers that have come")
            self._grown_from = None
            fewer, reason = before.num_data_workers, _why_growth_did_not_pay(before, snapshot)
            if fewer and have > fewer and starving and reason:
                self._disappointed(now, fewer)
                return self._shrink_to(snapshot, fewer, reason)
        if self._ceiling is not None and now >= self._retry_at:
            self._ceiling = None
            self._loading.forget()
        self._note_loading(snapshot, have, now)
        need, by = self._need(snapshot)
        room = self._maximum(snapshot) - have
        idle = snapshot.steps_per_s < _BUSY_SHARE * capacity_per_s(snapshot)
        self._note_need(snapshot, now, stuck=room <= 0 or idle)
        if starving and not pending and room > 0 and need is not None and not idle:
            if now < self._refusals.until:
                return self._backing_off(now)
            model = self._loading.model()
            more = max(need, have + 1)
            if model is not None and not growth_paid(model.per_s(have), model.per_s(more), have, more):
                self._disappointed(now, have)
                return _hold(f"{waits}, and {need} data workers would not make enough more than {have}: {model}")
            count = min(more, have * _MOST_GROWTH, have + room) - have
            return self._grow(snapshot, count, f"{waits}, {need} data workers would feed it{by}")
        calm_need = self._calm_need(now)
        if calm_need == 0 and snapshot.num_companions:
            self._disappointed(now, None)
            self.stage = Stage.LOCAL
            return self._shrink_to(snapshot, 0, f"{snapshot.steps_per_s:.1f} steps/s, as many as with local loading")
        if calm_need is not None and calm_need < have and snapshot.num_companions:
            return self._shrink_to(snapshot, calm_need, f"{waits}, {calm_need} data workers are enough")
        if pending:
            return _hold(f"{len(pending)} companions wait in Slurm's queue; {waits}")
        if starving and (idle or need is None) and snapshot.earlier_wait_share > STARVING_SHARE:
            theirs = f"the data workers of this stage wait {snapshot.earlier_wait_share:.0%}"
            return _hold(f"{waits}, but for the stage before: {theirs}")
        if starving and idle:
            return _hold(f"{waits}, but not for data workers: those that are there have time left")
        return _hold(waits + (", and no more data workers are allowed" if starving and room <= 0 else ""))

    def _need(self, snapshot: Snapshot) -> tuple[int | None, str]:
        """Data workers that would feed the trainer, and who says so if that is the fitted model.

        Of now's rate alone the need is too small where data workers share something: each one more makes all of them
        slower, and growth comes in many steps. The model knows by how much.
        """
        need, model = needed(snapshot, self.cpus, GROW_HEADROOM), self._loading.model()
        if need is None or model is None or snapshot.steps_per_s <= 0:
            return need, ""
        enough = model.needed(demand_per_s(snapshot) * (1 - STARVING_SHARE))
        if enough is None or enough < need:
            return need, ""
        return enough + 1, f" ({model})"

    def _note_loading(self, snapshot: Snapshot, have: int, now: float) -> None:
        working = snapshot.of(CompanionState.WORKING)
        rates = [companion.rate_per_s for companion in working] + (
            [snapshot.fixed_rate_per_s] if snapshot.fixed else []
        )
        # One of another size, or one that has just come, would be taken for a bend of the curve.
        if (
            snapshot.fixed + len(working) == have
            and all(companion.cpus == self.cpus for companion in working)
            and all(rate > 0 for rate in rates)
        ):
            self._loading.note(self.cpus, have, sum(rates), now)

    def _note_trainer(self, used: float, now: float) -> None:
        """Remember what a trainer that was fed used; its greatest use of the last time counts, so that none is lost."""
        self._trainer_used.append((now, used))
        while self._trainer_used[0][0] <= now - _TRAINER_S:
            self._trainer_used.popleft()
        self.trainer_cpus = trainer_cpus_needed(max(used for _, used in self._trainer_used))

    def _note_need(self, snapshot: Snapshot, now: float, *, stuck: bool) -> None:
        """Remember what was needed: none if local loading is as fast; all that are there while the trainer starves."""
        starving, moves = snapshot.wait_share > STARVING_SHARE, snapshot.steps_per_s > 0
        need = needed(snapshot, self.cpus, SHRINK_HEADROOM)
        if need is None or starving or not moves:
            need = snapshot.num_data_workers
        if moves and (stuck or not starving) and not self._pays(snapshot):
            need = 0
        self._needs.append((now, need))
        while len(self._needs) > 1 and self._needs[1][0] <= now - self._calm_s:
            self._needs.popleft()

    def _pays(self, snapshot: Snapshot) -> bool:
        """Whether local loading would be slower; taken for granted where it was not measured."""
        if self.local is None or snapshot.fixed:
            return True
        made_per_s = snapshot.steps_per_s
        if snapshot.of(CompanionState.PENDING) or snapshot.earlier_wait_share > STARVING_SHARE:
            # Rates are too low while companions are missing or an earlier stage starves: all workers count.
            rate = rate_of_one(snapshot, self.cpus)
            if rate <= 0:
                return True
            made_per_s = max(made_per_s, min(demand_per_s(snapshot), rate * snapshot.num_data_workers))
        return remote_pays(self.local.steps_per_s(snapshot), made_per_s)

    def _calm_need(self, now: float) -> int | None:
        """The greatest need of the last time; None as long as it is not known."""
        if not self._needs or now - self._needs[0][0] < self._calm_s:
            return None
        return max(need for _, need in self._needs)

    @property
    def _calm_s(self) -> float:
        return _CALM_COOLDOWNS * self.limits.cooldown_s

    # --- changes ----------------------------------------------------------------------------------------------------

    def _maximum(self, snapshot: Snapshot) -> int:
        """Data workers that may be there now. Those of component 1 are the job's own, whatever the site says."""
        limits = (self.limits.maximum, self._ceiling, snapshot.site_limit)
        return max(self.limits.minimum, snapshot.fixed, min(limit for limit in limits if limit is not None))

    def _grow(self, snapshot: Snapshot, count: int, reason: str) -> Decision:
        self._grown_from = snapshot
        self._needs.clear()
        return Decision(Action.GROW, count, reason, cpus=self.cpus)

    def _shrink_to(self, snapshot: Snapshot, num_data_workers: int, reason: str) -> Decision:
        """Take back what waits in the queue first; then let the slowest leave. As many as the script wants stay."""
        most = snapshot.num_data_workers - self.limits.minimum
        count = min(snapshot.num_data_workers - num_data_workers, snapshot.num_companions, most)
        if count <= 0:
            return _hold(f"{reason}; the script asks for {self.limits.minimum} data workers at the least")
        self._needs.clear()
        waiting = snapshot.of(CompanionState.PENDING)
        if waiting:
            return _cancel(waiting[-count:], reason)
        leaving = slowest(snapshot.of(CompanionState.STARTING, CompanionState.WORKING), count)
        return Decision(Action.DRAIN, len(leaving), reason, job_ids(leaving))

    def _disappointed(self, now: float, ceiling: int | None) -> None:
        self._retry_at = now + min(_LONGEST_RETRY_S, _RETRY_S * 2**self._num_disappointments)
        self._num_disappointments += 1
        self._ceiling = ceiling

    def _backing_off(self, now: float) -> Decision:
        return _hold(f"Slurm refused the last submission, next try in {self._refusals.until - now:.0f} s")


def _why_growth_did_not_pay(before: Snapshot, after: Snapshot) -> str:
    """Why more data workers have brought too little; "" if they have brought enough."""
    fewer, more = before.num_data_workers, after.num_data_workers
    if before.features_share > STARVING_SHARE:
        # They do more for a step than those before did: what they can make is nothing to compare.
        if after.steps_per_s >= before.steps_per_s * (1 + LEAST_GAIN):
            return ""
        return (
            f"with {more} data workers the trainer takes {after.steps_per_s:.1f} steps/s, "
            f"with {fewer} it took {before.steps_per_s:.1f}"
        )
    before_per_s, after_per_s = capacity_per_s(before), capacity_per_s(after)
    if growth_paid(before_per_s, after_per_s, fewer, more):
        return ""
    return f"{more} data workers can make {after_per_s:.1f} steps/s, {fewer} could {before_per_s:.1f}"


def _hold(reason: str) -> Decision:
    return Decision(Action.HOLD, 0, reason)


def _cancel(companions: list[Companion], reason: str) -> Decision:
    return Decision(Action.CANCEL, len(companions), reason, job_ids(companions))
