"""The memory that counts for this process, for its heartbeats. Called by the control thread."""

from __future__ import annotations

from pathlib import Path

# Counting takes the kernel some milliseconds for each GB, in which the process can map nothing.
_EVERY_S = 10.0


class OwnMemory:
    """Memory of this process that a limit of Slurm counts: its own pages and shared ones, no file's.

    What several processes share, such as pages from before a fork, counts in parts (proc_pid_smaps(5), Pss): the sum
    over the processes of a data worker is what they have together.
    """

    def __init__(self, rollup: Path = Path("/proc/self/smaps_rollup")) -> None:
        self._rollup = rollup
        self._read_at = float("-inf")
        self._bytes = 0

    def resident_bytes(self, now: float) -> int:
        """What it is, read every ten seconds; 0 where the kernel does not say."""
        if now - self._read_at >= _EVERY_S:
            self._read_at, self._bytes = now, self._read()
        return self._bytes

    def _read(self) -> int:
        try:
            lines = self._rollup.read_text().splitlines()
        except OSError:
            return 0
        counted = ("Pss_Anon:", "Pss_Shmem:")
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(counted))
