"""Who may have a checkpoint directory when a job takes the training of another over: decisions of both sides. Pure.

The job that trains is the owner; the one that was started to go on in its place is the successor. The successor asks
only when its program is initialised, and the owner stops only for a successor that lives. Called by
`checkpoint/flash/handover.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Asked:
    """A request, as the owner finds it.

    Attributes:
        attempt: the owner that is asked.
        successor: who asks, in words.
        is_live: whether who asks still lives.
    """

    attempt: int
    successor: str
    is_live: bool


@dataclass(frozen=True)
class Answer:
    """What the owner does.

    Attributes:
        hands_over: stop after the next save; else go on.
        reason: why.
    """

    hands_over: bool
    reason: str


def answer(attempt: int, asked: Asked | None) -> Answer:
    """What an owner says to a request.

    Args:
        attempt: of the owner.
        asked: the request; None if there is none.
    """
    if asked is None:
        return Answer(False, "nobody asks")
    if asked.attempt != attempt:
        return Answer(False, f"{asked.successor} asks attempt {asked.attempt}, this is attempt {attempt}")
    if not asked.is_live:
        return Answer(False, f"{asked.successor} asked and has died since, or gave up")
    return Answer(True, f"hand-over to {asked.successor}")


@dataclass(frozen=True)
class Taking:
    """How far a start is.

    Attributes:
        takes_over: the job whose training it takes over; "" if it is a start like any other.
        is_ready: its program is initialised.
        asked_attempt: the owner that it has asked; 0 before.
        waited_s: how long it has waited since it asked first.
        timeout_s: how long it waits.
    """

    takes_over: str
    is_ready: bool = False
    asked_attempt: int = 0
    waited_s: float = 0.0
    timeout_s: float = 0.0


@dataclass(frozen=True)
class Seen:
    """A checkpoint directory that a start could not take, as it finds it.

    Attributes:
        owner_job: Slurm's id of the newest owner's job, without its component; "" if nobody says.
        owner: the newest owner in words.
        owner_attempt: its attempt; 0 if nobody says.
        other_successor: another living job that has asked for the directory, in words; "" if there is none.
    """

    owner_job: str = ""
    owner: str = ""
    owner_attempt: int = 0
    other_successor: str = ""


class Action(Enum):
    """What a start does."""

    LATER = "go on with the program and come back when it is initialised"
    ASK = "ask the owner"
    WAIT = "wait for the owner"
    REFUSE = "fail: it is somebody else's"
    GIVE_UP = "fail: the owner does not answer"


@dataclass(frozen=True)
class Decision:
    """What a start does and why."""

    action: Action
    reason: str


def decide(taking: Taking, seen: Seen) -> Decision:
    """What a start does about a directory that it could not take."""
    if seen.other_successor:
        # Also when it is free: it was handed over to the other one, or its owner died while the other one waited.
        return Decision(Action.REFUSE, f"it is being handed over to {seen.other_successor}")
    owner = seen.owner or "a process that does not say who it is"
    if not taking.takes_over:
        return Decision(Action.REFUSE, f"it is in use by {owner}")
    if seen.owner_job != taking.takes_over:
        return Decision(Action.REFUSE, f"it is in use by {owner}, and not by job {taking.takes_over}")
    if not taking.is_ready:
        return Decision(Action.LATER, f"{owner} trains until this job is initialised")
    if taking.asked_attempt and taking.waited_s >= taking.timeout_s:
        return Decision(Action.GIVE_UP, f"{owner} was asked {taking.waited_s:.0f} s ago and still has it")
    if taking.asked_attempt != seen.owner_attempt:
        return Decision(Action.ASK, f"{owner} has it")
    return Decision(Action.WAIT, f"{owner} was asked {taking.waited_s:.0f} s ago")
