"""Where sessions are in the streams that they share, and who has those batches in its cache. Pure.

`sharing.py` keeps each stream by itself; here are the sessions that read it.
"""

from __future__ import annotations

from hetstream.mpi_dataworkers.dispatcher.records import Lease, Session
from hetstream.mpi_dataworkers.dispatcher.sharing import ShareGroup, ShareGroups
from hetstream.mpi_dataworkers.wire.messages import OpenSession


class SharedStreams:
    """The streams that sessions share.

    Attributes:
        groups: the streams that are read now, by share key.
    """

    def __init__(self) -> None:
        self.groups = ShareGroups()

    def group_of(self, session: Session) -> ShareGroup | None:
        """The stream that a session shares; None if it shares none."""
        sharing = session.spec.sharing
        return self.groups.get(sharing.key) if sharing is not None else None

    def join(self, session: Session, message: OpenSession, held: list[Lease]) -> None:
        """A session is opened, of which data workers may hold leases already."""
        spec = session.spec
        if spec.sharing is None:
            return
        group = self.groups.join(spec.sharing.key, spec.session_id)
        shift = message.shift
        if _follows_window(session) and not (message.consumed or message.received or held):
            position = session.position(0) + shift
            shift += group.enter(max(0, position)) - position
        session.shifts = [(0, shift)]
        for lease in held:
            self.note_lease(lease, session)

    def leave(self, session: Session) -> None:
        """A session is closed."""
        if session.spec.sharing is not None:
            self.groups.leave(session.spec.sharing.key, session.spec.session_id)

    def follow(self, session: Session, group: ShareGroup) -> None:
        """In window mode, move a session on whose next steps have left the caches."""
        if session.requeued or not _follows_window(session):
            return
        position = session.position(session.frontier)
        moved = group.follow(position) - position
        if moved:
            session.shifts.append((session.frontier, session.shift(session.frontier) + moved))

    def note_lease(self, lease: Lease, session: Session) -> None:
        """A worker still makes these steps of a session, says the worker: others of the group get them there too."""
        group = self.group_of(session)
        if group is not None:
            if lease.shift != session.shift(lease.first):
                session.shifts.append((lease.first, lease.shift))
                session.shifts.sort()
            group.lease(session.position(lease.first), session.position(lease.stop - 1) + 1, lease.worker)

    def fit(self, peer: str, session: Session, first: int, stop: int) -> tuple[int, bool, bool]:
        """Fit a lease of steps [first, stop) into the stream that the session shares.

        Returns:
            Where the lease must stop, so that all of it is alike; whether the worker has it in its cache, or will have;
            whether it was leased before.
        """
        group = self.group_of(session)
        if group is None:
            return stop, False, False
        self.follow(session, group)
        alike = _what_is_known(group, session, first)
        at = first + 1
        while at < stop and _what_is_known(group, session, at) == alike:
            at += 1
        holder, again, _ = alike
        cached = holder == peer
        if not cached:
            group.lease(session.position(first), session.position(at - 1) + 1, peer)
        return at, cached, again


def _what_is_known(group: ShareGroup, session: Session, step: int) -> tuple[str | None, bool, int]:
    position = session.position(step)
    return group.holder(position), group.was_leased(position), session.shift(step)


def _follows_window(session: Session) -> bool:
    return session.spec.sharing is not None and session.spec.sharing.mode == "window"
