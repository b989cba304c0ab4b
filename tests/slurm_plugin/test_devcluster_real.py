"""The throw-away cluster with real daemons, as a user meets it at the command line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetstream.hetjob.errors import SlurmCommandError
from tests.devcluster.boot import BootRequest, boot
from tests.devcluster.errors import BootFailed, ClusterExists
from tests.devcluster.processes import cluster_processes
from tests.devcluster.programs import host_programs
from tests.devcluster.record import ClusterRecord, read_daemons, read_record
from tests.devcluster.roots import prepare_root
from tests.devcluster.spec import DEFAULT_STATE_ROOT, ClusterShape
from tests.devcluster.teardown import tear_down

pytestmark = pytest.mark.slurm

DEVCLUSTER = [sys.executable, "-m", "tests.devcluster"]
SMALL = ("--gpu-nodes=1", "--cpu-nodes=1")

HETJOB = """\
#!/bin/bash
#SBATCH --gpus=1 --cpus-per-task=2
#SBATCH hetjob
#SBATCH --partition=cpu --ntasks=3 --cpus-per-task=1
srun --het-group=0,1 bash -c 'echo $SLURM_PROCID $SLURMD_NODENAME'
"""


def hetstream(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    argv = [*DEVCLUSTER, *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, **options)


def footprint() -> dict[str, set[str]]:
    """What a cluster could leave on the machine, without what clusters of others have there at any time."""
    others = {"/var/lib/hetstream", "/run/hetstream-devcluster.lock"}
    directories = ("/run", "/run/lock", "/dev", "/var/lib", "/var/log", "/etc")
    return {
        "mounts": set(Path("/proc/self/mountinfo").read_text().splitlines()),
        "entries": {str(path) for parent in directories for path in Path(parent).iterdir()} - others,
    }


def assert_nothing_left(record: ClusterRecord | None, before: dict[str, set[str]], wait_until: Any) -> None:
    """No process, mount, file or device node of the cluster, and the machine as it was."""
    assert record is not None
    assert not Path(record.state_dir).exists()
    assert cluster_processes(record) == []
    wait_until(lambda: not naming(record.state_dir), 10, f"the end of processes that name {record.state_dir}")
    after = footprint()
    assert {kind: after[kind] - before[kind] for kind in before} == {"mounts": set(), "entries": set()}


def naming(text: str) -> list[str]:
    """The command lines that hold `text`: how a user would look for what is left, by other means than `down` does."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in words:
            found.append(words)
    return found


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a cluster that the test may boot; whatever is left of it goes afterwards."""
    name = f"pytest-{os.getpid()}-own"
    yield name
    tear_down(DEFAULT_STATE_ROOT / name)


def test_job_sees_its_gpus(devcluster: Any) -> None:
    shown = devcluster.run("srun", "--gpus=2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES on $SLURMD_NODENAME")
    assert re.fullmatch(r"(0,1|2,3) on gpu[01]", shown)


def test_fake_gpus_are_counted(devcluster: Any) -> None:
    with pytest.raises(SlurmCommandError, match="Requested node configuration is not available"):
        devcluster.run("srun", "--nodes=1", "--gpus-per-node=5", "true")


def test_memory_is_counted_and_no_job_takes_all_of_it_unasked(devcluster: Any) -> None:
    shown = devcluster.run("srun", "--ntasks=2", "sh", "-c", "scontrol show job $SLURM_JOB_ID")
    assert "MinMemoryCPU=4000M" in shown
    devcluster.run("srun", "--mem=60000", "true")
    with pytest.raises(SlurmCommandError):
        devcluster.run("srun", "--mem=65000", "true")


def test_heterogeneous_job_starts_at_once_on_two_kinds_of_nodes(devcluster: Any, wait_until: Any) -> None:
    out = devcluster.out_dir / "het.out"
    devcluster.run("sbatch", f"--output={out}", stdin=HETJOB)
    wait_until(lambda: out.exists() and len(out.read_text().splitlines()) == 4, 15, "the heterogeneous job's output")
    ranks = dict(line.split() for line in out.read_text().splitlines())
    assert ranks["0"].startswith("gpu")
    assert all(ranks[rank].startswith("cpu") for rank in "123")


def test_an_ordinary_user_runs_jobs(devcluster: Any, wait_until: Any) -> None:
    out = devcluster.out_dir / "nobody.out"
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    script = "#!/bin/sh\nid -u\nsrun id -u\n"
    devcluster.run(*drop, "sbatch", f"--output={out}", "--chdir=/tmp", stdin=script)
    wait_until(lambda: out.exists() and out.read_text() == "65534\n65534\n", 15, "the output of nobody's job")


def test_a_closed_umask_does_not_lock_other_users_out(place: str) -> None:
    assert hetstream("up", "--name", place, *SMALL, umask=0o077).returncode == 0
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    shown = hetstream("exec", "--name", place, "--", *drop, "srun", "id", "-u", cwd="/tmp")
    assert shown.stdout == "65534\n", shown.stderr


def test_daemons_are_not_on_the_network(devcluster: Any) -> None:
    conf = (devcluster.state_dir / "slurm.conf").read_text()
    port = int(re.search(r"^SlurmctldPort=(\d+)$", conf, re.MULTILINE)[1])  # type: ignore[index]
    sockets = [
        line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    ]
    ours = {f"{number:04X}" for number in range(port, port + 1 + len(devcluster.record.nodes))}
    addresses = [address for address, number in (socket.split(":") for socket in sockets) if number in ours]
    assert addresses == ["0100007F"] * len(ours)


def test_two_clusters_side_by_side(devcluster: Any, place: str) -> None:
    up = hetstream("up", "--name", place, *SMALL)
    assert up.returncode == 0, up.stderr
    assert f"export SLURM_CONF={DEFAULT_STATE_ROOT / place}/slurm.conf" in up.stdout
    shown = hetstream("exec", "--name", place, "--", "srun", "sh", "-c", "echo $SLURM_CLUSTER_NAME")
    assert shown.stdout.startswith(place), shown.stderr
    assert devcluster.run("srun", "sh", "-c", "echo $SLURM_CLUSTER_NAME").startswith(devcluster.record.name)
    assert hetstream("down", "--name", place).returncode == 0
    assert devcluster.run("srun", "hostname")


def test_exec_passes_streams_and_exit_code(devcluster: Any) -> None:
    words = ("exec", "--state-dir", str(devcluster.state_dir), "--")
    done = hetstream(*words, "sh", "-c", "cat; echo to-stderr >&2; exit 7", input="from stdin")
    assert (done.returncode, done.stdout, done.stderr) == (7, "from stdin", "to-stderr\n")
    missing = hetstream(*words, "no-such-program")
    assert missing.returncode == 1
    assert "no-such-program exited with 127" in missing.stderr


def test_status_shows_the_cluster(devcluster: Any) -> None:
    shown = hetstream("status", "--state-dir", str(devcluster.state_dir), "--json")
    facts = json.loads(shown.stdout)
    assert shown.returncode == 0
    assert facts["healthy"] is True
    assert facts["slurm_version"] == devcluster.record.slurm_version
    assert {row["node"] for row in facts["node_states"]} == set(devcluster.record.nodes)
    assert [daemon["name"] for daemon in facts["daemons"]][:4] == ["supervisor", "munged", "slurmctld", "slurmd gpu0"]
    table = hetstream("status", "--state-dir", str(devcluster.state_dir)).stdout
    assert all(node in table for node in devcluster.record.nodes)


def test_a_second_up_at_the_same_place_is_refused(devcluster: Any) -> None:
    request = BootRequest("again", devcluster.state_dir, ClusterShape())
    with pytest.raises(ClusterExists, match="devcluster down"):
        boot(request, host_programs(), print)
    assert devcluster.run("srun", "hostname")


def test_up_does_not_touch_a_directory_of_others(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(ClusterExists, match="no cluster's"):
        boot(BootRequest("x", tmp_path, ClusterShape()), host_programs(), print)
    assert os.listdir(tmp_path) == ["precious"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two nodes with cores of their own need two cores")
def test_jobs_run_on_the_cores_of_their_node(place: str) -> None:
    cores = sorted(os.sched_getaffinity(0))
    shape = ["--gpu-nodes=1", "--gpus-per-node=1", "--cpu-nodes=1"]
    assert hetstream("up", "--name", place, "--own-cores", *shape).returncode == 0
    try:
        script = "import os; print(sorted(os.sched_getaffinity(0)))"
        for partition, expected in (("gpu", cores[:1]), ("cpu", cores[1:])):
            srun = ("srun", "--quiet", f"--partition={partition}", sys.executable, "-c", script)
            assert json.loads(hetstream("exec", "--name", place, "--", *srun).stdout) == expected
    finally:
        hetstream("down", "--name", place)


def test_down_leaves_nothing(place: str, wait_until: Any, tmp_path: Path) -> None:
    before = footprint()
    record = boot(BootRequest(place, DEFAULT_STATE_ROOT / place, ClusterShape(1, 1, 1, 4)), host_programs(), print)
    # A job whose processes hide: a new session, an empty environment, an ended parent.
    pid_file = tmp_path / "pid"
    hide = f"setsid --fork env -i sh -c 'echo $$ > {pid_file}; exec sleep 600'"
    script = f"#!/bin/sh\n{hide}\nsrun sleep 600\n"
    words = ("exec", "--name", place, "--", "sbatch", "--output=/dev/null")
    assert hetstream(*words, input=script).returncode == 0
    wait_until(lambda: pid_file.exists() and pid_file.read_text().strip(), 15, "the job's hidden process")
    hidden = int(pid_file.read_text())
    dry = hetstream("down", "--name", place, "--dry-run")
    assert f"would kill {hidden} sleep 600" in dry.stdout
    assert hidden in {process.pid for process in cluster_processes(record)}
    down = hetstream("down", "--name", place)
    assert down.returncode == 0, down.stderr
    wait_until(lambda: not Path(f"/proc/{hidden}").exists(), 10, "the end of the hidden process")
    assert_nothing_left(record, before, wait_until)
    assert "nothing to do" in hetstream("down", "--name", place).stdout


def test_down_ends_commands_that_wait_for_the_cluster_but_no_shell(place: str, wait_until: Any) -> None:
    record = boot(BootRequest(place, DEFAULT_STATE_ROOT / place, ClusterShape(1, 1, 1, 4)), host_programs(), print)
    env = record.environment(os.environ)
    submit = ["sbatch", "--wait", "--output=/dev/null", "--wrap", "sleep 600"]
    with (
        subprocess.Popen(submit, env=env, stdout=subprocess.PIPE, text=True) as waiting,
        subprocess.Popen(["sh", "-c", "read line"], env=env, stdin=subprocess.PIPE) as shell,
    ):
        assert waiting.stdout is not None
        waiting.stdout.readline()
        tear_down(Path(record.state_dir))
        assert waiting.wait(10) != 0
        assert shell.poll() is None
        shell.communicate(b"end\n")


@pytest.mark.parametrize(
    "victims", [("slurmctld",), ("supervisor",), ("munged", "slurmd gpu0"), ("supervisor", "slurmctld")]
)
def test_down_after_daemons_were_killed(place: str, victims: tuple[str, ...], wait_until: Any) -> None:
    before = footprint()
    record = boot(BootRequest(place, DEFAULT_STATE_ROOT / place, ClusterShape(1, 1, 1, 4)), host_programs(), print)
    for daemon in read_daemons(Path(record.state_dir)):
        if daemon.name in victims:
            os.kill(daemon.pid, signal.SIGKILL)
    status = hetstream("status", "--name", place)
    assert status.returncode == 1
    assert status.stdout.count("DEAD") == len(victims)
    assert hetstream("down", "--name", place).returncode == 0
    assert_nothing_left(record, before, wait_until)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("moment", ["cluster.json", "log/slurmctld.log"])
def test_up_interrupted(place: str, number: signal.Signals, moment: str, wait_until: Any) -> None:
    before = footprint()
    state_dir = DEFAULT_STATE_ROOT / place
    argv = [*DEVCLUSTER, "up", "--name", place]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: (state_dir / moment).exists(), 20, moment)
        record = read_record(state_dir)
        process.send_signal(number)
        returncode = process.wait(30)
    if number == signal.SIGKILL:
        assert hetstream("down", "--name", place).returncode == 0
    else:
        assert returncode == 130
    assert_nothing_left(record, before, wait_until)


def test_up_after_an_up_that_was_killed(place: str, wait_until: Any) -> None:
    state_dir = DEFAULT_STATE_ROOT / place
    argv = [*DEVCLUSTER, "up", "--name", place]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: (state_dir / "daemons.json").exists(), 20, "the supervisor")
        process.kill()
    first = read_record(state_dir)
    assert first is not None
    assert hetstream("up", "--name", place, *SMALL).returncode == 0
    assert cluster_processes(first) == []


def test_two_ups_at_the_same_place_at_once(place: str) -> None:
    argv = [*DEVCLUSTER, "up", "--name", place, *SMALL]
    ups = [subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [up.communicate(timeout=60)[1] for up in ups]
    assert sorted(up.returncode for up in ups) == [0, 1]
    assert any(f"cluster {place} is up in" in text for text in said)
    assert hetstream("status", "--name", place).returncode == 0


def test_up_after_a_reboot(place: str) -> None:
    record = boot(BootRequest(place, DEFAULT_STATE_ROOT / place, ClusterShape(1, 1, 1, 1)), host_programs(), print)
    for process in cluster_processes(record):
        os.kill(process.pid, signal.SIGKILL)
    assert hetstream("up", "--name", place, *SMALL).returncode == 0
    assert hetstream("status", "--name", place).returncode == 0


def test_a_place_that_forbids_to_start_programs_is_refused(tmp_path: Path) -> None:
    mounted = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o noexec tmpfs "$1" && shift && exec "$@"', "_"]
    up = [*DEVCLUSTER, "up", "--state-dir", str(tmp_path / "below")]
    done = subprocess.run([*mounted, str(tmp_path), *up], capture_output=True, text=True, timeout=60)
    if "unshare failed" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"mounting is not allowed here: {done.stderr}")
    assert done.returncode == 1
    assert f"{tmp_path} is mounted noexec" in done.stderr


def test_a_daemon_that_ends_fails_the_boot_with_its_log(place: str) -> None:
    programs = replace(host_programs(), slurmd=Path("/bin/false"))
    with pytest.raises(BootFailed, match=r"slurmd [gc]pu\d ended with 1\."):
        boot(BootRequest(place, DEFAULT_STATE_ROOT / place, ClusterShape()), programs, print)
    assert not (DEFAULT_STATE_ROOT / place).exists()


def test_ports_in_use_are_found_and_told(place: str, monkeypatch: pytest.MonkeyPatch, devcluster: Any) -> None:
    conf = (devcluster.state_dir / "slurm.conf").read_text()
    taken = int(re.search(r"^SlurmctldPort=(\d+)$", conf, re.MULTILINE)[1])  # type: ignore[index]
    monkeypatch.setattr("tests.devcluster.boot.PORT_RANGE", (taken - 1, taken + 3))
    with pytest.raises(BootFailed, match=r"no 3 consecutive free TCP ports"):
        boot(BootRequest(place, DEFAULT_STATE_ROOT / place, ClusterShape(1, 1, 1, 1)), host_programs(), print)
    # The search was wrong: slurmctld itself must say so.
    monkeypatch.setattr("tests.devcluster.boot._free_ports", lambda count: taken)
    with pytest.raises(BootFailed, match=r"Address already in use"):
        boot(BootRequest(place, DEFAULT_STATE_ROOT / place, ClusterShape(1, 1, 1, 1)), host_programs(), print)
    assert not (DEFAULT_STATE_ROOT / place).exists()


def test_slurms_own_scheduler_timing_on_request(place: str) -> None:
    shown = hetstream("up", "--name", place, "--default-scheduler", "--dry-run").stdout
    assert "SchedulerParameters" not in shown
    assert "SchedulerParameters=" in hetstream("up", "--name", place, "--dry-run").stdout
    assert not (DEFAULT_STATE_ROOT / place).exists()


@pytest.mark.slow
@pytest.mark.parametrize("release", ["24.11", "26.05"])
class TestNewerSlurm:
    """The same from a Debian root: jobs run with the host's file system and Python."""

    def test_version_of_daemons_and_of_commands_in_jobs(self, release: str, devclusters: Callable[[str], Any]) -> None:
        cluster = devclusters(release)
        assert cluster.record.slurm_version.startswith(release)
        assert release in cluster.run("srun", "sinfo", "--version")

    def test_jobs_run_the_hosts_python_with_its_libraries(
        self, release: str, devclusters: Callable[[str], Any]
    ) -> None:
        program = "import sys, ssl, numpy; print(sys.executable)"
        assert devclusters(release).run("srun", sys.executable, "-c", program) == sys.executable

    def test_job_sees_its_gpus(self, release: str, devclusters: Callable[[str], Any]) -> None:
        shown = devclusters(release).run("srun", "--gpus=2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
        assert shown in ("0,1", "2,3")

    def test_heterogeneous_job(self, release: str, devclusters: Callable[[str], Any], wait_until: Any) -> None:
        test_heterogeneous_job_starts_at_once_on_two_kinds_of_nodes(devclusters(release), wait_until)

    def test_an_ordinary_user_runs_jobs(self, release: str, devclusters: Callable[[str], Any], wait_until: Any) -> None:
        test_an_ordinary_user_runs_jobs(devclusters(release), wait_until)

    def test_a_job_with_an_empty_environment_finds_the_same_commands(
        self, release: str, devclusters: Callable[[str], Any], wait_until: Any
    ) -> None:
        cluster = devclusters(release)
        out = cluster.out_dir / "none.out"
        script = "#!/bin/sh\nsinfo --version\nsrun /bin/sh -c 'sinfo --version'\n"
        cluster.run("sbatch", "--export=NONE", f"--output={out}", stdin=script)
        wait_until(lambda: out.exists() and out.read_text().count(f"slurm-wlm {release}") == 2, 15, f"two {release}")

    def test_reconfigure_keeps_the_daemons(
        self, release: str, devclusters: Callable[[str], Any], wait_until: Any
    ) -> None:
        cluster = devclusters(release)
        cluster.run("scontrol", "reconfigure")
        wait_until(lambda: cluster.run("sinfo", "-h", "-o", "%T").split() == ["idle"], 20, "idle nodes")
        assert cluster.run("srun", "--nodes=2", "hostname")

    def test_down_leaves_nothing(self, release: str, place: str, wait_until: Any) -> None:
        before = footprint()
        up = hetstream("up", "--slurm", release, "--name", place, *SMALL)
        assert up.returncode == 0, up.stderr
        record = read_record(DEFAULT_STATE_ROOT / place)
        assert record is not None
        assert f"export PATH={record.path_prefix}:$PATH" in up.stdout
        words = ("exec", "--name", place, "--", "sbatch", "--output=/dev/null")
        assert hetstream(*words, input="#!/bin/sh\nsrun sleep 600\n").returncode == 0
        assert hetstream("down", "--name", place).returncode == 0
        assert_nothing_left(record, before, wait_until)


@pytest.mark.slow
def test_a_root_is_made_from_nothing_and_boots(place: str) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as cache:
        Path(cache).chmod(0o755)
        # Debian 12's packages hold /lib and /usr/lib, later ones /usr/lib alone.
        root = prepare_root("22.05", Path(cache), print)
        assert os.listdir(cache) == [root.directory.name]
        record = boot(BootRequest(place, DEFAULT_STATE_ROOT / place, ClusterShape(1, 1, 1, 1)), root.programs(), print)
        try:
            drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
            shown = hetstream("exec", "--name", place, "--", *drop, "srun", "sinfo", "--version", cwd="/tmp")
            assert "22.05" in shown.stdout, shown.stderr
        finally:
            tear_down(Path(record.state_dir))
