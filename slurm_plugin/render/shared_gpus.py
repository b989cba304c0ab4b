"""Shared GPUs on the page of `hetstream report`, and as its tables and JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from hetstream.slurm_plugin.insight.observation import Observation
from hetstream.slurm_plugin.insight.shared_gpus import IdleTrainer, SharingRow, idle_trainers, sharing_rows
from hetstream.slurm_plugin.render.cards import html_table, nothing
from hetstream.slurm_plugin.render.report import Column, Section, percent
from hetstream.slurm_plugin.render.table import size_words

_TITLE, _TRAINERS_TITLE = "Shared GPUs", "Trainers that leave their GPUs idle"
_NOBODY = "No node tells of shared GPUs."
_NO_TRAINERS = "None is known."
_NOTE = (
    "<p>Idle is the part of the guaranteed job's mini-batches in which it has nothing on the GPU; free is what its "
    "peak leaves. A mini-batch stands beside the time that one takes alone.</p>"
)
_HEAD = (
    "GPU", "In use", "Idle", "Free", "Job", "User", "Class", "Holds", "On host", "Mini-batch", "Alone", "What else",
)  # fmt: skip
_TRAINER_HEAD = (
    "Job", "User", "GPUs", "Waits for data", "Idle", "Free", "Sharing", "On", "Whether an opportunistic job can come",
)  # fmt: skip
# On the page, of each table.
MOST_LINES = 100
_TRAINERS_NOTE = "<p>Where <code>hetstream packer</code> finds most time for opportunistic jobs.</p>"


def shared_gpu_cards(seen: Observation) -> Iterator[tuple[str, str]]:
    """Titles and contents of the page's cards; none where there is no site daemon that would know."""
    if seen.shared is None:
        return
    if seen.shared.missing:
        yield _TITLE, nothing(f"They are not known: {seen.shared.missing}")
        return
    rows = sharing_rows(seen.shared, seen.snapshot.jobs)
    lines = [_line(row, before) for row, before in zip(rows, [None, *rows], strict=False)]
    yield _TITLE, (_NOTE if rows else "") + _shortened(_HEAD, lines, _NOBODY)
    trainers = idle_trainers(seen.shared, seen.snapshot.jobs, seen.wait_shares)
    lines = [_trainer_line(row) for row in trainers]
    yield _TRAINERS_TITLE, (_TRAINERS_NOTE if trainers else "") + _shortened(_TRAINER_HEAD, lines, _NO_TRAINERS)


def _shortened(head: Sequence[str], lines: Sequence[Sequence[object]], empty: str) -> str:
    num_more = len(lines) - MOST_LINES
    more = f"<p>and {num_more:,} more, all of them with --json</p>" if num_more > 0 else ""
    return html_table(head, lines[:MOST_LINES], empty) + more


def shared_gpu_sections(seen: Observation) -> tuple[list[Section], list[str]]:
    """The same as tables, and what is to be noted."""
    if seen.shared is None:
        return [], []
    if seen.shared.missing:
        return [], [f"shared GPUs are not known: {seen.shared.missing}"]
    rows = [asdict(row) for row in sharing_rows(seen.shared, seen.snapshot.jobs)]
    trainers = [asdict(row) for row in idle_trainers(seen.shared, seen.snapshot.jobs, seen.wait_shares)]
    return [
        Section("shared_gpus", _COLUMNS, rows, title=_TITLE, empty=_NOBODY),
        Section("idle_trainers", _TRAINER_COLUMNS, trainers, title=_TRAINERS_TITLE, empty=_NO_TRAINERS),
    ], []


def _line(row: SharingRow, before: SharingRow | None) -> tuple[object, ...]:
    """One job; what is said of its GPU stands in the first line of each GPU alone."""
    is_first = before is None or (before.node, before.index) != (row.node, row.index)
    of_gpu = (percent(row.used_share), _shown(row.idle_share, percent), size_words(row.free_bytes))
    return (
        f"{row.node}:{row.index}", *(of_gpu if is_first else ("", "", "")), row.job or "–", row.user or "–",
        row.job_class or "–", _shown(row.held_bytes, size_words), _shown(row.host_bytes, size_words),
        _shown(row.batch_s, _time), _alone(row), row.note,
    )  # fmt: skip


def _trainer_line(row: IdleTrainer) -> tuple[object, ...]:
    return (
        row.job, row.user, row.gpus, _shown(row.wait_share, percent), _shown(row.idle_share, percent),
        _shown(row.free_bytes, size_words), row.num_sharing, " ".join(row.places) or "–", row.verdict,
    )  # fmt: skip


def _alone(row: SharingRow) -> str:
    return "–" if row.alone_s is None or row.ratio is None else f"{_time(row.alone_s)} (×{row.ratio:.2f})"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _shown(value: Any, show: Any) -> str:
    return "–" if value is None else str(show(value))


_COLUMNS = (
    Column("node", "NODE", left=True), Column("index", "GPU"), Column("used_share", "USED", percent),
    Column("idle_share", "IDLE", percent), Column("free_bytes", "FREE", size_words), Column("job", "JOB", left=True),
    Column("user", "USER", left=True), Column("job_class", "CLASS", left=True),
    Column("held_bytes", "HOLDS", size_words), Column("host_bytes", "ON HOST", size_words),
    Column("batch_s", "BATCH", _time), Column("alone_s", "ALONE", _time), Column("ratio", "RATIO", "{:.2f}".format),
    Column("note", "NOTE", left=True),
)  # fmt: skip
_TRAINER_COLUMNS = (
    Column("job", "JOB", left=True), Column("user", "USER", left=True), Column("gpus", "GPUS"),
    Column("wait_share", "WAITS", percent), Column("idle_share", "IDLE", percent),
    Column("free_bytes", "FREE", size_words), Column("num_sharing", "SHARING"),
    Column("verdict", "TAKES AN OPPORTUNISTIC JOB", left=True),
)  # fmt: skip
