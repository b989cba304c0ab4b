"""Whether a program is to end, and why. Who asks is a signal, the job's checkpoint writer, or the job's successor.

Called by the checkpointer. `stop_request.py` hears the signals, and by `stop_agreement.py` all ranks end after the same
step.
"""

from __future__ import annotations

from hetstream.checkpoint.flash.distributed import Communicator
from hetstream.checkpoint.flash.stop_agreement import StopAgreement
from hetstream.checkpoint.flash.stop_request import StopRequest
from hetstream.checkpoint.flash.storage import CheckpointStorage


class Stopping:
    """Whether one rank is asked to end, and what all ranks have agreed on. Listens to signals until `remove`.

    Args:
        ranks: the ranks that have to agree.
        storage: of this rank; its checkpoint writer and the job's successor may ask.
        signals: the signals that ask.
    """

    def __init__(self, ranks: Communicator, storage: CheckpointStorage, signals: tuple[int, ...]) -> None:
        self._is_alone = ranks.world_size == 1
        self._storage = storage
        self._request = StopRequest(signals, before_death=storage.mark_closed)
        self._request.install()
        self._agreement = StopAgreement(ranks, self._asked_here, storage.succession.asked)

    def is_asked(self, step: int) -> bool:
        """Whether to stop after this step: the same answer on every rank. Every rank calls it after each step."""
        return self._agreement.is_asked(step)

    def must_end(self, *, has_saved: bool) -> bool:
        """Whether to end. The program that asks this ends in its own time: from now on SIGTERM leaves it that time.

        Args:
            has_saved: see `reason`.
        """
        self._request.note_watched()
        is_asked = self.reason(has_saved=has_saved) != ""
        if is_asked:
            self._request.note_asked()
        return is_asked

    def reason(self, *, has_saved: bool) -> str:
        """Why to end, in words; "" for no reason.

        Args:
            has_saved: this rank has saved. One that saves and never calls `is_asked` goes by what it was asked itself.
        """
        is_agreed = not self._is_alone and (self._agreement.has_looked or not has_saved)
        return self._agreement.reason or ("" if is_agreed else self._asked_here())

    @property
    def hands_over(self) -> bool:
        """Whether another job goes on, on every rank."""
        return self._agreement.hands_over

    def remove(self) -> None:
        """Give the signals back."""
        self._request.remove()

    def _asked_here(self) -> str:
        """Why this rank was asked to end; "" if it was not."""
        return self._request.reason or self._storage.stop_reason()
