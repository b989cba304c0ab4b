"""Reads the cluster again and again, and goes on when slurmctld does not answer. Used by the exporter and the page.

It never changes anything in Slurm, and asks at most once in an interval, however often somebody looks at the result.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hetstream.base.errors import HetstreamError
from hetstream.base.signals import sleep_in_parts
from hetstream.slurm_plugin.client.model import Cluster, Job
from hetstream.slurm_plugin.errors import NodesHidden
from hetstream.slurm_plugin.insight.history import History
from hetstream.slurm_plugin.insight.observation import Observation, observe
from hetstream.slurm_plugin.insight.shared_gpus import SharedGpus

logger = logging.getLogger(__name__)

MIN_INTERVAL_S = 5.0


@dataclass(frozen=True)
class Reading:
    """How the newest attempt went.

    Attributes:
        observation: None if Slurm could not be read, or was not yet.
        error: what failed, in one line: reading, or keeping what was read; empty if nothing did.
        num_errors: kind of error -> how often, since the start.
        read_s: how long it took.
        success_s: when one last succeeded, in seconds since the epoch; None if none did.
    """

    observation: Observation | None = None
    error: str = ""
    num_errors: Mapping[str, int] = field(default_factory=dict)
    read_s: float = 0.0
    success_s: float | None = None


class Monitor:
    """Makes readings.

    Args:
        cluster: whom to ask.
        wait_shares: what running jobs' trainers tell; see `wait_shares.py`.
        history: where samples are kept, or nowhere.
        shared: tells of shared GPUs; nobody does.
    """

    def __init__(
        self,
        cluster: Cluster,
        wait_shares: Callable[[Iterable[Job]], Mapping[str, float]],
        history: History | None,
        shared: Callable[[], SharedGpus | None] = lambda: None,
    ) -> None:
        self._cluster = cluster
        self._wait_shares = wait_shares
        self._history = history
        self._shared = shared
        self._errors: Counter[str] = Counter()
        self._success_s: float | None = None
        self._said_hidden = False

    def readings(self, interval_s: float, sleep: Callable[[float], object] = sleep_in_parts) -> Iterator[Reading]:
        """A reading now, and then one in each interval, without end."""
        while True:
            reading = self.read()
            yield reading
            sleep(max(MIN_INTERVAL_S, interval_s - reading.read_s))

    def read(self) -> Reading:
        """One reading. A failure is part of it: an exporter that dies with slurmctld cannot say that it is down.

        Raises:
            NodesHidden: there is nothing to read for this user.
        """
        begin_s = time.monotonic()
        observation, error = None, ""
        try:
            snapshot = self._cluster.snapshot()
            if snapshot.hidden and not self._said_hidden:
                self._said_hidden = True
                logger.warning("%s: all figures are of what this user may see", snapshot.hidden)
            observation = observe(snapshot, self._wait_shares(snapshot.jobs), self._shared())
            self._success_s = snapshot.taken_s
            if self._history:
                self._history.append(observation.sample)
        except NodesHidden:
            raise
        except HetstreamError as exc:
            error = self._count(exc)
            logger.warning("the cluster was not read: %s: %s", type(exc).__name__, exc)
        except Exception as exc:  # counted and logged with its traceback; the next one may go well
            error = self._count(exc)
            logger.exception("the cluster was not read")
        return Reading(observation, error, dict(self._errors), time.monotonic() - begin_s, self._success_s)

    def _count(self, exc: Exception) -> str:
        self._errors[type(exc).__name__] += 1
        return str(exc)
