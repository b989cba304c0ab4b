"""Embedding servers of a job on real Slurm: there at once, back when killed, more as tables grow, gone with the job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_main_job import processes

PROGRAM = Path(__file__).parent / "programs" / "train_embedding.py"
HETSTREAM = Path(sys.executable).with_name("hetstream")
SCRIPT = f"""#!/bin/bash
#SBATCH --job-name=tables --output=out.txt
#SBATCH --gres=gpu:1 --cpus-per-task=2 --mem=2G --time=10
#HETSTREAM --data-workers=1 --data-worker-cpus=1 --data-worker-partition=cpu --data-worker-mem=512M
#HETSTREAM --embedding-servers=2-3 --embedding-server-memory=512M
srun {sys.executable} {PROGRAM}
"""


@pytest.mark.shows("embedding servers of a job live as long as it does, and one that is killed comes back")
@pytest.mark.slurm
@pytest.mark.every_release
@pytest.mark.timeout(300)
def test_embedding_servers_of_a_job(devcluster: Any, wait_until: Callable[..., None]) -> None:
    directory = devcluster.out_dir / "embedding"
    directory.mkdir()
    (directory / "train.sbatch").write_text(SCRIPT)

    def run(*argv: str) -> str:
        return subprocess.run(
            argv, cwd=directory, env=dict(devcluster.env), capture_output=True, text=True, check=True, timeout=60
        ).stdout

    job_id = run(str(HETSTREAM), "sbatch", "--parsable", "train.sbatch").strip()
    home = directory / ".hetstream" / f"job-{job_id}"

    def servers(*words: str) -> list[int]:
        found = processes("embedding-server", f"file:{home}/address", *words)
        return [pid for pid, argv in found.items() if "--het-group=2" not in argv]

    def registered() -> dict[str, Any]:
        return {path.stem: json.loads(path.read_text()) for path in (home / "embedding-servers").glob("*.json")}

    try:
        wait_until((directory / "seen").exists, timeout_s=120, what="both registrations")
        seen = json.loads((directory / "seen").read_text())
        place = directory / "hetstream-embedding" / f"job-{job_id}"
        assert seen == {name: str(place / f"server-{name}") for name in ("0", "1")}
        wait_until(lambda: processes("worker", f"file:{home}/address"), what="the data worker")
        before = registered()["1"]["start"]
        for pid in servers("1"):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: registered()["1"]["start"] != before, timeout_s=60, what="the server again")
        shown = json.loads(run(str(HETSTREAM), "job", "--json", job_id))
        assert [row["server"] for row in shown["embedding_servers"]][:2] == ["0", "1"]
        assert "embedding servers, allowed 2-3" in shown["service"]["elastic_embedding"]

        names = "0", "1"
        wait_until(lambda: len(registered()) > 2, timeout_s=60, what="a companion, as the table grows")
        (companion,) = registered().keys() - {*names}
        wait_until(lambda: registered()[companion]["rows"] > 0, timeout_s=60, what="rows on the companion")
        assert "embedding_servers grow by 1" in run(str(HETSTREAM), "job", "--events", job_id)
        # As the job master does when half would be enough.
        run("scancel", "--batch", "--signal=TERM", companion.removeprefix("job-"))
        wait_until(lambda: companion not in registered(), timeout_s=60, what="the companion to give its rows away")
        (directory / "stop").touch()
        wait_until((directory / "result").exists, timeout_s=60, what="the end of the program")
        assert json.loads((directory / "result").read_text())["wrong"] == 0
    finally:
        for path in (directory / "out.txt", home / "master.log"):
            print(path.read_text() if path.exists() else f"no {path}")
        run("scancel", "--quiet", job_id)
        wait_until(
            lambda: not run("squeue", "--noheader", "--states=PD,R,CG"), timeout_s=120, what="the end of the job"
        )
    wait_until(lambda: not servers(), what="the end of the servers")
    assert not (home / "embedding-servers").exists()
    assert not (home / "address").exists()
    assert (home / "embedding-server-1.log").exists()
    assert not place.exists(), "without a generation no checkpoint names it"
    summary = json.loads((home / "summary.json").read_text())
    assert [server["name"] for server in summary["embedding_servers"]] == [*names, companion]
    assert sum(server["rows"] for server in summary["embedding_servers"]) > 0
    assert summary["elastic_embedding"]["embedding_servers_at_most"] == 3
    assert "changes of the number of embedding servers" in run(str(HETSTREAM), "job", str(home))
