"""What the job master does next: events in, instructions out. Pure; the clock is an argument.

The local backend runs the same machine with processes instead of job steps. Nothing here touches a process, a file or
Slurm; `hetstream.hetjob.master.children` carries the instructions out and reports what happened.

    STARTING --DispatcherReady--> RUNNING --StopRequested--> STOPPING --last child gone--> ENDED
        \\----------------------StopRequested-------------------^
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import ClassVar

from hetstream.base.text import count_words

DISPATCHER = "dispatcher"

FIRST_DELAY_S = 0.5  # long enough for a port or a step to be released
LONGEST_DELAY_S = 30.0  # a broken program must not flood slurmctld with steps
STEADY_AFTER_S = 60.0  # a child that lived this long was fine: its next end is a new trouble


class Phase(Enum):
    """Where the job master is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Begin:
    """The job master came up."""


@dataclass(frozen=True, slots=True)
class DispatcherReady:
    """The address file is there: data workers and trainers can connect."""


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """A child process, or the step that it is, ended.

    Attributes:
        name: `dispatcher`, `embedding_server=N` or `data_worker=N`.
        returncode: negative for a signal, as in `subprocess`.
    """

    name: str
    returncode: int


@dataclass(frozen=True, slots=True)
class ClockReached:
    """Some time passed; a restart may be due."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The job, or the program, is over."""

    reason: str


Event = Begin | DispatcherReady | ChildEnded | ClockReached | StopRequested


@dataclass(frozen=True, slots=True)
class StartDispatcher:
    """Start the dispatcher, with the same arguments every time: it recovers and keeps its address."""

    reason: str


@dataclass(frozen=True, slots=True)
class StartDataWorker:
    """Start data worker number `index`."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class StartEmbeddingServer:
    """Start embedding server number `index`, with the same arguments every time: it has its name and its log again."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class BeginElastic:
    """Let the elastic controller submit and drain companion jobs from now on."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopAll:
    """End the elastic controller with its companions, and ask every child to end."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing is left running."""

    reason: str


Instruction = StartDispatcher | StartDataWorker | StartEmbeddingServer | BeginElastic | StopAll | Finish


class IllegalTransition(RuntimeError):
    """An event came in a phase where it cannot happen: a bug. The message carries the story."""


def data_worker(index: int) -> str:
    """Return the name of a data worker in events and log lines."""
    return f"data_worker={index}"


def embedding_server(index: int) -> str:
    """The same of an embedding server."""
    return f"embedding_server={index}"


def log_name(name: str) -> str:
    """Return the file name of a child's log, such as "data-worker-0.log"."""
    return f"{name.replace('_', '-').replace('=', '-')}.log"


class MasterState:
    """The state of one job's service.

    Attributes:
        phase: see the module's drawing. Only `handle` changes it.
        running: name -> when it was started, for every child that has been started and has not ended.
        due: name -> when to start it again. A name is never in both `running` and `due`.
        failures: name -> ends in a row without a steady life between them; sets the delay of the next start.
        story: the last events and what followed, newest last.

    Args:
        data_workers: how many to keep running.
        elastic: whether there may be companion jobs besides.
        embedding_servers: how many to keep running.
    """

    def __init__(self, data_workers: int, elastic: bool = False, embedding_servers: int = 0) -> None:
        self._starts: dict[str, Callable[[str], Instruction]] = {DISPATCHER: StartDispatcher}
        # First, as the first step of a program waits for them.
        for index in range(embedding_servers):
            self._starts[embedding_server(index)] = partial(StartEmbeddingServer, index)
        for index in range(data_workers):
            self._starts[data_worker(index)] = partial(StartDataWorker, index)
        self.elastic = elastic
        self.phase = Phase.STARTING
        self.running: dict[str, float] = {}
        self.due: dict[str, float] = {}
        self.failures: dict[str, int] = {}
        self.story: deque[tuple[float, Event, tuple[Instruction, ...]]] = deque(maxlen=100)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event and return what to do, in order.

        Args:
            event: what happened.
            now: seconds on a clock that never goes back.

        Raises:
            IllegalTransition: this event cannot happen in this phase.
        """
        handler = self._HANDLERS.get((self.phase, type(event)))
        if handler is None:
            raise IllegalTransition(f"{event} in phase {self.phase.value}; story: {list(self.story)}")
        instructions = handler(self, event, now)
        self.story.append((now, event, tuple(instructions)))
        self.validate()
        return instructions

    def next_due(self) -> float | None:
        """Return when `ClockReached` should come, or None while nothing waits for the clock."""
        return min(self.due.values(), default=None)

    def validate(self) -> None:
        """Check the invariants; a violation is a bug."""
        assert not self.running.keys() & self.due.keys(), (self.running, self.due)
        assert self.phase in (Phase.STARTING, Phase.RUNNING) or not self.due, self.due
        assert self.phase is not Phase.ENDED or not self.running, self.running

    def _begin(self, _event: Event, now: float) -> list[Instruction]:
        return [self._start(DISPATCHER, now, "the job begins")]

    def _ready(self, _event: Event, now: float) -> list[Instruction]:
        self.phase = Phase.RUNNING
        others = [name for name in self._starts if name != DISPATCHER]
        instructions = [self._start(name, now, "the dispatcher is ready") for name in others]
        if self.elastic:
            instructions.append(BeginElastic("the dispatcher is ready"))
        return instructions

    def _ended(self, event: Event, now: float) -> list[Instruction]:
        assert isinstance(event, ChildEnded)
        lived_s = now - self.running.pop(event.name)
        failures = 0 if lived_s >= STEADY_AFTER_S else self.failures.get(event.name, 0)
        self.failures[event.name] = failures + 1
        self.due[event.name] = now + min(LONGEST_DELAY_S, FIRST_DELAY_S * 2**failures)
        return []

    def _clock(self, _event: Event, now: float) -> list[Instruction]:
        ready = [name for name, when in self.due.items() if when <= now]
        return [
            self._start(name, now, f"it ended {count_words(self.failures[name], 'time')} in a row") for name in ready
        ]

    def _stop(self, event: Event, _now: float) -> list[Instruction]:
        assert isinstance(event, StopRequested)
        self.phase = Phase.STOPPING
        self.due.clear()
        return [StopAll(event.reason), *self._finish_if_empty(event.reason)]

    def _ended_while_stopping(self, event: Event, _now: float) -> list[Instruction]:
        assert isinstance(event, ChildEnded)
        del self.running[event.name]
        return self._finish_if_empty("every child has ended")

    def _nothing(self, _event: Event, _now: float) -> list[Instruction]:
        return []

    def _finish_if_empty(self, reason: str) -> list[Instruction]:
        if self.running:
            return []
        self.phase = Phase.ENDED
        return [Finish(reason)]

    def _start(self, name: str, now: float, reason: str) -> Instruction:
        self.due.pop(name, None)
        self.running[name] = now
        return self._starts[name](reason)

    _Handler = Callable[["MasterState", Event, float], list[Instruction]]
    _HANDLERS: ClassVar[dict[tuple[Phase, type], _Handler]] = {
        (Phase.STARTING, Begin): _begin,
        (Phase.STARTING, DispatcherReady): _ready,
        (Phase.STARTING, ChildEnded): _ended,
        (Phase.STARTING, ClockReached): _clock,
        (Phase.STARTING, StopRequested): _stop,
        (Phase.RUNNING, ChildEnded): _ended,
        (Phase.RUNNING, ClockReached): _clock,
        (Phase.RUNNING, StopRequested): _stop,
        (Phase.STOPPING, ChildEnded): _ended_while_stopping,
        (Phase.STOPPING, ClockReached): _nothing,
        (Phase.STOPPING, StopRequested): _nothing,
    }
