"""Data workers with a GPU: how a script asks for them, what the job master is told, and how it runs them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetstream.hetjob.convert.convert import convert
from hetstream.hetjob.convert.directives import WITH_VALUE, from_command_line, read_directives
from hetstream.hetjob.convert.plan import HetPlan
from hetstream.hetjob.convert.sbatch_options import parse_words
from hetstream.hetjob.convert.spec import JobSpec, read_spec
from hetstream.hetjob.errors import DirectiveError
from hetstream.hetjob.job.job import JobEnvironment
from hetstream.hetjob.master.elastic import ElasticStages, GpuStage, elastic_of_gpu_stage
from hetstream.hetjob.master.server import MasterConfig, SlurmLauncher
from hetstream.mpi_dataworkers.wire.messages import (
    DataWorkerStatus,
    LoaderStats,
    LoaderStatus,
    Status,
    SteerDataWorkers,
)
from hetstream.slurm_plugin.cli import build_parser
from hetstream.slurm_plugin.cli.master import _config
from hetstream.slurm_plugin.client.fake import FakeSlurm

WaitUntil = Callable[..., None]


def plan_of(sbatch: str, words: str) -> HetPlan:
    script = f"#!/bin/bash\n#SBATCH {sbatch}\n#HETSTREAM {words}\nsrun python train.py\n"
    options, _ = parse_words([], "command line", extra=WITH_VALUE)
    spec = read_spec([*read_directives(script, "train.sbatch"), *from_command_line(options)], "train.sbatch")
    assert spec is not None
    return convert(spec, script, "train.sbatch")


def gpu_options(sbatch: str, words: str) -> tuple[int, int, int, tuple[str, ...]]:
    """What the job master makes of a script, by way of the command line in between."""
    plan = plan_of(sbatch, f"--data-worker-partition=cpu {words}")
    assert plan.master_options is not None
    found = _config(
        build_parser("internal", "master").parse_args(["internal", "master", "start", *plan.master_options])
    ).gpu_stage
    assert found is not None
    return found.minimum, found.maximum, found.cpus, found.options


@pytest.mark.parametrize(
    ("sbatch", "words", "expected"),
    [
        ("-p gpu", "--data-workers=0-4 --gpu-data-workers=1-3", (1, 3, 2, ("--partition=gpu", "--gres=gpu:1"))),
        ("-c 8", "--data-workers=2 --gpu-data-workers=2", (2, 2, 2, ("--gres=gpu:1",))),
        (
            "-p gpu --mem=8G -A team --time=10 --reservation=r",
            "--data-workers=2-4 --gpu-data-workers=0-2 --gpu-data-worker-gres=gpu:a100:1 --gpu-data-worker-cpus=4",
            (0, 2, 4, ("--partition=gpu", "--gres=gpu:a100:1", "--mem-per-cpu=4G", "--account=team", "--time=10",
                       "--reservation=r")),
        ),
        (
            "-p big",
            "--data-workers=2 --gpu-data-workers=1-2 --gpu-data-worker-mem=6G --gpu-data-worker-partition=small",
            (1, 2, 2, ("--partition=small", "--gres=gpu:1", "--mem-per-cpu=3G")),
        ),
    ],
)  # fmt: skip
def test_what_a_script_asks_for_reaches_the_job_master(sbatch: str, words: str, expected: tuple[Any, ...]) -> None:
    assert gpu_options(sbatch, words) == expected


def test_the_conversion_says_what_comes() -> None:
    plan = plan_of(
        "-p gpu", "--data-workers=2 --data-worker-partition=cpu --data-worker-cooldown=7 --gpu-data-workers=0-3"
    )
    assert "0 to 3 companion jobs with gpu:1 and 2 CPUs, one data worker each" in [one.change for one in plan.changes]
    assert "--cooldown=7" in (plan.master_options or ()), "also where the other stage has a fixed size"
    assert len(plan.components) == 2, "the trainer does not wait for a GPU more"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--data-workers=2 --gpu-data-workers=3-1", "not below MIN"),
        ("--data-workers=2 --gpu-data-workers=many", "write MIN or MIN-MAX"),
        ("--data-workers=2 --gpu-data-workers=1 --gpu-data-worker-gres=gpu:2", "one GPU, such as gpu:1 or gpu:a100:1"),
        ("--data-workers=2 --gpu-data-workers=1 --gpu-data-worker-gres=gpu:a100:4", "one GPU"),
        ("--data-workers=2 --gpu-data-workers=1 --gpu-data-worker-gres=gpu:1,gpu:1", "one GPU"),
        ("--data-workers=2 --gpu-data-workers=1 --gpu-data-worker-gres=license:1", "one GPU"),
        ("--data-workers=2 --gpu-data-workers=1 --gpu-data-worker-cpus=0", "at least 1"),
        ("--data-workers=2 --gpu-data-workers=1 --gpu-data-worker-mem=big", "a size such as"),
        ("--data-workers=2 --gpu-data-worker=1", "did you mean --gpu-data-workers?"),
    ],
)
def test_wrong_directives(words: str, said: str) -> None:
    with pytest.raises(DirectiveError) as caught:
        read_spec(read_directives(f"#!/bin/bash\n#HETSTREAM {words}\n", "x"), "x")
    assert said in str(caught.value)


def test_a_spec_without_the_stage_before_is_refused() -> None:
    with pytest.raises(DirectiveError, match="only with --data-workers, which make their batches"):
        JobSpec(checkpoint="c", checkpoint_size="1G", gpu_data_workers_max=1)


class Dispatcher:
    """Says that every companion works, the trainer waits, and each data worker is busy all of the time."""

    def __init__(self, slurm: FakeSlurm) -> None:
        self.slurm, self.orders = slurm, list[SteerDataWorkers]()

    def steer(self, order: SteerDataWorkers) -> Status:
        self.orders.append(order)
        rows = [
            DataWorkerStatus(0, "h", int(job), "working", 1, 9, 2.0, 0.9, 0, 9.0, 0.1, job, 0, "gpu")
            for job in self.slurm.jobs
        ]
        taker = LoaderStatus(
            "job", 0, 0, 1, "h", 1, 0, 5, 90, 1, 8, 1, 2.0, 1e3, 0.9, LoaderStats(), 0.0, 0.0, "", None, "gpu"
        )
        return Status(1, 9.0, rows, [taker], len(rows), 0, 1, 0, 1.0)

    def close(self) -> None:
        pass


def test_companions_with_a_gpu_are_jobs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    monkeypatch.setattr("hetstream.hetjob.master.elastic._EVERY_S", 0.02)
    job = JobEnvironment("7", "train", "gpu0", tmp_path, 1, 0)
    job.directory.mkdir(parents=True)
    job.address_file.touch()
    (job.directory / "companion-4.log").touch()  # of the other stage
    slurm = FakeSlurm(tmp_path, dict(os.environ))
    dispatcher = Dispatcher(slurm)
    stage = GpuStage(2, 4, 2, ("--partition=gpu", "--gres=gpu:1"))
    elastic = elastic_of_gpu_stage(stage, 10.0, slurm, job, lambda _: ["sleep", "600"], lambda: dispatcher, None)
    elastic.begin()
    try:
        wait_until(lambda: len(slurm.jobs) == 2, what="as many as the script asks for at the least")
        words = next(words for method, words in slurm.calls if method == "submit")
        assert words[:5] == ("--partition=gpu", "--gres=gpu:1", "--nodes=1", "--ntasks=1", "--cpus-per-task=2")
        assert "--comment=hets:trainer=7 hets:gpu-start=7.0" in words
        assert "--job-name=train-gpu-data-worker" in words
        assert f"--output={job.directory}/gpu-companion-0.log" in words
        assert list(slurm.keys) == ["7.0.gpu-companion-0", "7.0.gpu-companion-1"]
        wait_until(lambda: dispatcher.orders[-1].elastic.startswith("2 data workers"), what="both to work")
        assert {order.device for order in dispatcher.orders} == {"gpu"}
    finally:
        elastic.stop()
        elastic.join()
    wait_until(lambda: not slurm.marked_jobs("hets:gpu-start=7.0"), what="the end of the companions")
    summary = ElasticStages(gpu=elastic).summary(3)
    assert summary["elastic_gpu"]["trainer_cpus"] == 3
    assert [(one["action"], one["count"]) for one in summary["elastic_gpu"]["decisions"]] == [("grow", 2)]
    assert (job.gpu_controller_state_file).exists()


def test_a_data_worker_with_a_gpu_is_one_process_in_the_programs_python(tmp_path: Path) -> None:
    job = JobEnvironment("7", "train", "gpu0", tmp_path, 1, 0)
    slurm = FakeSlurm(tmp_path, dict(os.environ))
    launcher = SlurmLauncher(MasterConfig(("/bin/hetstream",), 2, 4), slurm, job, "127.0.0.1")
    words = launcher.gpu_worker_words(2)
    service = f"file:{job.address_file}"
    assert words == [
        "/bin/hetstream",
        "internal",
        "worker",
        "--follow-program",
        "--service",
        service,
        "--device",
        "gpu",
    ]
    given = SlurmLauncher(MasterConfig(("/x",), 2, 4, data_worker_program=("/bin/py",)), slurm, job, "127.0.0.1")
    assert shlex.join(given.gpu_worker_words(2)) == f"/bin/py internal worker --service {service} --device gpu"
