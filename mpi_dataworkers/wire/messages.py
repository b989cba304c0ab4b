"""Every message between loader, dispatcher and data worker, as frozen typed structs: all of them, and who says which.

msgspec encodes them as a tagged union: a message of an unknown type, or with a field of another form, is refused on
arrival. `codec.py` adds the magic, the protocol version and the frames. Failure (`BatchFailed`), loss (`StepsLost`),
end of an epoch (by count, in the loader), end of a shard whose length nobody knew (`EndOfShard`) and end of the service
(`ShutDown`) are different things and no one can be taken for another.

    loader      -> dispatcher   RegisterLoader ProvidePipeline OpenSession ExtendSession ReportProgress
                                LoaderHeartbeat CloseSession EndProcesses LeaveLoader
    dispatcher  -> loader       LoaderRegistered NeedPipeline Membership Notice LeaseRevoked StepsLost BatchFailed
                                ProcessesEnded Alive UnknownPeer Refused ShutDown
    data worker -> dispatcher   RegisterWorker WorkerHeartbeat FinishLease FailLease FailStep EndOfShard FetchPipeline
                                Draining LeaveWorker
    dispatcher  -> data worker  WorkerRegistered GrantLease TrimLease RevokeLease DrainWorker RenewWorker AddProcess
                                DropSession ProvidePipeline DropPipeline Alive UnknownPeer Refused ShutDown
    data worker -> loader       Hello Proof Compressed Batch Batches EndOfShard
    loader      -> data worker  Challenge
    trainer          -> embedding server  OpenTables ReadRows WriteRows ExpectParts SendParts DropParts AdoptParts
                                          MarkGeneration RestoreGeneration
    embedding server -> trainer           RowsRead WritesKept PartsHeld GenerationMarked EmbeddingRefused
    embedding server -> another one       PartRows PartsSent
    whoever holds the job's key asks the dispatcher RequestStatus and gets Status
    the job's elastic controller tells the dispatcher SteerDataWorkers and gets Status

They are in order of who speaks to whom, behind what they talk about.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from hetstream.base.process import TrainingProgress

# What loader, dispatcher and data worker talk about: orders, sessions, programs, failures. Holds no logic.

PROTOCOL_VERSION = 6
# Data workers and loaders tell the dispatcher this often that they are there.
HEARTBEAT_S = 0.5

Ranges = list[tuple[int, int]]
# What data workers make a stage of the pipeline with.
Device = Literal["cpu", "gpu"]
# Whose number the controllers of a job steer.
Steered = Literal["cpu", "gpu", "embedding"]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=False, forbid_unknown_fields=True):
    """Base of all messages; the type's name travels with it."""


class PlannedOrder(msgspec.Struct, frozen=True, tag="planned", forbid_unknown_fields=True):
    """Order that any data worker computes itself: the fields of `sharding.EpochPlan` but the epoch, and the rank.

    `bucketed` when it is a `bucketing.BucketPlan`; the buckets are part of the pipeline.
    """

    num_samples: int
    batch_size: int
    world_size: int
    rank: int
    drop_last: bool
    shuffle: bool
    order_seed: int
    bucketed: bool = False
    shard: int = 0
    num_shards: int = 1
    global_batch_size: int | None = None


class ListedOrder(msgspec.Struct, frozen=True, tag="listed", forbid_unknown_fields=True):
    """Order that comes from the program's own sampler, sent in pieces by `ExtendSession`.

    Attributes:
        batched: each step is a list of samples for `collate_fn`; else each step is one sample (batch_size=None).
    """

    batched: bool


class Sharing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """That a session shares its batches with the sessions of other jobs that have the same key.

    Attributes:
        key: digest of all that a batch depends on but its position: pipeline, seed, order.
        mode: `lossless`: each session reads every step of its own; `window`: each follows the common stream and skips
            what has left the data workers' caches.
        num_steps: steps of an epoch.
    """

    key: str
    mode: Literal["lossless", "window"]
    num_steps: int


class ShardOrder(msgspec.Struct, frozen=True, tag="shard", forbid_unknown_fields=True):
    """One shard of an IterableDataset's epoch, whose length nobody knows: `ops.iterable` reads it.

    Attributes:
        cut: how the dataset is divided, a `visitation.Cut`.
        shard, num_shards: which part of how many.
        batch_size: samples in a step; 0: each step is one sample (batch_size=None).
        drop_last: leave out an incomplete last step.
        shuffle: permute the files, by (order_seed, epoch).
        order_seed: base of that permutation.
        seed_shard: shard number from which random states are derived; two copies with the same one are alike.
        rank, world_size: whose slice of each round, when all ranks read the shard in rounds of like length; else 0, 0.
    """

    cut: str
    shard: int
    num_shards: int
    batch_size: int
    drop_last: bool
    shuffle: bool
    order_seed: int
    seed_shard: int
    rank: int = 0
    world_size: int = 0


class ErrorPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What becomes of a step that data workers cannot make.

    Attributes:
        on_error: `raise` it in the training loop, `skip` the sample, or skip it in later epochs too (`quarantine`).
        max_attempts: how often a step is tried, on different hosts or data workers where there are several; where there
            are two, on both in any case.
        sample_timeout_s: a sample (or what is read as one: a batch) that takes longer hangs.
        quarantined: samples that are left out without being tried, ascending.
    """

    on_error: Literal["raise", "skip", "quarantine"] = "raise"
    max_attempts: int = 3
    sample_timeout_s: float = 300.0
    quarantined: list[int] = []


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An exception of user code, or the end of the process that ran it.

    Attributes:
        sample_index: the sample in work, or -1 when it was not one sample.
        error_type: (module, qualified name) of the exception's class.
        text: its text.
        remote_traceback: formatted where it happened.
        host, pid: where.
        is_final: the whole pipeline cannot be used, so there is no sample to leave out.
        interpreter: the Python of that process, in words.
    """

    sample_index: int
    error_type: tuple[str, str]
    text: str
    remote_traceback: str
    host: str = ""
    pid: int = 0
    is_final: bool = False
    interpreter: str = ""


class Interpreter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The Python of a process, and what of its packages decides whether it can make another one's batches.

    Attributes:
        executable: its path.
        python, torch, hetstream: versions; "" where one is not known.
    """

    executable: str = ""
    python: str = ""
    torch: str = ""
    hetstream: str = ""

    def __str__(self) -> str:
        named = {"torch": self.torch, "hetstream": self.hetstream}
        versions = [f"Python {self.python}", *(f"{name} {version}" for name, version in named.items() if version)]
        return f"{self.executable}, {', '.join(versions)}"


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The program that a pipeline comes from. A data worker process serves one: what Python has loaded stays loaded.

    Attributes:
        working_dir: where relative paths start.
        sys_path: where it imports from, in its order; "" stands for the directories of the Python installation.
        modules: digest of the source of each module of its own that the pipeline needs, by name.
        owners: `access.owners_of` on the program's host, by path: of these places, and of those that its environment
            names. Ranks of one program may differ in it.
        knows_hetstream: the pipeline's loader is hetstream's own. Else its modules are as those of torch's worker
            processes, which import nothing again.
    """

    working_dir: str
    sys_path: list[str]
    modules: dict[str, str] = {}
    knows_hetstream: bool = True
    owners: dict[str, list[int]] = {}


class WorkerSeeds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the random numbers of torch's worker processes follow from, in whose place data workers make a pass.

    Attributes:
        base_seed: that torch drew; it seeds worker process w with this plus w.
        passes_before: passes that these processes have made already; 0 without persistent_workers.
        generators: a digest of the state of each generator that dataset and `collate_fn` hold when the processes start.
        are_kept: these processes make the next pass, too, as with persistent_workers.
        rank, world_size: of the trainer in `torch.distributed`; 0, 0 where it has initialised none. These three are for
            streams, which divide themselves by them.
        environment: the variables that say which of its job's processes the trainer is; None: it has no such variable.
        shared: where the dataset holds tensors and values in memory that its program shares with kept worker processes.
        shares_more: it shares memory that is of neither kind, as an array over a mapping.
        held: states of the generators that its objects and their modules hold, as `torch_streams.pack_states`.
    """

    base_seed: int
    passes_before: int
    generators: list[int]
    are_kept: bool = False
    rank: int = 0
    world_size: int = 0
    environment: dict[str, str | None] = {}
    shared: list[list[str | int]] = []
    shares_more: bool = False
    held: bytes = b""


class SessionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a session reads, and how: one loader reads one epoch, or one shard of it, once.

    Attributes:
        session_id: unique; batches of an older session are told apart by it.
        pipeline_id: which pipeline.
        epoch: the epoch.
        seed: base of the random state of each sample.
        order: which samples each step has.
        receivers: addresses at which the loader takes batches, the best transport first.
        sharing: with whom it shares its batches, or None.
        kept_together: its leases go to one data worker for as long as that is there (a shard).
        at_most_once: what a lost data worker held is not leased again.
        errors: what becomes of a step that cannot be made.
        worker_seeds: what random numbers follow from instead of seed and epoch, in a program that only knows torch.
    """

    session_id: str
    pipeline_id: str
    epoch: int
    seed: int
    order: PlannedOrder | ListedOrder | ShardOrder
    receivers: list[str]
    sharing: Sharing | None = None
    kept_together: bool = False
    at_most_once: bool = False
    errors: ErrorPolicy = ErrorPolicy()
    worker_seeds: WorkerSeeds | None = None


class StepList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sample indices of consecutive steps: int32 counts and int64 indices, little-endian bytes."""

    first_step: int
    counts: bytes
    indices: bytes


class LoaderStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a loader has delivered to its training loop since it was made.

    Attributes:
        wait_s: time that the loop waited for steps.
        elapsed_s: time inside sessions, with the waits; of the open one, up to its last step.
        moved_bytes: of what operators that a partitioner has moved have computed, in these batches.
        compared_steps: that were made from the program's own objects, too, and compared.
        differing_steps: those of them that were not the same.
        cache_hits, cache_misses: fronts of samples that a prefix cache had, and that were made.
        cache_bytes: of those that it had, and of those that it has kept.
        cache_saved_s: CPU time that the hits took when they were made, without that of reading them back.
    """

    epochs: int = 0
    steps: int = 0
    samples: int = 0
    bytes: int = 0
    wait_s: float = 0.0
    elapsed_s: float = 0.0
    local_steps: int = 0
    duplicates_dropped: int = 0
    shared_steps: int = 0
    repeated_steps: int = 0
    skipped_steps: int = 0
    lost_steps: int = 0
    lost_shards: int = 0
    skipped: int = 0
    moved_bytes: int = 0
    compared_steps: int = 0
    differing_steps: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_bytes: int = 0
    cache_saved_s: float = 0.0


class EmbeddingLookups(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trainer has timed of its lookups of embeddings since it was started.

    Attributes:
        num_timed: of the times from one call of an optimizer to the next in which lookups were timed.
        timed_s: how long those lookups took together.
    """

    num_timed: int
    timed_s: float


class OptimizerCalls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trainer has counted of its optimizers' steps since it was started.

    Attributes:
        num_calls: of them, but for those within others.
        num_timed, timed_s: of them that were timed, and how long these took together.
        embeddings: looked up between them; None while none was.
    """

    num_calls: int
    num_timed: int
    timed_s: float
    embeddings: EmbeddingLookups | None = None


class FeatureCut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a loader's feature graph is cut.

    Attributes:
        num_operators: of the graph.
        on_trainer: of them that the trainer computes.
        share: of the training loop's time that these take, which more data workers could take from it; 0 where the
            program itself has said where the graph is cut.
        reason: why it is cut there, on one line.
    """

    num_operators: int
    on_trainer: int
    share: float
    reason: str


# Messages between loader and dispatcher, in both directions. Holds no logic.


class RegisterLoader(Message, frozen=True):
    """A loader introduces itself.

    `ordinal`, `occurrence`, `place`, `made_at` and `divides` are as in `naming.LoaderName`.

    Attributes:
        description: compared between programs of one job name.
        trainer: random name of its process; the loaders of one process have the same.
        interpreter: of its process.
        title: what a person knows it by.
        device: what data workers make its batches with.
        feeds: id of the data worker that makes steps of its batches; "" for a trainer's.
    """

    job_name: str
    ordinal: int
    rank: int
    world_size: int
    host: str
    pid: int
    pipeline_id: str
    description: dict[str, str]
    occurrence: int = 0
    place: str = ""
    made_at: str = ""
    divides: bool = False
    trainer: str = ""
    interpreter: Interpreter = Interpreter()
    title: str = ""
    device: Device = "cpu"
    feeds: str = ""


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The bytes that a pickle stream refers to, or that are too large for a message: see `pipeline_transfer.py`.

    Attributes:
        sizes: of each buffer, in bytes.
        data: all of them, one after the other; b"" when they are in a file.
        sha256: of the file's bytes, in hexadecimal; it also names the file. "" when there is none.
        with_blob: the first buffer is the pickle stream itself.
    """

    sizes: list[int] = []
    data: bytes = b""
    sha256: str = ""
    with_blob: bool = False


class ProvidePipeline(Message, frozen=True, omit_defaults=True):
    """The pickled pipeline, the program that it comes from, and what that has set, as `ops.program` writes it.

    The dispatcher keeps it and gives it to data workers that fetch it. `blob` is the pickle stream, `shared` are the
    numbers of the buffers that samples could write to, and the trainer would see it.
    """

    pipeline_id: str
    program: Program
    settings: bytes
    blob: bytes
    contents: Contents = Contents()
    shared: list[int] = []


class OpenSession(Message, frozen=True):
    """Begin a session, or continue it with a restarted dispatcher; `num_steps` -1 while the sampler's end is unknown.

    `shift` is how far the loader is from its own numbering in a stream that it shares in window mode, `snapshot` where
    the reader of a shard was at or before `consumed`.
    """

    session: SessionSpec
    num_steps: int
    consumed: int
    received: Ranges
    window: int
    steps: StepList | None
    shift: int = 0
    snapshot: bytes = b""


class ExtendSession(Message, frozen=True):
    """More steps of a listed order; `num_steps` is the total once the sampler has ended, else -1."""

    session_id: str
    steps: StepList
    num_steps: int


class ReportProgress(Message, frozen=True):
    """How far a session is: steps below `consumed` reached the training loop, `received` wait in its buffer.

    Attributes:
        training: of the program's training loop; None where no framework told it.
        optimizer: of its process; None while none has stepped.
        features: where its feature graph is cut; None without one.
    """

    session_id: str
    consumed: int
    received: Ranges
    window: int
    stats: LoaderStats
    training: TrainingProgress | None = None
    optimizer: OptimizerCalls | None = None
    features: FeatureCut | None = None


class LoaderHeartbeat(Message, frozen=True):
    """The loader is alive and reads no epoch at the moment."""

    stats: LoaderStats


class CloseSession(Message, frozen=True):
    """The session ended, by count or because the program left the loop."""

    session_id: str
    consumed: int
    stats: LoaderStats


class EndProcesses(Message, frozen=True):
    """End the processes that have made steps of this loader: the program wants what they hold, a lock or a port."""


class LeaveLoader(Message, frozen=True):
    """The loader was closed."""

    stats: LoaderStats


# --- dispatcher -> loader -------------------------------------------------------------------------------------------


class LoaderRegistered(Message, frozen=True):
    """Answer to `RegisterLoader`; the pipeline is sent once, by the first loader that has it.

    `pipeline_id` is the one of that registration: the loader may have come to another one since.
    """

    need_pipeline: bool
    num_data_workers: int
    pipeline_id: str = ""


class ProcessesEnded(Message, frozen=True):
    """Answer to `EndProcesses`: none of them is left."""


class NeedPipeline(Message, frozen=True):
    """A data worker asks for a pipeline of this loader, and the dispatcher does not have it."""

    pipeline_id: str


class Notice(Message, frozen=True):
    """Something that the user should know; nothing changes by it."""

    text: str


class Membership(Message, frozen=True):
    """How many data workers can reach this loader now."""

    num_data_workers: int


class LeaseRevoked(Message, frozen=True):
    """Batches that carry this fencing token are no longer wanted.

    `suspects` are the steps that its data worker was at when it was lost: they may have ended it.
    """

    session_id: str
    token: int
    suspects: Ranges = []


class StepsLost(Message, frozen=True):
    """These steps were held by a data worker that was lost, in a session that is read at most once: go on without.

    Attributes:
        stop_step: -1 for all that follow: the rest of a shard.
    """

    session_id: str
    first_step: int
    stop_step: int


class BatchFailed(Message, frozen=True):
    """In the place of a step's batch: nobody could make it, and the loader raises the failure there."""

    session_id: str
    step: int
    failure: Failure


# Messages between data worker and dispatcher, in both directions. Holds no logic.


class HeldLease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lease that a data worker still works on when it registers again."""

    token: int
    session_id: str
    first_step: int
    stop_step: int
    shift: int = 0


class Fate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a data worker process ended.

    Attributes:
        reason: in words that follow "the process".
        session_id, token, step: what it was at; an empty session when it was at none.
        failure: of that step.
    """

    reason: str
    session_id: str
    token: int
    step: int
    failure: Failure | None


class RegisterWorker(Message, frozen=True, omit_defaults=True):
    """A data worker process offers itself.

    Attributes:
        replaces: a dead sibling, whose leases are free at once; `fate` is how it ended.
        slurm_job: id of the Slurm job that it belongs to; "" outside of Slurm.
        slot: its place among the processes of its supervisor, of which several may be there for several programs; ""
            for a process that nobody can replace.
        program: that it serves; None while it serves none.
        interpreter: of its process.
        device: what it makes steps with.
    """

    host: str
    pid: int
    replaces: str
    held: list[HeldLease]
    fate: Fate | None = None
    slurm_job: str = ""
    slot: str = ""
    program: Program | None = None
    interpreter: Interpreter = Interpreter()
    device: Device = "cpu"


class WorkerHeartbeat(Message, frozen=True, omit_defaults=True):
    """Still alive, with the tokens it holds, and the memory that counts for this process; 0: not known."""

    tokens: list[int]
    resident_bytes: int = 0


class FinishLease(Message, frozen=True, omit_defaults=True):
    """All steps of the lease were sent; `busy_s` is the time it took to make them.

    `dropped` are the positions that left this worker's cache since it last said so, by share key; `snapshot` is that of
    the last batch, and `snapshot_step` the step after it. `waited_s` was spent waiting for the loader or the network.
    """

    token: int
    busy_s: float
    dropped: dict[str, Ranges] = {}
    snapshot: bytes = b""
    snapshot_step: int = 0
    waited_s: float = 0.0


class FailLease(Message, frozen=True):
    """The worker could not reach the loader, or lost it: the lease goes to someone else."""

    token: int
    reason: str


class FailStep(Message, frozen=True):
    """User code raised for this step. The steps of the lease before it were sent, those after it are not made."""

    token: int
    step: int
    failure: Failure


class EndOfShard(Message, frozen=True, omit_defaults=True):
    """The shard of this lease's session has `num_steps` steps; also said to the loader, on the batch connection.

    To the loader with `kept`: what is left of one of torch's worker processes that its next pass begins with.
    """

    session_id: str
    num_steps: int
    token: int
    kept: bytes = b""


class FetchPipeline(Message, frozen=True):
    """The worker meets a pipeline for the first time."""

    pipeline_id: str


class Draining(Message, frozen=True, omit_defaults=True):
    """The worker finishes the step it is at and takes no more leases.

    Attributes:
        leases: (token, stop) of each lease it holds: steps at or above `stop` are not made.
        renews: a process is forked in its slot, and comes in a moment.
    """

    leases: list[tuple[int, int]]
    renews: bool = False


class LeaveWorker(Message, frozen=True):
    """Orderly end: what it still held may be leased again; what it has sent is on its way."""


# --- dispatcher -> data worker --------------------------------------------------------------------------------------


class WorkerRegistered(Message, frozen=True):
    """Answer to `RegisterWorker`: its number among the data workers of this service."""

    number: int


class GrantLease(Message, frozen=True, omit_defaults=True):
    """Make steps [first_step, stop_step) of the session and send them to its receiver.

    In a shared stream, `shift` steps further than the session's own numbering says; `again` when they were leased
    before, for whichever session. `left_out` has the steps that failed before, with the samples to leave out and what
    they did. `snapshot` is where a reader of the shard was at or before the first step, "" for its beginning.
    """

    token: int
    session: SessionSpec
    first_step: int
    stop_step: int
    steps: StepList | None
    shift: int = 0
    again: bool = False
    left_out: dict[int, list[Failure]] = {}
    snapshot: bytes = b""


class TrimLease(Message, frozen=True):
    """Steps at or above `stop_step` went to a worker that was idle; those already begun do no harm."""

    token: int
    stop_step: int


class DrainWorker(Message, frozen=True):
    """Leave after the step in work, as after SIGTERM."""


class RenewWorker(Message, frozen=True):
    """Leave after the step in work, to be forked anew: the process's program is over, and another one is there."""


class AddProcess(Message, frozen=True):
    """Have one more process forked in this one's slot, for another program that is there at the same time."""


class RevokeLease(Message, frozen=True):
    """Stop working on it; with `reconnect` the connection to the loader is in doubt too."""

    token: int
    session_id: str
    reconnect: bool
    reason: str


class DropSession(Message, frozen=True):
    """Nobody reads this session any more: leases of it need not be made."""

    session_id: str


class DropPipeline(Message, frozen=True):
    """No loader uses this pipeline any more: what was made of it may go."""

    pipeline_id: str


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


# Messages about what goes on in a service, and the elastic controller's. Holds no logic.


class RequestStatus(Message, frozen=True):
    """Tell what goes on; asked without registering, changes nothing."""


class SteerDataWorkers(Message, frozen=True):
    """A job's elastic controller tells what it does; asked without registering, answered with `Status`.

    Attributes:
        elastic: what it says of itself, on one line.
        action: grow, drain or cancel; "" for nothing new.
        count: data workers that the action is about.
        reason: of the action.
        drain: Slurm jobs whose data workers are to leave after the step that they are at.
        device: of the data workers of the stage that it is the controller of, or `embedding` of the servers of tables.
    """

    elastic: str
    action: str
    count: int
    reason: str
    drain: list[str]
    device: Steered = "cpu"


DataWorkerState = Literal["working", "idle", "draining", "unreachable", "silent"]


class DataWorkerStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One data worker process.

    Attributes:
        state: `unreachable`: it could not deliver to some loader, and is not used for that one for a while.
        leases: that it holds now.
        steps, leases_revoked: since it registered; steps count when their lease is finished.
        steps_per_s, busy_share, wait_share: over the last seconds. Busy is the time in which it made steps,
            `wait_share` that in which it waited for the stage before, or did its work because nobody else did.
        up_s: since it registered.
        silent_s: since its last message.
        slurm_job: as in `RegisterWorker`.
        resident_bytes: of its memory, without files' pages, and its part of what it shares; 0 while that is not known.
        device: what it makes steps with.
    """

    number: int
    host: str
    pid: int
    state: DataWorkerState
    leases: int
    steps: int
    steps_per_s: float
    busy_share: float
    leases_revoked: int
    up_s: float
    silent_s: float
    slurm_job: str = ""
    resident_bytes: int = 0
    device: Device = "cpu"
    wait_share: float = 0.0


class LoaderStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One loader of one rank.

    Attributes:
        ordinal: number of the loader in its program.
        epoch: -1 between sessions.
        step, num_steps: taken by the training loop, of how many in this epoch; -1 while that is not known.
        buffered, window: steps that wait in its buffer, and how many may wait or be on their way.
        num_data_workers: that reach it.
        steps_per_s, bytes_per_s, wait_share: over the last seconds; a wait counts when it ends.
        totals: since the loader was made.
        step_s: time of the training loop for a step without its waits for data, over the last seconds; 0 without steps.
        step_time_spread: of `step_s` over the ranks of this loader that took steps: (largest - smallest) / mean.
        title: what a person knows it by, such as `ImageFolder train.py:38`.
        training: how far the training loop of its process is; None where no framework told it.
        device: what data workers make its batches with.
        optimizer: what its process has counted of optimizers' steps; None while none has stepped.
        features: where its feature graph is cut; None without one.
    """

    job: str
    ordinal: int
    rank: int
    world_size: int
    host: str
    pid: int
    epoch: int
    step: int
    num_steps: int
    buffered: int
    window: int
    num_data_workers: int
    steps_per_s: float
    bytes_per_s: float
    wait_share: float
    totals: LoaderStats
    step_s: float = 0.0
    step_time_spread: float = 0.0
    title: str = ""
    training: TrainingProgress | None = None
    device: Device = "cpu"
    optimizer: OptimizerCalls | None = None
    features: FeatureCut | None = None


class PastDecision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change of the number of data workers of a stage, or of embedding servers, `ago_s` seconds ago."""

    ago_s: float
    action: str
    count: int
    reason: str
    device: Steered = "cpu"


class Status(Message, frozen=True):
    """Answer to `RequestStatus`.

    Attributes:
        incarnation: number of this start of the dispatcher, from 1.
        uptime_s: since this start.
        data_workers, loaders: those that are there.
        data_workers_seen, data_workers_lost, leases_granted, leases_revoked: since this start; a data worker that left
            in an orderly way was not lost.
        leases_per_s: granted over the last seconds.
        elastic: what the elastic controller says of itself; "" without one.
        decisions: the last ones of all controllers, oldest first.
        elastic_gpu, elastic_embedding: what those of the stage on GPUs and of the embedding servers say; "" without.
    """

    incarnation: int
    uptime_s: float
    data_workers: list[DataWorkerStatus]
    loaders: list[LoaderStatus]
    data_workers_seen: int
    data_workers_lost: int
    leases_granted: int
    leases_revoked: int
    leases_per_s: float
    elastic: str = ""
    decisions: list[PastDecision] = []
    elastic_gpu: str = ""
    elastic_embedding: str = ""


# Messages between data worker and loader: who is there, and batches. Holds no logic.


class Hello(Message, frozen=True):
    """First message of a batch connection; the nonce is 32 random bytes, `receiver` the address connected to."""

    worker_id: str
    receiver: str
    nonce: bytes


class Challenge(Message, frozen=True):
    """The loader proves that it holds the job's key, and asks the same of the worker; and to `compress`, if it can."""

    nonce: bytes
    proof: bytes
    compress: bool = False


class Proof(Message, frozen=True):
    """The worker proves that it holds the job's key; batches follow."""

    proof: bytes


class Compressed(Message, frozen=True):
    """Header of a delivery whose frames are compressed.

    Attributes:
        sizes: of its own header and of the frames, before they were compressed; -1 for one that is as it was.
        header: its own header, as the frames are.
    """

    sizes: list[int]
    header: bytes


class CacheReport(msgspec.Struct, frozen=True, array_like=True):
    """What a data worker process's prefix cache did since its report before.

    Attributes:
        hits, misses: fronts of samples that it had, and that were made.
        num_bytes: of those that it had, and of those that it has kept now.
        saved_s: CPU time that the hits took when they were made, without that of reading them back.
        said: lines for the program's log.
    """

    hits: int
    misses: int
    num_bytes: int
    saved_s: float
    said: list[str] = []


class Batch(Message, frozen=True, omit_defaults=True):
    """Header of one step's batch; the tensors' bytes are the frames after it.

    Attributes:
        session_id, step, token: which lease made it.
        num_samples: samples in it; 0 when all were left out, and there is no batch.
        spec: structure of the batch, as `ops.tree` writes it.
        buffers: (frame, offset, num_bytes) of each leaf with bytes of its own.
        origin: `made` for this loader first, from the `cache` of what was made for another one, or made `again`.
        shift: as in `GrantLease`.
        num_skipped: samples of the step that are not in it, for `on_error`.
        left_out: those of them that failed at this step, with what they did; index -1 stands for all.
        snapshot: of a shard whose dataset has a state: where its reader is after this step, see `snapshots`.
        wrote: what its samples were seen to make or change in the file system, on one line.
        cache: what a prefix cache did for its samples; None where nothing.
    """

    session_id: str
    step: int
    token: int
    num_samples: int
    spec: bytes
    buffers: list[tuple[int, int, int]]
    origin: Literal["made", "cache", "again"] = "made"
    shift: int = 0
    num_skipped: int = 0
    left_out: list[Failure] = []
    snapshot: bytes = b""
    wrote: str = ""
    cache: CacheReport | None = None


class Batches(Message, frozen=True):
    """Small batches of one lease that share a message: their `buffers` are places in the frames of all of them."""

    batches: list[Batch]


# Messages between trainers and embedding servers, and between these. Holds no logic.
#
# A row is bytes: its weights, then its optimizer's state. Ids are int64 in native order. The part of an id is its
# remainder by `EMBEDDING_PARTS`; each part belongs to one rank, which alone reads and writes it, and lies on one
# server.

EMBEDDING_PARTS = 256


class EmbeddingTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table: ids are 0 to `num_rows` - 1."""

    name: str
    num_rows: int
    row_bytes: int


class OpenTables(Message, frozen=True):
    """First message of a trainer to each server, and the first again after a connection was lost.

    A client that the server has not met takes the place of those of its rank, and of whoever had the parts: they are
    empty then, and what the others ask is refused. One that it has met goes on: what it has opened stays, and tables
    may be added, and parts as long as it has changed nothing. `WritesKept` with number 0 answers where it names parts.
    Then it repeats, in order and with their numbers, all changes that it has not heard are kept.

    Attributes:
        client: 32 hexadecimal digits, anew for each start of a trainer.
        reply_to: where it takes answers, the best transport first.
        parts: that lie on this server from now on, empty, if the client is new.
    """

    client: str
    rank: int
    reply_to: tuple[str, ...]
    tables: list[EmbeddingTable]
    parts: list[int]


class ReadRows(Message, frozen=True):
    """Asks for rows; the frame is their ids."""

    client: str
    number: int
    table: str


class WriteRows(Message, frozen=True):
    """Rows as they are now; frames: ids, and rows one behind the other. The last write of a row counts.

    Attributes:
        number: larger with each change that this client asks of any server. Changes are made in their order, so what
            comes again is known by a number that is not larger than the last one's.
    """

    client: str
    number: int
    table: str


class ExpectParts(Message, frozen=True):
    """Parts will come from another server, asked later (`SendParts`); what is asked of them waits until then."""

    client: str
    number: int
    parts: list[int]


class SendParts(Message, frozen=True):
    """Send these parts to another server, which expects them; they stay here until `DropParts`.

    The client repeats it, with the same number and the other server's addresses of that time, until that one says
    `PartsHeld`; it writes no row of them here after it.
    """

    client: str
    number: int
    parts: list[int]
    to: tuple[str, ...]


class PartRows(Message, frozen=True):
    """Rows of a part that is sent to another server; frames as in `WriteRows`.

    Attributes:
        client: whose part it is.
        number: of its `SendParts`. What comes of an older one than the part is expected for is of no use any more.
        part: of all these rows; -1: of several.
    """

    client: str
    number: int
    table: str
    part: int


class PartsSent(Message, frozen=True):
    """All rows of these parts were sent; `client` and `number` as in `PartRows`."""

    client: str
    number: int
    parts: list[int]


class DropParts(Message, frozen=True):
    """These parts lie elsewhere now."""

    client: str
    number: int
    parts: list[int]


class AdoptParts(Message, frozen=True):
    """Take parts of a server that is lost, as its log has them; what is asked of them waits until then.

    Where they are expected from that server, this goes before what waits for them. Parts that are here have come whole.

    Attributes:
        log: the lost server's directory.
    """

    client: str
    number: int
    parts: list[int]
    log: str


class MarkGeneration(Message, frozen=True):
    """What was written until now is a generation. Ranks from `world_size` on are no more: their parts are empty then.

    Attributes:
        name: the same for all ranks.
        logs: directories of all servers that have parts of it; each of them is asked the same by each rank.
    """

    client: str
    number: int
    name: str
    world_size: int
    logs: list[str]


class RestoreGeneration(Message, frozen=True):
    """Make these parts what they were in a generation, whichever servers had them.

    Attributes:
        log: the directory of one server that has marked it.
    """

    client: str
    number: int
    name: str
    parts: list[int]
    log: str


class RowsRead(Message, frozen=True):
    """Answers `ReadRows`; frames: rows in the order of the ids, and a byte for each: 1 where there is such a row.

    Where there is none, the row's bytes mean nothing.
    """

    server: str
    number: int


class WritesKept(Message, frozen=True):
    """Writes with numbers up to this one are on the disk, and so is what was dropped."""

    server: str
    number: int


class PartsHeld(Message, frozen=True):
    """Parts that were expected, adopted or restored are here and on the disk.

    Attributes:
        number: of the message that asked for it.
    """

    server: str
    number: int
    parts: list[int]


class GenerationMarked(Message, frozen=True):
    """The generation is on the disk."""

    server: str
    number: int


class EmbeddingRefused(Message, frozen=True):
    """What was asked cannot be done, and no row was written. The client has failed: all else that it asks is refused.

    Attributes:
        number: of the message that asked for it; 0: `OpenTables`, or another client has taken its place.
        text: what failed, the value, the rule, the next step.
    """

    server: str
    number: int
    text: str


__all__ = [
    "EMBEDDING_PARTS",
    "PROTOCOL_VERSION",
    "AddProcess",
    "AdoptParts",
    "Alive",
    "AnyMessage",
    "Batch",
    "BatchFailed",
    "Batches",
    "CacheReport",
    "Carried",
    "Challenge",
    "CloseSession",
    "Compressed",
    "Contents",
    "DataWorkerState",
    "DataWorkerStatus",
    "Delivery",
    "Device",
    "DispatcherToLoader",
    "DispatcherToWorker",
    "DrainWorker",
    "Draining",
    "DropParts",
    "DropPipeline",
    "DropSession",
    "EmbeddingLookups",
    "EmbeddingMessage",
    "EmbeddingRefused",
    "EmbeddingTable",
    "EndOfShard",
    "EndProcesses",
    "ErrorPolicy",
    "ExpectParts",
    "ExtendSession",
    "FailLease",
    "FailStep",
    "Failure",
    "Fate",
    "FeatureCut",
    "FetchPipeline",
    "FinishLease",
    "GenerationMarked",
    "GrantLease",
    "HeldLease",
    "Hello",
    "Interpreter",
    "LeaseRevoked",
    "LeaveLoader",
    "LeaveWorker",
    "ListedOrder",
    "LoaderHeartbeat",
    "LoaderRegistered",
    "LoaderStats",
    "LoaderStatus",
    "LoaderToDispatcher",
    "LoaderToWorker",
    "MarkGeneration",
    "Membership",
    "Message",
    "NeedPipeline",
    "Notice",
    "OpenSession",
    "OpenTables",
    "OptimizerCalls",
    "PartRows",
    "PartsHeld",
    "PartsSent",
    "PastDecision",
    "PlannedOrder",
    "ProcessesEnded",
    "Program",
    "Proof",
    "ProvidePipeline",
    "Ranges",
    "ReadRows",
    "Refused",
    "RegisterLoader",
    "RegisterWorker",
    "RenewWorker",
    "ReportProgress",
    "RequestStatus",
    "RestoreGeneration",
    "RevokeLease",
    "RowsRead",
    "SendParts",
    "SessionSpec",
    "ShardOrder",
    "Sharing",
    "ShutDown",
    "Status",
    "SteerDataWorkers",
    "Steered",
    "StepList",
    "StepsLost",
    "ToDispatcher",
    "TrimLease",
    "UnknownPeer",
    "WorkerHeartbeat",
    "WorkerRegistered",
    "WorkerSeeds",
    "WorkerToDispatcher",
    "WorkerToLoader",
    "WriteRows",
    "WritesKept",
]

LoaderToDispatcher = (
    RegisterLoader
    | ProvidePipeline
    | OpenSession
    | ExtendSession
    | ReportProgress
    | LoaderHeartbeat
    | CloseSession
    | EndProcesses
    | LeaveLoader
)
WorkerToDispatcher = (
    RegisterWorker
    | WorkerHeartbeat
    | FinishLease
    | FailLease
    | FailStep
    | EndOfShard
    | FetchPipeline
    | Draining
    | LeaveWorker
)
ToDispatcher = LoaderToDispatcher | WorkerToDispatcher | RequestStatus | SteerDataWorkers
DispatcherToLoader = (
    LoaderRegistered
    | ProcessesEnded
    | NeedPipeline
    | Membership
    | Notice
    | LeaseRevoked
    | StepsLost
    | BatchFailed
    | Alive
    | UnknownPeer
    | Refused
    | ShutDown
)
DispatcherToWorker = (
    WorkerRegistered
    | GrantLease
    | TrimLease
    | RevokeLease
    | DrainWorker
    | RenewWorker
    | AddProcess
    | DropSession
    | ProvidePipeline
    | DropPipeline
    | Alive
    | UnknownPeer
    | Refused
    | ShutDown
)
EmbeddingMessage = (
    OpenTables
    | ReadRows
    | WriteRows
    | ExpectParts
    | SendParts
    | PartRows
    | PartsSent
    | DropParts
    | AdoptParts
    | MarkGeneration
    | RestoreGeneration
    | RowsRead
    | WritesKept
    | PartsHeld
    | GenerationMarked
    | EmbeddingRefused
)
Delivery = Batch | Batches | EndOfShard
# What goes over a transport's connections, once they are proven.
Carried = Delivery | EmbeddingMessage
WorkerToLoader = Hello | Proof | Compressed | Carried
LoaderToWorker = Challenge
AnyMessage = ToDispatcher | Status | DispatcherToLoader | DispatcherToWorker | WorkerToLoader | LoaderToWorker
