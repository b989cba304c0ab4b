"""hetstream: training batches from CPU nodes, streamed to the GPUs of a Slurm cluster.

What a program imports is here, the loader and the checkpointer; every error is in `hetstream.errors`.

    from hetstream import DataLoader, FlashCheckpointer
    from hetstream.errors import NoCheckpoint

`import hetstream` loads neither torch nor zmq. A name's own module is imported when the name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the same names as in the tables below, for editors and type checkers; `tests/test_door.py` compares
    from hetstream.base.errors import HetstreamError as HetstreamError
    from hetstream.checkpoint.flash.checkpointer import FlashCheckpointer as FlashCheckpointer
    from hetstream.checkpoint.flash.destinations import LoadedCheckpoint as LoadedCheckpoint
    from hetstream.checkpoint.flash.options import CheckpointOptions as CheckpointOptions
    from hetstream.checkpoint.flash.options import CheckpointStats as CheckpointStats
    from hetstream.checkpoint.flash.reader import CheckpointReader as CheckpointReader
    from hetstream.checkpoint.policy import Adaptive as Adaptive
    from hetstream.checkpoint.policy import Best as Best
    from hetstream.checkpoint.policy import Every as Every
    from hetstream.checkpoint.policy import Retention as Retention
    from hetstream.hetjob.master.local import data_workers as data_workers
    from hetstream.mpi_dataworkers.embedding.lookahead import lookahead as lookahead
    from hetstream.mpi_dataworkers.embedding.lookahead import with_lookups as with_lookups
    from hetstream.mpi_dataworkers.embedding.modules import Embedding as Embedding
    from hetstream.mpi_dataworkers.embedding.modules import EmbeddingBag as EmbeddingBag
    from hetstream.mpi_dataworkers.embedding.modules import EmbeddingBagCollection as EmbeddingBagCollection
    from hetstream.mpi_dataworkers.embedding.modules import EmbeddingBagConfig as EmbeddingBagConfig
    from hetstream.mpi_dataworkers.embedding.modules import torch_state_dict as torch_state_dict
    from hetstream.mpi_dataworkers.embedding.optimizers import RowAdam as RowAdam
    from hetstream.mpi_dataworkers.embedding.optimizers import RowSGD as RowSGD
    from hetstream.mpi_dataworkers.embedding.optimizers import RowWiseAdagrad as RowWiseAdagrad
    from hetstream.mpi_dataworkers.generators import deterministic as deterministic
    from hetstream.mpi_dataworkers.generators import numpy_sample_generator as numpy_sample_generator
    from hetstream.mpi_dataworkers.generators import sample_generator as sample_generator
    from hetstream.mpi_dataworkers.images.folder import ImageFolder as ImageFolder
    from hetstream.mpi_dataworkers.images.folder import ImageTar as ImageTar
    from hetstream.mpi_dataworkers.images.recipes import EvaluationRecipe as EvaluationRecipe
    from hetstream.mpi_dataworkers.images.recipes import TrainingRecipe as TrainingRecipe
    from hetstream.mpi_dataworkers.loader.data_loader import DataLoader as DataLoader
    from hetstream.mpi_dataworkers.loader.mixing import mix as mix
    from hetstream.mpi_dataworkers.order.data_state import merge_states as merge_states
    from hetstream.mpi_dataworkers.order.visitation import ShardingPolicy as ShardingPolicy
    from hetstream.mpi_dataworkers.order.visitation import Visitation as Visitation
    from hetstream.mpi_dataworkers.partitioner.partition import partition as partition

    __version__: str
else:
    # The module of each name.
    _MODULES = {
        "Adaptive": "checkpoint.policy",
        "Best": "checkpoint.policy",
        "CheckpointOptions": "checkpoint.flash.options",
        "CheckpointReader": "checkpoint.flash.reader",
        "CheckpointStats": "checkpoint.flash.options",
        "DataLoader": "mpi_dataworkers.loader.data_loader",
        "Embedding": "mpi_dataworkers.embedding.modules",
        "EmbeddingBag": "mpi_dataworkers.embedding.modules",
        "EmbeddingBagCollection": "mpi_dataworkers.embedding.modules",
        "EmbeddingBagConfig": "mpi_dataworkers.embedding.modules",
        "EvaluationRecipe": "mpi_dataworkers.images.recipes",
        "Every": "checkpoint.policy",
        "FlashCheckpointer": "checkpoint.flash.checkpointer",
        "HetstreamError": "base.errors",
        "ImageFolder": "mpi_dataworkers.images.folder",
        "ImageTar": "mpi_dataworkers.images.folder",
        "LoadedCheckpoint": "checkpoint.flash.destinations",
        "Retention": "checkpoint.policy",
        "RowAdam": "mpi_dataworkers.embedding.optimizers",
        "RowSGD": "mpi_dataworkers.embedding.optimizers",
        "RowWiseAdagrad": "mpi_dataworkers.embedding.optimizers",
        "ShardingPolicy": "mpi_dataworkers.order.visitation",
        "TrainingRecipe": "mpi_dataworkers.images.recipes",
        "Visitation": "mpi_dataworkers.order.visitation",
        "data_workers": "hetjob.master.local",
        "deterministic": "mpi_dataworkers.generators",
        "lookahead": "mpi_dataworkers.embedding.lookahead",
        "merge_states": "mpi_dataworkers.order.data_state",
        "mix": "mpi_dataworkers.loader.mixing",
        "numpy_sample_generator": "mpi_dataworkers.generators",
        "partition": "mpi_dataworkers.partitioner.partition",
        "sample_generator": "mpi_dataworkers.generators",
        "torch_state_dict": "mpi_dataworkers.embedding.modules",
        "with_lookups": "mpi_dataworkers.embedding.lookahead",
    }
    __all__ = [*_MODULES, "__version__"]

    def _module_of(name):
        try:
            return importlib.import_module(f"hetstream.{_MODULES[name]}")
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            message = f"hetstream.{name} needs torch, which is not installed. Run: pip install 'hetstream[torch]'"
            raise ModuleNotFoundError(message, name="torch") from None
        except AttributeError as error:  # which would read as if the name itself were missing
            raise ImportError(f"hetstream.{name} cannot be imported: {error}") from error

    def _version():
        metadata = importlib.import_module("importlib.metadata")
        try:
            return metadata.version("hetstream")
        except metadata.PackageNotFoundError:
            return "0+unknown"  # a checkout in PYTHONPATH, which nobody has installed

    def __getattr__(name):  # PEP 562: called once for each name, which is kept below
        if name in _MODULES:
            value = getattr(_module_of(name), name)
        elif name == "errors":
            value = importlib.import_module("hetstream.errors")
        elif name == "__version__":
            value = _version()
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__():
        return [*__all__, "errors"]
