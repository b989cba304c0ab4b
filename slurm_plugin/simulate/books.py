"""What running jobs use of the cluster, written down at every event. Pure; called by the engine."""

from __future__ import annotations

from array import array

import numpy as np

from hetstream.slurm_plugin.simulate.outcome import Use
from hetstream.slurm_plugin.simulate.packing import Packing
from hetstream.slurm_plugin.simulate.running import Running

_COLUMNS = 8


class Books:
    """The cluster's use up to now.

    Args:
        running: the jobs.
        packing: those that share GPUs; None if there are none.
    """

    def __init__(self, running: Running, packing: Packing | None) -> None:
        self._running, self._packing = running, packing
        self._rows = array("d")
        # GPUs, effective ones, CPUs, productive ones, effective GPUs of the jobs that share.
        self._used = [0.0] * 5

    def record(self, now_s: float, num_waiting: int, is_known: bool) -> None:
        """Write down what is used from now on.

        Args:
            now_s: the time.
            num_waiting: jobs.
            is_known: all that has changed was counted.
        """
        if not is_known or self._packing is not None:
            self.add_up()
        num_waiting += self._packing.num_waiting if self._packing is not None else 0
        self._rows.extend((now_s, *self._used, num_waiting, self._running.count))

    def add_up(self) -> None:
        """Count what all running jobs use."""
        running, packing = self._running, self._packing
        top = running.top
        gpus, speed = running.gpus[:top], running.speed[:top]
        cpus = np.add.reduce(running.held_cpus[:top]) + np.add.reduce(running.target[:top])
        useful = speed @ running.useful_cpus[:top]
        self._used = [float(np.add.reduce(gpus)), float(gpus @ speed), float(cpus), float(useful), 0.0]
        if packing is not None:
            shared = float(running.shared_gpus[:top] @ speed)
            self._used[0] += packing.num_idle_used()
            self._used[1] += shared
            self._used[4] = shared

    def count(self, gpus: float, speed: float, cpus: float, useful_cpus: float) -> None:
        """A job starts; with negative values, one leaves."""
        used = self._used
        used[0] += gpus
        used[1] += gpus * speed
        used[2] += cpus
        used[3] += useful_cpus * speed

    def use(self) -> Use:
        """All that was written down."""
        return Use(*np.frombuffer(self._rows, dtype=np.float64).reshape(-1, _COLUMNS).T.copy())
