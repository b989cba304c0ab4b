"""Every message between loader, dispatcher and data worker, as frozen typed structs. Holds no logic.

msgspec encodes them as a tagged union: a message of an unknown type, or with a field of another form, is refused on
arrival. `codec.py` adds the magic, the protocol version and the frames. Failure (`BatchFailed`), end of an epoch (by
count, in the loader) and end of the service (`ShutDown`) are different things and no one can be taken for another.

    loader      -> dispatcher   RegisterConsumer ProvideDefinition OpenEpoch ExtendEpoch ReportProgress LoaderHeartbeat
                                CloseEpoch LeaveConsumer
    dispatcher  -> loader       ConsumerRegistered Membership LeaseRevoked Alive UnknownPeer Refused ShutDown
    data worker -> dispatcher   RegisterWorker WorkerHeartbeat FinishLease FailLease FetchDefinition LeaveWorker
    dispatcher  -> data worker  WorkerRegistered GrantLease RevokeLease CloseSession Definition Alive UnknownPeer
                                Refused ShutDown
    data worker -> loader       Hello Proof Batch BatchFailed
    loader      -> data worker  Challenge
"""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION = 1

Ranges = list[tuple[int, int]]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=False, forbid_unknown_fields=True):
    """Base of all messages; the type's name travels with it."""


# --- the work -------------------------------------------------------------------------------------------------------


class PlannedOrder(msgspec.Struct, frozen=True, tag="planned", forbid_unknown_fields=True):
    """Order that any data worker computes itself: the arguments of `sharding.EpochPlan` and the rank."""

    num_samples: int
    batch_size: int
    world_size: int
    rank: int
    drop_last: bool
    shuffle: bool
    order_seed: int


class ListedOrder(msgspec.Struct, frozen=True, tag="listed", forbid_unknown_fields=True):
    """Order that comes from the program's own sampler, sent in pieces by `ExtendEpoch`.

    Attributes:
        batched: each step is a list of samples for `collate_fn`; else each step is one sample (batch_size=None).
    """

    batched: bool


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pass of one loader over one epoch.

    Attributes:
        session_id: unique per pass; batches of an older pass are told apart by it.
        definition_id: which pipeline.
        epoch: the epoch.
        seed: base of the random state of each sample.
        order: which samples each step has.
        receiver: address of the loader's batch socket.
    """

    session_id: str
    definition_id: str
    epoch: int
    seed: int
    order: PlannedOrder | ListedOrder
    receiver: str


class StepList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sample indices of consecutive steps: int32 counts and int64 indices, little-endian bytes."""

    first_step: int
    counts: bytes
    indices: bytes


class LoaderStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a loader has delivered to its training loop since it was made."""

    epochs: int = 0
    steps: int = 0
    samples: int = 0
    bytes: int = 0
    wait_s: float = 0.0
    elapsed_s: float = 0.0
    local_steps: int = 0
    duplicates_dropped: int = 0


# --- loader -> dispatcher -------------------------------------------------------------------------------------------


class RegisterConsumer(Message, frozen=True):
    """A loader introduces itself; `description` is compared between programs of one job name."""

    job_name: str
    ordinal: int
    rank: int
    world_size: int
    host: str
    pid: int
    definition_id: str
    description: dict[str, str]


class ProvideDefinition(Message, frozen=True):
    """The pickled pipeline and the import paths it needs."""

    definition_id: str
    sys_path: list[str]
    working_dir: str
    blob: bytes


class OpenEpoch(Message, frozen=True):
    """Begin a pass, or continue it with a restarted dispatcher; `num_steps` -1 while the sampler's end is unknown."""

    session: Session
    num_steps: int
    consumed: int
    received: Ranges
    window: int
    steps: StepList | None


class ExtendEpoch(Message, frozen=True):
    """More steps of a listed order; `num_steps` is the total once the sampler has ended, else -1."""

    session_id: str
    steps: StepList
    num_steps: int


class ReportProgress(Message, frozen=True):
    """How far a pass is: steps below `consumed` reached the training loop, `received` wait in its buffer."""

    session_id: str
    consumed: int
    received: Ranges
    window: int
    stats: LoaderStats


class LoaderHeartbeat(Message, frozen=True):
    """The loader is alive and reads no epoch at the moment."""

    stats: LoaderStats


class CloseEpoch(Message, frozen=True):
    """The pass ended, by count or because the program left the loop."""

    session_id: str
    consumed: int
    stats: LoaderStats


class LeaveConsumer(Message, frozen=True):
    """The loader was closed."""

    stats: LoaderStats


# --- dispatcher -> loader -------------------------------------------------------------------------------------------


class ConsumerRegistered(Message, frozen=True):
    """Answer to `RegisterConsumer`; the definition is sent once, by the first loader that has it."""

    need_definition: bool
    num_data_workers: int


class Membership(Message, frozen=True):
    """How many data workers can reach this loader now."""

    num_data_workers: int


class LeaseRevoked(Message, frozen=True):
    """Batches that carry this fencing token are no longer wanted."""

    session_id: str
    token: int


# --- data worker -> dispatcher --------------------------------------------------------------------------------------


class HeldLease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lease that a data worker still works on when it registers again."""

    token: int
    session_id: str
    first_step: int
    stop_step: int


class RegisterWorker(Message, frozen=True):
    """A data worker process offers itself; `replaces` names a dead sibling whose leases are free at once."""

    host: str
    pid: int
    replaces: str
    held: list[HeldLease]


class WorkerHeartbeat(Message, frozen=True):
    """Still alive, with the tokens it holds."""

    tokens: list[int]


class FinishLease(Message, frozen=True):
    """All steps of the lease were sent; `busy_s` is the time it took to make them."""

    token: int
    busy_s: float


class FailLease(Message, frozen=True):
    """The worker could not reach the loader, or lost it: the lease goes to someone else."""

    token: int
    reason: str


class FetchDefinition(Message, frozen=True):
    """The worker meets a pipeline for the first time."""

    definition_id: str


class LeaveWorker(Message, frozen=True):
    """Orderly end: everything it held may be leased again."""


# --- dispatcher -> data worker --------------------------------------------------------------------------------------


class WorkerRegistered(Message, frozen=True):
    """Answer to `RegisterWorker`: its number among the data workers of this service."""

    number: int


class GrantLease(Message, frozen=True):
    """Make steps [first_step, stop_step) of the session and send them to its receiver."""

    token: int
    session: Session
    first_step: int
    stop_step: int
    steps: StepList | None


class RevokeLease(Message, frozen=True):
    """Stop working on it; with `reconnect` the connection to the loader is in doubt too."""

    token: int
    session_id: str
    reconnect: bool
    reason: str


class CloseSession(Message, frozen=True):
    """Nobody reads this pass any more."""

    session_id: str


class Definition(Message, frozen=True):
    """Answer to `FetchDefinition`."""

    definition_id: str
    sys_path: list[str]
    working_dir: str
    blob: bytes


class UnknownPeer(Message, frozen=True):
    """The dispatcher has been restarted or took the peer for dead: register again and say what you hold."""


class Refused(Message, frozen=True):
    """The request is not granted; `code` names the error class that the peer raises."""

    code: str
    text: str


class Alive(Message, frozen=True):
    """Answer to a heartbeat: the dispatcher is there and knows the peer."""


class ShutDown(Message, frozen=True):
    """The service ends."""


# --- data worker <-> loader -----------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a batch connection; the nonce is 32 random bytes."""

    worker_id: str
    nonce: bytes


class Challenge(Message, frozen=True):
    """The loader proves that it holds the job's key, and asks the same of the worker."""

    nonce: bytes
    proof: bytes


class Proof(Message, frozen=True):
    """The worker proves that it holds the job's key; batches follow."""

    proof: bytes


class Batch(Message, frozen=True):
    """Header of one step's batch; the tensors' bytes are the frames after it.

    Attributes:
        session_id, step, token: which lease made it.
        num_samples: samples in it.
        spec: structure of the batch, as `ops.tree` writes it.
        buffers: (frame, offset, num_bytes) of each leaf with bytes of its own.
    """

    session_id: str
    step: int
    token: int
    num_samples: int
    spec: bytes
    buffers: list[tuple[int, int, int]]


class BatchFailed(Message, frozen=True):
    """User code raised while making this step.

    Attributes:
        error_type: (module, qualified name) of the exception's class.
        text: its text.
        remote_traceback: formatted where it happened.
        sample_index: the sample being read, or -1.
    """

    session_id: str
    step: int
    token: int
    error_type: tuple[str, str]
    text: str
    remote_traceback: str
    sample_index: int


LoaderToDispatcher = (
    RegisterConsumer
    | ProvideDefinition
    | OpenEpoch
    | ExtendEpoch
    | ReportProgress
    | LoaderHeartbeat
    | CloseEpoch
    | LeaveConsumer
)
WorkerToDispatcher = RegisterWorker | WorkerHeartbeat | FinishLease | FailLease | FetchDefinition | LeaveWorker
ToDispatcher = LoaderToDispatcher | WorkerToDispatcher
DispatcherToLoader = ConsumerRegistered | Membership | LeaseRevoked | Alive | UnknownPeer | Refused | ShutDown
DispatcherToWorker = (
    WorkerRegistered | GrantLease | RevokeLease | CloseSession | Definition | Alive | UnknownPeer | Refused | ShutDown
)
WorkerToLoader = Hello | Proof | Batch | BatchFailed
LoaderToWorker = Challenge
AnyMessage = ToDispatcher | DispatcherToLoader | DispatcherToWorker | WorkerToLoader | LoaderToWorker
