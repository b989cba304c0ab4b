"""What a data worker with a GPU asks of the stage before its own. `stages/earlier.py` has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hetstream.mpi_dataworkers.ops.pipeline import MadeStep
from hetstream.mpi_dataworkers.wire.messages import GrantLease, ProvidePipeline


class EarlierStage(Protocol):
    """Gives the batches from which the steps of leases are made. Of the main thread."""

    def take(self, lease: GrantLease, step: int) -> MadeStep | None:
        """Wait for the batch of a leased step; the steps of a lease are asked for in their order.

        Returns:
            It; None when nobody makes it: the caller makes the whole step.

        Raises:
            StepFailed: it cannot be made.
            LeaseGone: the lease is not held any more.
            HandoverFailed: the service does not let it ask.
        """

    def missed(self, made_here_s: float) -> None:
        """Nobody made the batch of a step, so it was made here, which took so long: that is as good as waiting."""

    def close(self) -> None:
        """Ask for no more."""


class StageLeases(Protocol):
    """The leases of the later stage."""

    def holds(self, token: int) -> bool:
        """Whether a lease is still to be worked on."""

    def held(self) -> Sequence[GrantLease]:
        """All of them, the oldest first."""


# Makes the stage before, for one process: its id as a data worker, its leases, and what fetches a pipeline as it was
# provided, for as long as that is wanted.
FetchProvided = Callable[[str, Callable[[], bool]], ProvidePipeline]
MakeEarlierStage = Callable[[str, StageLeases, FetchProvided], EarlierStage]
