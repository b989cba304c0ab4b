"""What is plugged into a checkpoint writer: the only place on its side that knows `replica/`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hetstream.checkpoint.memory.store_files import StoreFiles
from hetstream.checkpoint.persist.store_writer import Companion
from hetstream.checkpoint.record.generation import Generation


def companion_of(files: StoreFiles, directory: Path, report: Callable[[Generation | None, str], None]) -> Companion:
    """What else is done for a store.

    Args:
        files: of the store.
        directory: of the checkpoints.
        report: told the generation that another host keeps now, or why it does not. Called in a thread, too.
    """
    # Here, as trainers import this to start a checkpoint writer, and do not talk with other hosts.
    from hetstream.checkpoint.replica.serving import ReplicaServing

    return ReplicaServing(files, directory, report)
