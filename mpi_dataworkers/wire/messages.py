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
    whoever holds the job's key asks the dispatcher RequestStatus and gets Status
    the job's elastic controller tells the dispatcher SteerDataWorkers and gets Status

They are defined by who speaks to whom: `loader_messages.py`, `worker_messages.py`, `delivery_messages.py` and
`status_messages.py`; `work.py` has what they talk about. Everybody imports them from here.
"""

from __future__ import annotations

from hetstream.mpi_dataworkers.wire.delivery_messages import Batch, Batches, Challenge, Compressed, Hello, Proof
from hetstream.mpi_dataworkers.wire.loader_messages import (
    BatchFailed,
    CloseSession,
    Contents,
    EndProcesses,
    ExtendSession,
    LeaseRevoked,
    LeaveLoader,
    LoaderHeartbeat,
    LoaderRegistered,
    Membership,
    NeedPipeline,
    Notice,
    OpenSession,
    ProcessesEnded,
    ProvidePipeline,
    RegisterLoader,
    ReportProgress,
    StepsLost,
)
from hetstream.mpi_dataworkers.wire.status_messages import (
    DataWorkerState,
    DataWorkerStatus,
    LoaderStatus,
    PastDecision,
    RequestStatus,
    Status,
    SteerDataWorkers,
)
from hetstream.mpi_dataworkers.wire.work import (
    PROTOCOL_VERSION,
    Device,
    EmbeddingLookups,
    ErrorPolicy,
    Failure,
    FeatureCut,
    Interpreter,
    ListedOrder,
    LoaderStats,
    Message,
    OptimizerCalls,
    PlannedOrder,
    Program,
    Ranges,
    SessionSpec,
    ShardOrder,
    Sharing,
    StepList,
    WorkerSeeds,
)
from hetstream.mpi_dataworkers.wire.worker_messages import (
    AddProcess,
    Alive,
    Draining,
    DrainWorker,
    DropPipeline,
    DropSession,
    EndOfShard,
    FailLease,
    FailStep,
    Fate,
    FetchPipeline,
    FinishLease,
    GrantLease,
    HeldLease,
    LeaveWorker,
    Refused,
    RegisterWorker,
    RenewWorker,
    RevokeLease,
    ShutDown,
    TrimLease,
    UnknownPeer,
    WorkerHeartbeat,
    WorkerRegistered,
)

__all__ = [
    "PROTOCOL_VERSION",
    "AddProcess",
    "Alive",
    "AnyMessage",
    "Batch",
    "BatchFailed",
    "Batches",
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
    "DropPipeline",
    "DropSession",
    "EmbeddingLookups",
    "EndOfShard",
    "EndProcesses",
    "ErrorPolicy",
    "ExtendSession",
    "FailLease",
    "FailStep",
    "Failure",
    "Fate",
    "FeatureCut",
    "FetchPipeline",
    "FinishLease",
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
    "Membership",
    "Message",
    "NeedPipeline",
    "Notice",
    "OpenSession",
    "OptimizerCalls",
    "PastDecision",
    "PlannedOrder",
    "ProcessesEnded",
    "Program",
    "Proof",
    "ProvidePipeline",
    "Ranges",
    "Refused",
    "RegisterLoader",
    "RegisterWorker",
    "RenewWorker",
    "ReportProgress",
    "RequestStatus",
    "RevokeLease",
    "SessionSpec",
    "ShardOrder",
    "Sharing",
    "ShutDown",
    "Status",
    "SteerDataWorkers",
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
Delivery = Batch | Batches | EndOfShard
WorkerToLoader = Hello | Proof | Compressed | Delivery
LoaderToWorker = Challenge
AnyMessage = ToDispatcher | Status | DispatcherToLoader | DispatcherToWorker | WorkerToLoader | LoaderToWorker
