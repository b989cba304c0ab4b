"""Which GPU a process uses: by its launcher, and by what it lets itself see."""

from __future__ import annotations

import itertools

import pytest

from hetstream.hetjob.errors import GpuJobRefused
from hetstream.hetjob.gpu.config import settings_from_environment
from hetstream.hetjob.gpu.orders import LocalRank, gpu_of, local_rank

GPUS = ("GPU-1a2b", "GPU-1a3c", "GPU-77")
NUMBERS = ("1", "3", "4")


def rank(number: int, said_by: str = "LOCAL_RANK") -> LocalRank:
    return LocalRank(number, said_by=said_by)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 0, "")),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "SLURM_LOCALID": "0"}, (1, 2, "LOCAL_RANK")),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (3, 4, "OMPI_COMM_WORLD_LOCAL_RANK")),
        ({"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, (1, 2, "SLURM_LOCALID")),
        ({"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"}, (0, 1, "SLURM_LOCALID")),
        ({"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "nonsense"}, (0, 0, "SLURM_LOCALID")),
        ({"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x999999),1(x999999)"}, (0, 1, "SLURM_LOCALID")),
        ({"LOCAL_RANK": "٣", "SLURM_LOCALID": "1"}, (1, 0, "SLURM_LOCALID")),
        ({"LOCAL_RANK": "9" * 5000}, (0, 0, "")),
    ],
)  # fmt: skip
def test_the_innermost_launcher_numbers_the_processes(environ: dict[str, str], expected: tuple[int, int, str]) -> None:
    found = local_rank(environ)
    assert (found.number, found.count, found.said_by) == expected


def test_each_launch_of_a_job_has_a_name_of_its_own() -> None:
    ranks = [{"SLURM_STEP_ID": "0", "LOCAL_RANK": number} for number in "01"]
    assert len({local_rank(environ).launch for environ in ranks}) == 1
    others = [{"SLURM_STEP_ID": "1"}, {"SLURM_STEP_ID": "0", "MASTER_PORT": "29501"}, {"TORCHELASTIC_RUN_ID": "a"}]
    assert len({local_rank(environ).launch for environ in (*ranks, *others)}) == 4


def test_every_rank_has_a_gpu_of_its_own_in_the_order_of_the_job() -> None:
    assert [gpu_of(GPUS, NUMBERS, rank(number), None) for number in range(3)] == list(GPUS)


def test_what_a_process_lets_itself_see_is_numbered_as_cuda_does_it() -> None:
    """Whatever part of the job's GPUs, in whatever order, by name or by number: rank N has the Nth of them."""
    for count in range(1, 4):
        for chosen in itertools.permutations(range(3), count):
            for words in (GPUS, NUMBERS):
                visible = ",".join(words[place] for place in chosen)
                for number in range(count):
                    assert gpu_of(GPUS, NUMBERS, rank(number), visible) == GPUS[chosen[number]]
                # Where the others are hidden, several processes share one.
                if count == 1:
                    assert gpu_of(GPUS, NUMBERS, rank(7), visible) == GPUS[chosen[0]]


def test_where_slurm_constrains_devices_they_are_counted_from_0() -> None:
    assert [gpu_of(GPUS, NUMBERS, rank(number), "0,1,2") for number in range(3)] == list(GPUS)
    assert [gpu_of(GPUS, (), rank(number), "2,0") for number in range(2)] == [GPUS[2], GPUS[0]]


@pytest.mark.parametrize("visible", ["", "-1", "-1,1"])
def test_who_hides_all_gpus_shares_none(visible: str) -> None:
    assert gpu_of(GPUS, NUMBERS, rank(0), visible) == ""
    assert settings_from_environment({"HETSTREAM_GPU": ",".join(GPUS), "CUDA_VISIBLE_DEVICES": visible}) is None


def test_a_job_with_one_gpu_has_that_one() -> None:
    assert gpu_of(["GPU-1a2b"], (), rank(7), "nonsense") == "GPU-1a2b"


@pytest.mark.shows("ranks that claim other GPUs, or more GPUs than there are, are refused")
@pytest.mark.parametrize(
    ("number", "visible", "problem"),
    [
        (3, None, "LOCAL_RANK=3, and the job has 3 GPUs on this node, with numbers from 0. Start 3 processes"),
        (2, "3,1", "LOCAL_RANK=2, and the job has 2 GPUs on this node"),
        (0, "5", "CUDA_VISIBLE_DEVICES=5: 5 is none of the 3 GPUs that the job has on this node (1, 3, 4)"),
        (0, "GPU-99", "GPU-99 is none of the 3 GPUs"),
        (0, "GPU-1a", "GPU-1a is none of the 3 GPUs"),  # it could be two of them
        (0, "9" * 9000, "is none of the 3 GPUs"),
    ],
)
def test_what_a_process_claims_beyond_the_grant_is_one_line(number: int, visible: str | None, problem: str) -> None:
    with pytest.raises(GpuJobRefused) as refused:
        gpu_of(GPUS, NUMBERS, rank(number), visible)
    assert problem in str(refused.value)
    assert len(str(refused.value)) < 600
    environ = {"HETSTREAM_GPU": ",".join(GPUS), "HETSTREAM_GPU_NUMBERS": "1,3,4", "LOCAL_RANK": str(number)}
    settings = settings_from_environment(environ | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
    assert settings is not None
    assert (settings.gpu, settings.problem) == ("", str(refused.value))
