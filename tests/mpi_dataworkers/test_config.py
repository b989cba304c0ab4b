"""Settings from the environment: who this trainer is, and what is refused."""

from __future__ import annotations

import pytest

from hetstream.base.errors import ConfigError
from hetstream.mpi_dataworkers.process.config import (
    buffer_bytes_from_environment,
    compression_from_environment,
    identity_from_environment,
    service_from_environment,
    transports_from_environment,
)
from hetstream.mpi_dataworkers.transports.registry import DEFAULT_NAMES

STEP = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.shows("rank and world size come from torch, torchrun or Slurm; explicit ones win")
def test_rank_comes_from_torch_then_torchrun_then_slurm() -> None:
    torchrun = {"RANK": "2", "WORLD_SIZE": "3"}
    assert identity_from_environment((5, 6), None, STEP | torchrun).rank == 5
    assert identity_from_environment(None, None, STEP | torchrun).world_size == 3
    identity = identity_from_environment(None, None, STEP)
    assert (identity.rank, identity.world_size, identity.job_name) == (1, 4, "12.0")


def test_a_batch_script_is_one_process_whatever_the_job_has() -> None:
    batch = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    identity = identity_from_environment(None, None, batch)
    assert identity.world_size == 1
    assert identity.job_name.startswith("12.")


def test_single_processes_never_share_a_name_by_accident() -> None:
    assert identity_from_environment(None, None, {}).job_name != identity_from_environment(None, None, {}).job_name
    given = identity_from_environment(None, "mine", {"HETSTREAM_JOB_NAME": "other"})
    assert (given.job_name, given.is_named) == ("mine", True)


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x': must be a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of world size 2"),
        ({"HETSTREAM_JOB_NAME": ""}, "job name ''"),
        ({"HETSTREAM_JOB_NAME": "a\nb"}, "must be non-empty printable text"),
    ],
)
def test_bad_values_are_named(environ: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        identity_from_environment(None, None, environ)


def test_buffer_and_service() -> None:
    assert buffer_bytes_from_environment({"HETSTREAM_BUFFER_BYTES": "1000"}) == 1000
    with pytest.raises(ConfigError, match="must be positive"):
        buffer_bytes_from_environment({"HETSTREAM_BUFFER_BYTES": "0"})
    assert service_from_environment({"HETSTREAM_SERVICE": ""}) is None


def test_transports() -> None:
    assert (
        transports_from_environment({})
        == transports_from_environment({"HETSTREAM_TRANSPORT": ""})
        == set(DEFAULT_NAMES)
    )
    assert transports_from_environment({"HETSTREAM_TRANSPORT": "tcp"}) == {"tcp"}
    assert transports_from_environment({"HETSTREAM_TRANSPORT": "shm, tcp"}) == {"shm", "tcp"}
    with pytest.raises(ConfigError, match=r"'tcp,rdma,': 'rdma', '' is no transport; the transports are mpi, shm, "):
        transports_from_environment({"HETSTREAM_TRANSPORT": "tcp,rdma,"})


@pytest.mark.shows("every setting is checked at construction, all problems at once")
def test_compression() -> None:
    assert not compression_from_environment({})
    assert not compression_from_environment({"HETSTREAM_COMPRESSION": "none"})
    with pytest.raises(ConfigError, match="HETSTREAM_COMPRESSION='gzip': must be none or zstd"):
        compression_from_environment({"HETSTREAM_COMPRESSION": "gzip"})


def test_data_workers_in_the_trainers_step_are_no_trainers() -> None:
    step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "6", "SLURM_NTASKS_HET_GROUP_0": "2"}
    assert identity_from_environment(None, "x", step).world_size == 6
    by_mpi = identity_from_environment(None, "x", step | {"HETSTREAM_TRANSPORT": "mpi,tcp"})
    assert (by_mpi.rank, by_mpi.world_size) == (1, 2)


def test_an_mpi_world_counts_its_trainers_before_slurm_counts_tasks() -> None:
    step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "6"}
    by_mpi = step | {"HETSTREAM_TRANSPORT": "mpi,tcp"}

    def identity(environ: dict[str, str], counted: tuple[int, int] | None = (0, 2)) -> tuple[int, int]:
        found = identity_from_environment(None, "x", environ, of_mpi_world=lambda: counted)
        return found.rank, found.world_size

    assert identity(by_mpi) == (0, 2)
    assert identity(by_mpi | {"RANK": "2", "WORLD_SIZE": "3"}) == (2, 3)
    assert identity(by_mpi, counted=None) == identity(step) == (1, 6), "alone in its world, or not asked for"
