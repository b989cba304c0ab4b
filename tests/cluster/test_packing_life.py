"""The life of an opportunistic job on real Slurm, beside a guaranteed one: placed, evicted, placed again, upgraded.

Both train for real, on an emulated GPU. Whatever happens, the opportunistic job has the weights and the data of a run
that nobody disturbed, and the guaranteed one computes at each step what it computes alone.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.clients.ckpt_job import SAVE_EVERY, CheckpointJob, differences, undisturbed
from hetstream.hetjob.site.client import ADDRESS_VARIABLE, SiteSettings, parse_address
from hetstream.slurm_plugin.packing.notes import COMMENT_MARK
from tests.cluster.packing_site import STEPS, Site, held_job
from tests.conftest import WaitUntil

pytestmark = [pytest.mark.slurm, pytest.mark.every_release, pytest.mark.timeout(400)]
# Root's jobs are not held by the guard; this one says itself that it waits.
PATIENT = """\
#SBATCH --partition=gpu --gpus=1 --hold --account=vision --comment=hetstream:gpu-memory=128M
#HETSTREAM --job-class=guaranteed --opportunistic-after=00:00:01
"""


@pytest.fixture
def job(site: Site) -> Iterator[CheckpointJob]:
    with held_job(site) as job:
        yield job


@pytest.fixture
def chain(site: Site, wait_until: WaitUntil) -> Iterator[Callable[..., str]]:
    """All of a site: the node tells the site daemon of its GPU, and the packer reads it there. Calls `hetstream`."""
    address = f"unix:{site.out_dir}/daemon.sock"
    site.daemon = SiteSettings(parse_address(address), None)
    environ = {**site.env, ADDRESS_VARIABLE: address}
    number = site.gpu().gpu[-1]  # the other one is told to nobody, and stays free
    gpu = f"{number}=emulation:{site.sharing}/gpu{number}"
    calls = (
        ("site", "daemon", "--state-dir", str(site.out_dir / "daemon"), "--interval", "5"),
        ("internal", "gpu-report", "--node", "gpu0", "--gpus", gpu, "--socket", str(site.sharing / "gpu.sock")),
    )
    hetstream = [sys.executable, "-m", "hetstream"]
    with contextlib.ExitStack() as stack:
        for words in calls:
            log = stack.enter_context((site.out_dir / f"{words[0]}.log").open("wb"))
            process = stack.enter_context(subprocess.Popen([*hetstream, *words], env=environ, stderr=log))
            stack.callback(process.terminate)
            wait_until(lambda path=log.name: Path(path).stat().st_size > 0, 30, f"hetstream {words[0]}")
        yield (
            lambda *words: (
                subprocess.run(
                    [*hetstream, *words], env=environ, capture_output=True, text=True, check=True, timeout=60
                ).stdout
            )
        )


@pytest.mark.shows("an upgraded job is the same process, on real Slurm")
@pytest.mark.shows("the packer places an opportunistic job beside a guaranteed one, and it goes on from its checkpoint")
def test_a_whole_life(site: Site, chain: Callable[..., str], tmp_path: Path) -> None:
    """A guaranteed job without quota shares a GPU after a while, gives way, and is guaranteed where it runs at last.

    Agents tell the coordinator, that a reporter, that the site daemon, that the packer, and that Slurm.
    """
    job = CheckpointJob(site.out_dir / "opportunistic", site.env, 100_000, step_s=0.02, options=PATIENT)
    job.submit()
    try:
        live(site, job, chain)
        truth = undisturbed(tmp_path / "truth", max(int(words[0]) for words in job.ledger() if words[0].isdigit()))
        assert list(differences(job, truth)) == []
        assert job.starts()[-1].step >= SAVE_EVERY, "its state was not kept"
    finally:
        job.cancel()
    assert job.shared_memory() == []
    site.pack_until(lambda: not site.run("squeue", "-h"), "the end of what kept its GPU")


def live(site: Site, job: CheckpointJob, chain: Callable[..., str]) -> None:
    """Its life, as far as the packer, Slurm and the coordinator have to do with it."""

    def shown() -> str:
        return site.run("scontrol", "show", "job", job.job_id)

    assert "JobState=PENDING Reason=JobHeldUser" in shown()
    site.pack_until(lambda: site.happened("moved"), "its time without quota")
    assert "Partition=opp" in shown()
    site.wait_until(lambda: site.is_told_of(site.guaranteed), 60, "the node's word")
    lock = job.directory / "packer" / "lock"
    placed = chain("gpu", "pack", "--once", "--json", "--partition=opp", f"--lock={lock}")
    assert f'"placed", "job": "{job.job_id}"' in placed
    site.pack_until(lambda: site.happened("started"), "a start beside the guaranteed job")
    job.wait_for_steps(SAVE_EVERY + 1)
    (process,) = site.processes("opportunistic")
    assert process.job == job.job_id
    assert process.paused_s > 0, "it launched whenever it liked"
    site.wait_until(lambda: site.is_told_of(job.job_id), 20, "the node's word of both jobs")
    rows = json.loads(chain("report", "--fresh", "--json"))["shared_gpus"]
    classes = {row["job"]: row["job_class"] for row in rows}
    assert classes == {site.guaranteed: "guaranteed", job.job_id: "opportunistic"}
    # The owner of the node needs its CPUs.
    words = ("--parsable", "--partition=gpu", "--cpus-per-task=2", "--mem=100", "--output=/dev/null", "--wrap=true")
    own = site.run("sbatch", *words).strip()
    job.wait(lambda: "Restarts=1" in shown(), "its requeueing")
    # At once: Slurm itself starts it again soon, as it was.
    site.pack_until(lambda: site.happened("taken back"), "the packer's notice")
    # Else it would give way a second time.
    site.wait_until(lambda: own not in site.run("squeue", "-h", "-o", "%A").split(), 60, "the end of the other one")
    assert "Priority=0" in shown()
    assert COMMENT_MARK not in shown(), "a Prolog would give it a GPU"
    site.pack_until(lambda: site.happened("started") == 2, "a second start")
    job.wait(lambda: len(job.starts()) == 2, "its trainer's second start")
    site.check_guaranteed()
    assert not site.happened("upgraded")
    (process,) = site.processes("opportunistic")
    site.run("scancel", site.guaranteed)
    site.pack_until(lambda: site.happened("upgraded"), "its upgrade")
    (upgraded,) = site.processes("guaranteed")
    assert (upgraded.job, upgraded.pid) == (job.job_id, process.pid), job.story()
    # Slurm's books say so, too: nobody else gets the GPU.
    holders = site.run("squeue", "-h", "-t", "R", "-p", "gpu", "-o", "%k").split()
    assert holders == [f"hetstream:holds={job.job_id}@1"]
    assert "Restarts=1" in shown()
    gives_way_no_more(site, job)
    job.wait_for_steps(1)
    job.end_soon(10)
    job.wait_for_end()


def gives_way_no_more(site: Site, job: CheckpointJob) -> None:
    """Again somebody needs its CPUs, whom it gave way to before. (22.05 has nothing that would keep it from that.)"""
    if site.run("scontrol", "--version").split()[1].startswith("22.05"):
        return
    words = ("--parsable", "--partition=gpu", "--cpus-per-task=3", "--mem=100", "--output=/dev/null", "--wrap=true")
    comes = site.run("sbatch", *words).strip()
    site.wait_until(lambda: site.run("squeue", "-h", "-j", comes, "-o", "%r").strip() == "Resources", 30, "its turn")
    shown = site.run("scontrol", "show", "job", job.job_id)
    assert "JobState=RUNNING" in shown
    assert "Restarts=1" in shown
    site.run("scancel", comes)


@pytest.mark.shows("without a coordinator opportunistic jobs pause and guaranteed ones do not")
@pytest.mark.slow
def test_a_coordinator_that_dies_stops_the_opportunistic_job_alone(
    site: Site, job: CheckpointJob, tmp_path: Path
) -> None:
    truth = undisturbed(tmp_path / "truth", STEPS)
    site.kill("coordinator gpu0")
    site.packer.step()
    assert site.happened("placed") == 0, "nobody knows how the GPU is"
    site.guaranteed_goes_on(5)
    site.start_again("coordinator gpu0")
    site.pack_until(lambda: site.happened("started"), "a start")
    job.wait_for_steps(2)
    site.kill("coordinator gpu0")
    output = job.directory / "job.out"
    job.wait(lambda: "this opportunistic job pauses" in output.read_text(errors="replace"), "its pause")
    trained = len(job.ledger())
    site.guaranteed_goes_on(10)
    assert len(job.ledger()) <= trained + 1, "it went on without a coordinator"
    site.start_again("coordinator gpu0")
    job.wait_for_end()
    assert list(differences(job, truth)) == []
    site.check_guaranteed()


@pytest.mark.slow
def test_a_trainer_with_its_agent_that_is_killed_goes_on_from_memory(
    site: Site, job: CheckpointJob, tmp_path: Path
) -> None:
    truth = undisturbed(tmp_path / "truth", STEPS)
    site.pack_until(lambda: site.happened("started"), "a start")
    job.wait_for_steps(SAVE_EVERY + 1)
    job.kill_trainer()
    job.wait_for_end()
    assert list(differences(job, truth)) == []
    assert [start.source for start in job.starts()] == ["", "memory"]
    site.check_guaranteed()


@pytest.mark.slow
def test_a_slurmd_that_is_killed_takes_no_job_with_it(site: Site, job: CheckpointJob, tmp_path: Path) -> None:
    truth = undisturbed(tmp_path / "truth", STEPS)
    site.pack_until(lambda: site.happened("started"), "a start")
    job.wait_for_steps(2)
    site.kill("slurmd gpu0")
    trained = len(job.ledger())
    site.guaranteed_goes_on(10)
    job.wait(lambda: len(job.ledger()) > trained, "a step without slurmd")
    site.start_again("slurmd gpu0")
    job.wait_for_end()
    assert list(differences(job, truth)) == []
    site.check_guaranteed()


@pytest.mark.shows("the packer places, compares, takes away and places again; it may die at each point")
@pytest.mark.slow
def test_a_job_that_the_packer_takes_away_keeps_its_state(site: Site, job: CheckpointJob, tmp_path: Path) -> None:
    """Its node reports that it does not keep to its orders."""
    truth = undisturbed(tmp_path / "truth", STEPS)
    site.pack_until(lambda: site.happened("started"), "a start")
    job.wait_for_steps(SAVE_EVERY + 1)
    site.complaint = "it goes on although it should pause"
    site.packer.step()
    assert site.happened("evicted") == 1
    site.complaint = ""
    job.wait(lambda: job.state() == "PENDING", "its requeueing")
    site.guaranteed_goes_on(5)
    site.pack_until(lambda: site.happened("started") == 2, "a second start")
    job.wait_for_end()
    assert list(differences(job, truth)) == []
    assert job.starts()[-1].step >= SAVE_EVERY, "its state was not kept"
    site.check_guaranteed()


@pytest.mark.shows("agents, coordinator and nodes may be killed at each point, and the guaranteed job goes on as alone")
@pytest.mark.slow
def test_a_node_that_is_lost_with_all_that_runs_there_loses_no_state(
    site: Site, job: CheckpointJob, tmp_path: Path
) -> None:
    def node_state() -> str:
        return site.run("sinfo", "-h", "-N", "-n", "gpu0", "-O", "StateComplete:100")

    truth = undisturbed(tmp_path / "truth", STEPS)
    site.pack_until(lambda: site.happened("started"), "a start")
    job.wait_for_steps(SAVE_EVERY + 1)
    site.lose_node()
    site.run("scontrol", "update", "NodeName=gpu0", "State=DOWN", "Reason=lost")
    job.wait(lambda: job.state() == "PENDING", "its requeueing")
    site.start_again("coordinator gpu0")
    site.start_again("slurmd gpu0")
    # By ReturnToService=2 it is up again when its slurmd has registered; then Slurm refuses to resume it.
    site.wait_until(lambda: not re.search("NOT_RESPONDING|DOWN", node_state()), 60, "slurmd")
    losses = site.out_dir / "losses"
    losses.unlink()
    site.wait_until(losses.exists, 180, "the guaranteed job's second start")
    site.pack_until(lambda: site.happened("started") == 2, "a second start", 180)
    job.wait_for_end()
    assert list(differences(job, truth)) == []
    site.guaranteed_goes_on(5)


# Holds memory of the emulated GPU as a CUDA program without torch would of a real one.
HOG = """
import signal, sys
from hetstream.hetjob.gpu.emulated_file import EmulatedGpuFile
gpu = EmulatedGpuFile(sys.argv[1])
assert gpu.take(gpu.capacity_bytes // 4)
print("holds", flush=True)
signal.pause()
"""


@pytest.mark.slow
def test_a_job_that_drops_its_agent_is_taken_away(site: Site, chain: Callable[..., str]) -> None:
    site.wait_until(lambda: site.is_told_of(site.guaranteed), 60, "the node's word")
    (site.out_dir / "hog.py").write_text(HOG)
    drops = "env -u PYTHONPATH -u HETSTREAM_GPU -u HETSTREAM_JOB_CLASS"
    command = f"exec {drops} {sys.executable} hog.py {site.sharing}/gpu{site.number}"
    words = ("--parsable", "--partition=opp", "--comment=hetstream:gpu-memory=128M", "--mem=1G", "--time=20")
    job = site.run("sbatch", *words, "--requeue", "--output=hog.out", f"--wrap={command}")
    site.pack_until(lambda: site.happened("started"), "a start beside the guaranteed job")
    site.wait_until(lambda: "holds" in (site.out_dir / "hog.out").read_text(), 30, "the memory to be taken")
    site.pack_until(lambda: site.happened("evicted"), "its eviction")
    (reason,) = (event.reason for event in site.events if (event.event, event.job) == ("evicted", job))
    assert "bytes of the GPU without an agent" in reason
    site.pack_until(lambda: "Restarts=1" in site.run("scontrol", "show", "job", job), "its requeueing", 150)
    site.wait_until(lambda: site.gpu().agentless_bytes == 0, 30, "its memory to be free")
    site.check_guaranteed()
