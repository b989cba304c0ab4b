"""Quotas: worked-out cases, and laws that hold whatever comes and goes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetstream.hetjob.gpu.orders import JobClass
from hetstream.slurm_plugin.errors import QuotaError
from hetstream.slurm_plugin.packing.quota import (
    PATIENCE_S,
    QuotaAction,
    QuotaDecision,
    QuotaJob,
    Quotas,
    QuotaSite,
    above_quota,
    decide,
    read_quotas,
)

GUARANTEED, OPPORTUNISTIC = JobClass.GUARANTEED, JobClass.OPPORTUNISTIC
QUOTAS = Quotas({"a": 4, "b": 2}, 600.0)
SITE = QuotaSite(lambda _: 24, ["gpu", "opp", "whole"], ["opp"], ["whole"], ["vision", "a", "b"])


def verdicts(jobs: list[QuotaJob], free_gpus: int = 6, now_s: float = 0.0) -> dict[str, str]:
    return {found.job.name: found.verdict.value for found in decide(QUOTAS, jobs, free_gpus, now_s)}


def reason(jobs: list[QuotaJob], name: str, free_gpus: int = 6, now_s: float = 0.0) -> str:
    return next(found.reason for found in decide(QUOTAS, jobs, free_gpus, now_s) if found.job.name == name)


class TestReading:
    """The site's file."""

    def test_a_table(self) -> None:
        text = '{"tenants": {"vision": 16, "speech": 8}, "partitions": ["gpu"]}'
        found = read_quotas("q.json", text, replace(SITE, accounts=["vision", "speech"]))
        assert (found.of("vision"), found.of("nobody"), found.patience_s) == (16, 0, PATIENCE_S)

    @pytest.mark.shows("unknown classes, and quotas that the cluster cannot keep, are refused")
    @pytest.mark.parametrize(
        ("table", "text"),
        [
            ({"tenants": {"a": 16, "b": 9}}, "quotas of 25 GPUs together, and these partitions have 24: lower them"),
            ({"tenants": {"visoin": 1}}, r"'visoin' is no account of this cluster \(did you mean vision\?\)"),
            ({"tenants": {"a\nb": 1}}, r"'a\\nb' is no account"),
            ({"tenants": {"a": -1}}, "not a table of quotas"),
            ({"tenant": {}}, "not a table of quotas"),
            ({"tenants": {}, "partitions": []}, 'it names no partition whose jobs have them: write "partitions"'),
            ({"partitions": ["gpus"]}, r"no partition 'gpus' \(did you mean gpu\?\)"),
            ({"partitions": ["opp"]}, "'opp' is for opportunistic jobs"),
            ({"partitions": ["whole"]}, "'whole' take whole nodes with all GPUs"),
            ([], "not a table of quotas"),
        ],
    )
    def test_what_cannot_be_kept_is_refused(self, table: object, text: str) -> None:
        whole = {"partitions": ["gpu"], **table} if isinstance(table, dict) else table
        with pytest.raises(QuotaError, match=text):
            read_quotas("q.json", json.dumps(whole), SITE)

    def test_all_problems_are_one_line(self) -> None:
        with pytest.raises(
            QuotaError, match=r"^q.json: quotas of 99.*; 'x' is no account.*; 'y' is no account"
        ) as caught:
            read_quotas("q.json", '{"tenants": {"x": 98, "y": 1}, "partitions": ["gpu"]}', SITE)
        assert "\n" not in str(caught.value)

    def test_a_name_that_stands_there_twice_is_refused(self) -> None:
        with pytest.raises(QuotaError, match=r"^q.json: 'a' stands in it twice$"):
            read_quotas("q.json", '{"tenants": {"a": 8, "b": 1, "a": 2}, "partitions": ["gpu"]}', SITE)

    def test_where_accounts_are_not_known_they_are_not_compared(self) -> None:
        text = '{"tenants": {"x": 24}, "partitions": ["gpu"]}'
        assert read_quotas("q.json", text, replace(SITE, accounts=None)).of("x") == 24


class TestCases:
    """One at a time."""

    def test_a_job_within_its_quota_starts(self) -> None:
        assert verdicts([QuotaJob("1", "a", 4, 0.0)]) == {"1": "guaranteed"}

    def test_jobs_of_the_same_second_stand_in_the_order_of_their_numbers(self) -> None:
        jobs = [QuotaJob(name, "b", 1, 0.0) for name in ("33_10", "33_9", "33_8")]
        assert verdicts(jobs) == {"33_8": "guaranteed", "33_9": "guaranteed", "33_10": "wait"}

    def test_the_first_that_does_not_fit_keeps_what_is_left_of_the_quota(self) -> None:
        jobs = [
            QuotaJob("0", "a", 2, 0.0, runs_as=GUARANTEED),
            QuotaJob("1", "a", 3, 1.0),
            QuotaJob("2", "a", 1, 2.0),
            QuotaJob("3", "b", 2, 3.0),
        ]
        assert verdicts(jobs) == {"0": "keep", "1": "wait", "2": "wait", "3": "guaranteed"}
        assert "job 1 is before it in the line of tenant a" in reason(jobs, "2")

    def test_free_gpus_are_kept_for_a_gang_and_for_the_first_gang_alone(self) -> None:
        jobs = [QuotaJob("1", "a", 4, 0.0), QuotaJob("2", "b", 1, 1.0)]
        found = {decision.job.name: decision for decision in decide(QUOTAS, jobs, 3, 0.0)}
        assert (found["1"].verdict, found["1"].reserved_gpus) == (QuotaAction.RESERVE, 3)
        assert (found["2"].verdict, found["2"].reserved_gpus) == (QuotaAction.RESERVE, 0)
        assert "others are kept for job 1" in found["2"].reason

    def test_a_job_that_waits_long_is_offered_or_starts_if_its_user_lets_it(self) -> None:
        full = QuotaJob("0", "a", 4, 0.0, runs_as=GUARANTEED)
        told, lets = QuotaJob("1", "a", 1, 0.0), QuotaJob("2", "a", 1, 0.0, opportunistic_after_s=60.0)
        assert verdicts([full, told, lets], now_s=59.0) == {"0": "keep", "1": "wait", "2": "wait"}
        assert verdicts([full, told, lets], now_s=60.0)["2"] == "opportunistic"
        assert verdicts([full, told, lets], now_s=600.0)["1"] == "offer"
        assert "with --opportunistic-after" in reason([full, told, lets], "1", now_s=600.0)

    @pytest.mark.parametrize(("after_s", "verdict"), [(None, "offer"), (9e9, "opportunistic"), (0.0, "opportunistic")])
    def test_a_job_that_can_never_be_guaranteed_is_told_so_at_once(self, after_s: float | None, verdict: str) -> None:
        jobs = [QuotaJob("1", "b", 3, 0.0, opportunistic_after_s=after_s), QuotaJob("2", "b", 1, 1.0)]
        assert verdicts(jobs) == {"1": verdict, "2": "guaranteed"}
        assert "tenant b has a quota of 2: it can never be guaranteed" in reason(jobs, "1")

    def test_a_tenant_without_quota_has_opportunistic_jobs_alone(self) -> None:
        assert verdicts([QuotaJob("1", "c", 1, 0.0), QuotaJob("2", "c", 1, 0.0, OPPORTUNISTIC)]) == {
            "1": "offer",
            "2": "opportunistic",
        }

    @pytest.mark.shows("quotas of tenants hold; upgrades come before starts, and gangs are started as a whole")
    def test_an_upgrade_comes_before_a_start_and_nobody_is_overtaken_for_ever(self) -> None:
        runs = QuotaJob(
            "1",
            "a",
            1,
            500.0,
            runs_as=OPPORTUNISTIC,
            opportunistic_after_s=0.0,
            runs_on=frozenset({"n:0"}),
            is_ready=True,
        )
        full = QuotaJob("0", "a", 3, 0.0, runs_as=GUARANTEED)
        waits = QuotaJob("2", "a", 1, 0.0)
        assert verdicts([full, waits, runs]) == {"0": "keep", "1": "upgrade", "2": "wait"}
        # Submitted more than the patience earlier, the other one is first.
        late = replace(runs, submit_s=700.0)
        assert verdicts([full, waits, late]) == {"0": "keep", "1": "keep", "2": "guaranteed"}

    def test_upgrades_are_carried_out_first(self) -> None:
        runs = QuotaJob("2", "b", 1, 9e5, runs_as=OPPORTUNISTIC, runs_on=frozenset({"n:0"}), is_ready=True)
        found = decide(QUOTAS, [QuotaJob("1", "a", 1, 0.0), runs], 6, 0.0)
        assert [decision.job.name for decision in found] == ["2", "1"]

    def test_a_gang_that_is_not_ready_stays_as_it_is_and_holds_up_nobody(self) -> None:
        jobs = [QuotaJob("1", "a", 4, 0.0, runs_as=OPPORTUNISTIC), QuotaJob("2", "a", 4, 1.0)]
        assert verdicts(jobs) == {"1": "keep", "2": "guaranteed"}
        assert "until its processes are all on GPUs" in reason(jobs, "1")

    def test_of_two_on_one_gpu_one_is_upgraded(self) -> None:
        both = [
            QuotaJob(name, "a", 1, 0.0, runs_as=OPPORTUNISTIC, runs_on=frozenset({"n:0"}), is_ready=True)
            for name in "12"
        ]
        assert verdicts(both) == {"1": "upgrade", "2": "keep"}

    def test_who_asked_to_be_opportunistic_is_never_upgraded(self) -> None:
        job = QuotaJob("1", "a", 1, 0.0, OPPORTUNISTIC, OPPORTUNISTIC, runs_on=frozenset({"n:0"}), is_ready=True)
        assert verdicts([job]) == {"1": "keep"}

    def test_a_quota_that_was_lowered_takes_nobody_away_and_lets_nobody_on(self) -> None:
        jobs = [QuotaJob("0", "b", 5, 0.0, runs_as=GUARANTEED), QuotaJob("1", "b", 1, 1.0)]
        assert verdicts(jobs) == {"0": "keep", "1": "wait"}
        assert above_quota(QUOTAS, jobs) == {"b": 3}


@dataclass
class World:
    """A cluster in which decisions are carried out: each job's GPUs, and what happened."""

    num_gpus: int
    jobs: dict[str, QuotaJob] = field(default_factory=dict)
    starved: dict[str, int] = field(default_factory=dict)

    def guaranteed_on(self) -> set[str]:
        return {gpu for job in self.jobs.values() if job.runs_as is GUARANTEED for gpu in job.runs_on}

    def free(self) -> list[str]:
        return [f"g{place}" for place in range(self.num_gpus) if f"g{place}" not in self.guaranteed_on()]

    def seen(self) -> list[QuotaJob]:
        """The jobs as the packer shows them."""
        taken = self.guaranteed_on()
        return [
            replace(job, is_ready=job.runs_as is OPPORTUNISTIC and not job.runs_on & taken)
            for job in self.jobs.values()
        ]

    def carry_out(self, decision: QuotaDecision, seed: int) -> None:
        """As Slurm would: it knows nothing of opportunistic jobs when it chooses GPUs."""
        job = self.jobs[decision.job.name]
        if decision.verdict is QuotaAction.UPGRADE:
            assert not job.runs_on & self.guaranteed_on(), "two guaranteed jobs on one GPU"
            self.jobs[job.name] = replace(job, runs_as=GUARANTEED)
            assert self.jobs[job.name].runs_on == job.runs_on
        elif decision.verdict is QuotaAction.GUARANTEED:
            free = self.free()
            assert len(free) >= job.gpus, "it was to start, and there is no room"
            chosen = [free[(seed + place) % len(free)] for place in range(job.gpus)]
            self.jobs[job.name] = replace(job, runs_as=GUARANTEED, runs_on=frozenset(chosen))
        elif decision.verdict is QuotaAction.OPPORTUNISTIC:
            chosen = [f"g{(seed + place) % self.num_gpus}" for place in range(job.gpus)]
            self.jobs[job.name] = replace(job, runs_as=OPPORTUNISTIC, runs_on=frozenset(chosen))


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "end", "wait"]), st.sampled_from("abc"), st.integers(1, 5),
        st.integers(0, 7), st.sampled_from([None, 0.0, 50.0]), st.booleans(),
    ),
    max_size=40,
)  # fmt: skip
TABLES = st.tuples(st.integers(0, 5), st.integers(0, 3), st.sampled_from([0.0, 60.0, 600.0]))


def played(events: list[tuple[str, str, int, int, float | None, bool]], quotas: Quotas, num_gpus: int) -> World:
    """Let things happen, with all laws looked at after each."""
    world, now_s = World(num_gpus), 0.0
    for number, (what, tenant, gpus, seed, after_s, is_opportunistic) in enumerate(events):
        now_s += 37.0
        running = [job.name for job in world.jobs.values() if job.runs_as is not None]
        if what == "submit" and gpus <= num_gpus:
            asked = OPPORTUNISTIC if is_opportunistic else GUARANTEED
            world.jobs[f"{number}"] = QuotaJob(
                f"{number}", tenant, gpus, now_s, asked, opportunistic_after_s=None if is_opportunistic else after_s
            )
        elif what == "end" and running:
            del world.jobs[running[seed % len(running)]]
        found = decide(quotas, world.seen(), len(world.free()), now_s)
        assert {decision.job.name for decision in found} == world.jobs.keys()
        _is_in_order(quotas, found)
        before = {name: job.runs_as for name, job in world.jobs.items()}
        for decision in found:
            world.carry_out(decision, seed)
            assert decision.reason
        assert all(world.jobs[name].runs_as is GUARANTEED for name, was in before.items() if was is GUARANTEED)
        assert not above_quota(quotas, list(world.jobs.values()))
        held = [gpu for job in world.jobs.values() if job.runs_as is GUARANTEED for gpu in job.runs_on]
        assert len(held) == len(set(held)) <= num_gpus
    return world


def _is_in_order(quotas: Quotas, found: tuple[QuotaDecision, ...]) -> None:
    """Of jobs that ask alike nobody passes another one, but an upgrade by the patience."""
    granted = [decision.job for decision in found if decision.verdict in (QuotaAction.GUARANTEED, QuotaAction.UPGRADE)]
    waiting = [
        decision.job for decision in found
        if decision.job.runs_as is None and decision.job.asked is GUARANTEED and decision.job not in granted
    ]  # fmt: skip
    for first in waiting:
        for second in granted:
            if (first.tenant, first.gpus) == (second.tenant, second.gpus):
                head_start_s = quotas.patience_s if second.runs_as is OPPORTUNISTIC else 0.0
                assert second.submit_s - head_start_s <= first.submit_s


@pytest.mark.shows("quotas of tenants hold; upgrades come before starts, and gangs are started as a whole")
@settings(deadline=None, max_examples=60)
@given(events=EVENTS, table=TABLES)
def test_laws_hold_whatever_comes_and_goes(
    events: list[tuple[str, str, int, int, float | None, bool]], table: tuple[int, int, float]
) -> None:
    played(events, Quotas({"a": table[0], "b": table[1]}, table[2]), 8)


@pytest.mark.shows("quotas of tenants hold; upgrades come before starts, and gangs are started as a whole")
@settings(deadline=None, max_examples=40)
@given(events=EVENTS, table=TABLES)
def test_every_job_within_its_quota_is_guaranteed_in_the_end(
    events: list[tuple[str, str, int, int, float | None, bool]], table: tuple[int, int, float]
) -> None:
    quotas = Quotas({"a": table[0], "b": table[1]}, table[2])
    world = played(events, quotas, 8)
    for _ in range(2 * len(world.jobs) + 1):  # nobody comes any more, and who is guaranteed ends
        for name in [name for name, job in world.jobs.items() if job.runs_as is GUARANTEED]:
            del world.jobs[name]
        for decision in decide(quotas, world.seen(), len(world.free()), 1e6):
            world.carry_out(decision, 0)
    assert not [
        job for job in world.jobs.values() if job.asked is GUARANTEED and job.gpus <= quotas.of(job.tenant)
    ]  # fmt: skip


@settings(deadline=None, max_examples=20)
@given(events=EVENTS, table=TABLES)
def test_the_same_state_gives_the_same_decisions_in_any_order(
    events: list[tuple[str, str, int, int, float | None, bool]], table: tuple[int, int, float]
) -> None:
    quotas = Quotas({"a": table[0], "b": table[1]}, table[2])
    jobs = played(events, quotas, 8).seen()
    found = {decision.job.name: decision for decision in decide(quotas, jobs, 3, 1e4)}
    assert found == {decision.job.name: decision for decision in decide(quotas, jobs[::-1], 3, 1e4)}
