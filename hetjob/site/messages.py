"""What jobs and the site daemon say to each other: one question and one answer a connection, as JSON. Pure.

Used by both sides. A frame is a length of four bytes, then so many bytes. On a Unix socket the question's frame is the
JSON text itself; over TCP it is a MUNGE credential with the text inside. The answer's frame begins with an HMAC-SHA256
under the key that the question carries: only who could read the question can have written the answer.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import Annotated, Any

import msgspec

from hetstream.base import typed_json
from hetstream.hetjob.errors import SiteError
from hetstream.hetjob.ports import Measured

# What nodes tell the site daemon of their shared GPUs, and what it tells the packer: parts of messages. Pure.
#
# Sent by `hetstream internal gpu-report` and read by `hetstream gpu pack`, since version 3 of the protocol.

# More GPUs has no node, and more processes no GPU, that is shared sensibly.
MAX_GPUS = 64
MAX_SHARING = 32
# Names of nodes in an answer to a job.
MAX_NODES = 32

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Text = Annotated[str, msgspec.Meta(max_length=256)]
_JobId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
_Whole = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0)]


class SharingNow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An opportunistic job on a GPU.

    Attributes:
        job: its id.
        paused_s: for how long it has not been let run at all.
        complaint: what it does against its orders; empty if nothing.
    """

    job: _JobId
    paused_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    complaint: _Text = ""


class SharingJobNow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a job fares on a GPU, as it says itself: for people. Nothing is decided by it.

    Attributes:
        job: its id.
        uid: whose it is.
        is_guaranteed: it has the GPU; else it is opportunistic.
        held_bytes: memory of the GPU that it holds.
        host_bytes: most that its last mini-batch had on the host for want of memory of the GPU.
        batch_s: how long a mini-batch takes; 0: not known.
        alone_s: how long one takes when nobody else is there; 0: not known.
    """

    job: _JobId
    uid: _Whole
    is_guaranteed: bool = False
    held_bytes: _Whole = 0
    host_bytes: _Whole = 0
    batch_s: _Seconds = 0.0
    alone_s: _Seconds = 0.0


class GpuNow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One GPU, as its node sees it; but for `jobs`, nothing in it is a job's word about itself alone.

    Attributes:
        index: its number on the node.
        gpu: what jobs call it.
        used_share: of the last seconds, in which something ran on it.
        free_bytes: of its memory, without the most that the guaranteed job has needed, and what processes without an
            agent hold.
        is_reserved: a guaranteed job has it, by its grant.
        guaranteed: those jobs, as far as they have an agent.
        closed: why an opportunistic job could do nothing there; empty if it could.
        sharing: the opportunistic jobs on it.
        capacity_bytes: memory that its jobs may hold together; 0: not told.
        idle_share: of the guaranteed job's mini-batches, in which it has nothing on the GPU; None: not known.
        jobs: how those on it fare.
    """

    index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_GPUS)]
    gpu: _Name
    used_share: _Share
    free_bytes: Annotated[int, msgspec.Meta(ge=0)]
    is_reserved: bool = False
    guaranteed: Annotated[tuple[_JobId, ...], msgspec.Meta(max_length=MAX_SHARING)] = ()
    closed: _Text = ""
    sharing: Annotated[tuple[SharingNow, ...], msgspec.Meta(max_length=MAX_SHARING)] = ()
    capacity_bytes: _Whole = 0
    idle_share: _Share | None = None
    jobs: Annotated[tuple[SharingJobNow, ...], msgspec.Meta(max_length=MAX_SHARING)] = ()


class ReportGpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="report_gpus"):
    """The shared GPUs of a node; from root, the daemon's user, or one of `hetstream site daemon --gpu-reporters`.

    Attributes:
        node: by Slurm's name.
    """

    node: _Name
    gpus: Annotated[tuple[GpuNow, ...], msgspec.Meta(max_length=MAX_GPUS)]


class AskGpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ask_gpus"):
    """What have the nodes told of their GPUs?"""


class NodeGpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one node told last, and how long ago by the daemon's clock."""

    node: str
    age_s: float
    gpus: tuple[GpuNow, ...]


class TakeGpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="take_gpus"):
    """A report counts; says in how many seconds the next one is due."""

    next_s: float


class ShowGpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="show_gpus"):
    """The answer to `AskGpus`.

    Attributes:
        nodes: by name.
        wait_shares: job id -> share of time in which its trainers waited for data; for the packer alone.
    """

    nodes: tuple[NodeGpus, ...]
    wait_shares: dict[str, float]


class RefuseGpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refuse_gpus"):
    """It is not for this user to report, or to see."""

    reason: str


# Version 2 has what a job has measured, grants with preferred nodes, and questions about policies; version 3 has nodes'
# GPUs. A question says the lowest version that has all of it, so that a daemon of before answers what it knows.
VERSION = 3
_POLICY_VERSION = 2
_FIRST_VERSION = 1
# A question has less than 1 kB of JSON, but for a node's report of its GPUs: about 0.3 kB for each GPU and job. A
# credential is a third longer.
MAX_QUESTION_BYTES = 64 << 10
# The status of 10,000 jobs. A reading of the cluster has at most 2 MiB.
MAX_ANSWER_BYTES = 8 << 20
LENGTH = struct.Struct(">I")
_MAC_BYTES = hashlib.sha256().digest_size

_Count = Annotated[int, msgspec.Meta(ge=0, le=100_000)]


class ReportDemand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="report_demand"):
    """What a job has and wants, from its job master.

    Attributes:
        job_id: of the leader.
        minimum: data workers that it has in any case.
        current: data workers that it has.
        wanted: data workers that it would have without a limit of the site, at least `minimum`.
        cpus: of each.
        wait_share: share of the last seconds in which its trainers waited for data; None if not known.
        measured: since version 2; None from a job that has measured nothing yet, or is of version 1.
    """

    job_id: Annotated[int, msgspec.Meta(ge=1, le=(1 << 32) - 1)]
    minimum: _Count
    current: _Count
    wanted: _Count
    cpus: Annotated[int, msgspec.Meta(ge=1, le=100_000)]
    wait_share: _Share | None = None
    measured: Measured | None = None

    def __post_init__(self) -> None:
        if self.wanted < self.minimum:
            raise ValueError(f"wanted={self.wanted}: must be at least minimum={self.minimum}")


class AskStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ask_status"):
    """What does the daemon know? Root and the daemon's own user see all jobs, others their own."""


class AskReading(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ask_reading"):
    """What has the daemon read of the cluster last? Everybody is told at sites where Slurm hides none of it."""


class AskPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="ask_policy"):
    """Which policy divides, and who got what and why? Root and the daemon's own user see all jobs, others their own.

    Attributes:
        job: only of this one; empty for all.
        num_decisions: how many of the latest ones.
    """

    job: Annotated[str, msgspec.Meta(max_length=16)] = ""
    num_decisions: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 50


class SetPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="set_policy"):
    """Divide otherwise from now on. For root and the daemon's own user.

    Attributes:
        settings: as JSON; the daemon knows the form.
        dry_run: say only what would follow.
    """

    settings: Annotated[str, msgspec.Meta(max_length=8192)]
    dry_run: bool = False


Question = ReportDemand | AskStatus | AskReading | AskPolicy | SetPolicy | ReportGpus | AskGpus


class SiteRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The question with what protects it.

    Attributes:
        version: of this protocol.
        sent_ns: when it was sent, by the sender's clock. Of one job it must grow: what was sent before is refused.
        reply_key: 32 bytes in hexadecimal, for the answer's HMAC.
        question: what is asked.
    """

    version: Annotated[int, msgspec.Meta(ge=_FIRST_VERSION, le=VERSION)]
    sent_ns: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    reply_key: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    question: Question


class _Versioned(msgspec.Struct, frozen=True):
    """What says of which version a question is, whatever else is in it."""

    version: int


class CompanionSeen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A companion job, as the daemon has read it.

    Attributes:
        job_id: its own.
        mark: the word in its comment that says of which start of which job it is.
        state: in Slurm's spelling.
        num_cpus: in all.
    """

    job_id: str
    mark: str
    state: str
    num_cpus: int


class GrantLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="grant_limit"):
    """How many data workers a job may have.

    Attributes:
        limit: None if the site sets none.
        reason: why, for people.
        next_s: after how many seconds to report again.
        companions: of the job, in the daemon's last reading of the cluster, so that the job need not ask Slurm.
        read_age_s: how old that reading is; None: companions are not told.
        nodes: where data workers would be best, the best first; since version 2. Slurm has the last word.
    """

    limit: int | None
    reason: str
    next_s: float
    companions: tuple[CompanionSeen, ...] = ()
    read_age_s: float | None = None
    nodes: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_NODES)] = ()


class RefuseReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refuse_report"):
    """The report does not count: another user's job, or sent before the last one."""

    reason: str


class JobStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One job as the daemon knows it; see `ReportDemand` and `GrantLimit`.

    Attributes:
        weight: its right to CPUs, relative to others: its GPUs, at least 1.
        limit: what the policy says; jobs are told only in allocate mode.
        age_s: since its last report.
    """

    job: str
    user: str
    minimum: int
    current: int
    wanted: int
    cpus: int
    weight: float
    wait_share: float | None
    limit: int | None
    reason: str
    age_s: float


class ShowStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="show_status"):
    """The answer to `AskStatus`.

    Attributes:
        mode: `observe` or `allocate`.
        since_s: when the daemon started, in seconds since the epoch.
        num_readings: of the cluster, since then.
        num_errors: of those that failed.
        read_s: when the last one succeeded; None if none did.
        error: of the newest reading; empty if it succeeded.
        partitions: whose CPUs are divided.
        pool_cpus: how many CPUs that is now.
        jobs: by number.
    """

    mode: str
    since_s: float
    num_readings: int
    num_errors: int
    read_s: float | None
    error: str
    partitions: tuple[str, ...]
    pool_cpus: int
    jobs: tuple[JobStatus, ...]


class ShowReading(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="show_reading"):
    """The answer to `AskReading`.

    Attributes:
        snapshot: the cluster, as `slurm_plugin/insight/last_reading.py` packs it.
    """

    snapshot: bytes


class RefuseReading(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refuse_reading"):
    """There is no reading, or it is not for this user."""

    reason: str


class DecisionTaken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One decision about one job.

    Attributes:
        time_s: when, in seconds since the epoch.
        job, user: whose.
        before, after: its limit; None where it had none.
        policy: by name.
        is_told: whether the job was told; not in observe mode.
        reason: why.
    """

    time_s: float
    job: str
    user: str
    before: int | None
    after: int | None
    policy: str
    is_told: bool
    reason: str


class JobNow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a policy is told of a job now; see `JobTable` of the daemon.

    Attributes:
        remaining_s: what it is believed to have left, which is not always what it claims.
        remaining_source: who says how much is left; empty where nobody does.
        claimed_s, claimed_sigma: what that one says, and how sure it is.
    """

    job: str
    user: str
    tenant: str
    minimum: int
    wanted: int
    current: int
    cpus: int
    gpus: float
    limit: int | None
    speed: float | None
    remaining_s: float | None
    remaining_source: str
    reason: str
    claimed_s: float | None = None
    claimed_sigma: float | None = None


class ShowPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="show_policy"):
    """The answer to `AskPolicy` and `SetPolicy`.

    Attributes:
        mode: `observe` or `allocate`.
        settings: as JSON.
        choices: names of all policies.
        pool_cpus: what is divided.
        problem: why the last round kept the allocation of the one before; empty if it did not.
        jobs: by number.
        decisions: the latest first.
    """

    mode: str
    settings: str
    choices: tuple[str, ...]
    pool_cpus: int
    problem: str
    jobs: tuple[JobNow, ...]
    decisions: tuple[DecisionTaken, ...]


class RefusePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refuse_policy"):
    """It is not for this user to set, or is no policy."""

    reason: str


Answer = (
    GrantLimit | RefuseReport | ShowStatus | ShowReading | RefuseReading | ShowPolicy | RefusePolicy
    | TakeGpus | ShowGpus | RefuseGpus
)  # fmt: skip


def new_request(question: Question, sent_ns: int) -> SiteRequest:
    """Return a request with a key of its own."""
    return SiteRequest(version_of(question), sent_ns, secrets.token_hex(32), question)


def version_of(question: Question) -> int:
    """Return the lowest version of the protocol that has all of a question."""
    if isinstance(question, ReportGpus | AskGpus):
        return VERSION
    is_new = isinstance(question, AskPolicy | SetPolicy) or (
        isinstance(question, ReportDemand) and question.measured is not None
    )
    return _POLICY_VERSION if is_new else _FIRST_VERSION


def encode_request(request: SiteRequest) -> bytes:
    """Return the request as JSON."""
    return msgspec.json.encode(request)


def decode_request(data: bytes) -> SiteRequest:
    """Read a request.

    Raises:
        SiteError: it is none of this version.
    """
    version = _decode(data, _Versioned).version
    if not _FIRST_VERSION <= version <= VERSION:
        raise SiteError(
            f"a question has version {version} of the site daemon's protocol, this side speaks versions "
            f"{_FIRST_VERSION} to {VERSION}: "
            "install one release of hetstream for the daemon and the job masters (docs/upgrade.md)"
        )
    request: SiteRequest = _decode(data, SiteRequest)
    if request.version < version_of(request.question):
        raise SiteError(f"a question of version {request.version} has what only a later version has")
    return request


def encode_answer(answer: Answer, reply_key: str) -> bytes:
    """Return the answer as JSON behind its HMAC."""
    data = answer_text(answer)
    return answer_mac(data, reply_key) + data


def answer_text(answer: Answer) -> bytes:
    """Return the answer as JSON, for one who sends the same to many."""
    return msgspec.json.encode(answer)


def answer_mac(text: bytes, reply_key: str) -> bytes:
    """Return what goes before an answer: its HMAC under the key of the question."""
    return hmac.digest(bytes.fromhex(reply_key), text, "sha256")


def decode_answer(data: bytes, reply_key: str) -> Answer:
    """Read the answer to a request.

    Raises:
        SiteError: it does not come from who read the request, or is none of this version.
    """
    mac, text = data[:_MAC_BYTES], data[_MAC_BYTES:]
    if not hmac.compare_digest(mac, answer_mac(text, reply_key)):
        raise SiteError("the answer does not come from the daemon that was asked")
    answer: Answer = _decode(text, Answer)
    return answer


def _decode(data: bytes, kind: Any) -> Any:
    try:
        return typed_json.decode(data, kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SiteError(
            f"not a message of versions {_FIRST_VERSION} to {VERSION} of the site daemon's protocol: {error}"
        ) from error
