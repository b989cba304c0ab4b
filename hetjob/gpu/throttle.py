"""When a job's next launch is due under its order. Pure; the clock is an argument."""

from __future__ import annotations

from hetstream.hetjob.gpu.orders import FULL_SHARE, JobClass, Order, Verdict

# Whoever has to wait is woken when he may go on, and looks by himself after this: to wait costs next to nothing.
LOOK_AGAIN_NS = 50_000_000
# A gap that is open, but too short for the next launch, may be longer by then.
_LONGER_NS = 10_000_000
# Debts are forgiven beyond this: a kernel that took a second must not cost a minute.
_MOST_DEBT_NS = 1_000_000_000


def is_good_news(before: Order | None, after: Order, now_ns: int) -> bool:
    """Whether a process that waits under one order may go on under the next one: then it is woken."""
    if after.verdict == Verdict.PAUSE:
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
        """How long to wait, and ask again; 0: launch now.

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
        if order is None or now_ns >= order.valid_until_ns or order.verdict == Verdict.PAUSE:
            return LOOK_AGAIN_NS
        may_begin = boundaries < order.meet_at
        if order.verdict == Verdict.FINISH:
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
