"""What a loader has given to data workers: its pipeline as it was when it was sent, and a copy of that in the trainer.

Used by `loader_connection.py`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.loader.live_objects import ask_apart
from hetstream.mpi_dataworkers.loader.process_connection import service_at
from hetstream.mpi_dataworkers.loader.unseen import left_out, unseen_change
from hetstream.mpi_dataworkers.ops.entered import EnteredPipeline
from hetstream.mpi_dataworkers.ops.pickled_pipeline import (
    PickledPipeline,
    copy_of,
    difference,
    has_changed,
    pickle_pipeline,
)
from hetstream.mpi_dataworkers.ops.pickling import RunsUserCode
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline, Stages, same_stages
from hetstream.mpi_dataworkers.ops.program import LIBRARY_SETTINGS
from hetstream.mpi_dataworkers.ops.registries import registered
from hetstream.mpi_dataworkers.ops.shared_memory import WriteWatch
from hetstream.mpi_dataworkers.wire.codec import Buffer, aligned
from hetstream.mpi_dataworkers.wire.messages import ProvidePipeline
from hetstream.mpi_dataworkers.wire.pipeline_transfer import HandoverFailed, buffers_in, pack, places_of, read_into

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SentPipeline:
    """A pipeline as data workers have it.

    Attributes:
        message: what they are sent.
        pickled: the same here. Its buffers are the dataset's own memory: the program may have written to them since.
        shared_digest: of those that lie in shared memory, as they were sent.
        stages: the program's own objects.
    """

    message: ProvidePipeline
    pickled: PickledPipeline
    shared_digest: str
    stages: Stages


class SentPipelines:
    """The pipelines that a loader has sent.

    Args:
        address_file: of the service.
        knows_hetstream: see `Program`.

    Attributes:
        last: what was sent last.
    """

    def __init__(self, address_file: Path, knows_hetstream: bool = True) -> None:
        self._knows_hetstream = knows_hetstream
        self._address_file = address_file
        self._directory_found: Path | None = None
        self.last: SentPipeline | None = None
        self._said_kept = False
        self._copied: tuple[str, EnteredPipeline, WriteWatch] | None = None
        # What was sent with other stages, and what it was made of.
        self._restaged: tuple[SentPipeline, SentPipeline] | None = None

    def now(self, pipeline: Pipeline) -> SentPipeline:
        """A pipeline as it is now.

        A dataset that the program has used may hold what cannot be pickled (an open file): it is then as it was last
        sent, if nothing else of it shows a change.

        Raises:
            PipelineError: it cannot be pickled, or not be handed over.
        """
        objects = _objects_of(pipeline)
        try:
            pickled = self._pickled(pipeline)
        except PipelineError as error:
            if self.last is None:
                raise
            self.last = self.with_stages(self.last, pipeline)
            if changed := _change_since(self.last.pickled, pipeline):
                raise PipelineError(f"{changed} changed since data workers got it, and now {error}") from error
            if not self._said_kept:
                _log.warning("hetstream: data workers keep the dataset as they got it: now %s", error)
            self._said_kept = True
            return self.last
        if not self._knows_hetstream:
            if found := registered(pickled.program.modules, LIBRARY_SETTINGS):
                raise PipelineError(f"{found}. A module that the dataset's own imports can do it")
            if path := left_out(pickled, objects):
                raise PipelineError(f"data workers would have another {path}: its class leaves it out of its pickle")
            if change := unseen_change(pickled.pipeline_id, objects):
                raise PipelineError(f"the program has changed what data workers do not see: {change}")
        self.last = self._sent(pickled, pickled.buffers, self.last, pipeline.stages)
        return self.last

    def with_shared_memory(self, sent: SentPipeline) -> SentPipeline:
        """A pipeline as it was sent, but with what the program has written into shared memory since.

        Raises:
            PipelineError: it cannot be handed over.
        """
        pickled = sent.pickled
        if pickled.digest_of_shared() == sent.shared_digest:
            return sent
        buffers = list(pickled.buffers)
        if len(pickled.shared) < len(buffers):
            try:
                buffers = list(self._as_sent(sent))
            except HandoverFailed as error:
                raise PipelineError(f"its shared memory changed, and the rest cannot be sent again: {error}") from error
            for number in pickled.shared:
                buffers[number] = pickled.buffers[number]
        return self._sent(pickled.with_buffers(buffers), pickled.buffers, sent, sent.stages)

    def with_stages(self, sent: SentPipeline, pipeline: Pipeline) -> SentPipeline:
        """A pipeline as it was sent, but with the stages that it has now: other changes are for the next pass.

        Raises:
            PipelineError: it cannot be pickled, or not be handed over.
        """
        stages = pipeline.stages
        if same_stages(sent.stages, stages):
            return sent
        if self._restaged is not None and self._restaged[0] is sent and same_stages(self._restaged[1].stages, stages):
            return self._restaged[1]
        try:
            as_sent = self._pickled(pipeline.with_stages(sent.stages))
            is_as_sent = as_sent.pipeline_id
        except PipelineError:
            is_as_sent = ""  # it holds an open file by now, say
        if is_as_sent != sent.pickled.pipeline_id:
            if sent.pickled.shared:
                raise PipelineError(
                    "the stages cannot be changed now: the dataset has changed since data workers got it, and "
                    "holds shared memory, of which they would get a copy. Change them between two iterations"
                )
            pipeline = copy_of(self._private(sent))[0].with_stages(stages)
        pickled = self._pickled(pipeline)
        self.last = self._sent(pickled, pickled.buffers, sent, stages)
        self._restaged = sent, self.last
        return self.last

    def _pickled(self, pipeline: Pipeline) -> PickledPipeline:
        """A pipeline in pickled form. A program that only knows torch has its objects afterwards as before.

        Raises:
            PipelineError: it cannot be pickled, or that would change it.
        """
        if self._knows_hetstream:
            return pickle_pipeline(pipeline)
        try:
            return pickle_pipeline(pipeline, knows_hetstream=False, runs_user_code=False)
        except RunsUserCode:
            ask_apart(_objects_of(pipeline), lambda: pickle_pipeline(pipeline, knows_hetstream=False))
            return pickle_pipeline(pipeline, knows_hetstream=False)

    @contextlib.contextmanager
    def entered(self, sent: SentPipeline) -> Iterator[EnteredPipeline]:
        """A copy of what data workers have, for a step that the trainer makes itself: its own objects are untouched.

        Raises:
            PipelineError: the step has written into shared memory.
        """
        if self._copied is None or self._copied[0] != sent.pickled.pipeline_id:
            private = self._private(sent)
            pipeline = EnteredPipeline(copy_of(private)[0], 0)
            self._copied = sent.pickled.pipeline_id, pipeline, WriteWatch(private.digest_of_shared)
        _, pipeline, watch = self._copied
        with pipeline.in_trainer():
            yield pipeline
        watch.check()

    def _private(self, sent: SentPipeline) -> PickledPipeline:
        """A pipeline as it was sent, in memory of its own."""
        pickled = sent.pickled
        if has_changed(pickled):
            try:
                pickled = replace(pickled, buffers=self._as_sent(sent))
            except HandoverFailed as error:
                _log.warning("hetstream: steps made here have arrays that the program has written to: %s", error)
        return pickled.in_private()

    def _sent(
        self,
        pickled: PickledPipeline,
        own: Sequence[Buffer],
        before: SentPipeline | None,
        stages: Stages,
    ) -> SentPipeline:
        """Hand a pipeline over, unless data workers have it; `own` are the buffers in the dataset's own memory."""
        if before is not None and before.pickled.pipeline_id == pickled.pipeline_id:
            message = before.message
        else:
            blob, contents = pack(pickled.blob, pickled.buffers, self._directory)
            names = pickled.pipeline_id, pickled.program, pickled.settings
            message = ProvidePipeline(*names, blob, contents, pickled.written)
        return SentPipeline(message, replace(pickled, buffers=own), pickled.digest_of_shared(), stages)

    @property
    def _directory(self) -> Path:
        if self._directory_found is None:  # later the service may be away, which is no reason to stop
            self._directory_found = service_at(self._address_file).pipelines_dir
        return self._directory_found

    def _as_sent(self, sent: SentPipeline) -> list[memoryview]:
        """The buffers with the bytes that were sent.

        Raises:
            HandoverFailed: their file cannot be read.
        """
        contents = sent.message.contents
        room = aligned(places_of(contents.sizes)[-1]).data
        read_into(room, contents, self._directory)
        return buffers_in(room, contents)[int(contents.with_blob) :]


def _objects_of(pipeline: Pipeline) -> dict[str, Any]:
    return {**pipeline.user_objects, "worker_init_fn": pipeline.worker_init_fn}


def _change_since(pickled: PickledPipeline, pipeline: Pipeline) -> str:
    """What the program has changed of its pipeline since it was defined; "" for nothing."""
    if has_changed(pickled):
        return "an array"
    copied, changed_classes = copy_of(pickled.in_private())
    if changed_classes:
        return f"the class {changed_classes[0].__qualname__}"
    return difference(copied, pipeline)
