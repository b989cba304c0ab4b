"""hetstream: training batches from CPU nodes, streamed to the GPUs of a Slurm cluster.

What a program imports is here: the loader, the checkpointer, and every error. Importing this package imports neither
torch nor zmq; a name brings what it needs when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetstream.base.errors import ConfigError, HetstreamError, OptionsError, UsageError
    from hetstream.checkpoint.errors import (
        CheckpointError,
        Damaged,
        DamagedCheckpoint,
        DamagedLayout,
        DamagedLineage,
        DamagedSegment,
        DirectoryInUse,
        DirectoryNotWritable,
        DirectoryReplaced,
        ForeignOwner,
        MissingRanks,
        NoCheckpoint,
        NotEnoughSpace,
        OtherRelease,
        ReplicaError,
        SharedMemoryFull,
        StateMismatch,
        StoreInUse,
        UnsupportedState,
        WriterError,
    )
    from hetstream.checkpoint.flash.checkpointer import FlashCheckpointer
    from hetstream.checkpoint.flash.options import CheckpointOptions
    from hetstream.checkpoint.flash.reader import CheckpointReader
    from hetstream.checkpoint.flash.restore.destinations import LoadedCheckpoint
    from hetstream.checkpoint.flash.stats import CheckpointStats
    from hetstream.checkpoint.policy.interval import Adaptive, Every
    from hetstream.checkpoint.policy.retention import Best, Retention
    from hetstream.hetjob.errors import (
        ConversionError,
        DirectiveError,
        MasterError,
        ProgramNotFound,
        ServiceNotFound,
        SiteError,
        SlurmCommandError,
        WritersError,
    )
    from hetstream.mpi_dataworkers.errors import (
        AddressInUse,
        AuthenticationError,
        DataWorkerDied,
        JobNameConflict,
        PipelineError,
        ProtocolError,
        RemoteError,
        ServiceEnded,
        ServiceError,
        ServiceUnavailable,
        SourceError,
        StateError,
        Superseded,
    )
    from hetstream.mpi_dataworkers.generators import numpy_sample_generator, sample_generator
    from hetstream.mpi_dataworkers.loader.data_loader import DataLoader
    from hetstream.mpi_dataworkers.loader.mixing import mix
    from hetstream.mpi_dataworkers.order.data_state import merge_states
    from hetstream.mpi_dataworkers.order.visitation import ShardingPolicy, Visitation
    from hetstream.slurm_plugin.errors import (
        BootFailed,
        ClusterExists,
        DaemonStateError,
        DamagedRecord,
        DevclusterError,
        HistoryError,
        InstallFailed,
        NetworkFailed,
        NoCluster,
        ServeError,
        SlurmMissing,
        StillInUse,
        TeardownFailed,
        UnknownJob,
        UnreadableAnswer,
        UnsupportedSlurm,
    )

__all__ = [
    "Adaptive",
    "AddressInUse",
    "AuthenticationError",
    "Best",
    "BootFailed",
    "CheckpointError",
    "CheckpointOptions",
    "CheckpointReader",
    "CheckpointStats",
    "ClusterExists",
    "ConfigError",
    "ConversionError",
    "DaemonStateError",
    "Damaged",
    "DamagedCheckpoint",
    "DamagedLayout",
    "DamagedLineage",
    "DamagedRecord",
    "DamagedSegment",
    "DataLoader",
    "DataWorkerDied",
    "DevclusterError",
    "DirectiveError",
    "DirectoryInUse",
    "DirectoryNotWritable",
    "DirectoryReplaced",
    "Every",
    "FlashCheckpointer",
    "ForeignOwner",
    "HetstreamError",
    "HistoryError",
    "InstallFailed",
    "JobNameConflict",
    "LoadedCheckpoint",
    "MasterError",
    "MissingRanks",
    "NetworkFailed",
    "NoCheckpoint",
    "NoCluster",
    "NotEnoughSpace",
    "OptionsError",
    "OtherRelease",
    "PipelineError",
    "ProgramNotFound",
    "ProtocolError",
    "RemoteError",
    "ReplicaError",
    "Retention",
    "ServeError",
    "ServiceEnded",
    "ServiceError",
    "ServiceNotFound",
    "ServiceUnavailable",
    "ShardingPolicy",
    "SharedMemoryFull",
    "SiteError",
    "SlurmCommandError",
    "SlurmMissing",
    "SourceError",
    "StateError",
    "StateMismatch",
    "StillInUse",
    "StoreInUse",
    "Superseded",
    "TeardownFailed",
    "UnknownJob",
    "UnreadableAnswer",
    "UnsupportedSlurm",
    "UnsupportedState",
    "UsageError",
    "Visitation",
    "WriterError",
    "WritersError",
    "merge_states",
    "mix",
    "numpy_sample_generator",
    "sample_generator",
]

_HOMES = {
    "hetstream.base.errors": (
        "ConfigError",
        "HetstreamError",
        "OptionsError",
        "UsageError",
    ),
    "hetstream.checkpoint.errors": (
        "CheckpointError",
        "Damaged",
        "DamagedCheckpoint",
        "DamagedLayout",
        "DamagedLineage",
        "DamagedSegment",
        "DirectoryInUse",
        "DirectoryNotWritable",
        "DirectoryReplaced",
        "ForeignOwner",
        "MissingRanks",
        "NoCheckpoint",
        "NotEnoughSpace",
        "OtherRelease",
        "ReplicaError",
        "WriterError",
        "SharedMemoryFull",
        "StateMismatch",
        "StoreInUse",
        "UnsupportedState",
    ),
    "hetstream.checkpoint.flash.checkpointer": ("FlashCheckpointer",),
    "hetstream.checkpoint.flash.options": ("CheckpointOptions",),
    "hetstream.checkpoint.flash.reader": ("CheckpointReader",),
    "hetstream.checkpoint.flash.restore.destinations": ("LoadedCheckpoint",),
    "hetstream.checkpoint.flash.stats": ("CheckpointStats",),
    "hetstream.checkpoint.policy.interval": (
        "Adaptive",
        "Every",
    ),
    "hetstream.checkpoint.policy.retention": (
        "Best",
        "Retention",
    ),
    "hetstream.hetjob.errors": (
        "ConversionError",
        "DirectiveError",
        "MasterError",
        "ProgramNotFound",
        "WritersError",
        "ServiceNotFound",
        "SiteError",
        "SlurmCommandError",
    ),
    "hetstream.mpi_dataworkers.order.data_state": ("merge_states",),
    "hetstream.mpi_dataworkers.errors": (
        "AddressInUse",
        "AuthenticationError",
        "DataWorkerDied",
        "JobNameConflict",
        "PipelineError",
        "ProtocolError",
        "RemoteError",
        "ServiceEnded",
        "ServiceError",
        "ServiceUnavailable",
        "SourceError",
        "StateError",
        "Superseded",
    ),
    "hetstream.mpi_dataworkers.generators": (
        "numpy_sample_generator",
        "sample_generator",
    ),
    "hetstream.mpi_dataworkers.loader.data_loader": ("DataLoader",),
    "hetstream.mpi_dataworkers.loader.mixing": ("mix",),
    "hetstream.mpi_dataworkers.order.visitation": (
        "ShardingPolicy",
        "Visitation",
    ),
    "hetstream.slurm_plugin.errors": (
        "BootFailed",
        "ClusterExists",
        "DaemonStateError",
        "DamagedRecord",
        "DevclusterError",
        "HistoryError",
        "InstallFailed",
        "NetworkFailed",
        "NoCluster",
        "ServeError",
        "SlurmMissing",
        "StillInUse",
        "TeardownFailed",
        "UnknownJob",
        "UnreadableAnswer",
        "UnsupportedSlurm",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
