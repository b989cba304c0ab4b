"""Decides how many embedding servers a job has: (snapshot, now) -> Decision with its reason. Pure.

Called by `hetstream.hetjob.master.embedding` about once a second. Rows of a table come with new ids, so memory grows
with the training. One server more is asked for when the fullest one would be full of rows before a companion has
started, or when one of them has twice the load of the others for a minute; it takes parts of those that are there. One
leaves when the others would be half empty without it: its parts go to them first. Those that start together with the
trainer stay.

There is at most one change at a time, and none before the parts have come to rest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

import numpy as np

from hetstream.base.text import count_words
from hetstream.hetjob.elastic.controller import RefusalBackoff
from hetstream.hetjob.elastic.memory import theil_sen
from hetstream.hetjob.elastic.snapshot import Action, Companion, CompanionState, Decision, Limits

# Shares of a server's memory: above the first one more is needed; one goes if all others stay below the second.
FULL, EMPTY = 0.8, 0.5
# From a submission until a companion serves, before any has: a queue that is short, and Python from a busy file system.
_FIRST_START_S = 300.0
# Memory grows by steps of a table's array: its trend is looked at for this long, in points of this distance.
_TREND_S, _POINT_S, _LEAST_POINTS = 300.0, 5.0, 4
# For so many times as long as it was seen: in the first pass over the data all ids are new.
_BELIEVED = 4.0
# One server with so many times the load of the others, for so long. Below a least load nothing is of interest.
HOT, HOT_S, _LEAST_READS_PER_S = 2.0, 60.0, 10.0
# Of a server more, the hottest one must have lost this share of its load; else the load is of a few ids.
_LEAST_RELIEF = 0.1
# A server that has come or gone moves parts for about this long.
SETTLE_S = 60.0
# Memory must have been enough without a server for this long.
CALM_S = 600.0


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """An embedding server.

    Attributes:
        name: its own.
        job_id: of the companion that it is; "" for those that start together with the trainer.
        num_bytes, limit_bytes: that its rows take, and may take.
        reads_per_s: over the last seconds.
    """

    name: str
    job_id: str
    num_bytes: int
    limit_bytes: int
    reads_per_s: float

    @property
    def share(self) -> float:
        """Of its memory."""
        return self.num_bytes / self.limit_bytes


@dataclass(frozen=True, slots=True)
class EmbeddingSnapshot:
    """One moment of a job's embedding servers.

    Attributes:
        servers: those that say what they have, but for those that leave.
        companions: jobs.
    """

    servers: tuple[ServerLoad, ...]
    companions: tuple[Companion, ...] = ()

    def of(self, *states: CompanionState) -> list[Companion]:
        """Return the companions in one of these states."""
        return [companion for companion in self.companions if companion.state in states]


class EmbeddingController:
    """The controller of one job's embedding servers.

    Args:
        limits: of the script.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._refusals = RefusalBackoff()
        self._starts_s: deque[float] = deque(maxlen=5)
        self._asked_at: dict[str, float] = {}
        self._names: frozenset[str] | None = None
        self._steady_since = -math.inf
        self._points: dict[str, deque[tuple[float, int]]] = {}
        self._hot_since: float | None = None
        self._calm_since: float | None = None
        # What the hottest server read before one more came for that reason, and all of them; None if none has.
        self._hottest_before: float | None = None
        self._reads_before = 0.0

    @property
    def start_s(self) -> float:
        """From the submission of a companion until it serves: of the last ones, the slowest."""
        return max(self._starts_s, default=_FIRST_START_S)

    def refused(self, now: float) -> float:
        """Slurm refused a submission; returns after how many seconds the next one may be tried."""
        return self._refusals.refused(now)

    def accepted(self) -> None:
        """Slurm took a submission."""
        self._refusals.accepted()

    def decide(self, snapshot: EmbeddingSnapshot, now: float) -> Decision:
        """Return what to do now. The caller does it, and says so with `refused` if Slurm does not let it."""
        self._take_in(snapshot, now)
        servers = snapshot.servers
        if not servers:
            return _hold("no embedding server has told what it has")
        if leaving := snapshot.of(CompanionState.DRAINING):
            return _hold(f"{count_words(len(leaving), 'embedding server')} about to leave")
        if coming := snapshot.of(CompanionState.PENDING, CompanionState.STARTING):
            return _hold(f"{count_words(len(coming), 'embedding server')} on the way")
        if now - self._steady_since < SETTLE_S:
            return _hold(f"embedding servers have come or gone within {SETTLE_S:g} s")
        why = self._why_more(servers, now)
        working = snapshot.of(CompanionState.WORKING)
        num_servers = self.limits.minimum + len(working)
        if why and num_servers >= self.limits.maximum:
            return _hold(f"{why}; no more than {self.limits.maximum} embedding servers are allowed")
        if why and now < self._refusals.until:
            return _hold(f"{why}; Slurm refused the last submission")
        if why:
            if self._hot_since is not None:
                self._hottest_before = max(server.reads_per_s for server in servers)
                self._reads_before = sum(server.reads_per_s for server in servers)
            return Decision(Action.GROW, 1, why, cpus=self.limits.largest_cpus)
        why_fewer = self._why_fewer(servers, len(working), now)
        if why_fewer:
            # The newest: jobs are counted.
            newest = max(working, key=lambda companion: int(companion.job_id))
            return Decision(Action.DRAIN, 1, why_fewer, (newest.job_id,))
        fullest = max(servers, key=lambda server: server.share)
        return _hold(f"the fullest has {fullest.share:.0%} of its memory in use")

    # --- looking ----------------------------------------------------------------------------------------------------

    def _take_in(self, snapshot: EmbeddingSnapshot, now: float) -> None:
        names = frozenset(server.name for server in snapshot.servers)
        if names != self._names:
            # Parts move, if there is anything in them: what a server has grew or shrank for another reason.
            has_rows = any(server.num_bytes for server in snapshot.servers)
            self._steady_since = now if self._names and has_rows else -math.inf
            self._names, self._hot_since, self._calm_since = names, None, None
            self._points = {name: deque() for name in names}
        for server in snapshot.servers:
            points = self._points[server.name]
            if not points or now - points[-1][0] >= _POINT_S:
                points.append((now, server.num_bytes))
            while points[0][0] < now - _TREND_S:
                points.popleft()
        known = {companion.job_id for companion in snapshot.companions}
        self._asked_at = {job_id: asked_at for job_id, asked_at in self._asked_at.items() if job_id in known}
        for companion in snapshot.companions:
            if companion.state in (CompanionState.PENDING, CompanionState.STARTING):
                self._asked_at.setdefault(companion.job_id, now)
            elif companion.state is CompanionState.WORKING and companion.job_id in self._asked_at:
                self._starts_s.append(now - self._asked_at.pop(companion.job_id))

    def _foreseen_share(self, server: ServerLoad) -> float:
        """Of its memory, when a companion that is asked for now would serve."""
        points = self._points[server.name]
        if len(points) < _LEAST_POINTS:
            return server.share
        times, values = np.array(points, dtype=np.float64).T
        slope, grows = theil_sen(times, values)
        ahead_s = min(self.start_s, _BELIEVED * (times[-1] - times[0]))
        return server.share + (slope * ahead_s / server.limit_bytes if grows else 0.0)

    # --- more, or fewer ---------------------------------------------------------------------------------------------

    def _why_more(self, servers: Sequence[ServerLoad], now: float) -> str:
        """Why one more is needed; "" if none is."""
        shares = {server: self._foreseen_share(server) for server in servers}
        fullest = max(servers, key=lambda server: shares[server])
        if shares[fullest] > FULL:
            return (
                f"embedding server {fullest.name} has {fullest.share:.0%} of its memory in use, {shares[fullest]:.0%} "
                f"in {self.start_s:.0f} s, when one more could serve"
            )
        hottest = max(servers, key=lambda server: server.reads_per_s)
        usual = median_low([server.reads_per_s for server in servers])
        if len(servers) < 2 or hottest.reads_per_s < max(HOT * usual, _LEAST_READS_PER_S):
            self._hot_since = None
            return ""
        if self._hot_since is None:
            self._hot_since = now
        before = self._hottest_before
        if now - self._hot_since < HOT_S or (before and hottest.reads_per_s > (1 - _LEAST_RELIEF) * before):
            return ""
        return (
            f"embedding server {hottest.name} has {hottest.reads_per_s:.0f} reads/s for {now - self._hot_since:.0f} s, "
            f"the median is {usual:.0f}"
        )

    def _why_fewer(self, servers: Sequence[ServerLoad], num_companions: int, now: float) -> str:
        """Why one may go; "" if none may."""
        if not num_companions or len(servers) < 2:
            return ""
        limit = min(server.limit_bytes for server in servers)
        evenly = sum(server.num_bytes for server in servers) / (len(servers) - 1)
        share = max(evenly, *(server.num_bytes for server in servers)) / limit
        reads_per_s = sum(server.reads_per_s for server in servers)
        if share >= EMPTY or (self._hottest_before and reads_per_s > self._reads_before / 2):
            self._calm_since = None
            return ""
        if self._calm_since is None:
            self._calm_since = now
        if now - self._calm_since < CALM_S:
            return ""
        self._hottest_before = None
        return f"without the newest embedding server the others would have {share:.0%} of their memory in use"


def _hold(reason: str) -> Decision:
    return Decision(Action.HOLD, 0, reason)
