"""What the doctor says of a host's GPUs, from the lines of nvidia-smi."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetstream.slurm_plugin.install.doctor import HostGpus, Level, host_gpus, parse_gpus, read_gpus

USUAL = "GPU-1a2b, Disabled, Default\nGPU-3c4d, [N/A], Default\n"
MIXED = "GPU-1a2b, Enabled, Default\nGPU-3c4d, Disabled, Exclusive_Process\nNo devices were found\n"


def test_gpus_as_they_should_be_are_no_finding() -> None:
    assert list(host_gpus(parse_gpus(USUAL))) == []
    assert list(host_gpus(HostGpus({}, {}))) == []


def test_what_keeps_jobs_from_sharing_is_found_with_its_remedy() -> None:
    found = {finding.check: finding for finding in host_gpus(parse_gpus(MIXED, "/tmp/nvidia-mps"))}
    assert found["compute mode"].level is Level.PROBLEM
    assert found["compute mode"].seen == "Exclusive_Process of GPU-3c4d"
    assert found["compute mode"].fix == "nvidia-smi -i GPU-3c4d -c DEFAULT"
    assert found["MIG"].seen == "divides 1 of 2 GPUs"
    assert "GPU-1a2b cannot be shared as a whole" in found["MIG"].text
    assert found["MPS"].level is Level.WARNING


def test_they_are_read_from_nvidia_smi_and_a_host_without_it_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_gpus() is None
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{MIXED}'\n")
    program.chmod(0o755)
    (tmp_path / "control").touch()
    gpus = read_gpus({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})
    assert gpus == HostGpus(
        {"GPU-1a2b": True, "GPU-3c4d": False},
        {"GPU-1a2b": "Default", "GPU-3c4d": "Exclusive_Process"},
        str(tmp_path),
    )
