"""What the dispatcher decides to do: instructions that `state.py` returns and `server.py` carries out. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from hetstream.mpi_dataworkers.dispatcher.events import Event
from hetstream.mpi_dataworkers.wire.messages import LoaderStats, Message, ProvidePipeline, RegisterLoader


@dataclass(frozen=True)
class Send:
    """Instruction: send a message to a peer."""

    peer: str
    message: Message


@dataclass(frozen=True)
class RememberPipeline:
    """Instruction: journal a pickled pipeline before anything that follows in the same batch of instructions."""

    pipeline: ProvidePipeline


@dataclass(frozen=True)
class RememberStats:
    """Instruction: journal what a loader has delivered."""

    loader: RegisterLoader
    stats: LoaderStats


@dataclass(frozen=True)
class ForgetPipeline:
    """Instruction: take a pipeline that no loader uses out of the journal."""

    pipeline_id: str


@dataclass(frozen=True)
class RememberWorker:
    """Instruction: journal that a data worker is registered, before anything that is leased to it."""

    peer: str


@dataclass(frozen=True)
class ForgetWorker:
    """Instruction: take a data worker that is lost out of the journal."""

    peer: str


@dataclass(frozen=True)
class ReportEvent:
    """Instruction: report an event, in the process's log and in `events.jsonl`."""

    event: Event


Instruction = Send | ReportEvent | RememberPipeline | ForgetPipeline | RememberStats | RememberWorker | ForgetWorker
