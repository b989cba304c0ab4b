"""Two controllers for two stages, in a model of a job: each finds the size of its own stage, and only of its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from hetstream.hetjob.elastic.controller import Controller
from hetstream.hetjob.elastic.snapshot import Action, Companion, CompanionState, Decision, Limits, Snapshot
from hetstream.hetjob.master.elastic import WorkerRates
from hetstream.mpi_dataworkers.dispatcher.client import has_gpu_stage, load_of
from hetstream.mpi_dataworkers.wire.messages import DataWorkerStatus, Device, LoaderStats, LoaderStatus, Status

HOLD, GROW, DRAIN, CANCEL = Action
START_S = 12.0  # longer than a cooldown: the other stage may decide meanwhile


def worker(job: str, device: Device, per_s: float, busy: float, wait: float = 0.0) -> DataWorkerStatus:
    return DataWorkerStatus(
        0, "h", int(job), "working", 1, 9, per_s, min(1.0, busy), 0, 9.0, 0.1, job, 0, device, min(1.0, wait)
    )


def trainer(per_s: float, wait: float, device: Device = "gpu", epoch: int = 0) -> LoaderStatus:
    row = LoaderStatus("job", 0, 0, 1, "h", 1, epoch, 5, 90, 1, 8, 1, per_s, 1e3, wait, LoaderStats())
    return LoaderStatus(**{name: getattr(row, name) for name in row.__struct_fields__} | {"device": device})


def status(workers: list[DataWorkerStatus], *loaders: LoaderStatus) -> Status:
    return Status(1, 9.0, workers, list(loaders), len(workers), 0, 1, 0, 1.0)


@dataclass
class StagedJob:
    """A training job with two stages: seconds that a step takes the trainer, a CPU and a GPU.

    Attributes:
        latency_share: that a data worker with a GPU waits for the stage before although the trainer waits for nothing.
    """

    step_s: float = 0.025
    cpu_s: float = 0.1
    gpu_s: float = 0.02
    latency_share: float = 0.4
    fixed: int = 0
    companions: dict[Device, list[Companion]] = field(default_factory=lambda: {"cpu": [], "gpu": []})
    number: int = 0

    def working(self, device: Device) -> list[str]:
        mine = [one.job_id for one in self.companions[device] if one.state is CompanionState.WORKING]
        return mine + (["0"] * self.fixed if device == "cpu" else [])

    def status(self) -> Status:
        cpus, gpus = self.working("cpu"), self.working("gpu")
        if not gpus:
            per_s = 1 / (self.step_s + self.cpu_s + self.gpu_s)
            return status([worker(job, "cpu", 0, 0) for job in cpus], trainer(per_s, 1 - per_s * self.step_s))
        before = len(cpus) / self.cpu_s if cpus else len(gpus) / (self.cpu_s + self.gpu_s)
        per_s = min(1 / self.step_s, before, len(gpus) / self.gpu_s)
        busy = per_s * self.gpu_s / len(gpus)
        waits = 1 - busy if per_s == before else min(1 - busy, self.latency_share if per_s == 1 / self.step_s else 0)
        rows = [worker(job, "cpu", per_s / len(cpus), per_s * self.cpu_s / len(cpus)) for job in cpus]
        rows += [worker(job, "gpu", per_s / len(gpus), busy, waits) for job in gpus]
        return status(rows, trainer(per_s, max(0.0, 1 - per_s * self.step_s)))

    def snapshot(self, device: Device, rates: WorkerRates) -> Snapshot:
        load = load_of(device, self.status())
        of_jobs = rates.by_job(load.workers)
        return Snapshot(
            load.reading,
            load.steps_per_s,
            load.wait_share,
            tuple(replace(one, rate_per_s=of_jobs.get(one.job_id, 0.0)) for one in self.companions[device]),
            fixed=self.fixed if device == "cpu" else 0,
            fixed_rate_per_s=of_jobs.get("0", 0.0),
            earlier_wait_share=load.earlier_wait_share,
        )

    def carry_out(self, device: Device, decision: Decision, now: float) -> None:
        for _ in range(decision.count if decision.action is GROW else 0):
            self.number += 1
            self.companions[device].append(Companion(str(self.number), decision.cpus, CompanionState.PENDING, now))
        self.companions[device] = [one for one in self.companions[device] if one.job_id not in decision.jobs]

    def pass_time(self, now: float) -> None:
        for device, those in self.companions.items():
            self.companions[device] = [
                replace(one, state=CompanionState.WORKING, since=now)
                if one.state is CompanionState.PENDING and now - one.since >= START_S
                else one
                for one in those
            ]


Change = tuple[float, Device, Decision]


def run(job: StagedJob, limits: dict[Device, Limits], for_s: float = 400) -> list[Change]:
    """What the two controllers change."""
    controllers = {device: Controller(its) for device, its in limits.items()}
    rates = {device: WorkerRates() for device in limits}
    changes: list[Change] = []
    for second in range(int(for_s)):
        now = float(second)
        job.pass_time(now)
        for device, controller in controllers.items():
            decision = controller.decide(job.snapshot(device, rates[device]), now)
            if decision.is_change:
                changes.append((now, device, decision))
            job.carry_out(device, decision, now)
    return changes


@pytest.mark.parametrize(
    ("gpu_s", "gpus"), [(0.02, 1), (0.05, 3)], ids=["one GPU is enough", "the GPUs are the bottleneck"]
)
@pytest.mark.parametrize("fixed", [0, 1])
def test_each_stage_finds_its_own_size(gpu_s: float, gpus: int, fixed: int) -> None:
    job = StagedJob(gpu_s=gpu_s, fixed=fixed)
    changes = run(job, {"cpu": Limits(fixed, 16), "gpu": Limits(0, 8)})
    assert (len(job.working("cpu")), len(job.working("gpu"))) == (5, gpus)  # 4 and 0.8 or 2, and some to spare
    assert load_of("gpu", job.status()).wait_share < 0.05
    assert {decision.action for _, _, decision in changes} == {GROW}
    assert max(now for now, _, _ in changes) < 200


def test_a_last_stage_that_starves_for_the_first_does_not_grow_and_does_not_go() -> None:
    job = StagedJob(cpu_s=1.0)
    job.companions["gpu"] = [Companion("7", 2, CompanionState.WORKING, 0.0)]
    alone = run(job, {"gpu": Limits(0, 8, 2, 2)}, 200)
    assert alone == [], "nobody makes the stage before"
    controller, rates = Controller(Limits(0, 8, 2, 2)), WorkerRates()
    for second in range(20):
        decision = controller.decide(job.snapshot("gpu", rates), float(second))
    theirs = "the data workers of this stage wait 98%"
    assert decision.reason == f"the trainer waits 98% of the time, but for the stage before: {theirs}"
    assert controller.wanted(job.snapshot("gpu", rates), 20.0) == 1
    both = run(job, {"cpu": Limits(0, 8), "gpu": Limits(0, 8, 2, 2)}, 200)
    assert {device for _, device, _ in both} == {"cpu"}
    assert sum(decision.count for _, _, decision in both if decision.action is GROW) == 8


def test_a_first_stage_whose_takers_wait_while_the_trainer_is_fed_does_not_grow() -> None:
    job = StagedJob(fixed=5, latency_share=0.9)
    job.companions["gpu"] = [Companion("7", 2, CompanionState.WORKING, 0.0)]
    assert load_of("gpu", job.status()).earlier_wait_share > 0.1
    assert load_of("cpu", job.status()).wait_share == 0.0
    assert run(job, {"cpu": Limits(5, 16), "gpu": Limits(0, 8, 2, 2)}) == []


def test_as_many_as_the_script_asks_for_come_at_once_and_stay() -> None:
    job = StagedJob(step_s=1.0, cpu_s=0.0001, gpu_s=0.0001)
    changes = run(job, {"gpu": Limits(2, 4, 2, 2)}, 600)
    assert [(now, decision.action, decision.count) for now, _, decision in changes] == [(0.0, GROW, 2)]
    assert changes[0][2].reason == "the script asks for 2 data workers at the least"
    job.companions["gpu"].pop()
    assert run(job, {"gpu": Limits(2, 4, 2, 2)}, 100)[0][2].count == 1
    idle = Controller(Limits(1, 4, 2, 2))
    snapshot = Snapshot(False, 0, 0.0, (Companion("7", 2, CompanionState.WORKING, 0.0),))
    assert idle.decide(snapshot, 0.0).action is HOLD
    assert "the script asks for 1 data workers at the least" in idle.decide(snapshot, 301.0).reason


def test_stages_of_a_status() -> None:
    rows = [worker("1", "cpu", 3, 0.5), worker("2", "cpu", 1, 0.7), worker("3", "gpu", 4, 0.2, 0.6)]
    both = status(rows, trainer(4, 0.3), trainer(9, 0.1, device="cpu"))
    first, last = load_of("cpu", both), load_of("gpu", both)
    assert (len(first.workers), first.steps_per_s, first.wait_share) == (2, 13, 0.3)
    assert first.busy_share == pytest.approx(0.6)
    assert (len(last.workers), last.steps_per_s, last.wait_share, last.earlier_wait_share) == (1, 4, 0.3, 0.6)
    assert ([row.steps_per_s for row in first.trainers], [row.steps_per_s for row in last.trainers]) == ([9], [4])
    plain = status(rows[:2], trainer(9, 0.1, device="cpu"))
    assert not has_gpu_stage(plain)
    assert load_of("cpu", plain).wait_share == 0.1
    assert not load_of("gpu", plain).reading
    nobody = status(rows[:2], trainer(4, 0.9))
    assert not load_of("cpu", nobody).reading, "without data workers with a GPU nobody takes its batches"
    assert load_of("gpu", status(rows, trainer(0, 0.0, epoch=0))).wait_share == 0.0, "its buffer is not empty"
    assert not load_of("cpu", status(rows, trainer(0, 0.0, epoch=-1))).reading
