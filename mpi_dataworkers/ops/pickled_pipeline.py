"""A pipeline as it travels: pickled, with what its code needs of the program around it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.ops.code_globals import Reached, is_own
from hetstream.mpi_dataworkers.ops.pickling import (
    RunsUserCode,
    digest_of,
    digest_of_buffers,
    is_of_started_manager,
    pickle_apart,
    unpickle,
)
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline
from hetstream.mpi_dataworkers.ops.process_memory import PrivatePages
from hetstream.mpi_dataworkers.ops.program import program_of, settings_of
from hetstream.mpi_dataworkers.process.handlers import others
from hetstream.mpi_dataworkers.wire.codec import Buffer, aligned
from hetstream.mpi_dataworkers.wire.messages import Program


@dataclass(frozen=True)
class PickledPipeline:
    """A pipeline in pickled form, with what its code needs of the program around it.

    Attributes:
        pipeline_id: see `digest_of`.
        program: the trainer's.
        settings: what the trainer has set, for `ops.program.SettingsInForce`.
        blob: the pickle stream, for `load_pipeline`.
        buffers: the large buffers that the stream refers to. In the trainer they are the dataset's own memory; in a
            data worker they are shared with others until someone writes to them.
        shared: numbers of the buffers that lie in memory which the trainer shares with other processes; where samples
            are made, of those that they could write to.
    """

    pipeline_id: str
    program: Program
    settings: bytes
    blob: Buffer
    buffers: Sequence[Buffer] = ()
    shared: Sequence[int] = ()

    def with_buffers(self, buffers: Sequence[Buffer]) -> PickledPipeline:
        """The same pipeline with other bytes in its buffers."""
        pipeline_id = digest_of(self.blob, buffers, self.program, self.settings)
        return replace(self, pipeline_id=pipeline_id, buffers=buffers)

    def in_private(self) -> PickledPipeline:
        """The same in memory of its own: what samples write there is not written into the program's arrays."""
        return replace(self, buffers=[_copy_of(buffer) for buffer in self.buffers], shared=self.written)

    @property
    def written(self) -> list[int]:
        """Of the shared buffers those that samples could write to."""
        return [number for number in self.shared if not memoryview(self.buffers[number]).readonly]

    def look_at_shared(self) -> Callable[[], object]:
        """In a data worker, what is another one when it has written to the buffers of shared memory: pages that are
        its own, as long as none is, or their digest."""
        pages = PrivatePages([self.buffers[number] for number in self.shared])
        try:
            return self.digest_of_shared if any(map(any, pages.own())) else pages.look
        except OSError:  # a kernel that shows no pages
            return self.digest_of_shared

    def digest_of_shared(self) -> str:
        """Digest of the buffers that lie in shared memory, as they are now."""
        return digest_of_buffers([self.buffers[number] for number in self.shared])


def _copy_of(buffer: Buffer) -> Buffer:
    copied = aligned(memoryview(buffer).nbytes).data
    copied[:] = memoryview(buffer).cast("B")
    return copied


def pickle_pipeline(pipeline: Pipeline, knows_hetstream: bool = True, runs_user_code: bool = True) -> PickledPipeline:
    """Pickle a pipeline. Classes and functions of `__main__` travel by value, those of modules by name.

    Args:
        pipeline: the pipeline.
        knows_hetstream: see `Program`.
        runs_user_code: see `pickle_apart`.

    Raises:
        PipelineError: something in it cannot be pickled; the message names the object.
        RunsUserCode: see `pickle_apart`.
    """
    try:
        pickled = pickle_apart(pipeline, runs_user_code)
    except RunsUserCode:
        raise
    except others() as error:  # pickling runs user code (__reduce__, __getstate__): any exception may come
        where = find_unpicklable(pipeline, runs_user_code=runs_user_code)
        raise PipelineError(
            f"the dataset cannot be sent to data workers: {where} cannot be pickled ({error}). Open files, locks and "
            "connections belong into __getitem__ or worker_init_fn, or leave them out in __getstate__."
        ) from error
    try:
        reached = Reached(pickled.met, is_own)
        program, settings = program_of(reached, knows_hetstream), settings_of(reached, knows_hetstream)
    except PipelineError:
        raise
    except others() as error:  # looking at a proxy runs user code, too
        raise PipelineError(
            f"the dataset cannot be sent to data workers: an object that its code names cannot be looked at ({error!r})"
        ) from error
    return PickledPipeline("", program, settings, pickled.blob, shared=pickled.shared).with_buffers(pickled.buffers)


def has_changed(pickled: PickledPipeline) -> bool:
    """Whether the program has written to the arrays of a dataset since it was defined in this process."""
    return pickled.with_buffers(pickled.buffers).pipeline_id != pickled.pipeline_id


def load_pipeline(pickled: PickledPipeline) -> Pipeline:
    """Rebuild a pipeline, in a data worker in the program that it comes from.

    Raises:
        PipelineError: it cannot be rebuilt here, or its dataset has another length here.
    """
    try:
        pipeline: Pipeline = unpickle(pickled.blob, pickled.buffers)[0]
        here = len(pipeline.dataset) if pipeline.num_samples >= 0 else -1
    except BaseException as error:  # unpickling runs user code: anything may come (a module that calls sys.exit, too)
        text = f"{type(error).__name__}: {error}"
        raise PipelineError(
            f"the dataset cannot be rebuilt in a data worker: {text}. What it imports and opens when it is unpickled "
            "must be on the data workers' hosts, under the same names."
        ) from error
    if here != pipeline.num_samples:
        raise PipelineError(
            f"the dataset has {here} samples in a data worker and {pipeline.num_samples} in the trainer: its files "
            "changed, or differ between hosts. All hosts must see the same data."
        )
    return pipeline


def copy_of(pickled: PickledPipeline) -> tuple[Pipeline, list[type]]:
    """A copy of a pipeline in the process that has defined it. Its classes are the program's own, as they are now.

    Args:
        pickled: in private memory; what samples write is written there.

    Returns:
        The copy, and classes of the script that the program has changed since.

    Raises:
        PipelineError: user code raised.
    """
    try:
        return unpickle(pickled.blob, pickled.buffers)
    except Exception as error:  # unpickling runs user code: any exception may come
        raise PipelineError(f"the dataset cannot be rebuilt in the trainer: {type(error).__name__}: {error}") from error


def difference(copied: Any, current: Any, path: str = "", depth: int = 0) -> str:
    """Where two objects differ, as `dataset.transform`, as far as pickling shows; "" when it shows nothing.

    Args:
        copied: the earlier one, unpickled.
        current: the later one, of which a part can no longer be pickled.
    """
    try:
        # Through pickle once, as the earlier one: what Python shares between objects is then alike.
        same = cloudpickle.dumps(copied) == cloudpickle.dumps(unpickle(cloudpickle.dumps(current))[0])
        return "" if same else path.lstrip(".") or "it"
    except others():  # pickling runs user code; the question is only whether it raises
        if depth >= 8 or type(copied) is not type(current) or not hasattr(current, "__dict__"):
            return ""
    before, after = vars(copied), vars(current)
    for name in before.keys() & after.keys():
        if found := difference(before[name], after[name], f"{path}.{name}", depth + 1):
            return found
    return ""


def find_unpicklable(value: Any, path: str = "", above: Sequence[Any] = (), runs_user_code: bool = True) -> str:
    """Name the innermost object that cannot be pickled, as `dataset.transform.lock (_thread.lock)`, or of a script
    `dataset.__getitem__ -> global LOCK (_thread.lock)`."""
    above = (*above, value)
    try:
        parts = list(_named_parts(value)) if len(above) <= 8 else []
    except others():  # a proxy's own code, which asks for its object
        parts = []
    for name, part in parts:
        try:
            pickle_apart(part, runs_user_code)
        except RunsUserCode:
            continue
        except others():  # the question is only whether it raises
            if not any(part is parent for parent in above):
                return find_unpicklable(part, path + name, above, runs_user_code)
    return f"{path.lstrip('.') or 'it'} ({type(value).__module__}.{type(value).__qualname__})"


def _named_parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What is pickled with an object. Its methods are, where its class travels by value, with what they read."""
    if is_of_started_manager(value):  # it is refused itself
        return
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif inspect.isfunction(value):
        try:
            found = inspect.getclosurevars(value)
        except ValueError:  # a name of its closure has no value yet
            return
        yield from ((f".<closure>.{name}", item) for name, item in found.nonlocals.items())
        yield from ((f" -> global {name}", item) for name, item in found.globals.items())
    elif not inspect.isclass(value):
        yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())
        for kind in type(value).__mro__:
            yield from ((f".{name}", item) for name, item in vars(kind).items() if inspect.isfunction(item))
