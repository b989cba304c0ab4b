"""Which jobs may be guaranteed: (tenants' quotas, their jobs, time) -> a decision with its reason for each. Pure.

`quota_file.py` makes the jobs of Slurm's records; `quota_packer.py` carries decisions out.

A quota is a number of GPUs that a tenant's guaranteed jobs hold together at most; opportunistic jobs count against
nobody's. Nothing here names a GPU: who becomes guaranteed stays where he is.

A tenant's jobs that are or want to be guaranteed stand in one line, by submission. Who runs as an opportunistic job
already and can be upgraded stands as far ahead as if it had been submitted `patience_s` earlier: so an upgrade comes
before the start of another job, and still nobody is overtaken by all that come later. The first for which the quota
or the GPUs do not suffice keeps what is left of them, so that small jobs do not pass a gang for ever.
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Annotated

import msgspec

from hetstream.base.text import count_words, duration, printable
from hetstream.base.typed_json import decode
from hetstream.hetjob.gpu.orders import JobClass
from hetstream.slurm_plugin.errors import QuotaError
from hetstream.slurm_plugin.packing.state import by_number

PATIENCE_S = 1800.0
_MOST_GPUS = 10_000_000


class Quotas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The site's file.

    Attributes:
        tenants: GPUs by Slurm account. A tenant that is not named has none: its jobs can only be opportunistic.
        patience_s: wait for quota after which a job is offered to start as an opportunistic one.
        partitions: whose jobs with GPUs are guaranteed, and wait for quota. The guard holds them there.
    """

    tenants: dict[str, Annotated[int, msgspec.Meta(ge=0, le=_MOST_GPUS)]] = {}
    patience_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = PATIENCE_S
    partitions: tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=256)], ...] = ()

    def of(self, tenant: str) -> int:
        """GPUs of a tenant."""
        return self.tenants.get(tenant, 0)


@dataclass(frozen=True)
class QuotaSite:
    """What quotas are compared with.

    Attributes:
        num_gpus: of some of its partitions together.
        partitions: all of them.
        opportunistic: partitions of opportunistic jobs.
        exclusive: partitions whose jobs take whole nodes.
        accounts: that Slurm knows; None where that is not known.
    """

    num_gpus: Callable[[Collection[str]], int]
    partitions: Collection[str] = ()
    opportunistic: Collection[str] = ()
    exclusive: Collection[str] = ()
    accounts: Collection[str] | None = None


def read_quotas(source: str, text: str | bytes, site: QuotaSite) -> Quotas:
    """Read the site's file, `{"partitions": ["gpu"], "tenants": {"vision": 16, "speech": 8}, "patience_s": 1800}`.

    Args:
        source: for messages.
        text: of the file.
        site: the cluster.

    Raises:
        QuotaError: with all that is wrong.
    """
    try:
        quotas = decode(text, Quotas)
    except msgspec.MsgspecError as error:
        raise QuotaError(f"{source}: not a table of quotas: {error}") from error
    problems = [f"{name!r} stands in it twice" for name in _twice(text)]
    if not quotas.partitions:
        problems.append('it names no partition whose jobs have them: write "partitions": ["gpu"]')
    for name in quotas.partitions:
        if name not in site.partitions:
            problems.append(f"there is no partition {name!r}{_near(name, site.partitions)}. See: sinfo --all")
        elif name in site.opportunistic:
            problems.append(f"partition {name!r} is for opportunistic jobs, which take no quota")
        elif name in site.exclusive:
            problems.append(f"jobs of partition {name!r} take whole nodes with all GPUs (OverSubscribe=EXCLUSIVE)")
    promised, num_gpus = sum(quotas.tenants.values()), site.num_gpus(quotas.partitions)
    if promised > num_gpus:
        problems.append(
            f"quotas of {promised:,} GPUs together, and these partitions have {num_gpus:,}: lower them, since "
            "guaranteed is what is there"
        )
    for tenant in quotas.tenants if site.accounts is not None else ():
        if tenant not in (site.accounts or ()):
            near = _near(tenant, site.accounts or ())
            problems.append(f"{tenant!r} is no account of this cluster{near}. See: sacctmgr show account")
    if problems:
        raise QuotaError(f"{source}: {'; '.join(problems)}")
    return quotas


def _twice(text: str | bytes) -> list[str]:
    """Names that an object of some JSON has more than once: readers of JSON keep the last in silence."""
    found: list[str] = []

    def look(pairs: list[tuple[str, object]]) -> None:
        found.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)

    json.loads(text, object_pairs_hook=look)
    return found


def _near(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {printable(near[0])}?)" if near else ""


@dataclass(frozen=True)
class QuotaJob:
    """A job that waits, or runs.

    Attributes:
        name: of it.
        tenant: its Slurm account.
        gpus: that it asks for, or runs on.
        submit_s: when it was submitted.
        asked: the class that its user asked for.
        runs_as: its class now; None: it waits.
        opportunistic_after_s: its user lets it start as an opportunistic one when it has waited so long for quota; None
            where the user does not.
        runs_on: the GPUs that a running opportunistic job is on, by names that differ within the cluster.
        is_ready: of a running opportunistic job: all of its processes are there, each on a GPU that no guaranteed job
            has, so that the whole gang can become guaranteed where it is.
        not_now: why it cannot, though its processes and GPUs are ready.
        is_reserved: it has a reservation, whose GPUs are nobody else's.
        granted_gpus: of a running guaranteed one: with how many the packer let it start; None where that is not known.
        took_gpus: with more than it had been granted it ran before, with so many, and was taken back; 0: it never was.
    """

    name: str
    tenant: str
    gpus: int
    submit_s: float
    asked: JobClass = JobClass.GUARANTEED
    runs_as: JobClass | None = None
    opportunistic_after_s: float | None = None
    runs_on: frozenset[str] = frozenset()
    is_ready: bool = False
    not_now: str = ""
    is_reserved: bool = False
    granted_gpus: int | None = None
    took_gpus: int = 0

    @property
    def wants(self) -> str:
        """How many GPUs it is to have, in words."""
        gpus = count_words(self.gpus, "GPU")
        return f"it took {gpus} when it was started" if self.gpus <= self.took_gpus else f"it asks for {gpus}"

    @property
    def can_upgrade(self) -> bool:
        """Whether it could become guaranteed where it is, as far as its processes and GPUs go."""
        return self.runs_as is JobClass.OPPORTUNISTIC and self.is_ready


class QuotaAction(enum.Enum):
    """What becomes of a job."""

    KEEP = "keep"
    """It runs on as what it is."""
    GUARANTEED = "guaranteed"
    """It waits, and can start as a guaranteed job: within the quota, and so many GPUs are free."""
    UPGRADE = "upgrade"
    """It runs as an opportunistic job, and becomes guaranteed where it is."""
    OPPORTUNISTIC = "opportunistic"
    """It waits, and can start as an opportunistic job."""
    OFFER = "offer"
    """It waits, and its user is to be told that it could start as an opportunistic one."""
    RESERVE = "reserve"
    """It waits for the rest of its gang. What is free is kept for it; opportunistic jobs use that meanwhile."""
    WAIT = "wait"
    """It waits for quota, or behind others."""


@dataclass(frozen=True)
class QuotaDecision:
    """What becomes of one job, and why.

    Attributes:
        reserved_gpus: that are kept for a gang.
    """

    job: QuotaJob
    verdict: QuotaAction
    reason: str
    reserved_gpus: int = 0


@dataclass
class _Left:
    """What is left while decisions are made.

    Attributes:
        quota: GPUs of each tenant.
        gpus: that no guaranteed job has, and that are kept for none.
        head: whom each tenant's line stops at.
        gang: whom GPUs are kept for.
        upgraded: GPUs of jobs that become guaranteed, and their names.
    """

    quota: dict[str, int]
    gpus: int
    head: dict[str, str] = field(default_factory=dict)
    gang: str = ""
    upgraded: dict[str, str] = field(default_factory=dict)


def decide(quotas: Quotas, jobs: Sequence[QuotaJob], free_gpus: int, now_s: float) -> tuple[QuotaDecision, ...]:
    """Decide on all jobs.

    Args:
        quotas: of the tenants.
        jobs: all that run or wait, in any order.
        free_gpus: that no guaranteed job has, opportunistic jobs on them or not.
        now_s: the time.

    Returns:
        A decision for each job. Upgrades come first, and are to be carried out first: a job that starts could take a
        GPU that one of them is on.
    """
    left = _Left(dict(quotas.tenants), max(0, free_gpus))
    for job in jobs:
        if job.runs_as is JobClass.GUARANTEED:
            left.quota[job.tenant] = left.quota.get(job.tenant, 0) - job.gpus
    line = sorted(
        (job for job in jobs if job.asked is JobClass.GUARANTEED and job.runs_as is not JobClass.GUARANTEED),
        key=lambda job: _place(job, quotas.patience_s),
    )
    found = [_decide_in_line(job, quotas, left, now_s) for job in line]
    found.sort(key=lambda decision: decision.verdict is not QuotaAction.UPGRADE)
    others = [job for job in jobs if job.asked is JobClass.OPPORTUNISTIC or job.runs_as is JobClass.GUARANTEED]
    return (*found, *(_decide_besides(job) for job in others))


def _place(job: QuotaJob, patience_s: float) -> tuple[object, ...]:
    """Where it stands in its line."""
    return job.submit_s - (patience_s if job.can_upgrade else 0.0), job.submit_s, by_number(job.name)


def _decide_besides(job: QuotaJob) -> QuotaDecision:
    """A job that has no need of quota, or has it."""
    if job.runs_as is JobClass.GUARANTEED:
        return QuotaDecision(job, QuotaAction.KEEP, "it is guaranteed until it ends")
    verdict = QuotaAction.OPPORTUNISTIC if job.runs_as is None else QuotaAction.KEEP
    return QuotaDecision(job, verdict, "opportunistic, as was asked for: it takes no quota and waits for none")


def _decide_in_line(job: QuotaJob, quotas: Quotas, left: _Left, now_s: float) -> QuotaDecision:
    """The next job of the line."""
    whole, free, tenant = quotas.of(job.tenant), left.quota.get(job.tenant, 0), printable(job.tenant)
    if job.gpus > whole:
        why = f"{job.wants}, and tenant {tenant} has a quota of {whole}: it can never be guaranteed"
        return _without_quota(job, why, 0.0, 0.0, now_s)
    if job.runs_as is JobClass.OPPORTUNISTIC and not job.is_ready:
        why = f": {job.not_now}" if job.not_now else " until its processes are all on GPUs that no guaranteed job has"
        return QuotaDecision(job, QuotaAction.KEEP, f"opportunistic{why}")
    beside = next((left.upgraded[gpu] for gpu in sorted(job.runs_on) if gpu in left.upgraded), None)
    if beside is not None:
        return QuotaDecision(job, QuotaAction.KEEP, f"opportunistic: job {beside} on its GPU becomes guaranteed")
    why = ""
    if job.tenant in left.head:
        why = f"job {left.head[job.tenant]} is before it in the line of tenant {tenant}"
    elif job.gpus > free:
        left.head[job.tenant] = job.name
        why = f"tenant {tenant} has {max(0, free)} of its {count_words(whole, 'GPU')} left, and {job.wants}"
    if why:
        after_s = quotas.patience_s if job.opportunistic_after_s is None else job.opportunistic_after_s
        return _without_quota(job, why, after_s, quotas.patience_s, now_s)
    if job.gpus > left.gpus and not job.is_reserved:
        return _reserve(job, left)
    left.quota[job.tenant] = free - job.gpus
    left.gpus -= 0 if job.is_reserved else job.gpus
    reason = f"tenant {tenant} has {free} of its {count_words(whole, 'GPU')} left"
    if job.runs_as is None:
        return QuotaDecision(job, QuotaAction.GUARANTEED, reason)
    left.upgraded |= dict.fromkeys(job.runs_on, job.name)
    return QuotaDecision(job, QuotaAction.UPGRADE, f"{reason}, and all of its processes are ready")


def _reserve(job: QuotaJob, left: _Left) -> QuotaDecision:
    """The quota suffices, the GPUs that are free do not: they are kept for the gang that comes first."""
    left.head[job.tenant] = job.name
    kept, left.gpus = left.gpus, 0
    gang, left.gang = left.gang, left.gang or job.name
    if job.runs_as is JobClass.OPPORTUNISTIC:
        return QuotaDecision(
            job, QuotaAction.KEEP, f"opportunistic: the GPUs that are free go to job {gang or 'others'}"
        )
    others = f"; others are kept for job {gang}" if gang else ""
    return QuotaDecision(
        job,
        QuotaAction.RESERVE,
        f"within its quota; {kept} of its {count_words(job.gpus, 'GPU')} are free{others}",
        kept,
    )


def _without_quota(job: QuotaJob, why: str, after_s: float, offer_s: float, now_s: float) -> QuotaDecision:
    """A job that cannot be guaranteed now: it runs on, starts as an opportunistic one, or waits.

    Args:
        job: of it.
        why: it cannot.
        after_s: wait after which it starts as an opportunistic job, if its user lets it.
        offer_s: its user is told when it has, if not.
        now_s: the time.
    """
    if job.runs_as is JobClass.OPPORTUNISTIC:
        return QuotaDecision(job, QuotaAction.KEEP, f"opportunistic: {why}")
    waited_s = max(0.0, now_s - job.submit_s)
    since = f"{why}; it has waited for {duration(waited_s)}"
    if job.opportunistic_after_s is None:
        if waited_s < offer_s:
            return QuotaDecision(job, QuotaAction.WAIT, since)
        return QuotaDecision(
            job,
            QuotaAction.OFFER,
            f"{since}. As an opportunistic job it could start now: submit it again with --opportunistic-after",
        )
    if waited_s < after_s:
        return QuotaDecision(job, QuotaAction.WAIT, since)
    return QuotaDecision(job, QuotaAction.OPPORTUNISTIC, f"{since}, and its user lets it start as an opportunistic job")


def above_quota(quotas: Quotas, jobs: Sequence[QuotaJob]) -> Mapping[str, int]:
    """GPUs that guaranteed jobs hold above their tenants' quotas, by tenant: a quota may have been lowered."""
    held: dict[str, int] = {}
    for job in jobs:
        if job.runs_as is JobClass.GUARANTEED:
            held[job.tenant] = held.get(job.tenant, 0) + job.gpus
    return {tenant: gpus - quotas.of(tenant) for tenant, gpus in held.items() if gpus > quotas.of(tenant)}


@dataclass(frozen=True)
class Excess:
    """A running job that holds more GPUs than the packer let it start with.

    Attributes:
        job: of it.
        is_within: its tenant's quota has room for them.
        reason: in words.
    """

    job: QuotaJob
    is_within: bool
    reason: str


def excesses(quotas: Quotas, jobs: Sequence[QuotaJob]) -> tuple[Excess, ...]:
    """Return the jobs that hold more GPUs than they were granted: by a request that Slurm understands in another way
    than who counted it, or by a change while they run. Whose tenant has room for them keeps them.

    A quota that was lowered makes nobody of these: what a job was granted is its own until it ends.
    """
    left = dict(quotas.tenants)
    for job in jobs:
        if job.runs_as is JobClass.GUARANTEED:
            granted = job.gpus if job.granted_gpus is None else min(job.gpus, job.granted_gpus)
            left[job.tenant] = left.get(job.tenant, 0) - granted
    found = []
    for job in sorted(jobs, key=lambda job: (job.submit_s, by_number(job.name))):
        if job.runs_as is not JobClass.GUARANTEED or job.granted_gpus is None or job.gpus <= job.granted_gpus:
            continue
        whole, free, tenant = quotas.of(job.tenant), max(0, left[job.tenant]), printable(job.tenant)
        more = job.gpus - job.granted_gpus
        why = f"it holds {count_words(job.gpus, 'GPU')}, and {job.granted_gpus} were granted: tenant {tenant} has "
        is_within = more <= free
        if is_within:
            left[job.tenant] -= more
        found.append(Excess(job, is_within, f"{why}{free} of its {count_words(whole, 'GPU')} left"))
    return tuple(found)
