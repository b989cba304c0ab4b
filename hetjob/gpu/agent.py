"""The agent in one training process: keeps to the coordinator's orders, and says how the process is.

Called from the program's own threads, at launches and at boundaries of mini-batches; it has no thread. A guaranteed
process never waits here, whatever has become of the coordinator. An opportunistic one launches only while an order
lets it: without a coordinator it pauses, and asks for a new one.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from hetstream.base.process import generation
from hetstream.hetjob.errors import GpuCoordinatorError, GpuJobRefused, GpuTaken
from hetstream.hetjob.gpu.config import reach
from hetstream.hetjob.gpu.device import Device
from hetstream.hetjob.gpu.orders import FULL_SHARE, NO_LIMIT, GpuUse, JobClass, Order, Statistics

# When a job's next launch is due under its order. Pure; the clock is an argument.

# Whoever has to wait is woken when he may go on, and looks by himself after this: to wait costs next to nothing.
LOOK_AGAIN_NS = 50_000_000
# A gap that is open, but too short for the next launch, may be longer by then.
_LONGER_NS = 10_000_000
# Debts are forgiven beyond this: a kernel that took a second must not cost a minute.
_MOST_DEBT_NS = 1_000_000_000


def is_good_news(before: Order | None, after: Order, now_ns: int) -> bool:
    """Return whether a process that waits under one order may go on under the next one: then it is woken."""
    if after.verdict == GpuUse.PAUSE:
        return False
    if before is None or before.verdict != after.verdict or before.valid_until_ns <= now_ns:
        return True
    if before.meet_at != after.meet_at and (after.meet_at == 0 or after.meet_at > before.meet_at):
        return True
    opens = after.open_until_ns > now_ns >= before.open_until_ns
    return opens or after.share > before.share


def open_until(order: Order, busy_since_ns: int) -> int:
    """Until when others leave the GPU idle; 0 if the guaranteed job has begun since the order was made."""
    return order.open_until_ns if busy_since_ns <= order.idle_since_ns else 0


class Throttle:
    """Says how long a job has to wait before it launches, and learns how long its launches keep the GPU busy.

    A share of 250 thousandths means that each millisecond of work is followed by three of rest, but while others leave
    the GPU idle.

    Args:
        job_class: a guaranteed job never waits.
    """

    def __init__(self, job_class: JobClass) -> None:
        self._is_bound = job_class is JobClass.OPPORTUNISTIC
        self._rested_ns = 0  # when the debt of earlier launches is paid

    def wait_ns(
        self,
        order: Order | None,
        now_ns: int,
        *,
        work_ns: int = 0,
        in_mini_batch: bool = True,
        busy_since_ns: int = 0,
        boundaries: int = 0,
    ) -> int:
        """Return how long to wait, and ask again; 0: launch now.

        Args:
            order: the newest; None: there is none that is whole.
            now_ns: the time.
            work_ns: how long the launch will keep the GPU busy, as far as known: it is to end while the GPU is idle.
            in_mini_batch: whether the job is on the way to a boundary.
            busy_since_ns: when the guaranteed job began to use the GPU last, as it says itself.
            boundaries: that the job has come to.
        """
        if not self._is_bound:
            return 0
        if order is None or now_ns >= order.valid_until_ns or order.verdict == GpuUse.PAUSE:
            return LOOK_AGAIN_NS
        may_begin = boundaries < order.meet_at
        if order.verdict == GpuUse.FINISH:
            return 0 if in_mini_batch or may_begin else LOOK_AGAIN_NS
        if order.meet_at and not in_mini_batch and not may_begin:
            return LOOK_AGAIN_NS
        open_until_ns = open_until(order, busy_since_ns)
        if order.share >= FULL_SHARE or now_ns + work_ns <= open_until_ns:
            return 0
        most_ns = _LONGER_NS if now_ns < open_until_ns else LOOK_AGAIN_NS
        return most_ns if order.share <= 0 else min(most_ns, max(0, self._rested_ns - now_ns))

    def worked(self, order: Order | None, now_ns: int, work_ns: int, busy_since_ns: int = 0) -> None:
        """Note work that has just ended."""
        if order is None or now_ns <= open_until(order, busy_since_ns) or not 0 < order.share < FULL_SHARE:
            return
        debt_ns = work_ns * (FULL_SHARE - order.share) // order.share
        self._rested_ns = min(max(self._rested_ns, now_ns) + debt_ns, now_ns + _MOST_DEBT_NS)


# A coordinator that has gone is looked for again after this.
_CONNECT_AGAIN_NS = 500_000_000
_NEVER_NS = -_CONNECT_AGAIN_NS
# A guaranteed process that has waited for an answer in vain asks again only when this times as long has passed.
_WAITED_FACTOR = 50
# While it waits, a process says so often that it is there.
_REPORT_NS = 100_000_000


class OrderChannel(Protocol):
    """Where orders come from, and statistics go: a `Connection`."""

    @property
    def job_class(self) -> JobClass:
        """What the other end takes the process for; it may become guaranteed while it runs."""

    def order(self) -> Order | None:
        """Return the newest order."""

    def report(self, statistics: Statistics, *, news: bool) -> None:
        """Say how the process is."""

    def busy_since_ns(self) -> int:
        """Return when the guaranteed job began to use the GPU last, as it says itself; 0: it does not."""

    def say_busy(self, now_ns: int) -> None:
        """Of a guaranteed process: it uses the GPU from now on."""

    def look(self) -> bool:
        """Return whether anybody is at the other end."""

    def wait(self, timeout_s: float) -> None:
        """Wait for another order, or for the timeout."""

    def close(self) -> None:
        """Leave."""


class Agent:
    """One process's agent.

    Args:
        device: the GPU.
        job_class: of the process.
        connect: makes a channel.
        clock: nanoseconds of CLOCK_MONOTONIC.
        wait: waits for a number of seconds, in the place of the channel.
        follows_forks: a forked child has an agent of its own. Without it, it has none.
        launcher: process that has started this one as a rank, such as torchrun; 0: nobody who would end it.
    """

    def __init__(
        self,
        device: Device,
        job_class: JobClass,
        connect: Callable[[], OrderChannel],
        clock: Callable[[], int] = time.monotonic_ns,
        wait: Callable[[float], None] | None = None,
        *,
        follows_forks: bool = False,
        launcher: int = 0,
    ) -> None:
        self._device, self._job_class, self._connect = device, job_class, connect
        self._clock, self._wait = clock, wait
        self._channel: OrderChannel | None = None
        self._launcher = launcher
        self._begin()
        self._watch_forks(follows_forks)

    def _begin(self) -> None:
        """As a process begins that has said nothing and heard nothing."""
        self._throttle = Throttle(self._job_class)
        self._connected_ns = _NEVER_NS
        self._is_missed = False
        self._generation = generation()
        self._boundaries = self._boundary_ns = self._mini_batch_ns = self._gap_ns = 0
        self._is_idle = False
        self._limit_bytes = NO_LIMIT
        self._paused_ns = self._reported_ns = 0
        self._usual_work_ns = 0

    def before_launch(self) -> None:
        """Wait until the process may launch. The first launch is when the coordinator hears of the process.

        Raises:
            GpuJobRefused: an opportunistic process may not take part, or it waits in vain and its launcher has gone.
            GpuTaken: a guaranteed process has not begun, and its GPU has another guaranteed job.
        """
        if generation() != self._generation:
            return
        if self._connected_ns == _NEVER_NS:
            self._look_for_coordinator()
        if self._job_class is JobClass.OPPORTUNISTIC:
            wait_ns = self._wait_ns()
            if wait_ns:
                self._pause(wait_ns)
        if self._is_idle:  # until here, also while it waited
            self._begin_mini_batch()

    def after_launch(self) -> None:
        """Note what the GPU has done, and keep little enough in flight."""
        if self._job_class is JobClass.GUARANTEED or generation() != self._generation:
            return
        work_ns = self._device.launched()
        if work_ns:
            self._usual_work_ns += (work_ns - self._usual_work_ns) // 8
            self._throttle.worked(self._order(), self._clock(), work_ns, self._busy_since_ns())

    def at_boundary(self) -> None:
        """A mini-batch has ended: take over the memory limit, and report.

        Raises:
            GpuJobRefused: an opportunistic process may no longer take part.
        """
        if generation() != self._generation:
            return
        reach("agent.boundary")
        now_ns = self._clock()
        if self._boundary_ns:
            self._mini_batch_ns = now_ns - self._boundary_ns
        self._boundaries += 1
        self._boundary_ns = now_ns
        self._is_idle = True
        if self._channel is None or not self._channel.look():
            self._leave_lost_coordinator()
            if now_ns - self._connected_ns >= _CONNECT_AGAIN_NS:
                self._look_for_coordinator()
        self._apply_limit()
        reach("agent.limited")
        self._report(news=True)
        self._device.begin_mini_batch()

    def close(self) -> None:
        """Leave the coordinator."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _watch_forks(self, follows_forks: bool) -> None:
        """A child that kept the connection would keep its parent alive for the coordinator."""
        reference = weakref.ref(self)

        def leave() -> None:
            agent = reference()
            if agent is not None:
                agent.close()
                agent._launcher = os.getppid() if agent._launcher else 0
                if follows_forks:
                    agent._begin()

        os.register_at_fork(after_in_child=leave)

    def _begin_mini_batch(self) -> None:
        """The first launch after a boundary. What was launched before it must have ended, else there was no gap."""
        self._is_idle = False
        now_ns = self._clock()
        if self._channel is not None and self._job_class is JobClass.GUARANTEED:
            self._channel.say_busy(now_ns)
        self._gap_ns = now_ns - self._boundary_ns if self._device.is_idle() else 0
        self._report(news=True)

    def _order(self) -> Order | None:
        return self._channel.order() if self._channel is not None else None

    def _busy_since_ns(self) -> int:
        return self._channel.busy_since_ns() if self._channel is not None else 0

    def _wait_ns(self) -> int:
        return self._throttle.wait_ns(
            self._order(),
            self._clock(),
            work_ns=self._usual_work_ns,
            in_mini_batch=self._boundaries > 0 and not self._is_idle,
            busy_since_ns=self._busy_since_ns(),
            boundaries=self._boundaries,
        )

    def _pause(self, wait_ns: int) -> None:
        reach("agent.pausing")
        began_ns = self._clock()
        while wait_ns:
            if self._clock() - self._reported_ns >= _REPORT_NS:
                self._look_and_report()
            wait = self._wait or (self._channel.wait if self._channel is not None else time.sleep)
            wait(wait_ns / 1e9)
            wait_ns = self._wait_ns()
        self._paused_ns += self._clock() - began_ns

    def _look_and_report(self) -> None:
        """What a process that waits does from time to time."""
        self._reported_ns = self._clock()
        if self._channel is None or not self._channel.look():
            self._leave_lost_coordinator()
            if self._reported_ns - self._connected_ns >= _CONNECT_AGAIN_NS:
                self._look_for_coordinator()
            if self._channel is None and self._launcher and os.getppid() != self._launcher:
                raise GpuJobRefused(
                    "no coordinator of GPUs is here, and who launched this process (torchrun, srun) has gone: it ends"
                )
        self._apply_limit()
        self._report(news=False)

    def _take_class(self) -> None:
        """An opportunistic process becomes guaranteed where it is, if the coordinator says so; never the other way."""
        is_upgraded = self._channel is not None and self._channel.job_class is JobClass.GUARANTEED
        if is_upgraded and self._job_class is JobClass.OPPORTUNISTIC:
            self._job_class = JobClass.GUARANTEED
            self._throttle = Throttle(self._job_class)
            _say("this job has become guaranteed: it has its GPU for itself, and goes on")

    def _apply_limit(self) -> None:
        """Hold as much memory as the order says; without an order, a guaranteed process holds what it needs."""
        self._take_class()
        order = self._order()
        if self._job_class is JobClass.GUARANTEED:
            limit_bytes = NO_LIMIT
        elif order is None:
            return
        else:
            limit_bytes = order.limit_bytes
        if limit_bytes != self._limit_bytes:
            self._limit_bytes = limit_bytes
            self._device.set_limit(limit_bytes)

    def _report(self, *, news: bool) -> None:
        if self._channel is None:
            return
        use = self._device.memory()
        self._channel.report(
            Statistics(
                updated_ns=self._clock(),
                boundaries=self._boundaries,
                boundary_ns=self._boundary_ns,
                mini_batch_ns=self._mini_batch_ns,
                gap_ns=self._gap_ns,
                is_idle=int(self._is_idle),
                held_bytes=use.held_bytes,
                peak_bytes=use.peak_bytes,
                host_bytes=use.host_bytes,
                host_capacity_bytes=use.host_capacity_bytes,
                limit_bytes=self._limit_bytes,
                paused_ns=self._paused_ns,
            ),
            news=news,
        )

    def _look_for_coordinator(self) -> None:
        self._connected_ns = self._clock()
        try:
            self._channel = self._connect()
        except GpuCoordinatorError as error:
            if self._job_class is JobClass.GUARANTEED:  # one that is stopped takes connections, and never answers
                self._connected_ns += _WAITED_FACTOR * (self._clock() - self._connected_ns)
            self._miss(str(error))
            return
        except GpuJobRefused as error:
            has_begun = self._boundaries > 0 or not isinstance(error, GpuTaken)
            if self._job_class is JobClass.OPPORTUNISTIC or not has_begun:
                raise
            self._miss(str(error))
            return
        if self._is_missed:
            _say("the coordinator of GPUs is back")
            self._is_missed = False
        self._report(news=True)

    def _leave_lost_coordinator(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            self._miss("the coordinator of GPUs has gone")

    def _miss(self, why: str) -> None:
        """Say once that there is no coordinator, and what follows from that."""
        if not self._is_missed:
            guaranteed = self._job_class is JobClass.GUARANTEED
            _say(f"{why}; this {self._job_class.value} job {'goes on as if alone' if guaranteed else 'pauses'}")
            self._is_missed = True


def _say(text: str) -> None:
    sys.stderr.write(f"hetstream: {text}\n")
    sys.stderr.flush()
