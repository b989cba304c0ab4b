"""Which parts of a training step are known while a job runs, with which uncertainty, and which are not. Pure."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from hetstream.hetjob.elastic.controller import ControllerState
from hetstream.hetjob.elastic.step_terms import StepTerm, StepTerms
from hetstream.hetjob.elastic.tuning import LoadingPoints
from hetstream.hetjob.master.controller_state_file import ControllerStateFile, told_by
from hetstream.mpi_dataworkers.wire.messages import EmbeddingLookups, LoaderStats, LoaderStatus, OptimizerCalls
from hetstream.slurm_plugin.cli.job import _of_record

UNKNOWN = StepTerm("T_data", None, None, "nothing was tried")


def row(
    step_s: float,
    wait_share: float = 0.0,
    *,
    ranks: int = 1,
    ordinal: int = 0,
    epoch: int = 0,
    steps: int = 0,
    optimizer: OptimizerCalls | None = None,
    pid: int = 1,
) -> LoaderStatus:
    return LoaderStatus(
        "job", ordinal, 0, ranks, "h", pid, epoch, 5, 90, 0, 8, 1, 4.0, 1e3, wait_share, LoaderStats(steps=steps),
        step_s, optimizer=optimizer,
    )  # fmt: skip


def updating(num: int, each_s: float = 0.010, *, per_step: float = 1.0, ranks: int = 1, pid: int = 1) -> LoaderStatus:
    """A trainer of 40 ms a step at its n-th look: 80 steps from one to the next, a tenth of its updates timed."""
    num_timed = int(8 * num * per_step)
    calls = OptimizerCalls(int(80 * num * per_step), num_timed, num_timed * each_s)
    return row(0.040 + 0.001 * (-1) ** num, ranks=ranks, steps=80 * num, optimizer=calls, pid=pid)


def looking_up(num: int, each_s: float = 0.004, *, ranks: int = 1) -> LoaderStatus:
    """The same trainer, with embeddings: two of its steps from one look to the next have timed lookups."""
    found = updating(num, ranks=ranks)
    assert found.optimizer is not None
    lookups = EmbeddingLookups(2 * num, 2 * num * each_s)
    return msgspec.structs.replace(found, optimizer=msgspec.structs.replace(found.optimizer, embeddings=lookups))


def after(*moments: list[LoaderStatus], every_s: float = 6.0) -> dict[str, StepTerm]:
    terms = StepTerms()
    for number, rows in enumerate(moments):
        terms.note(rows, UNKNOWN, number * every_s)
    return {term.name: term for term in terms.told}


def test_with_one_rank_synchronising_takes_nothing_and_the_rest_is_known_together() -> None:
    found = after(*([row(0.030 + 0.001 * (-1) ** number)] for number in range(8)))
    together = found["T_grad + T_upd"]
    assert together.seconds == pytest.approx(0.030)
    assert together.error_s == pytest.approx(1.96 * 0.00107 / 8**0.5, rel=0.01)
    assert str(together).startswith("T_grad + T_upd: 30 ms ± 0.74 ms: 8 readings of the time between two batches")
    assert (found["T_sync"].seconds, found["T_sync"].error_s) == (0.0, 0.0)
    for name in ("T_grad", "T_upd", "T_data"):
        assert found[name].seconds is None
        assert "not identified" in str(found[name])


def test_with_more_ranks_the_one_that_waits_longest_counts_and_nothing_is_known_apart() -> None:
    # Both take a step in 50 ms: one waits 20 of them for data, the other one for the first in the all-reduce.
    found = after(*([row(0.030, 0.4, ranks=2), row(0.050, 0.0, ranks=2)] for _ in range(8)))
    assert found["T_grad + T_upd + T_sync"].seconds == pytest.approx(0.030)
    assert [found[name].seconds for name in ("T_grad", "T_upd", "T_sync")] == [None] * 3
    assert "2 ranks" in found["T_sync"].reason


@pytest.mark.shows("the parts of a step that a running job can tell are timed now and then")
def test_a_timed_optimizer_tells_the_update_from_the_gradients() -> None:
    found = after(*([updating(num)] for num in range(10)))
    update, gradient = found["T_upd"], found["T_grad"]
    assert update.seconds == pytest.approx(0.010)
    assert update.error_s == pytest.approx(0.0, abs=1e-9)
    assert update.reason == "9 readings, 72 timed calls of the optimizer"
    assert gradient.seconds == pytest.approx(0.030)
    assert gradient.error_s == found["T_grad + T_upd"].error_s
    assert gradient.reason == "T_grad + T_upd without T_upd"
    # One update for four steps that gather gradients.
    found = after(*([updating(num, per_step=0.25)] for num in range(10)))
    assert found["T_upd"].seconds == pytest.approx(0.0025)
    # Of several ranks synchronising stays with the gradients.
    found = after(*([updating(num, ranks=2)] for num in range(10)))
    assert found["T_upd"].seconds == pytest.approx(0.010)
    assert found["T_grad + T_sync"].seconds == pytest.approx(0.030)
    assert found["T_grad"].seconds is found["T_sync"].seconds is None


@pytest.mark.shows("the parts of a step that a running job can tell are timed now and then")
def test_timed_lookups_of_embeddings_are_a_term_and_there_is_none_without_embeddings() -> None:
    assert not any("T_emb" in name for name in after(*([updating(num)] for num in range(10))))
    found = after(*([looking_up(num)] for num in range(10)))
    assert list(found) == ["T_grad + T_emb + T_upd", "T_upd", "T_emb", "T_grad", "T_sync", "T_data"]
    assert found["T_emb"].seconds == pytest.approx(0.004)
    assert found["T_emb"].reason == "9 readings, 18 timed steps"
    assert found["T_grad"].seconds == pytest.approx(0.026)
    assert found["T_grad"].reason == "T_grad + T_emb + T_upd without T_upd and T_emb"
    # Too few readings of one of them: it stays with the gradients.
    found = after(*([updating(num)] for num in range(5)), *([looking_up(num)] for num in range(5, 10)))
    assert found["T_emb"].reason == "4 of 8 readings of timed steps"
    assert found["T_grad + T_emb"].seconds == pytest.approx(0.030)
    found = after(*([looking_up(num)] for num in range(8)))
    assert found["T_grad"].reason == "T_grad + T_emb + T_upd is known, and T_upd and T_emb is not"
    found = after(*([looking_up(num, 0.031)] for num in range(10)))
    assert found["T_grad"].reason == "T_upd and T_emb alone is as long as the time between two batches"
    # Of several ranks synchronising stays with the gradients.
    found = after(*([looking_up(num, ranks=2)] for num in range(10)))
    assert found["T_grad + T_sync"].seconds == pytest.approx(0.026)
    assert found["T_grad"].seconds is found["T_sync"].seconds is None


def test_the_errors_of_both_readings_count() -> None:
    # In turns 9 and 11 ms from look to look.
    found = after(*([updating(num, 0.010 - 0.001 * (num % 2) / max(1, num))] for num in range(13)))
    assert found["T_upd"].seconds == pytest.approx(0.010)
    together, update, gradient = (found[name].error_s for name in ("T_grad + T_upd", "T_upd", "T_grad"))
    assert together
    assert update
    assert gradient == pytest.approx((together**2 + update**2) ** 0.5)


def test_an_optimizer_that_was_timed_too_little_or_too_long_tells_nothing_apart() -> None:
    found = after(*([updating(num)] for num in range(8)))
    assert found["T_upd"].reason == "7 of 8 readings of timed calls of the optimizer"
    assert found["T_grad"].reason == "T_grad + T_upd is known, and T_upd is not"
    # Nothing was timed since, or no step was taken: no reading.
    found = after(*([updating(1)] for _ in range(10)))
    assert found["T_upd"].reason.startswith("0 of 8")
    # A trainer that was started anew counts from 0 on.
    found = after(*([updating(num)] for num in range(6)), *([updating(num, pid=2)] for num in range(5)))
    assert found["T_upd"].seconds == pytest.approx(0.010)
    found = after(*([updating(num, 0.050)] for num in range(10)))
    assert found["T_grad"].reason == "T_upd alone is as long as the time between two batches"
    assert "compiled" in after(*[[row(0.03)]] * 8)["T_upd"].reason


def test_few_readings_and_such_that_say_nothing_identify_nothing() -> None:
    assert after() == {}
    assert after([row(0.0)], [row(0.03, 0.99)], [row(0.03, epoch=-1)], [row(float("nan"))]) == {}
    (first, *_) = after(*[[row(0.03)]] * 7).values()
    assert (first.seconds, first.reason) == (None, "7 of 8 readings")
    (first, *_) = after(*[[row(0.03)]] * 40, every_s=1.0).values()
    assert first.reason == "7 of 8 readings", "one in six seconds"
    # The second loader of a program is its validation's.
    found = after(*[[row(0.03), row(0.01, ordinal=1)]] * 8)
    assert found["T_grad + T_upd"].seconds == pytest.approx(0.03)


def test_another_phase_and_other_ranks_begin_anew() -> None:
    found = after(*[[row(0.03)]] * 40, *[[row(0.06)]] * 10)
    assert found["T_grad + T_upd"].seconds == pytest.approx(0.06)
    found = after(*[[row(0.03)]] * 49, [row(0.04, ranks=4)])
    assert found["T_grad + T_upd + T_sync"].reason == "1 of 8 readings"


@pytest.mark.shows("the parts of a step that a running job can tell are timed now and then")
def test_what_loading_takes_has_an_uncertainty_or_says_what_is_missing() -> None:
    points = LoadingPoints()
    assert points.term(4).seconds is None
    assert "seen were none" in points.term(4).reason
    for number, off in ((1, 1.01), (2, 0.99), (4, 1.01)):
        points.note(2, number, off / (0.004 + 0.1 / number), 0.0)
        known = points.term(4)
        assert (known.seconds is None) == (number < 4)
    assert known.seconds == pytest.approx(0.029, rel=0.02)
    assert known.error_s is not None
    assert 0 < known.error_s < 0.02 * 0.029
    assert "with 4 data workers: " in known.reason
    assert points.term(0).seconds is None


def test_the_terms_are_kept_for_why_and_shown_in_the_summary(tmp_path: Path) -> None:
    terms = (StepTerm("T_grad + T_upd", 0.03, 0.001, "8 readings"), UNKNOWN)
    tmp_path.chmod(0o700)
    ControllerStateFile(tmp_path / "elastic.json").write(ControllerState(), (), terms)
    assert told_by(tmp_path).step_terms == terms
    summary = json.loads(json.dumps({"elastic": {"step_terms": [msgspec.structs.asdict(term) for term in terms]}}))
    lines = _of_record(summary, tmp_path)[1].lines
    at = lines.index("parts of a step:")
    assert lines[at + 1 : at + 3] == [
        "  T_grad + T_upd: 30 ms ± 1 ms: 8 readings",
        "  T_data (loading data): not identified: nothing was tried",
    ]
