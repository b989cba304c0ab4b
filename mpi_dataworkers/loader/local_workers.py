"""The pipeline in process: torch's own DataLoader over steps, with the worker processes that the program asks for."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data
from torch import _utils as torch_utils
from torch.utils.data import dataloader as torch_dataloader

from hetstream.mpi_dataworkers.ops.entered import enter_worker
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline, SampleError, generators_kept, make_step

_ExceptionWrapper: Any = torch_utils.ExceptionWrapper
_TorchLoader: Any = torch.utils.data.DataLoader


class FailedStep:
    """In the place of a step: user code raised while torch's own DataLoader made it.

    A value, because an exception would look like torch's own (a timeout, a process that died), which takes no step.

    Args:
        error: what user code raised.
        in_trainer: in the training process; else the exception has to travel.
    """

    def __init__(self, error: BaseException, in_trainer: bool) -> None:
        kind = type(error)
        where = "in a process of the loader"
        self._error: Any = error if in_trainer else _ExceptionWrapper((kind, error, error.__traceback__), where)

    def reraise(self) -> None:
        """Raise the exception, with its own type."""
        if isinstance(self._error, BaseException):
            raise self._error
        self._error.reraise()


class _StepDataset(torch.utils.data.Dataset[Any]):
    """Steps as elements: lets torch's own worker processes run the pipeline, a batch an element."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._is_ready = False

    def __getitem__(self, step: Any) -> Any:
        indices, seeds, policy, form = step
        if not self._is_ready:  # in the process that makes the steps, after worker_init_fn
            self._pipeline, self._is_ready = self._pipeline.with_own_generators(), True
        in_trainer = torch.utils.data.get_worker_info() is None
        try:
            if in_trainer:
                with generators_kept(self._pipeline.own_generators):
                    made = make_step(self._pipeline, indices, seeds, policy, form)
            else:
                made = make_step(self._pipeline, indices, seeds, policy, form)
        except SampleError as error:
            return FailedStep(error.user_error(), in_trainer)
        return made


def no_collate(batch: Any) -> Any:
    """The batch as it is: torch's own DataLoader gets whole ones."""
    return batch


class PlainLoader(_TorchLoader):  # type: ignore[misc]
    """torch's own DataLoader, as it is without the hook and whatever else has changed its class."""

    _iterator: Any

    def _get_iterator(self) -> Any:
        kind = torch_dataloader._MultiProcessingDataLoaderIter
        return kind(self) if self.num_workers else torch_dataloader._SingleProcessDataLoaderIter(self)

    def __iter__(self) -> Any:
        if not self.persistent_workers:
            return self._get_iterator()
        if self._iterator is None:
            self._iterator = self._get_iterator()
        else:
            self._iterator._reset(self)
        return self._iterator


@dataclass(frozen=True)
class BeginWorker:
    """The `worker_init_fn` of torch's processes that run a pipeline: they show user code what a data worker shows."""

    pipeline: Pipeline
    base_seed: int

    def __call__(self, worker_id: int) -> None:
        enter_worker(self.pipeline, self.base_seed, worker_id, begins=True)


class _CurrentSteps:
    """The sampler of torch's DataLoader: the steps of the pass that began last."""

    def __init__(self) -> None:
        self.steps: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.steps


class LocalWorkers:
    """torch's own DataLoader over the steps of passes, one after the other; its worker processes may outlive a pass.

    Args:
        pipeline: what makes a step.
        torch_options: keywords of torch's DataLoader.
        base_seed: of the worker processes.
    """

    def __init__(self, pipeline: Pipeline, torch_options: dict[str, Any], base_seed: int) -> None:
        self._steps = _CurrentSteps()
        self._current: weakref.ref[object] | None = None
        self._loader = PlainLoader(
            _StepDataset(pipeline),
            batch_size=None,
            sampler=self._steps,
            collate_fn=no_collate,
            generator=torch.Generator(),  # its own, so that the program's generators are not advanced
            **torch_options | {"worker_init_fn": BeginWorker(pipeline, base_seed)},
        )

    def begin(self, owner: object, steps: Iterator[Any]) -> Iterator[Any]:
        """Make steps; ends the owner before this one, whose worker processes these are."""
        self._steps.steps, self._current = steps, weakref.ref(owner)
        iterator: Iterator[Any] = iter(self._loader)
        return iterator

    def is_current(self, owner: object) -> bool:
        """Whether the worker processes still work for this owner."""
        return self._current is not None and self._current() is owner


def early_end(step: int) -> RuntimeError:
    """torch's own DataLoader says that there is no more, and there is: this is not the end of the data."""
    return RuntimeError(
        f"the DataLoader's processes ended before step {step}: one of them died, or user code (worker_init_fn, "
        "the sampler) raised"
    )
