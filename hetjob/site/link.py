"""A job's link to the site daemon: a thread that reports the job's demand and keeps the newest limit.

Made by the job master where a site daemon is set. `report` and `data_workers` never wait. A daemon that does not answer
changes nothing at once: the last limit holds for `HOLD_S`, so that a restart of the daemon does not make all jobs grow,
and then there is none.
"""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType

import msgspec

from hetstream.base.errors import ConfigError, HetstreamError
from hetstream.hetjob.errors import SiteClosed
from hetstream.hetjob.ports import JobDemand, MarkedJob, SiteReading
from hetstream.hetjob.site.address import SiteSettings, read_settings
from hetstream.hetjob.site.client import ask
from hetstream.hetjob.site.messages import Answer, GrantLimit, ReportDemand

log = logging.getLogger(__name__)

HOLD_S = 120.0
_FIRST_RETRY_S = 2.0
_LONGEST_RETRY_S = 30.0
# A daemon of version 1 of the protocol may be replaced while the job runs.
_TRY_NEWER_S = 600.0
_SHORTEST_S, _LONGEST_S = 1.0, 300.0
# Nothing waits for the thread for longer: it holds no lock and no file between two questions.
_JOIN_S = 6.0


@contextlib.contextmanager
def linked(environ: Mapping[str, str], job_id: int) -> Iterator[SiteLink | None]:
    """The job's link while it runs; None where no site daemon is set. A wrong address is no reason to fail a job."""
    try:
        settings = read_settings(environ)
    except ConfigError as error:
        log.warning("no link to the site daemon: %s", error)
        settings = SiteSettings(None, None)
    if settings.address is None:
        yield None
        return
    log.info("job=%d reports to the site daemon at %s", job_id, settings.address)
    with SiteLink(settings, job_id) as link:
        yield link


class SiteLink:
    """The thread; `hetstream.hetjob.ports.SiteLimit` for the elastic controller.

    Args:
        settings: with an address.
        job_id: of the leader.
        clock: seconds, never going back.
    """

    def __init__(self, settings: SiteSettings, job_id: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._job_id = job_id
        self._clock = clock
        self._news = threading.Condition()
        self._demand: ReportDemand | None = None
        self._said: ReportDemand | None = None
        self._granted: GrantLimit | None = None
        self._granted_s = 0.0
        self._asked_s = 0.0
        self._closed = False
        self._problem = ""
        self._old_until_s = float("-inf")
        self._has_told_old = False
        self._thread = threading.Thread(target=self._run, name="hetstream-site", daemon=True)
        self._thread.start()

    def report(self, demand: JobDemand) -> None:
        """Say what the job has and wants, as in `ReportDemand`. A change is sent at once, the rest when it is due."""
        report = ReportDemand(
            job_id=self._job_id,
            minimum=demand.minimum,
            current=demand.current,
            wanted=max(demand.wanted, demand.minimum),
            cpus=demand.cpus,
            wait_share=min(max(demand.wait_share, 0.0), 1.0),
            measured=demand.measured,
        )
        with self._news:
            self._demand = report
            self._news.notify()

    def data_workers(self) -> int | None:
        """How many data workers the job may have, minimum included; None where nobody limits it."""
        with self._news:
            granted, held_s = self._granted, self._clock() - self._granted_s
        return granted.limit if granted is not None and held_s < HOLD_S else None

    def preferred_nodes(self) -> Sequence[str]:
        """Where the next data workers would be best, as the newest answer says."""
        with self._news:
            granted, held_s = self._granted, self._clock() - self._granted_s
        return granted.nodes if granted is not None and held_s < HOLD_S else ()

    def marked(self, mark: str) -> SiteReading | None:
        """This job's companions with this word in their comment, in the daemon's last reading; None if it told none."""
        with self._news:
            granted, asked_s = self._granted, self._asked_s
        if granted is None or granted.read_age_s is None:
            return None
        seen = [
            MarkedJob(companion.job_id, companion.state, companion.num_cpus)
            for companion in granted.companions
            if companion.mark == mark
        ]
        # Not after the answer has come: it may have been on its way for seconds.
        return SiteReading(asked_s - granted.read_age_s, seen)

    def close(self) -> None:
        """End the thread. A question that is on its way is waited for, a few seconds at most."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join(_JOIN_S)

    def __enter__(self) -> SiteLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's
        retry_s = _FIRST_RETRY_S
        next_s = soonest_s = self._clock()
        while True:
            demand = self._wait(next_s, soonest_s)
            if demand is None:
                return
            asked_s = self._clock()
            soonest_s = asked_s + _SHORTEST_S
            try:
                answer = self._ask(demand)
                if not isinstance(answer, GrantLimit):
                    self._note(f"the site daemon refuses the report of job={demand.job_id}: {answer}")
                    delay_s = _LONGEST_RETRY_S
                else:
                    self._take(demand, answer, asked_s)
                    delay_s = min(max(answer.next_s, _SHORTEST_S), _LONGEST_S)
                retry_s = _FIRST_RETRY_S
            except HetstreamError as error:
                self._note(f"the site daemon was not asked: {error}")
                # Not all jobs at once when the daemon is back.
                delay_s = retry_s * random.uniform(0.5, 1.0)
                retry_s = min(_LONGEST_RETRY_S, 2 * retry_s)
            except Exception as error:  # noqa: BLE001, the boundary of the thread: the job goes on without the site's word
                self._note(f"the link to the site daemon fails: {type(error).__name__}: {error}")
                delay_s = _LONGEST_RETRY_S
            next_s = self._clock() + delay_s

    def _ask(self, demand: ReportDemand) -> Answer:
        """Ask with all that was measured, or with what a daemon of version 1 of the protocol understands."""
        if demand.measured is None or self._clock() >= self._old_until_s:
            try:
                return ask(self._settings, demand)
            except SiteClosed:
                if demand.measured is None:
                    raise
        answer = ask(self._settings, msgspec.structs.replace(demand, measured=None))
        if self._clock() >= self._old_until_s:
            self._old_until_s = self._clock() + _TRY_NEWER_S
        if not self._has_told_old:
            self._has_told_old = True
            log.info("the site daemon speaks version 1: it is not told what job=%d has measured", demand.job_id)
        return answer

    def _wait(self, next_s: float, soonest_s: float) -> ReportDemand | None:
        """The newest demand when it is time to report it, for one that has changed the sooner; None at the end."""
        with self._news:
            while not self._closed:
                due_s = min(next_s, soonest_s) if self._has_changed() else next_s
                left_s = due_s - self._clock()
                if self._demand is not None and left_s <= 0:
                    return self._demand
                self._news.wait(left_s if self._demand is not None else None)
        return None

    def _has_changed(self) -> bool:
        """Whether the job wants something else than what the daemon has answered."""
        new, said = self._demand, self._said
        if new is None or said is None:
            return False
        return (new.minimum, new.wanted, new.cpus) != (said.minimum, said.wanted, said.cpus)

    def _take(self, demand: ReportDemand, granted: GrantLimit, asked_s: float) -> None:
        with self._news:
            self._asked_s = asked_s
            before, self._granted, self._granted_s = self._granted, granted, self._clock()
            self._said = demand
        self._problem = ""
        if before is None or before.limit != granted.limit:
            log.info("job=%d site limit=%s: %s", demand.job_id, granted.limit, granted.reason)

    def _note(self, problem: str) -> None:
        """Say it once, not every time."""
        if problem != self._problem:
            log.warning("%s", problem)
        self._problem = problem
