"""What a data worker process has loaded of the program that it serves.

Used by the process that makes batches (`pipelines.py`), and by one that loads a pipeline for others, which are forked
from it (`fork_server.py`): they go on with the object as it was left.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.ops.attached_memory import leave_attachments_alone
from hetstream.mpi_dataworkers.ops.holdings import importing
from hetstream.mpi_dataworkers.ops.import_effects import without_effects
from hetstream.mpi_dataworkers.ops.pickled_pipeline import PickledPipeline, load_pipeline
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline
from hetstream.mpi_dataworkers.ops.program import SettingsInForce, changed_since, enter_program
from hetstream.mpi_dataworkers.own_log import imported_again
from hetstream.mpi_dataworkers.programs import joined, serves
from hetstream.mpi_dataworkers.wire.messages import Program

_log = logging.getLogger(__name__)


def objects_bytes(pickled: PickledPipeline) -> int:
    """Bytes of a pipeline's objects in pickled form; the arrays beside them are shared anyway."""
    return memoryview(pickled.blob).nbytes


def _imports_of(program: Program) -> AbstractContextManager[None]:
    return nullcontext() if program.knows_hetstream else without_effects()


@contextmanager
def _modules_of(program: Program) -> Iterator[None]:
    """Import what the program imports.

    Raises:
        PipelineError: it cannot be imported.
    """
    try:
        with _imports_of(program), imported_again(), importing():
            yield
    except PipelineError:
        raise
    except BaseException as error:  # the program's modules are imported: anything may come
        text = f"{type(error).__name__}: {error}"
        raise PipelineError(f"the program's modules cannot be imported in a data worker: {text}") from error


class OtherProgram(Exception):
    """This process serves another program, or has loaded another version of its modules."""


class LoadedProgram:
    """The program of this process, and the pipeline that was loaded before it was forked, if one was.

    Attributes:
        program: that this process serves; None as long as it serves none. Other threads may read it.
        kept_bytes: `objects_bytes` of the pipeline that was loaded before this process was forked; 0 for none.
    """

    def __init__(self) -> None:
        self.program: Program | None = None
        self._in_force = SettingsInForce()
        self._said_changed = False
        self.kept_bytes = 0
        self._kept: tuple[PickledPipeline, Pipeline] | None = None

    def enter(self, pickled: PickledPipeline) -> None:
        """Put what the program had set when it defined a pipeline in force.

        Raises:
            PipelineError: a module of the program cannot be imported.
        """
        if self._in_force.is_entered(pickled.pipeline_id, pickled.settings):
            return
        self._in_force.program = pickled.program
        with _modules_of(pickled.program):
            self._in_force.enter(pickled.pipeline_id, pickled.settings)

    def load(self, pickled: PickledPipeline) -> Pipeline:
        """Be a process of a pipeline's program, under its settings, and unpickle it.

        Raises:
            OtherProgram: this process cannot.
            PipelineError: user code failed, or a module would have changed what the running program owns.
        """
        program = pickled.program
        if self.program is None:
            enter_program(program)
            leave_attachments_alone()
        elif not serves(self.program, program):
            raise OtherProgram
        self.program = program if self.program is None else joined(self.program, program)
        with _imports_of(program), imported_again():
            return self._load(pickled)

    def _load(self, pickled: PickledPipeline) -> Pipeline:
        program = pickled.program
        self.enter(pickled)
        with _modules_of(program):
            other = self._in_force.other_than_sent()
        if other:
            raise PipelineError(
                f"{other} is another one in data workers: the program has changed it, and it does not travel"
            )
        changed = changed_since(program)
        if changed and not self._said_changed:
            self._said_changed = True
            _log.warning(
                "on this host the source of %s is not what the program has loaded: samples may differ until it "
                "starts again",
                ", ".join(changed),
            )
        return load_pipeline(pickled)

    def keep(self, pickled: PickledPipeline) -> None:
        """Load a pipeline for processes that are forked from this one."""
        pipeline = self.load(pickled)
        self.kept_bytes = objects_bytes(pickled)
        if not pickled.buffers:  # else arrays lie in the memory in which it came
            pickled = replace(pickled, blob=b"")
        self._kept = pickled, pipeline

    def forget(self, pipeline_id: str) -> None:
        """A pipeline will not be entered again."""
        self.take(pipeline_id)
        self._in_force.forget(pipeline_id)

    def take(self, pipeline_id: str) -> tuple[PickledPipeline, Pipeline] | None:
        """The pipeline that was loaded before this process was forked: once, because samples may change it."""
        if self._kept is None or self._kept[0].pipeline_id != pipeline_id:
            return None
        taken, self._kept = self._kept, None
        return taken
