"""What loader, dispatcher and data worker talk about: orders, sessions, programs, failures. Holds no logic."""

from __future__ import annotations

from typing import Literal

import msgspec

PROTOCOL_VERSION = 6
# Data workers and loaders tell the dispatcher this often that they are there.
HEARTBEAT_S = 0.5

Ranges = list[tuple[int, int]]
# What data workers make a stage of the pipeline with.
Device = Literal["cpu", "gpu"]


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
    """

    base_seed: int
    passes_before: int
    generators: list[int]
    are_kept: bool = False


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
