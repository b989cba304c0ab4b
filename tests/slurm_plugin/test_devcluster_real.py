"""The throw-away cluster with real daemons, as a user meets it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slurm


def test_gpu_job_sees_its_gpus(devcluster) -> None:
    out = devcluster.out_dir / "gpus.out"
    devcluster.run(["sbatch", "--wait", "--gpus=2", f"--output={out}", "--wrap", "echo gpus=$CUDA_VISIBLE_DEVICES"])
    assert out.read_text().strip() in ("gpus=0,1", "gpus=2,3")
