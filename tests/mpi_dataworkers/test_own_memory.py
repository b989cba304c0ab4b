"""What a data worker process says of its memory, and where it can be seen."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetstream.mpi_dataworkers.dispatcher.client import StatusClient, running_service
from hetstream.mpi_dataworkers.worker.worker import OwnMemory

ROLLUP = """\
55d5278b8000-7ffd83203000 ---p 00000000 00:00 0                          [rollup]
Rss:              900000 kB
Pss:              700000 kB
Pss_Anon:            300 kB
Pss_File:         600000 kB
Pss_Shmem:            12 kB
"""


def test_pages_of_its_own_and_shared_ones_count_and_those_of_files_do_not(tmp_path: Path) -> None:
    rollup = tmp_path / "smaps_rollup"
    rollup.write_text(ROLLUP)
    memory = OwnMemory(rollup)
    assert memory.resident_bytes(0.0) == 312 * 1024
    rollup.unlink()
    assert memory.resident_bytes(9.0) == 312 * 1024  # it is read every ten seconds
    assert memory.resident_bytes(10.0) == 0


def test_memory_that_is_used_is_seen() -> None:
    before = OwnMemory().resident_bytes(0.0)
    # A mapping of its own: what numpy frees it may give out again, and that is in use already.
    with mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as used:
        for at in range(0, len(used), mmap.PAGESIZE):
            used[at] = 1
        assert OwnMemory().resident_bytes(0.0) - before > 16 << 20


def test_the_status_of_a_service_has_the_memory_of_its_data_workers(
    three: Any, wait_until: Callable[..., None]
) -> None:
    with StatusClient(running_service(three.address_file)) as client:
        wait_until(
            lambda: [row.resident_bytes > 1 << 20 for row in client.fetch().data_workers] == [True] * 3,
            what="three data workers that say what they have",
        )
