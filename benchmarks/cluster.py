"""A throw-away Slurm cluster for the benchmarks that need a real one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import say
from tests.devcluster.boot import BootRequest, boot
from tests.devcluster.errors import TeardownFailed
from tests.devcluster.programs import missing_programs
from tests.devcluster.roots import DEFAULT_CACHE_DIR, HOST, choose_programs
from tests.devcluster.spec import DEFAULT_STATE_ROOT, ClusterShape
from tests.devcluster.teardown import tear_down

# A thousand processes do not end on two cores within the ten seconds that one try takes.
_TEARDOWN_TRIES = 10


def why_no_cluster() -> str:
    """Why none can be started here; "" if it can."""
    if os.geteuid() != 0 or missing_programs():
        return "needs root and Debian's Slurm: devcluster install"
    return ""


@contextmanager
def throw_away_cluster(
    shape: ClusterShape | None = None, *, tuned: bool = True, settings: tuple[str, ...] = (), label: str = ""
) -> Iterator[tuple[Path, dict[str, str]]]:
    """Start a cluster, and remove it at the end.

    Args:
        shape: its nodes.
        tuned: its scheduler looks often; else with Slurm's own timing.
        settings: more lines of slurm.conf.
        label: tells clusters apart that run at the same time.

    Gives:
        An empty directory for jobs, and the environment that reaches the cluster. `HETSTREAM_MUNGE_SOCKET` in it is the
        socket of its munged.
    """
    name = f"bench-{os.getpid()}-{label[:12].rstrip('-') or ('tuned' if tuned else 'default')}"
    request = BootRequest(
        name, DEFAULT_STATE_ROOT / name, shape or ClusterShape(), tuned_scheduler=tuned, settings=settings
    )
    record = boot(request, choose_programs(HOST, DEFAULT_CACHE_DIR, say), say)
    state_dir = Path(record.state_dir)
    try:
        munge = str(state_dir / "run" / "munge.sock")
        with tempfile.TemporaryDirectory(prefix="hetstream-bench-") as directory:
            yield Path(directory), {**record.environment(os.environ), "HETSTREAM_MUNGE_SOCKET": munge}
    finally:
        for tries_left in range(_TEARDOWN_TRIES - 1, -1, -1):
            try:
                tear_down(state_dir)
                break
            except TeardownFailed:
                if not tries_left:
                    raise
