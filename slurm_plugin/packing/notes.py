"""What is written into Slurm's records of an opportunistic job: by its owner, and by the packer. Pure.

The owner's wishes are words of the job's Comment:

    hetstream:gpus=2 hetstream:gpu-memory=16G      GPUs on each node, memory of each

    hetstream:hold                                 its owner holds it: written and taken away by job_submit.lua

The packer writes before them which GPUs it has chosen, for the prolog, and what it must remember into AdminComment,
which owners cannot change. So the packer keeps nothing of its own:

    hetstream:gpu=0,1 hetstream:gpus=2 ...                                          Comment
    hetstream:placed=g[1-2]:0,1@1795000000@0 hetstream:evicted=2@1794990000@g3:0    AdminComment
    hetstream:upgraded=1795000100@0                                                 AdminComment
    hetstream:not-upgraded=1795000100@0@1@gpu0%20lacks%20a%20GPU                    AdminComment
    hetstream:limit=480                                                             AdminComment, until it has started

    hetstream:guarded                                      AdminComment: written by job_submit.lua, which holds the job
    hetstream:held-at=1                                    Comment of a guaranteed job: it was held by requeuehold
    hetstream:granted=2                                    AdminComment of one: GPUs that it was let start with
    hetstream:took=4                                       AdminComment: with so many it ran, and was taken back

Jobs of the packer's own have a Comment that says what they are for; see `quota_packer.py`:

    hetstream:holds=8123@0                                 keeps a GPU for that start of job 8123
    hetstream:upgrade=8123:0,1@1795000200                  its Prolog makes job 8123 guaranteed, until then
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from hetstream.hetjob.convert.plan import AFTER_MARK, CLASS_MARK
from hetstream.hetjob.convert.spec import GUARANTEED
from hetstream.slurm_plugin.client.slurm_units import compress, expand
from hetstream.slurm_plugin.packing.state import Place

# A Comment that begins so was written by the packer (the guard refuses it to others): GPU numbers with commas follow.
COMMENT_MARK = "hetstream:gpu="
# Likewise: it keeps a GPU for another job, or makes another job guaranteed (`packing/quota_packer.py`).
HOLDS_MARK, UPGRADE_MARK = "hetstream:holds=", "hetstream:upgrade="


# The prolog (`slurm_plugin/prolog/`) reads a Comment that begins so; the guard lets nobody but the packer write it.

OWN_MARKS = (HOLDS_MARK, UPGRADE_MARK)
# Written by `slurm_plugin/lua/job_submit.lua`; the first also by the packer, for a requeuehold, which no guard hears.
HOLD_WORD, OPERATORS_HOLD_WORD = "hetstream:hold", "hetstream:operators-hold"
_HELD_AT = "hetstream:held-at="
_GUARDED_WORD = "hetstream:guarded"
_GPUS, _MEMORY = "hetstream:gpus=", "hetstream:gpu-memory="
_PLACED, _EVICTED, _NODELIST = "hetstream:placed=", "hetstream:evicted=", "hetstream:nodelist="
_UPGRADED, _UPGRADING, _ASKED = "hetstream:upgraded=", "hetstream:upgrading=", "hetstream:asked="
_GIVEN_UP, _TAKING = "hetstream:not-upgraded=", "hetstream:taking"
_LIMIT, _UNLIMITED = "hetstream:limit=", "UNLIMITED"
_TAKEN_BACK = "hetstream:taken-back="
_GRANTED, _TOOK = "hetstream:granted=", "hetstream:took="
# Of a job that declares no memory: what small models and a driver's context need.
DEFAULT_GPU_BYTES = 4 << 30
_MOST_GPUS = 64
_UNITS = {"": 1 << 20, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# More digits are no memory of a GPU, number of GPUs or time.
# (ASCII: elsewhere the sign of kelvin counts as a K.)
_MEMORY_TEXT = re.compile(r"(\d{1,12})([KMGT]?)i?B?", re.IGNORECASE | re.ASCII)
_GPUS_TEXT = re.compile(r"\d{1,3}", re.ASCII)
_SPOT = r"([\w.,\[\]-]{1,4096}):(\d{1,3}(?:,\d{1,3})*)"
_PLACED_TEXT = re.compile(rf"{_SPOT}@(\d{{1,12}})@(\d{{1,9}})")
_UPGRADED_TEXT = re.compile(r"(\d{1,12})@(\d{1,9})", re.ASCII)
_GIVEN_UP_TEXT = re.compile(r"(\d{1,12})@(\d{1,9})@([01])@([\w.~%-]{1,2048})", re.ASCII)
_ASKED_TEXT = re.compile(r"gpu|p\d{1,3}", re.ASCII)
_HOLDS_TEXT = re.compile(r"(\d{1,12})@(\d{1,9})", re.ASCII)
_NUMBER_TEXT = re.compile(r"\d{1,9}", re.ASCII)
_LIMIT_TEXT = re.compile(rf"\d{{1,9}}|{_UNLIMITED}", re.ASCII)
_EVICTED_TEXT = re.compile(rf"(\d{{1,6}})@(\d{{1,12}})(?:@{_SPOT})?")
# Slurm refuses a longer Comment, also of the packer.
_MOST_COMMENT_BYTES = 1024
_OURS = "hetstream:"


@dataclass(frozen=True, slots=True)
class GpuWish:
    """What the owner asks for.

    Attributes:
        gpus: on each node.
        gpu_bytes: of the memory of each.
        problem: what is wrong with it; empty if nothing.
    """

    gpus: int = 1
    gpu_bytes: int = DEFAULT_GPU_BYTES
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PlacedRecord:
    """Where a job was placed, when, and how often it had been requeued by then."""

    place: Place
    at_s: float
    num_restarts: int


@dataclass(frozen=True, slots=True)
class EvictedRecord:
    """How often a job was taken away in a row, and when last.

    Attributes:
        place: whose GPUs rest, as they were too much in use; None: no GPU had a part in it.
    """

    count: int
    at_s: float
    place: Place | None


@dataclass(frozen=True, slots=True)
class UpgradedRecord:
    """When a job became guaranteed where it runs, and how often it had been requeued by then.

    Attributes:
        is_done: its nodes call it so; else they are being told to, and may at any time.
    """

    at_s: float
    num_restarts: int
    is_done: bool = True


@dataclass(frozen=True, slots=True)
class GivenUpRecord:
    """When a job's upgrade was given up, and why.

    Attributes:
        num_restarts: how often the job had been requeued by then.
        rests: it is not tried again for a while.
    """

    at_s: float
    num_restarts: int
    rests: bool
    reason: str


@dataclass(frozen=True, slots=True)
class PackingRecord:
    """What the packer has written into AdminComment.

    Attributes:
        placed: None if the job is not placed.
        evicted: None if it never was.
        nodelist: nodes that its owner asked for, before the packer named others.
        upgraded: None if it is not guaranteed.
        asked: types of GRES that it has asked for before, where Slurm does not forget them; see `jobs.py`.
        given_up: None if its upgrade was not given up lately.
        taking: the packer is about to hold it, so that this is nobody else's hold.
        limit: its TimeLimit, as scontrol takes it, while Slurm may start it with a shorter one; empty: it has its own.
    """

    placed: PlacedRecord | None = None
    evicted: EvictedRecord | None = None
    nodelist: tuple[str, ...] = ()
    upgraded: UpgradedRecord | None = None
    asked: frozenset[str] = frozenset()
    given_up: GivenUpRecord | None = None
    taking: bool = False
    limit: str = ""


def wish_of(comment: str) -> GpuWish:
    """Read the owner's wishes."""
    gpus, memory = _value(comment, _GPUS), _value(comment, _MEMORY)
    if gpus and not (_GPUS_TEXT.fullmatch(gpus) and 1 <= int(gpus) <= _MOST_GPUS):
        return GpuWish(problem=f"its comment says {_GPUS}{gpus[:32]}: write a number from 1 to {_MOST_GPUS}")
    found = _MEMORY_TEXT.fullmatch(memory)
    if memory and not found:
        return GpuWish(problem=f"its comment says {_MEMORY}{memory[:32]}: write a size such as 16G")
    gpu_bytes = int(found[1]) * _UNITS[found[2].upper()] if found else DEFAULT_GPU_BYTES
    return GpuWish(int(gpus or 1), gpu_bytes)


def comment_with_gpus(comment: str, gpus: int) -> str:
    """Return the Comment of a job that is to get this number of GPUs on each node, whatever it said of that before."""
    others = [word for word in comment.split() if not word.startswith(_GPUS)]
    return comment_with(" ".join([*others, f"{_GPUS}{gpus}"]), None)


def wants_guarantee(comment: str) -> bool:
    """Return whether the owner of an opportunistic job would rather have a guaranteed one."""
    return _value(comment, CLASS_MARK) == GUARANTEED


def is_held_by_owner(comment: str) -> bool:
    """Return whether the owner of a job holds it. Slurm's reason does not say it: other holds have the same."""
    return HOLD_WORD in comment.split()


def is_held_by_operator(comment: str) -> bool:
    """Return whether an operator holds a job by `uhold`."""
    return OPERATORS_HOLD_WORD in comment.split()


def is_guarded(admin_comment: str) -> bool:
    """Return whether the guard has seen a job, so that nobody but the packer or an operator starts it."""
    return _GUARDED_WORD in admin_comment.split()


def with_guard(admin_comment: str) -> str:
    """Return an AdminComment that says that a job is held as the guard would have held it."""
    others = [word for word in admin_comment.split() if word not in (_GUARDED_WORD, _TAKING)]
    return " ".join([*others, _GUARDED_WORD])


def with_hold(comment: str) -> str:
    """Return a Comment that says that the owner holds the job."""
    return comment if is_held_by_owner(comment) else f"{comment} {HOLD_WORD}".strip()


def held_at(comment: str) -> int:
    """At which start of a guaranteed job the packer has made a hold of its owner's of a `requeuehold`; 0: at none."""
    found = _value(comment, _HELD_AT)
    return int(found) if _NUMBER_TEXT.fullmatch(found) else 0


def with_requeuehold(comment: str, num_restarts: int, *, is_owners: bool = True) -> str:
    """Return a Comment that says that a job is held since this start: by its owner, or by the packer itself."""
    others = [word for word in comment.split() if not word.startswith(_HELD_AT)]
    text = " ".join([*others, f"{_HELD_AT}{num_restarts}"])
    return comment_with(with_hold(text) if is_owners else text, None)


def granted_gpus(admin_comment: str) -> int | None:
    """With how many GPUs the packer let a guaranteed job start; None where an operator did."""
    found = _value(admin_comment, _GRANTED)
    return int(found) if _NUMBER_TEXT.fullmatch(found) else None


def took_gpus(admin_comment: str) -> int:
    """Return how many GPUs a guaranteed job had when it was taken back, which it would have again; 0: it never was."""
    found = _value(admin_comment, _TOOK)
    return int(found) if _NUMBER_TEXT.fullmatch(found) else 0


def with_granted(admin_comment: str, gpus: int) -> str:
    """Return an AdminComment that says how many GPUs a job may have."""
    others = [word for word in admin_comment.split() if not word.startswith(_GRANTED)]
    return " ".join([*others, f"{_GRANTED}{gpus}"])


def with_taken(admin_comment: str, gpus: int) -> str:
    """Return an AdminComment that says how many GPUs a job had, more than it was granted."""
    others = [word for word in admin_comment.split() if not word.startswith(_TOOK)]
    return " ".join([*others, f"{_TOOK}{gpus}"])


def opportunistic_after_s(comment: str) -> float | None:
    """Return how long a job waits for quota before it starts as an opportunistic one; None: its owner lets it wait."""
    after = _value(comment, AFTER_MARK)
    return float(after) if _NUMBER_TEXT.fullmatch(after) else None


def holds_comment(job_id: int, num_restarts: int) -> str:
    """Return the Comment of a job that keeps a GPU for this start of another one."""
    return f"{HOLDS_MARK}{job_id}@{num_restarts}"


def upgrade_comment(job_id: int, place: Place, until_s: float) -> str:
    """Return the Comment of a job whose Prolog makes another one guaranteed; not after that time."""
    return f"{UPGRADE_MARK}{job_id}:{','.join(map(str, place.indices))}@{until_s:.0f}"


def held_for(comment: str) -> tuple[int, int] | None:
    """For which job, and which of its starts, a job with this Comment keeps a GPU; None: for none."""
    found = _HOLDS_TEXT.fullmatch(comment.removeprefix(HOLDS_MARK)) if comment.startswith(HOLDS_MARK) else None
    return (int(found[1]), int(found[2])) if found else None


def upgrades(comment: str) -> int | None:
    """Return which job the Prolog of one with this Comment makes guaranteed; None: none."""
    number = comment.removeprefix(UPGRADE_MARK).partition(":")[0] if comment.startswith(UPGRADE_MARK) else ""
    return int(number) if number.isascii() and number.isdecimal() else None


def comment_with(comment: str, place: Place | None) -> str:
    """Return the Comment of a job: the GPUs first, if it is placed, then the owner's words.

    Where there is no room for all, wishes stay, and each word is whole: half of a wish would be another one.
    """
    gone = (COMMENT_MARK, _TAKEN_BACK)
    parts = [word for word in comment.split() if word.isprintable() and not word.startswith(gone)]
    parts = [*([_mark(place)] if place else []), *parts]
    kept, left = set(), _MOST_COMMENT_BYTES
    for number in sorted(range(len(parts)), key=lambda number: not parts[number].startswith(_OURS)):
        num_bytes = len(parts[number].encode()) + 1
        if num_bytes <= left:
            kept.add(number)
            left -= num_bytes
    return " ".join(word for number, word in enumerate(parts) if number in kept)


def comment_without_place(comment: str, why: str) -> str:
    """Return the Comment of a job that was taken back: that it has no GPU, and, where there is room, why, as
    one word.
    """
    plain = comment_with(comment, None)
    said = f"{plain} {_TAKEN_BACK}{why.replace(' ', '-')}".strip() if why else plain
    return said if len(said.encode()) < _MOST_COMMENT_BYTES else plain


def says_place(comment: str, place: Place) -> bool:
    """Return whether a Comment tells the prolog this place."""
    return comment.split(" ")[0] == _mark(place)


def read_record(admin_comment: str) -> PackingRecord:
    """Read what `record_words` wrote; what has another form counts as not there."""
    placed = _PLACED_TEXT.fullmatch(_value(admin_comment, _PLACED))
    evicted = _EVICTED_TEXT.fullmatch(_value(admin_comment, _EVICTED))
    done = _value(admin_comment, _UPGRADED)
    upgraded = _UPGRADED_TEXT.fullmatch(done or _value(admin_comment, _UPGRADING))
    gone = _GIVEN_UP_TEXT.fullmatch(_value(admin_comment, _GIVEN_UP))
    limit = _LIMIT_TEXT.fullmatch(_value(admin_comment, _LIMIT))
    try:
        return PackingRecord(
            PlacedRecord(_place(placed[1], placed[2]), float(placed[3]), int(placed[4])) if placed else None,
            _evicted(evicted) if evicted else None,
            expand(_value(admin_comment, _NODELIST)),
            UpgradedRecord(float(upgraded[1]), int(upgraded[2]), bool(done)) if upgraded else None,
            frozenset(filter(_ASKED_TEXT.fullmatch, _value(admin_comment, _ASKED).split(","))),
            GivenUpRecord(float(gone[1]), int(gone[2]), gone[3] == "1", unquote(gone[4])) if gone else None,
            _TAKING in admin_comment.split(),
            limit[0] if limit else "",
        )
    except ValueError:  # a hostlist that is none
        return PackingRecord()


def with_record(admin_comment: str, record: PackingRecord) -> str:
    """Return an AdminComment with this record in the place of an earlier one; others' words stay."""
    ours = (_PLACED, _EVICTED, _NODELIST, _UPGRADED, _UPGRADING, _ASKED, _GIVEN_UP, _TAKING, _LIMIT)
    found = [word for word in admin_comment.split() if not word.startswith(ours)]
    if record.placed:
        placed = record.placed
        found.append(f"{_PLACED}{_spot(placed.place)}@{placed.at_s:.0f}@{placed.num_restarts}")
    if record.evicted:
        evicted = record.evicted
        spot = f"@{_spot(evicted.place)}" if evicted.place else ""
        found.append(f"{_EVICTED}{evicted.count}@{evicted.at_s:.0f}{spot}")
    if record.upgraded:
        mark = _UPGRADED if record.upgraded.is_done else _UPGRADING
        found.append(f"{mark}{record.upgraded.at_s:.0f}@{record.upgraded.num_restarts}")
    if record.taking:
        found.append(_TAKING)
    if record.given_up:
        gone = record.given_up
        found.append(f"{_GIVEN_UP}{gone.at_s:.0f}@{gone.num_restarts}@{int(gone.rests)}@{quote(gone.reason, safe='')}")
    if record.asked:
        found.append(f"{_ASKED}{','.join(sorted(record.asked))}")
    if record.limit:
        found.append(f"{_LIMIT}{record.limit}")
    if record.nodelist:
        found.append(f"{_NODELIST}{compress(record.nodelist)}")
    return " ".join(found)


def limit_of(time_limit_s: float | None) -> str:
    """Return a job's time limit, as scontrol takes it."""
    return _UNLIMITED if time_limit_s is None else f"{-(-time_limit_s // 60):.0f}"


def gres_of(place: Place) -> str:
    """Return what Slurm is asked for on each node."""
    return ",".join(f"opp:p{index}:1" for index in place.indices)


def where(place: Place) -> str:
    """Return a place, for people."""
    return f"GPU {','.join(map(str, place.indices))} of {compress(place.nodes)}"


def _mark(place: Place) -> str:
    return COMMENT_MARK + ",".join(map(str, place.indices))


def _evicted(found: re.Match[str]) -> EvictedRecord:
    place = _place(found[3], found[4]) if found[3] else None
    return EvictedRecord(int(found[1]), float(found[2]), place)


def _spot(place: Place) -> str:
    return f"{compress(place.nodes)}:{','.join(map(str, place.indices))}"


def _place(hosts: str, indices: str) -> Place:
    return Place(expand(hosts), tuple(int(index) for index in indices.split(",")))


def _value(text: str, begin: str) -> str:
    return next((word.removeprefix(begin) for word in text.split() if word.startswith(begin)), "")
