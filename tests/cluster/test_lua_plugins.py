"""The Lua plugins in real daemons: plain sbatch streams, and nothing that is wrong with them stops a job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetstream.slurm_plugin.install.installation import LUA_DIR, hook_text
from hetstream.slurm_plugin.submit.program import own_program
from tests.clusters import Devcluster, running_cluster
from tests.devcluster.spec import ClusterShape

pytestmark = [pytest.mark.slurm, pytest.mark.every_release]
PROGRAM = Path(__file__).parent / "programs" / "train.py"
DIRECTIVE = "#HETSTREAM --data-workers=1 --data-worker-cpus=1 --data-worker-partition=cpu\n"
TRAIN = f"""#!/bin/bash
#SBATCH --gres=gpu:1 --cpus-per-task=8 --time=10 --output=train.out
{DIRECTIVE}
echo "cpus=$SLURM_CPUS_PER_TASK arguments=$*"
DECODE_S=0.002 srun {sys.executable} {PROGRAM} ledger
exit 7
"""
SHORT = f'#!/bin/bash\n#SBATCH --output=short.out\n{DIRECTIVE}\necho "service=$HETSTREAM_SERVICE"\nexit 3\n'


class Cluster(Devcluster):
    """A cluster with the plugins, whose files the tests may change."""

    def directory(self, name: str, **scripts: str) -> Path:
        directory = super().directory(name)
        for script, text in scripts.items():
            (directory / f"{script}.sbatch").write_text(text)
        return directory

    def load(self, policy: str = "{}", program: str = "", modules: Path = LUA_DIR) -> None:
        """Put other hooks and another policy in place, for sbatch and slurmctld."""
        (self.state_dir / "policy.lua").write_text(f"return {policy}\n")
        for name in ("cli_filter.lua", "job_submit.lua"):
            path = self.state_dir / name
            text = hook_text(name, modules, self.state_dir / "policy.lua", program or own_program()[0], None)
            path.write_text(text)
            # slurmctld reads a file again that is newer than its last look at it, in whole seconds.
            os.utime(path, (time.time() + 2, time.time() + 2))

    def has_ended(self, job_id: str) -> bool:
        return bool(re.search("JobState=(COMPLETED|FAILED)", self.show(job_id)))


@pytest.fixture(scope="module")
def cluster(release: str) -> Iterator[Cluster]:
    """This module's cluster of a release."""
    with running_cluster("lua", ClusterShape(1, 2, 1), release, wrapper=Cluster, lua_plugins=True) as cluster:
        yield cluster


@pytest.mark.shows("plain `sbatch` of a marked script is converted; without a working converter the plain job goes on")
def test_plain_sbatch_becomes_a_streaming_job(cluster: Cluster, wait_until: Any) -> None:
    cluster.load()
    directory = cluster.directory("train", train=TRAIN)
    done = cluster.attempt("sbatch", "--parsable", "train.sbatch", "one", "two words", cwd=directory)
    assert (done.returncode, done.stderr) == (0, "")
    job_id = done.stdout.strip()
    # Not with --wait, which the next test has once: it asks only after 2 s, and again after 4, 8, 16 s.
    wait_until(lambda: cluster.show(job_id).count("ExitCode=7:0") == 2, timeout_s=120, what="the end of the job")
    assert done.stdout == f"{job_id}\n"
    assert job_id.isdigit()
    shown = cluster.show(job_id)
    assert "HetJobOffset=1" in shown
    assert "JobName=train.sbatch" in shown
    assert "cpus=2 arguments=one two words" in (directory / "train.out").read_text()
    assert (directory / "ledger").read_text().count("\n") == 80
    master = directory / ".hetstream" / f"job-{job_id}" / "master.log"
    wait_until(lambda: "80 steps, 1280 samples" in master.read_text(), timeout_s=30, what="the summary")
    assert not list(Path("/tmp").glob("hetstream-*/train.sbatch")), "the converted script is left"


@pytest.mark.shows("plain `sbatch` of a marked script is converted; without a working converter the plain job goes on")
def test_without_a_converter_the_plain_job_goes_on(cluster: Cluster, tmp_path: Path, wait_until: Any) -> None:
    directory = cluster.directory("plain", short=SHORT)
    tools = {name: tmp_path / name for name in ("slow", "broken", "silent", "missing")}
    tools["slow"].write_text("#!/bin/sh\nexec sleep 60\n")
    tools["broken"].write_text("#!/bin/sh\necho all is wrong >&2\nexit 1\n")
    tools["silent"].write_text("#!/bin/sh\nexit 0\n")
    for name in ("slow", "broken", "silent"):
        tools[name].chmod(0o755)
    told = {
        "missing": "No such file or directory\n",
        "slow": "the converter took longer than 1 s\n",
        "broken": "all is wrong\n",
        "silent": "exit code 0\n",
    }
    for name, problem in told.items():
        cluster.load("{timeout_s = 1}", str(tools[name]))
        done = cluster.attempt("sbatch", "short.sbatch", cwd=directory)
        assert done.returncode == 0, name
        assert done.stdout.startswith("Submitted batch job ")
        assert done.stderr.startswith("hetstream: submitted without data workers: "), name
        assert done.stderr.endswith(problem), name
        job_id = done.stdout.split()[-1]
        wait_until(lambda job_id=job_id: cluster.has_ended(job_id), timeout_s=60, what=f"the end of the job: {name}")
        assert "ExitCode=3:0" in cluster.show(job_id), name
        assert (directory / "short.out").read_text() == "service=\n"
        assert "HetJobOffset" not in cluster.show(job_id)
        (directory / "short.out").unlink()
    cluster.load(modules=tmp_path)  # the modules themselves are gone
    done = cluster.attempt("sbatch", "--parsable", "--wait", "short.sbatch", cwd=directory)
    assert done.returncode == 3
    assert (directory / "short.out").read_text() == "service=\n"


@pytest.mark.slow
def test_ctrl_c_while_it_plans_submits_nothing(cluster: Cluster, tmp_path: Path, wait_until: Any) -> None:
    directory = cluster.directory("interrupted", short=SHORT)
    (tmp_path / "slow").write_text(f"#!/bin/sh\ntouch {tmp_path}/planning\nexec sleep 60\n")
    (tmp_path / "slow").chmod(0o755)
    cluster.load("{timeout_s = 60}", str(tmp_path / "slow"))
    environ = cluster.env
    with subprocess.Popen(
        ["sbatch", "--job-name=interrupted", "short.sbatch"], cwd=directory, env=environ, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as sbatch:  # fmt: skip
        wait_until((tmp_path / "planning").exists, timeout_s=60, what="the converter")
        os.killpg(sbatch.pid, signal.SIGINT)  # what a terminal sends
        out, err = sbatch.communicate(timeout=60)
    assert (sbatch.returncode, out, err) == (130, "", "")
    assert cluster.attempt("squeue", "--noheader", "--name=interrupted", "--states=all", cwd=directory).stdout == ""


@pytest.mark.shows("standard input, `--wrap`, arrays, hetjobs and srun pass through cli_filter unchanged")
@pytest.mark.slow
def test_what_is_not_to_be_converted_passes_unchanged(cluster: Cluster) -> None:
    cluster.load()
    plain = "#!/bin/bash\nexit 4\n"
    pair = SHORT.replace(DIRECTIVE, f"#SBATCH hetjob\n#SBATCH --partition=cpu\n{DIRECTIVE}")
    wrong = SHORT.replace("--data-workers=1", "--data-workers=many")
    directory = cluster.directory("unchanged", plain=plain, short=SHORT, pair=pair, wrong=wrong)
    (directory / "short.sbatch").chmod(0o755)
    silent: list[tuple[tuple[str, ...], str, int]] = [
        (("sbatch", "--wait", "plain.sbatch"), "", 4),
        (("sbatch", "--wait", "--output=stdin.out"), SHORT, 3),
        (("sbatch", "--wait", "--wrap=exit 5"), "", 5),
        (("srun", "true"), "", 0),
    ]
    for argv, stdin, code in silent:
        done = cluster.attempt(*argv, stdin=stdin, cwd=directory)
        assert (done.returncode, done.stderr) == (code, ""), argv
    for program in ("srun", "salloc"):
        done = cluster.attempt(program, "--gpus=1", "./short.sbatch", cwd=directory)
        assert (done.returncode, done.stdout) == (3, "service=\n"), program  # as a program, without data workers
        assert "hetstream" not in done.stderr
    told = [
        (("--array=0-1", "short.sbatch"), "is not supported with a heterogeneous job"),
        (("pair.sbatch",), "hetstream adds the data workers as component 1 itself"),
        (("wrong.sbatch",), "wrong.sbatch line "),
    ]
    for words, error in told:
        done = cluster.attempt("sbatch", "--wait", *words, cwd=directory)
        assert done.returncode == 3, words
        assert done.stdout.startswith("Submitted batch job ")
        assert done.stderr.count("\n") == 1
        assert error in done.stderr
    refused = cluster.attempt("sbatch", "--partition=none", "short.sbatch", cwd=directory)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "invalid partition specified: none" in refused.stderr
    unknown = cluster.attempt("sbatch", "--no-such-option", "short.sbatch", cwd=directory)
    assert "unrecognized option" in unknown.stderr


@pytest.mark.shows("plain `sbatch` of a marked script is converted; without a working converter the plain job goes on")
@pytest.mark.slow
def test_words_arrive_as_they_were(cluster: Cluster) -> None:
    cluster.load()
    says = 'echo "$SLURM_JOB_NAME|$SLURM_JOB_PARTITION|$*|${HETSTREAM_SERVICE:0:6}"\n'
    other = SHORT.replace("exit 3", "exit 9")
    directory = cluster.directory("words", script=SHORT.replace('echo "service=$HETSTREAM_SERVICE"\n', says))
    (directory / "two words").mkdir()
    (directory / "two words" / "other.sbatch").write_text(other)
    environ = ["env", "SBATCH_COMMENT=as it was"]
    job = ["-J", 'it\'s "one" job', "script.sbatch", "a b", "$HOME", "--time=1"]
    done = cluster.attempt(*environ, "sbatch", "--wait", *job, cwd=directory)
    assert (done.returncode, done.stderr) == (3, "")
    assert (directory / "short.out").read_text() == 'it\'s "one" job|gpu|a b $HOME --time=1|file:/\n'
    # Wherever sbatch finds a script; and what hetstream sbatch has converted is not converted again.
    done = cluster.attempt("env", f"PATH={directory}/two words:{cluster.env['PATH']}",
                       "sbatch", "--wait", "other.sbatch", cwd=directory)  # fmt: skip
    assert (done.returncode, done.stderr) == (9, "")
    done = cluster.attempt(own_program()[0], "sbatch", "--wait", "script.sbatch", cwd=directory)
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.shows("plain `sbatch` of a marked script is converted; without a working converter the plain job goes on")
@pytest.mark.slow
def test_a_site_may_ask_for_data_workers_where_scripts_do_not(cluster: Cluster) -> None:
    cluster.load('{eligible = function(options) return "--data-workers=0-1 --data-worker-partition=cpu" end}')
    directory = cluster.directory("policy", short=SHORT.replace(DIRECTIVE, ""))
    assert cluster.attempt("sbatch", "--wait", "short.sbatch", cwd=directory).returncode == 3
    assert (directory / "short.out").read_text().startswith("service=file:/")
    done = cluster.attempt("sbatch", "--wait", "--wrap=exit 5", cwd=directory)
    assert (done.returncode, done.stderr) == (5, "")


@pytest.mark.shows("texts of refusals reach the user, and name the rule and the way out")
def test_the_guard_right_sizes_and_refuses(cluster: Cluster, wait_until: Any) -> None:
    directory = cluster.directory("guard")
    asks = ["--gpus=2", "--gres=gpu:2", "--gpus-per-node=2", "--gpus-per-task=2"]
    cluster.load("{cpus_per_gpu = {max = {gpu = 4}}}")
    for ask in asks:
        done = cluster.attempt("sbatch", "-n1", "-c10", ask, "--wrap=true", cwd=directory)
        assert done.returncode == 1, ask
        assert "10 CPUs for 2 GPUs in partition gpu, where 4 for each GPU are allowed" in done.stderr
        assert "Write --cpus-per-task=8" in done.stderr
        assert "(site rule: cpus_per_gpu)" in done.stderr
    assert cluster.attempt("sbatch", "-n1", "-c8", "--gpus=2", "--wait", "--wrap=exit 5", cwd=directory).returncode == 5
    cluster.load('{cpus_per_gpu = {max = {gpu = 4}, action = "shrink"}}')
    for ask in asks:
        script = "--wrap=echo $SLURM_CPUS_PER_TASK $SLURM_JOB_CPUS_PER_NODE; srun true"
        done = cluster.attempt("sbatch", "--parsable", "-n1", "-c10", ask, "--output=%j.out", script, cwd=directory)
        assert done.returncode == 0, ask
        assert "--cpus-per-task=10 became 8" in done.stderr
        job_id = done.stdout.strip()
        wait_until(lambda job_id=job_id: cluster.has_ended(job_id), timeout_s=60, what=f"the end of the job: {ask}")
        assert "ExitCode=0:0" in cluster.show(job_id), ask
        assert (directory / f"{job_id}.out").read_text() == "8 8\n", ask
    # Another spelling of CPUs: the steps have it in their environment, so it is refused.
    done = cluster.attempt("sbatch", "-n1", "--gpus=2", "--cpus-per-gpu=5", "--wrap=true", cwd=directory)
    assert done.returncode == 1
    assert "Write --cpus-per-gpu=4" in done.stderr
    # Under its limit it goes on.
    done = cluster.attempt("sbatch", "-n1", "--gpus=2", "--cpus-per-gpu=4", "--wait", "--wrap=srun true", cwd=directory)
    assert done.returncode == 0


def test_a_host_without_the_modules_is_silent(cluster: Cluster, wait_until: Any) -> None:
    """As compute nodes that share Slurm's directory with the login nodes, and have no hetstream."""
    directory = cluster.directory("bare")
    cluster.load(modules=cluster.state_dir / "none")
    for words in (["srun", "-n1", "true"], ["sbatch", "--parsable", "-o", "bare.out", "--wrap", "srun -n1 echo step"]):
        done = cluster.attempt(*words, cwd=directory)
        assert (done.returncode, done.stderr) == (0, ""), words
    wait_until(lambda: cluster.has_ended(done.stdout.strip()), timeout_s=60, what="the end of the job")
    assert (directory / "bare.out").read_text() == "step\n"


@pytest.mark.shows("any error of hetstream's Lua leaves the job as it is, on all versions")
@pytest.mark.slow
def test_a_hook_that_fails_lets_every_job_through(cluster: Cluster, wait_until: Any) -> None:
    directory = cluster.directory("failing")
    log = cluster.state_dir / "log" / "slurmctld.log"
    for policy in ("{cpus_per_gpu = 7, opportunistic = 8}", "{", "{cpus_per_gpu = {max = {gpu = {}}}}"):
        cluster.load(policy)
        done = cluster.attempt("sbatch", "-n1", "-c3", "--gpus=1", "--wait", "--wrap=exit 5", cwd=directory)
        assert (done.returncode, done.stderr) == (5, ""), policy
    wait_until(lambda: "the hook failed" in log.read_text(), what="the log line")
    assert "no policy, every job is let through" in log.read_text()
