"""A sample that a loader's first process makes twice, before anything that is compared; see `canary`."""

from __future__ import annotations

from hetstream.mpi_dataworkers.loader.canary import Canary
from hetstream.mpi_dataworkers.loader.local_workers import StepRequest, one_sample_of
from hetstream.mpi_dataworkers.loader.pass_shards import PassShards
from hetstream.mpi_dataworkers.loader.witness import Witness
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline
from hetstream.mpi_dataworkers.wire.messages import ErrorPolicy


class MadeTwice:
    """A sample of another step than those that are compared.

    So that samples which depend on what was made before them (on the last one, with which they are mixed) differ in
    the first step already: no data worker has made anything before that one. And it shows what samples change.

    Args:
        canary: of the loader.
        pipeline: of the program.

    Attributes:
        number: of the sample, which is asked for as a step; None where nothing is to be learnt of it (any more).
    """

    def __init__(self, canary: Canary, pipeline: Pipeline) -> None:
        self._canary, self._pipeline = canary, pipeline
        self.number: int | None = None

    def requests(self, shards: PassShards, policy: ErrorPolicy, steps: list[int], num_known: int) -> list[StepRequest]:
        """What its process is to make before it makes `steps`; nothing but in a loader's first pass."""
        first = shards.position
        if shards.order is None or not self._canary.is_first or num_known <= first:
            return []
        number = -self._pipeline.num_workers
        other = next((step for step in range(first, num_known) if step not in steps), first)
        sample = one_sample_of(shards.order, other, shards.seeds, policy, number)
        self.number = None if sample is None else number
        return [] if sample is None else [sample]

    def changes(self, witness: Witness, limit_s: float) -> str:
        """What the sample changes, on one line; asked for once.

        Raises:
            NotMade: the process gives no answer.
        """
        if self.number is None or not witness.has(self.number):
            return ""
        made, request = witness.made(self.number, limit_s), witness.requests.asked[0]
        if not made.repeated:
            self.number = None
            return made.changes
        # Another process tells what is another one each time: a time, a number of the system.
        other = self._canary.new_witness(self._pipeline)
        try:
            other.begin([request])
            again = other.made(request[1], limit_s)
            varying = {each.field for each in self._canary.differences(again, made)}
        finally:
            self._canary.end_witness(other)
        found = next((how for field, how in made.repeated.items() if field not in varying), "")
        self.number = None
        said = "a sample is another one when its process makes it a second time, so samples may depend on one another"
        return f"{said}: {found}" if found else ""
