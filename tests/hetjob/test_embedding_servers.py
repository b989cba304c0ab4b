"""Embedding servers: how a script asks for them, what the job master is told, and when there are more or fewer."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from hetstream.hetjob.convert.convert import JobArrayNotSupported, NeedsBackfill, NoSuchNode, check_cluster, convert
from hetstream.hetjob.convert.directives import read_directives
from hetstream.hetjob.convert.plan import HetPlan
from hetstream.hetjob.convert.render import render
from hetstream.hetjob.convert.spec import JobSpec, read_spec
from hetstream.hetjob.elastic.embedding import (
    CALM_S,
    HOT_S,
    SETTLE_S,
    EmbeddingController,
    EmbeddingSnapshot,
    ServerLoad,
)
from hetstream.hetjob.elastic.snapshot import Action, Companion, CompanionState, Decision, Limits
from hetstream.hetjob.errors import DirectiveError
from hetstream.hetjob.job.embedding_servers import (
    EmbeddingServers,
    remove_registrations,
)
from hetstream.hetjob.job.job import JobEnvironment
from hetstream.hetjob.master import embedding
from hetstream.hetjob.master.elastic import ElasticStages
from hetstream.hetjob.master.server import MasterConfig, SlurmLauncher
from hetstream.hetjob.ports import UNKNOWN_CLUSTER, ClusterLimits, NodeSize, PartitionLimits
from hetstream.mpi_dataworkers.embedding.registration import REGISTRY, Registration, read_registrations
from hetstream.mpi_dataworkers.wire.messages import Status, SteerDataWorkers
from hetstream.slurm_plugin.cli import build_parser
from hetstream.slurm_plugin.cli.job import _server_rows
from hetstream.slurm_plugin.cli.master import _config
from hetstream.slurm_plugin.client.fake import FakeSlurm
from tests.hetjob.test_master_server import PROGRAM

WaitUntil = Callable[..., None]
GIB = 1 << 30
ONE = "--embedding-servers=1 --embedding-server-memory=8G"
TWO_TO_FIVE = "--embedding-servers=2-5 --embedding-server-memory=64G"


def spec_of(words: str) -> JobSpec:
    spec = read_spec(read_directives(f"#!/bin/bash\n#HETSTREAM {words}\n", "x"), "x")
    assert spec is not None
    return spec


def plan_of(sbatch: str, words: str, cluster: ClusterLimits = UNKNOWN_CLUSTER) -> HetPlan:
    script = f"#!/bin/bash\n#SBATCH {sbatch}\n#HETSTREAM {words}\nsrun python train.py\n"
    return convert(spec_of(words), script, "train.sbatch", cluster=cluster)


def told(plan: HetPlan) -> MasterConfig:
    """What the job master makes of a plan, by way of the command line in between."""
    assert plan.master_options is not None
    words = ["internal", "master", "start", *plan.master_options]
    return _config(build_parser("internal", "master").parse_args(words))


NODES = {"cpu": PartitionLimits((NodeSize(32, 140_000, False, 4),))}
CLUSTER = ClusterLimits(frozenset({"cpu", "gpu"}), "cpu", "sched/backfill", NODES)


@pytest.mark.parametrize(
    ("sbatch", "words", "expected"),
    [
        ("-p gpu", f"{TWO_TO_FIVE} --embedding-server-partition=fat", [
            ("embedding_servers", "--partition=fat --cpus-per-task=2 --ntasks=2 --mem-per-cpu=32G"),
        ]),
        ("-p gpu", f"{TWO_TO_FIVE} --data-workers=3 --data-worker-partition=cpu --data-worker-account=a", [
            ("data_workers", "--partition=cpu --cpus-per-task=4 --account=a --ntasks=3"),
            ("embedding_servers", "--partition=cpu --cpus-per-task=2 --account=a --ntasks=2 --mem-per-cpu=32G"),
        ]),
        # Slurm copies --mem, which is of a node: of each node as many servers as it has memory for.
        ("-p gpu --mem=100G", "--embedding-servers=3 --embedding-server-memory=64G", [
            (
                "embedding_servers",
                "--partition=cpu --cpus-per-task=2 --ntasks=3 --ntasks-per-node=2 --mem=128G",
            ),
        ]),
        ("-p gpu --mem=100G --signal=USR1@60", "--embedding-servers=2 --embedding-server-memory=100G", [
            (
                "embedding_servers",
                "--partition=cpu --cpus-per-task=2 --ntasks=2 --ntasks-per-node=1 --mem=100G --signal=B:USR1@60",
            ),
        ]),
    ],
)  # fmt: skip
def test_those_from_the_start_have_a_component(sbatch: str, words: str, expected: list[tuple[str, str]]) -> None:
    plan = plan_of(sbatch, words, CLUSTER)
    assert [(one.role, " ".join(one.options)) for one in plan.components[1:]] == expected
    assert [one.het_job_offset for one in plan.components] == [*range(1 + len(expected))]
    text = render(f"#!/bin/bash\n#SBATCH {sbatch}\n", plan, ["/bin/hetstream"])
    assert f"# Component {len(expected)}, the embedding servers." in text


def test_what_a_script_asks_for_reaches_the_job_master() -> None:
    config = told(plan_of("-p gpu --mem=9G --time=10 -A team", f"{TWO_TO_FIVE} --embedding-dir=rows", CLUSTER))
    options = ("--partition=cpu", "--cpus-per-task=2", "--mem-per-cpu=32G", "--account=team", "--time=10")
    assert config.embedding == EmbeddingServers(2, 60 * GIB, Path("rows"), 2, 5, options)
    assert config.data_workers == config.companions == 0
    fixed = told(plan_of("-p gpu", f"{ONE} --data-workers=2-4", CLUSTER)).embedding
    assert fixed == EmbeddingServers(1, 15 * GIB // 2, Path("hetstream-embedding"), 2, 1)


def test_the_conversion_says_what_comes() -> None:
    changes = [one.change for one in plan_of("-p gpu --gpus=1 -c 16", TWO_TO_FIVE, CLUSTER).changes]
    assert "component 1 added: 2 embedding servers of 64G in partition cpu" in changes
    assert any(change.startswith("up to 3 companion jobs, one embedding server each") for change in changes)
    assert not any("CPUs" in change for change in changes), "without data workers the trainer keeps its own"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--embedding-servers=2", "belong together"),
        ("--embedding-server-memory=8G", "--embedding-server-memory: only with --embedding-servers"),
        ("--embedding-dir=rows --data-workers=1", "--embedding-dir: only with --embedding-servers"),
        ("--embedding-servers=0-2 --embedding-server-memory=8G", "MIN is at least 1"),
        ("--embedding-servers=3-2 --embedding-server-memory=8G", "not below MIN"),
        ("--embedding-servers=2-300 --embedding-server-memory=8G", "at most 256"),
        ("--embedding-servers=2 --embedding-server-memory=big", "a size such as 64G, above 256M"),
        ("--embedding-servers=2 --embedding-server-memory=256M", "above 256M"),
        ("--embedding-server=2", "did you mean --embedding-servers?"),
        (f"{ONE} --job-class=opportunistic", "no component of a heterogeneous job can"),
    ],
)
def test_wrong_directives(words: str, said: str) -> None:
    with pytest.raises(DirectiveError) as caught:
        spec_of(words)
    assert said in str(caught.value)


def test_slurms_limits_hold_for_this_component_too() -> None:
    with pytest.raises(JobArrayNotSupported, match="--embedding-servers"):
        plan_of("-p gpu --array=0-3", ONE, CLUSTER)
    with pytest.raises(NeedsBackfill, match="--embedding-servers"):
        check_cluster(spec_of(ONE), ClusterLimits(frozenset({"cpu"}), "cpu", "sched/builtin"))
    with pytest.raises(NoSuchNode, match="an embedding server of 2 CPUs and 1024G fits no node of partition cpu"):
        plan_of("-p gpu", "--embedding-servers=1 --embedding-server-memory=1T", CLUSTER)


def test_each_is_a_step_of_the_last_component(tmp_path: Path, wait_until: WaitUntil) -> None:
    job = JobEnvironment("7", "train", "gpu0", tmp_path, 3, 0)
    job.directory.mkdir(parents=True)
    for data_workers, group in ((2, 2), (0, 1)):
        slurm = FakeSlurm(tmp_path, dict(os.environ))
        servers = EmbeddingServers(2, 8 * GIB, Path("rows"), 2, 2).of_start(job)
        assert servers.directory == tmp_path / "rows" / "job-7"
        assert stat.S_IMODE(servers.directory.stat().st_mode) == 0o700
        launcher = SlurmLauncher(MasterConfig(("true",), data_workers, 4, embedding=servers), slurm, job, "127.0.0.1")
        child = launcher.embedding_server(1)
        wait_until(lambda child=child: child.poll() == 0, what="the end of `true`")
        ((_, words),) = slurm.calls
        assert words[:5] == (f"--het-group={group}", "--exact", "--nodes=1", "--ntasks=1", "--cpus-per-task=2")
        service, directory = f"file:{job.address_file}", str(servers.directory)
        assert words[8:] == (
            *("true", "internal", "embedding-server", "--service", service, "--directory", directory),
            *("--memory", str(8 * GIB), "--name", "1", "--drain-s", "0"),
        )
    assert (job.directory / "embedding-server-1.log").exists()


# Decisions.

LIMIT = 100 * GIB


class Watched:
    """A controller that is asked once a second."""

    def __init__(self, minimum: int = 2, maximum: int = 4) -> None:
        self.controller = EmbeddingController(Limits(minimum, maximum, 2, 2))
        self.now = 0.0

    def after(
        self, seconds: float, shares: Callable[[float], Sequence[float]], reads: Sequence[float] = (), jobs: int = 0,
        state: CompanionState = CompanionState.WORKING,
    ) -> Decision:  # fmt: skip
        """The first change that is decided in so many seconds, else the last word.

        Args:
            seconds: how long it is looked.
            shares: from the time to the share of its memory that each server uses; the last `jobs` are companions.
            reads: of each per second.
            jobs: companions.
            state: of the last of them, which is no server then unless it works.
        """
        until = self.now + seconds
        decision = Decision(Action.HOLD, 0, "")
        while self.now < until:
            self.now += 1
            used = shares(self.now)
            ids = [""] * (len(used) - jobs) + [str(1000 + index) for index in range(jobs)]
            servers = [
                ServerLoad(job_id or str(index), job_id, int(share * LIMIT), LIMIT, reads[index] if reads else 0.0)
                for index, (job_id, share) in enumerate(zip(ids, used, strict=True))
            ]
            states = [CompanionState.WORKING] * (jobs - 1) + [state]
            companions = [Companion(str(1000 + index), 2, states[index], 0.0) for index in range(jobs)]
            if jobs and state is not CompanionState.WORKING:
                servers = servers[:-1]
            decision = self.controller.decide(EmbeddingSnapshot(tuple(servers), tuple(companions)), self.now)
            if decision.is_change:
                break
        return decision


def test_one_more_is_asked_for_before_the_fullest_is_full() -> None:
    """It grows by a percent in 10 s: 300 s before 0.8, the time that a companion is taken to need."""
    watched = Watched()
    decision = watched.after(900, lambda now: (0.2, now / 1000))
    assert (decision.action, decision.count, decision.cpus) == (Action.GROW, 1, 2)
    assert 480 <= watched.now <= 520
    assert decision.reason.startswith("embedding server 1 has 50% of its memory in use, 80% in 300 s")


def test_a_small_table_that_fills_at_once_asks_for_nothing_and_a_large_one_does() -> None:
    """In the first seconds all ids are new."""
    assert Watched().after(300, lambda now: (min(now / 500, 0.05),) * 2).action is Action.HOLD
    watched = Watched()
    assert watched.after(60, lambda now: (now / 100,) * 2).action is Action.GROW
    assert watched.now <= 25


def test_servers_that_register_one_by_one_are_not_waited_for() -> None:
    watched = Watched()
    for servers in ((), (0.0,), (0.0, 0.0)):
        watched.after(1, lambda _, servers=servers: servers)
    assert watched.after(5, lambda _: (0.9, 0.9)).action is Action.GROW


def test_memory_that_stays_asks_for_nothing() -> None:
    watched = Watched()
    assert watched.after(900, lambda _: (0.7, 0.7)).reason == "the fullest has 70% of its memory in use"
    assert watched.after(60, lambda _: (0.7, 0.81)).action is Action.GROW


def test_how_long_a_companion_takes_is_learnt_and_nothing_is_asked_meanwhile() -> None:
    watched = Watched()
    assert watched.after(100, lambda _: (0.9, 0.9)).action is Action.GROW
    coming = watched.after(20, lambda _: (0.9, 0.9, 0.0), jobs=1, state=CompanionState.PENDING)
    assert coming.reason == "1 embedding server on the way"
    assert watched.after(SETTLE_S - 1, lambda _: (0.6, 0.6, 0.6), jobs=1).action is Action.HOLD, "parts move"
    assert watched.controller.start_s == 20.0
    began = watched.now
    decision = watched.after(900, lambda now: (0.6 + (now - began) / 1000, 0.6, 0.6), jobs=1)
    assert 170 <= watched.now - began <= 200
    assert "80% in 20 s" in decision.reason


def test_no_more_than_the_script_allows() -> None:
    decision = Watched(2, 2).after(100, lambda _: (0.9, 0.9))
    assert decision.action is Action.HOLD
    assert decision.reason.endswith("no more than 2 embedding servers are allowed")


def test_a_hot_server_gets_one_beside_it_once() -> None:
    """Where a server more does not help, the load is of a few rows."""
    watched = Watched(3, 5)
    assert watched.after(30, lambda _: (0.1, 0.1, 0.1), (100, 300, 120)).action is Action.HOLD
    decision = watched.after(60, lambda _: (0.1, 0.1, 0.1), (100, 300, 120))
    assert decision.action is Action.GROW
    assert watched.now == 1 + HOT_S
    assert decision.reason == "embedding server 1 has 300 reads/s for 60 s, the median is 120"
    same = watched.after(1000, lambda _: (0.1, 0.1, 0.1, 0.1), (100, 290, 120, 10), jobs=1)
    assert same.action is Action.HOLD, "nor does it leave while as much is read"


def test_the_newest_leaves_when_half_would_be_enough_and_no_fixed_one() -> None:
    watched = Watched()
    assert watched.after(2 * CALM_S, lambda _: (0.4, 0.4, 0.3), jobs=1).action is Action.HOLD, "0.55 without it"
    decision = watched.after(2 * CALM_S, lambda _: (0.3, 0.3, 0.2, 0.2), jobs=2)
    assert (decision.action, decision.jobs) == (Action.DRAIN, ("1001",))
    assert decision.reason == "without the newest embedding server the others would have 33% of their memory in use"
    leaving = watched.after(5, lambda _: (0.3, 0.3, 0.2, 0.2), jobs=2, state=CompanionState.DRAINING)
    assert leaving.reason == "1 embedding server about to leave"
    assert Watched().after(2 * CALM_S, lambda _: (0.0, 0.0)).action is Action.HOLD


def test_after_a_refusal_it_waits() -> None:
    watched = Watched()
    assert watched.after(10, lambda _: (0.9, 0.9)).action is Action.GROW
    assert watched.controller.refused(watched.now) == 10.0
    assert watched.after(8, lambda _: (0.9, 0.9)).reason.endswith("Slurm refused the last submission")
    assert watched.after(3, lambda _: (0.9, 0.9)).action is Action.GROW


# What is done about it.


class Steered:
    """Hears orders."""

    def __init__(self) -> None:
        self.orders: list[SteerDataWorkers] = []

    def steer(self, order: SteerDataWorkers) -> Status:
        self.orders.append(order)
        return Status(1, 9.0, [], [], 0, 0, 1, 0, 1.0)

    def close(self) -> None:
        pass


def tell(job: JobEnvironment, name: str, **facts: object) -> None:
    place = job.directory / REGISTRY
    place.mkdir(exist_ok=True)
    new = place / f"{name}.new"
    new.write_text(json.dumps({"name": name, "start": "a", "addresses": [], "log": "/l", "limit_bytes": 100, **facts}))
    new.rename(place / f"{name}.json")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobEnvironment]:
    monkeypatch.chdir(tmp_path)
    job = JobEnvironment("7", "train", "gpu0", tmp_path, 2, 0)
    job.directory.mkdir(parents=True, mode=0o700)
    job.address_file.touch()
    return job


def test_companions_are_submitted_and_asked_to_leave(
    job: JobEnvironment, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    monkeypatch.setattr("hetstream.hetjob.master.elastic._EVERY_S", 0.02)
    dispatcher, clock = Steered(), [0.0]
    monkeypatch.setattr(embedding, "StatusClient", lambda _: dispatcher)
    monkeypatch.setattr(embedding, "running_service", lambda _: None)
    slurm = FakeSlurm(job.submit_dir, dict(os.environ))
    servers = EmbeddingServers(1, 100, Path("rows"), 2, 3, ("--partition=cpu",)).of_start(job)
    tell(job, "0", rows=9, bytes=90)
    elastic = embedding.elastic_of_embedding_servers(servers, PROGRAM, slurm, job, None)
    assert elastic is not None
    elastic._clock = lambda: clock[0]
    elastic.begin()
    try:
        wait_until(lambda: slurm.jobs, what="a companion")
        words = next(words for method, words in slurm.calls if method == "submit")
        assert words[:4] == ("--partition=cpu", "--nodes=1", "--ntasks=1", "--cpus-per-task=2")
        assert "--comment=hets:trainer=7 hets:embedding-start=7.0" in words
        assert "--job-name=train-embedding-server" in words
        assert f"--output={job.directory}/embedding-companion-0.log" in words
        wait_until(lambda: len(read_registrations(job.directory / REGISTRY)) == 2, what="its registration")
        seen = lambda text: any(text in order.elastic for order in dispatcher.orders)  # noqa: E731
        wait_until(lambda: seen("2 embedding servers, allowed 1-3"), what="it to be seen")
        for _ in range(int(CALM_S + SETTLE_S) // 5 + 20):
            clock[0] += 5
            for name in ("0", "job-1000"):
                tell(job, name, bytes=10)
            looks = len(dispatcher.orders)
            wait_until(lambda looks=looks: len(dispatcher.orders) > looks + 1, what="a look")
            if slurm.jobs["1000"][0].poll() is not None:
                break
        assert ("ask_to_end", ("--signal=TERM", "1000")) in slurm.calls
        said = [(order.action, order.device) for order in dispatcher.orders if order.action]
        assert said == [("grow", "embedding"), ("drain", "embedding")]
    finally:
        elastic.stop()
        elastic.join()
    wait_until(lambda: not slurm.marked_jobs("hets:embedding-start=7.0"), what="the end of the companion")
    summary = ElasticStages(embedding=elastic).summary(3)["elastic_embedding"]
    assert summary["embedding_servers_at_most"] == 2
    assert [one["embedding_servers_before"] for one in summary["decisions"]] == [1, 2]


def test_a_job_shows_how_full_its_servers_are_and_how_fast(job: JobEnvironment) -> None:
    facts = {"rows": 5, "bytes": 90}
    tell(job, "10", **facts)
    tell(job, "2", **facts, draining=True, reads=5)
    before = read_registrations(job.directory / REGISTRY)
    seconds_ago = before["2"].written_s - 2
    earlier = {"2": Registration("2", "a", [], "/l", reads=1, written_s=seconds_ago)}
    rows = _server_rows(job.directory, earlier)
    assert [(row["server"], row["state"], row["share"]) for row in rows] == [
        ("2", "draining", 0.9),
        ("10", "serving", 0.9),
    ]
    assert [row["reads_per_s"] for row in rows] == [pytest.approx(2.0), None]
    assert earlier == before, "for the next look"
    assert _server_rows(job.submit_dir, {}) == []


def test_registrations_are_read_and_removed(job: JobEnvironment) -> None:
    assert read_registrations(job.directory / REGISTRY) == {}
    for name in ("10", "2"):
        tell(job, name, rows=5, bytes=50, reads=7, other={"new": 1})
    (job.directory / REGISTRY / "3.json").write_text("{")
    (job.directory / REGISTRY / ".half").write_text("")
    found = read_registrations(job.directory / REGISTRY)
    assert {name: (one.rows, one.bytes, one.limit_bytes) for name, one in found.items()} == dict.fromkeys(
        ("2", "10"), (5, 50, 100)
    )
    first = found["2"]
    later = Registration("2", "a", [], "/l", reads=27, written_s=first.written_s + 2)
    assert later.reads_per_s(first) == pytest.approx(10.0)
    assert Registration("2", "b", [], "/l", reads=3, written_s=later.written_s + 1).reads_per_s(later) is None
    remove_registrations(job.directory)
    remove_registrations(job.directory)
    assert read_registrations(job.directory / REGISTRY) == {}
