"""Looks at how the steps of a loader with `HybridFeatures` go, and has a `Recutter` decide about the cut in a thread.

Used by `feature_parts.py`, which notes each batch and carries out what was decided, both in the training thread.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetstream.mpi_dataworkers.features.cut_transform import HandedOver
from hetstream.mpi_dataworkers.gpu_features.layer_hooks import Clock
from hetstream.mpi_dataworkers.gpu_features.operations import Batches
from hetstream.mpi_dataworkers.gpu_features.recut import Recut, Recutter, Seen

_log = logging.getLogger(__name__)
# A look is over so many steps, and so long, at the least.
_STEPS, _LOOK_S = 20, 1.0
# A longer step is an evaluation, or a checkpoint, and no step.
_PAUSE_S, _PAUSE_FACTOR = 1.0, 10.0
# A decision that is being made when the loader closes is waited for so long.
_CLOSED_WITHIN_S = 2.0
# So many batches may be on the device before one's time is given up.
_MOST_MARKS = 16


class PartTimes:
    """Takes the time of the trainer's part of each batch, on the host and on its device: `with times: ...`.

    A device is behind the host, and nobody waits for it: its time is that of the last batch that it has finished.

    Args:
        clock: of the device.

    Attributes:
        host_s: of the last batch: launching alone, where a device computes.
        device_s: of a batch, on the device.
    """

    def __init__(self, clock: Clock) -> None:
        self.host_s = self.device_s = 0.0
        self._clock = clock
        self._marks: collections.deque[tuple[Any, Any]] = collections.deque(maxlen=_MOST_MARKS)

    @property
    def most_s(self) -> float:
        """Of the two the longer one: the device may work while the host goes on, and the host while it does."""
        return max(self.host_s, self.device_s)

    def __enter__(self) -> None:
        self._began, self._first = time.perf_counter(), self._clock.mark()

    def __exit__(self, *_: object) -> None:
        self._marks.append((self._first, self._clock.mark()))
        self.host_s = time.perf_counter() - self._began
        while self._marks and self._clock.is_over(self._marks[0][1]):
            self.device_s = self._clock.seconds(*self._marks.popleft())


@dataclass(frozen=True)
class Surroundings:
    """What a loader knows besides its batches.

    Attributes:
        wait_s: in which the training loop has waited for data since the loader was made.
        num_data_workers, wire_bytes_per_s, batches_ahead: as `Seen`.
    """

    wait_s: float
    num_data_workers: int
    wire_bytes_per_s: float | None
    batches_ahead: int


class FeatureRecuts:
    """Looks, and decides in a thread; one decision at a time.

    Args:
        recutter: decides.
        look: gives the surroundings.
        clock: seconds, never going back.
    """

    def __init__(
        self, recutter: Recutter, look: Callable[[], Surroundings], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.recutter = recutter
        self._look, self._clock = look, clock
        self._thread: threading.Thread | None = None
        self._decided: Recut | None = None
        self._has_failed = False
        self._begin_look()

    def _begin_look(self) -> None:
        self._num_steps = 0
        self._began = self._last = self._clock()
        self._before: Surroundings | None = None
        self._trainer_s = self._data_worker_s = self._num_rows = self._list_length = 0.0

    def note(self, handed: HandedOver, trainer_s: float) -> None:
        """A batch is finished.

        Args:
            handed: of which it was made.
            trainer_s: that the trainer's part took.
        """
        now = self._clock()
        mean_s = (self._last - self._began) / self._num_steps if self._num_steps else 0.0
        is_pause = self._num_steps > 0 and now - self._last > max(_PAUSE_S, _PAUSE_FACTOR * mean_s)
        if is_pause or handed.fingerprint != self.recutter.cut.fingerprint or self._before is None:
            self._begin_look()  # with the next batch: nothing is known of how long this one took
            self._before = self._look()
            return
        self._num_steps += 1
        self._last = now
        self._trainer_s += trainer_s
        self._data_worker_s += handed.seconds
        self._num_rows += handed.num_rows
        self._list_length += handed.list_length
        if self._num_steps < _STEPS or now - self._began < _LOOK_S or self._thread is not None or self._has_failed:
            return
        seen = self._seen(self._before, now)
        self._begin_look()
        if seen is not None:
            recutter = self.recutter
            self._thread = threading.Thread(
                target=self._decide, args=(recutter, seen, now), name="hetstream-recut", daemon=True
            )
            self._thread.start()

    def _seen(self, before: Surroundings, now: float) -> Seen | None:
        num, around = self._num_steps, self._look()
        wait_s, trainer_s = (around.wait_s - before.wait_s) / num, self._trainer_s / num
        num_rows = round(self._num_rows / num)
        if num_rows < 1 or around.num_data_workers != before.num_data_workers:
            return None
        return Seen(
            step_s=max(0.0, (now - self._began) / num - wait_s - trainer_s),
            wait_s=wait_s,
            trainer_s=trainer_s,
            data_worker_s=self._data_worker_s / num,
            num_data_workers=around.num_data_workers,
            wire_bytes_per_s=around.wire_bytes_per_s,
            batches_ahead=around.batches_ahead,
            batches=Batches(num_rows, self._list_length / num),
        )

    def _decide(self, recutter: Recutter, seen: Seen, now: float) -> None:
        try:
            decided = recutter.decide(seen, now)
        except Exception:  # noqa: BLE001, of a thread: said, and the cut stays
            _log.exception("hetstream: features: the cut stays as it is, and is not decided anew")
            self._has_failed = True
            return
        if recutter is self.recutter:  # else for a graph that is not the loader's any more
            self._decided = decided

    def decided(self) -> Recut | None:
        """What was decided since this was last asked."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread, found, self._decided = None, self._decided, None
        return found

    def begin_again(self, recutter: Recutter) -> None:
        """Decide about another graph from now on."""
        self.recutter, self._decided = recutter, None
        self._begin_look()

    def close(self) -> None:
        """Decide nothing more."""
        self._has_failed = True
        if self._thread is not None:
            self._thread.join(_CLOSED_WITHIN_S)
