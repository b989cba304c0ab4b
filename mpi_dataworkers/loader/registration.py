"""How a loader is known at its dispatcher, and what it still has to say there. No I/O.

Used by `client.py`, which guards it with its lock. A dispatcher that was restarted knows nothing of a loader:
it is told everything again, from the sessions as they are by then.
"""

from __future__ import annotations

import collections
import os
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hetstream.mpi_dataworkers.config import TrainerIdentity
from hetstream.mpi_dataworkers.interpreter import this_interpreter
from hetstream.mpi_dataworkers.loader.naming import LoaderName, title_of
from hetstream.mpi_dataworkers.loader.rebuilding import BatchBuilder
from hetstream.mpi_dataworkers.loader.session import LoaderSession
from hetstream.mpi_dataworkers.loader.statistics import LoaderStatistics
from hetstream.mpi_dataworkers.wire.messages import (
    CloseSession,
    Device,
    Message,
    ProvidePipeline,
    RegisterLoader,
)

_REGISTER_AGAIN_S = 1.0


@dataclass(frozen=True)
class ClientOptions:
    """What a loader says of itself at its service, and what it does with batches.

    Attributes:
        address_file: the dispatcher's address file.
        identity: who this trainer is.
        name: who the loader is among those of its program.
        description: the pipeline in words, compared between programs of one job name.
        batches: builds them from headers and frames.
        statistics: what the dispatcher is told of the loader.
        buffer_bytes: finished batches to hold ahead of the training loop.
        transports: the ways on which batches may come.
        compress: ask data workers that come over TCP to compress.
        device: what data workers make its batches with.
        feeds: id of the data worker that this loader belongs to; "" for a trainer's.
    """

    address_file: Path
    identity: TrainerIdentity
    name: LoaderName
    description: dict[str, str]
    batches: BatchBuilder
    statistics: LoaderStatistics
    buffer_bytes: int
    transports: frozenset[str]
    compress: bool = False
    device: Device = "cpu"
    feeds: str = ""


_trainer: tuple[int, str] = (0, "")


def _trainer_name() -> str:
    """A random name of this process; a forked one gets its own."""
    global _trainer
    if _trainer[0] != os.getpid():
        _trainer = os.getpid(), secrets.token_hex(8)
    return _trainer[1]


class Registration:
    """A loader's registration, its newest pipeline and its messages that wait.

    Args:
        options: who the loader is.
        pipeline: the pipeline in pickled form.

    Attributes:
        pipeline: the newest one.
        message: what the dispatcher is told first.
        was_answered: the dispatcher has let the loader in, at some time.
    """

    def __init__(self, options: ClientOptions, pipeline: ProvidePipeline) -> None:
        identity, name = options.identity, options.name
        self.pipeline = pipeline
        self.was_answered = False
        # When the registration that is under way was sent; None while there is none.
        self._asked_at: float | None = None
        self._outbox: collections.deque[Message] = collections.deque()
        self.message = RegisterLoader(
            job_name=identity.job_name,
            ordinal=name.ordinal,
            rank=identity.rank,
            world_size=identity.world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            pipeline_id=pipeline.pipeline_id,
            description=options.description,
            occurrence=name.occurrence,
            place=name.place,
            made_at=name.made_at,
            divides=name.divides,
            trainer=_trainer_name(),
            interpreter=this_interpreter(),
            title=title_of(identity, name, options.description),
            device=options.device,
            feeds=options.feeds,
        )

    @property
    def is_known(self) -> bool:
        """Whether the dispatcher knows the loader, and no registration is under way."""
        return self.was_answered and self._asked_at is None

    def begin(self, now: float) -> RegisterLoader:
        """The message with which a registration begins."""
        self._asked_at = now
        return self.message

    def is_to_begin_again(self, now: float) -> bool:
        """Whether to register with a dispatcher that does not know the loader.

        It may have died before it answered: a registration that got no answer is sent again.
        """
        return self._asked_at is None or now - self._asked_at > _REGISTER_AGAIN_S

    def answered(self) -> None:
        """The dispatcher has let the loader in."""
        self.was_answered, self._asked_at = True, None

    def use(self, pipeline: ProvidePipeline) -> ProvidePipeline:
        """Say which pipeline the next session has, unless it is the same; returns the one to keep."""
        if pipeline.pipeline_id != self.pipeline.pipeline_id:
            self.pipeline = pipeline
            self.message = msgspec.structs.replace(self.message, pipeline_id=pipeline.pipeline_id)
            self._outbox.append(pipeline)
        return self.pipeline

    def say(self, message: Message) -> None:
        """Send this after what waits already."""
        self._outbox.append(message)

    def say_all(self, sessions: Iterable[LoaderSession], known_id: str) -> None:
        """Queue what a dispatcher that has just let this loader in is to know.

        Args:
            sessions: those that are open.
            known_id: id of the pipeline that it has, "" for none.
        """
        # All else is said again, from the sessions as they are now; the end of one would be lost.
        self._outbox = collections.deque(message for message in self._outbox if isinstance(message, CloseSession))
        # Sessions of what is known come first: the dispatcher forgets what no session uses when another one comes.
        current = self.pipeline.pipeline_id

        def rank(session: LoaderSession) -> tuple[bool, bool, str]:
            pipeline_id = session.pipeline.pipeline_id
            return pipeline_id != known_id, pipeline_id == current, pipeline_id

        last = known_id
        for session in sorted(sessions, key=rank):
            if session.pipeline.pipeline_id != last:
                last = session.pipeline.pipeline_id
                self._outbox.append(session.pipeline)
            self._outbox.append(session.opening())
        if current != last:
            self._outbox.append(self.pipeline)

    def take_waiting(self) -> Iterable[Message]:
        """Messages that can be sent now; each is forgotten when it is taken."""
        while self.is_known and self._outbox:
            yield self._outbox.popleft()
