"""What nodes told of their shared GPUs, kept in memory for the packer: who may tell, and who may see. Pure.

Readings are some seconds old or worth nothing, so none is written down: after the daemon's start they come again.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import msgspec

from hetstream.hetjob.site.gpus import AskGpus, GpuNow, NodeGpus, RefuseGpus, ReportGpus, ShowGpus, TakeGpus

# Two reports may be lost before the packer holds a reading for too old.
REPORT_S = 5.0
# A node that has told nothing for so long is forgotten.
_FORGET_S = 600.0


class GpuReadings:
    """The last reading of each node.

    Args:
        trusted: users who may tell and see, beside root and this process's own. Jobs cannot run as one of these, so no
            job tells anything about itself.
    """

    def __init__(self, trusted: Collection[int] = ()) -> None:
        self._trusted = frozenset({0, os.geteuid(), *trusted})
        self._reports: dict[str, tuple[float, ReportGpus]] = {}

    def trusts(self, uid: int) -> bool:
        """Whether a user may tell, and see all."""
        return uid in self._trusted

    def report(self, uid: int, report: ReportGpus, now_s: float) -> TakeGpus | RefuseGpus:
        """Take a node's word.

        Args:
            uid: of who reports.
            report: what it says.
            now_s: by a clock that never goes back.
        """
        if not self.trusts(uid):
            return RefuseGpus(
                f"user {uid} does not tell of GPUs here: start the daemon with --gpu-reporters={uid} if it should"
            )
        self._reports = {node: last for node, last in self._reports.items() if now_s - last[0] < _FORGET_S}
        self._reports[report.node] = now_s, report
        return TakeGpus(REPORT_S)

    def show(self, uid: int, hidden: str, wait_shares: Mapping[str, float], now_s: float) -> ShowGpus | RefuseGpus:
        """All readings.

        Args:
            uid: of who asks. How jobs fare, a user is told of his own alone.
            hidden: why users do not see all of the cluster; empty if they do.
            wait_shares: of jobs, by id; what jobs tell of themselves is for trusted users alone.
            now_s: as for `report`.
        """
        if hidden and not self.trusts(uid):
            return RefuseGpus(hidden)
        reports = sorted(self._reports.items())
        if self.trusts(uid):
            nodes = tuple(NodeGpus(node, now_s - at_s, report.gpus) for node, (at_s, report) in reports)
            return ShowGpus(nodes, dict(wait_shares))
        own = tuple(
            NodeGpus(node, now_s - at_s, tuple(_with_own_jobs(gpu, uid) for gpu in report.gpus))
            for node, (at_s, report) in reports
        )
        return ShowGpus(own, {})

    def answer(
        self, uid: int, question: ReportGpus | AskGpus, hidden: str, wait_shares: Mapping[str, float], now_s: float
    ) -> TakeGpus | ShowGpus | RefuseGpus:
        """Either of them."""
        if isinstance(question, ReportGpus):
            return self.report(uid, question, now_s)
        return self.show(uid, hidden, wait_shares, now_s)


def _with_own_jobs(gpu: GpuNow, uid: int) -> GpuNow:
    return msgspec.structs.replace(gpu, jobs=tuple(job for job in gpu.jobs if job.uid == uid))
