"""How a loader shares its batches with loaders of other jobs: the keywords checked, the key made, the cursor kept.

Used by `loader_connection.py`; the service's side is `dispatcher/sharing.py` and `cache.py`.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from hetstream.mpi_dataworkers.loader.batch_stages import digest_of_stages
from hetstream.mpi_dataworkers.ops.pipeline import Stages
from hetstream.mpi_dataworkers.wire.messages import ListedOrder, PlannedOrder, Sharing

SharingMode = Literal["lossless", "window"]


class SharedStream:
    """What one loader keeps of the stream that it shares.

    Args:
        mode: `lossless` (every batch of the loader's own order) or `window` (skip what other jobs are past).
        pipeline_name: name of the pipeline that the user gave, or "" to go by the digest of what travels.

    Attributes:
        shift: how far the loader is from its own numbering; None before the first batch.
    """

    def __init__(self, mode: SharingMode, pipeline_name: str) -> None:
        self.mode = mode
        self.shift: int | None = None
        self._pipeline_name = pipeline_name

    def with_others(
        self,
        pipeline_id: str,
        stages: Stages,
        seed: int,
        order: PlannedOrder | ListedOrder,
        num_steps: int,
    ) -> Sharing:
        """The key under which sessions of other loaders meet this one's: all that a batch depends on but its place.

        A name says that the pipelines are the same when the loaders are made; their stages may be others by now.
        """
        pipeline = f"digest {pipeline_id}"
        if self._pipeline_name:
            pipeline = f"name {self._pipeline_name}" + digest_of_stages(stages)
        parts = msgspec.msgpack.encode((self.mode, pipeline, seed, order))
        return Sharing(hashlib.blake2b(parts, digest_size=16).hexdigest(), self.mode, num_steps)

    def skipped(self, shift: int) -> int:
        """Take note of a batch's shift, and say how many batches of the common stream were left out before it.

        What was over before the loader's first batch is not counted.
        """
        before, self.shift = self.shift, shift
        return 0 if before is None else max(0, shift - before)
