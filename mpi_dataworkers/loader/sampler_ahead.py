"""A program's own sampler, drawn ahead of the training loop, and its steps on their way to the dispatcher.

Used by `remote_source.py`. `step_indices.LookAhead` says how far.
"""

from __future__ import annotations

from hetstream.mpi_dataworkers.loader.client import ServiceClient
from hetstream.mpi_dataworkers.loader.session import LoaderSession
from hetstream.mpi_dataworkers.loader.step_indices import ListedSteps, LookAhead, steps_to_gather
from hetstream.mpi_dataworkers.ops.index_form import pack_indices


class SamplerAhead:
    """Draws a sampler's steps and sends them.

    Args:
        order: the steps.
        first_step: where the epoch begins or is continued.
        look_ahead: how far they may be drawn.
    """

    def __init__(self, order: ListedSteps, first_step: int, look_ahead: LookAhead) -> None:
        self._order = order
        self._look_ahead = look_ahead
        self._first_step = self._next_step = first_step
        self._end_is_sent = order.num_steps >= 0

    def draw(self, client: ServiceClient, session: LoaderSession, taking: bool, as_torch: bool) -> None:
        """Draw as far as is due, and send what was drawn.

        Args:
            client, session: to whom.
            taking: the training loop asks for the next step now.
            as_torch: no further than torch's own loader; data workers make no step that was not sent.
        """
        if self._end_is_sent:
            return
        order, position = self._order, session.buffer.position
        goal = self._look_ahead.goal(position, session.window, taking, self._next_step > self._first_step, as_torch)
        try:
            while self._next_step < goal and order.indices(self._next_step) is not None:
                self._next_step += 1
        finally:  # also what it gave before it raised
            has_ended, first_unsent = order.num_steps >= 0, session.known_steps
            is_needed = first_unsent <= position < self._next_step
            if has_ended or is_needed or self._next_step - first_unsent >= steps_to_gather(goal, position):
                self._send(client, session, has_ended)

    def send_again(self, client: ServiceClient, session: LoaderSession) -> None:
        """Send all that was drawn and not taken, to a new session."""
        self._send(client, session, self._end_is_sent)

    def _send(self, client: ServiceClient, session: LoaderSession, has_ended: bool) -> None:
        """Send what the session does not know."""
        order = self._order
        steps = [
            pack_indices(indices, order.form(step))
            for step in range(session.known_steps, self._next_step)
            if (indices := order.indices(step)) is not None
        ]
        if steps or has_ended:
            client.extend(session, steps, has_ended)
        self._end_is_sent = has_ended
