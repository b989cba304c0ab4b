"""The local backend with the real dispatcher and data workers: exit codes, signals, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetstream.base.errors import UsageError
from hetstream.hetjob.errors import MasterError, ProgramNotFound
from hetstream.hetjob.job.ended_job import next_try, summary_line
from hetstream.hetjob.master.local import LocalCompanions, LocalConfig, LocalResult, run_local
from hetstream.slurm_plugin.cli import main

HETSTREAM = str(Path(sys.executable).with_name("hetstream"))
STAND_IN = (sys.executable, str(Path(__file__).parent / "programs" / "stand_in.py"))
WaitUntil = Callable[..., None]


def hook(service: str | None, _environ: object) -> dict[str, str]:
    return {"SERVICE": service or "none"}


def shell(text: str, data_workers: int = 1) -> LocalResult:
    return run_local(LocalConfig(STAND_IN, ("sh", "-c", text), data_workers), os.environ, hook)


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.parametrize(("text", "returncode"), [("exit 5", 5), ("true", 0), ("kill -TERM $$", 143)])
def test_the_exit_code_is_the_programs(text: str, returncode: int) -> None:
    assert shell(text).returncode == returncode


def test_the_program_sees_the_service_and_the_summary_comes_back(tmp_path: Path) -> None:
    result = shell('test -e "${SERVICE#file:}" && echo "$SERVICE" > service')
    assert result == LocalResult(0, {"loaders": [{"steps": 7}], "data_workers_seen": 2})
    assert not list(tmp_path.glob("hetstream-*"))
    assert (tmp_path / "service").read_text().startswith("file:/")


def test_what_a_child_said_that_has_died_is_shown_before_its_log_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    shell("touch die-dispatcher; kill -KILL $(sed -n 's/dispatcher //p' started); sleep 2")
    assert "dispatcher ended with -9" in caplog.text
    assert re.search(
        r"dispatcher ended with 9; the end of its log \(.*/dispatcher.log\):\ndispatcher dies$", caplog.text, re.M
    )


def test_without_data_workers_there_is_no_service() -> None:
    assert shell('test "$SERVICE" = none', data_workers=0) == LocalResult(0)
    assert not Path("started").exists()


def test_embedding_servers_live_as_long_as_the_program_and_their_folder_stays(
    tmp_path: Path, wait_until: WaitUntil
) -> None:
    """One that is killed is started again, with its name and its folder; and there may be no data worker."""
    text = """
        here=$(dirname "${SERVICE#file:}")/embedding-servers
        until [ -e $here/0.json ] && [ -e $here/1.json ]; do sleep 0.02; done
        set -e
        first=$(head -1 hetstream-embedding/run-*/server-1/starts)
        kill -KILL $first
        until [ "$(wc -l < $(echo hetstream-embedding/run-*/server-1/starts))" = 2 ]; do sleep 0.02; done
        cp $here/1.json seen"""
    config = LocalConfig(STAND_IN, ("sh", "-c", text), 0, embedding_servers=2)
    assert run_local(config, os.environ, hook).returncode == 0
    (run,) = (tmp_path / "hetstream-embedding").iterdir()
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert sorted(path.name for path in run.iterdir()) == ["lock", "server-0", "server-1"]
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["log"] == str(run / "server-1")
    assert 0 < seen["limit_bytes"] < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 4
    assert not Path("started").read_text().count("worker")
    pids = [int(line) for path in run.glob("*/starts") for line in path.read_text().split()]
    assert len(pids) == 3
    wait_until(lambda: not any(map(is_alive, pids)), what="the end of the servers")
    text = 'until [ -e "$(dirname "${SERVICE#file:}")/embedding-servers/0.json" ]; do sleep 0.02; done'
    again = run_local(LocalConfig(STAND_IN, ("sh", "-c", text), 0, embedding_servers=1), os.environ, hook)
    assert len(list((tmp_path / "hetstream-embedding").iterdir())) == 2, "the next run has a folder of its own"
    assert [server["name"] for server in again.summary["embedding_servers"]] == ["0"]


def test_unusable_programs_and_counts() -> None:
    with pytest.raises(ProgramNotFound, match="'no-such-program' is not a program on PATH"):
        run_local(LocalConfig(STAND_IN, ("no-such-program",), 1), os.environ, hook)
    with pytest.raises(UsageError, match=r"--embedding-servers=257: 0 to 256"):
        LocalConfig(STAND_IN, ("true",), 0, embedding_servers=257)
    with pytest.raises(UsageError, match=r"--data-workers=-1: 0 to 1024; worker_processes=0.*; no program"):
        LocalConfig(STAND_IN, (), -1, 0)


def test_a_file_that_is_not_executable_is_called_that() -> None:
    for name in ("train.py", "start"):
        Path(name).write_text("")
    with pytest.raises(ProgramNotFound, match=r"'\./train.py' is a file that is not executable.*: python \./train.py$"):
        run_local(LocalConfig(STAND_IN, ("./train.py",), 1), os.environ, hook)
    with pytest.raises(ProgramNotFound, match=r"'\./start' is a file that is not executable. Run: chmod \+x \./start$"):
        run_local(LocalConfig(STAND_IN, ("./start",), 1), os.environ, hook)


@pytest.mark.parametrize("words", [["--data-workers", "1"], ["--data-workers=-1", "true"]])
def test_wrong_usage_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words]) == 2
    assert capsys.readouterr().err.startswith("hetstream run: ")


def test_a_summary_that_cannot_be_written_is_told_before_the_program_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = tmp_path / "started"
    assert main(["run", "--data-workers", "0", "--json", f"{tmp_path}/none/x.json", "touch", str(started)]) == 2
    assert f"there is no directory {tmp_path}/none" in capsys.readouterr().err
    assert not started.exists()


def test_an_address_of_another_host_is_named_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--bind", "tcp://192.0.2.1:0", "--work-dir", str(tmp_path), "--address-file", f"{tmp_path}/address"]
    assert main(["internal", "dispatcher", *words]) == 1
    assert "cannot bind tcp://192.0.2.1:0: Cannot assign requested address" in (said := capsys.readouterr().err)
    assert said.endswith("This host's addresses: ip -brief address\n")


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    words = ["--bind", "tcp://127.0.0.1:0", "--work-dir", f"{tmp_path}/file/work", "--address-file", "address"]
    assert main(["internal", "dispatcher", *words]) == 1
    said = capsys.readouterr().err
    path = f"{tmp_path}/file"
    assert said == f"hetstream internal dispatcher: {path}: Not a directory. Check: namei -l {path}\n"


@pytest.mark.shows("every setting is checked at construction, all problems at once")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["dispatcher", "--work-dir", "", "--address-file", "a"], "--work-dir '': must name a path"),
        (["dispatcher", "--work-dir", "w", "--address-file", ""], "--address-file '': must name a path"),
        (
            ["dispatcher", "--work-dir", "w", "--address-file", "."],
            "--address-file '.' is a directory: name a file in",
        ),
        (["worker", "--service", "file:a", "--processes", "0"], "--processes 0: must be 1 to 4096"),
        (
            ["worker", "--service", "file:a", "--processes", "100000"],
            "--processes 100000: must be 1 to 4096",
        ),
        (
            ["worker", "--service", "file:a", "--device", "gpu", "--processes", "2"],
            "--device gpu with --processes",
        ),
    ],
)
def test_options_of_the_service_that_cannot_be_meant_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    verb, *options = words
    binds = ["--bind", "tcp://127.0.0.1:0"] if verb == "dispatcher" else []
    assert main(["internal", verb, *binds, *options]) == 2
    assert f"hetstream internal {verb}: {says}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "nothing was made"


def test_the_trainer_never_waited_longer_than_it_ran() -> None:
    loaders = [{"wait_s": 2.1, "elapsed_s": 2.0}, {"wait_s": 3.0, "elapsed_s": 3.0}]
    assert "trainer waited 100% of the time" in summary_line({"loaders": loaders})


def test_the_summary_says_what_was_and_no_more() -> None:
    none = summary_line({"loaders": [], "data_workers_seen": 2})
    assert none.startswith("no loader connected (the program made no DataLoader, or they stayed local")
    assert none.endswith("2 data worker processes")
    assert "0 steps made in the trainer, it took no step" in summary_line({"loaders": [{"wait_s": 2.0}]})
    loaders = [{"steps": 5, "local_steps": 5, "elapsed_s": 1.0}]
    alone = summary_line({"loaders": loaders, "data_workers_seen": 5, "data_workers_replaced": 3})
    assert "5 steps, 0 samples, all of them made in the trainer, trainer waited 0% of the time" in alone
    assert alone.endswith("2 data worker processes, 3 more in the place of some that died")
    anew = summary_line({"loaders": loaders, "data_workers_seen": 8, "data_workers_used": 4})
    assert anew.endswith(" 4 data worker processes"), "four left before a step, for the program's Python"


def test_the_summary_says_what_a_moved_forward_costs() -> None:
    loaders = [{"steps": 4, "moved_bytes": 4_000_000}, {"steps": 4}]
    assert ", moved operators add 500,000 bytes to a batch, " in summary_line({"loaders": loaders})


class Run:
    """`hetstream run` around a program that says what signals it gets."""

    PROGRAM = """
import os, signal, time
def note(number, frame):
    os.write(1, (signal.Signals(number).name + "\\n").encode())  # it may come inside the print below
    os._exit(9)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1): signal.signal(number, note)
print(os.getpid(), flush=True)
while True: time.sleep(60)
"""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [HETSTREAM, "run", "--data-workers", "1", "--", sys.executable, "-c", self.PROGRAM],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.program = int(self.process.stdout.readline())

    def descendants(self) -> list[int]:
        return [pid for pid in self._below(self.process.pid) if is_alive(pid)]

    def _below(self, pid: int) -> Iterator[int]:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, task.read_text().split()):
                yield child
                yield from self._below(child)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def running() -> Iterator[Run]:
    run = Run()
    yield run
    run.process.kill()
    run.process.communicate()


@pytest.mark.parametrize(
    ("wait_s", "local_steps", "data_workers", "said"),
    [
        (2.0, 0, 2, "the trainer hardly waited: all is well"),
        (62.0, 0, 2, "to wait less, try --data-workers=6"),
        (95.0, 0, 2, "to wait less, try --data-workers=8, as many as this host has CPUs; about 40 would be enough"),
        (50.0, 0, 8, "this host has 8 CPUs, all in use: on Slurm, data workers of other nodes would shorten the waits"),
        (50.0, 60, 2, "most batches were made in the program: a longer run tells more, as data workers take seconds"),
        (50.0, 0, 0, ""),
    ],
)
def test_the_last_line_says_what_to_try_next(wait_s: float, local_steps: int, data_workers: int, said: str) -> None:
    loader = {"steps": 100, "elapsed_s": 100.0, "wait_s": wait_s, "local_steps": local_steps}
    assert next_try({"loaders": [loader]}, data_workers, cpus=8).startswith(said)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_signals_reach_the_program(running: Run, name: str, wait_until: WaitUntil) -> None:
    family = running.descendants()
    assert len(family) >= 3
    running.process.send_signal(signal.Signals[name])
    out, err = running.process.communicate(timeout=60)
    assert (out, running.process.returncode) == (f"{name}\n", 9), err
    assert "hetstream: no loader connected" in err
    wait_until(lambda: not any(map(is_alive, family)), what="the end of every process")


@pytest.mark.shows("after SIGKILL no process, port, socket name or shared memory is left")
def test_nothing_outlives_a_killed_runner(running: Run, wait_until: WaitUntil) -> None:
    family = running.descendants()
    assert len(family) >= 3
    running.process.kill()
    wait_until(lambda: not any(map(is_alive, family)), timeout_s=30, what="the end of every process")


@pytest.mark.shows("without a cluster the loader makes the same bytes in process")
@pytest.mark.slow
def test_a_real_program_streams(tmp_path: Path) -> None:
    program = Path(__file__).parents[1] / "cluster" / "programs" / "train.py"
    words = [HETSTREAM, "run", "--data-workers", "2", "--json", "summary.json", sys.executable, program]
    done = subprocess.run([*words, "streamed"], capture_output=True, text=True, check=True, timeout=120)
    words[3] = "0"
    at_once = os.environ | {"DECODE_S": "0"}
    subprocess.run([*words, "local"], env=at_once, capture_output=True, check=True, timeout=120)
    assert (tmp_path / "streamed").read_text() == (tmp_path / "local").read_text()
    assert "1 loader, 80 steps, 1280 samples, 0 steps made in the trainer" in done.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["returncode"] == 0


PACED = """
import time
from torch.utils.data import DataLoader, Dataset

class Quick(Dataset):
    def __len__(self):
        return 1200
    def __getitem__(self, index):
        return index

if __name__ == "__main__":
    given = []
    for batch in DataLoader(Quick(), batch_size=4, num_workers=1):
        given += batch.tolist()
        time.sleep(0.05)
    print(given == [*range(1200)])
"""


@pytest.mark.shows("`hetstream run` needs no number: data workers leave that are not needed")
def test_without_a_number_there_are_as_many_data_workers_as_are_needed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PACED)
    words = [HETSTREAM, "run", "--json", "summary.json", sys.executable, "train.py"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=180)
    assert done.stdout == "True\n"
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["data_workers_used"] == len(os.sched_getaffinity(0))
    assert "the trainer hardly waited: all is well" in done.stderr
    assert "INFO" not in done.stderr


def test_data_workers_of_this_host_stand_in_for_companion_jobs(tmp_path: Path, wait_until: WaitUntil) -> None:
    companions = LocalCompanions(lambda number: ["sh", "-c", f"echo $HETSTREAM_COMPANION > {number}; exec sleep 60"])
    names = [companions.submit(), companions.submit()]
    wait_until(lambda: (tmp_path / "1").exists() and (tmp_path / "1").read_text(), what="the second data worker")
    assert (tmp_path / "1").read_text().strip() == names[1]
    assert [job.job_id for job in companions.listed()] == names
    companions.cancel(names[0])
    companions.cancel("of nobody")
    assert [job.job_id for job in companions.listed()] == names[1:]
    companions.cancel(names[1])
    assert companions.listed() == []
    with pytest.raises(MasterError, match="no data worker can be started"):
        LocalCompanions(lambda _: ["/nowhere"]).submit()


PRINTING = """
import logging
import sys
import warnings
from torch.utils.data import DataLoader, Dataset

log = logging.getLogger("mine")

class Printing(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        print("sample", index)
        print("as an error", index, file=sys.stderr)
        log.info("logged %d", index)
        logging.getLogger("quiet").warning("not shown")
        warnings.warn(f"warned of {index}")
        warnings.warn("ignored", DeprecationWarning)
        return index

if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s|%(message)s", level=logging.INFO)
    logging.getLogger("quiet").disabled = True
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    for batch in DataLoader(Printing(), batch_size=2, num_workers=2):
        print("batch", batch.tolist())
"""


def test_what_samples_print_is_output_of_the_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PRINTING)
    words = [HETSTREAM, "run", "--data-workers", "2", "--", sys.executable, script]
    # Else lines are written in parts, and those of processes mix, as without hetstream.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(words, env=buffered, capture_output=True, text=True, check=True, timeout=120)
    # Two data workers may both make a step, when one takes it over from the other.
    batches = [f"batch [{index}, {index + 1}]" for index in range(0, 8, 2)]
    assert set(done.stdout.splitlines()) == {*batches, *(f"sample {index}" for index in range(8))}
    assert "4 steps, 8 samples, 0 steps made in the trainer" in done.stderr
    plain = [sys.executable, script]
    of_torch = subprocess.run(plain, env=buffered, capture_output=True, text=True, check=True, timeout=120)
    # Without what `hetstream run` says itself.
    told = [line for line in done.stderr.splitlines() if " INFO hetstream.hetjob." not in line]
    ours = {line for line in told if not line.startswith("hetstream: ")}
    assert ours == set(of_torch.stderr.splitlines())
    assert len(ours) == 8 * 3 + 1, "each line and warning, and the place of the warning"


# A dataset with a pool of its own, which nobody shuts down.
POOLED = """
from concurrent.futures import ProcessPoolExecutor
from torch.utils.data import DataLoader, Dataset

class Pooled(Dataset):
    pool = None
    def __len__(self):
        return 8
    def __getitem__(self, index):
        self.pool = self.pool or ProcessPoolExecutor(1)
        return self.pool.submit(abs, -index).result()

if __name__ == "__main__":
    print([batch.tolist() for batch in DataLoader(Pooled(), batch_size=2)])
"""


def processes_with(mark: str) -> list[int]:
    """Processes with this text in their environment, which those that they start have, too."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has gone
            if mark.encode() in Path("/proc", name, "environ").read_bytes():
                found.append(int(name))
    return found


def test_no_process_that_a_sample_has_started_outlives_the_run(tmp_path: Path, wait_until: WaitUntil) -> None:
    """Also where its data worker ends in order."""
    (tmp_path / "pooled.py").write_text(POOLED)
    mark = f"pooled-{uuid.uuid4()}"
    options = ["--data-workers", "2", "--stream-in-process-loaders"]
    try:
        done = subprocess.run(
            [HETSTREAM, "run", *options, sys.executable, "pooled.py"], env={**os.environ, "MARK": mark},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False,
            timeout=120,
        )  # fmt: skip
        assert (done.returncode, done.stdout.splitlines()[0]) == (0, "[[0, 1], [2, 3], [4, 5], [6, 7]]")
        wait_until(lambda: not processes_with(mark), 30, "the end of what was started")
    finally:
        for pid in processes_with(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_dry_run_prints_the_commands() -> None:
    words = [HETSTREAM, "run", "--data-workers", "2", "--dry-run", "python", "train.py"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[2] for line in lines[:3]] == ["dispatcher", "worker", "worker"]
    assert lines[3].endswith("python train.py")


@pytest.mark.parametrize(("words", "others"), [([], []), (["--data-workers", "1"], ["worker"])])
def test_a_dry_run_shows_embedding_servers_and_what_the_program_sees(words: list[str], others: list[str]) -> None:
    """Without data workers torch's DataLoaders stay what they are."""
    words = [HETSTREAM, "run", "--embedding-servers", "2", *words, "--dry-run", "true"]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[2] for line in lines[:-1]] == ["dispatcher", "embedding-server", "embedding-server", *others]
    assert f" --directory {Path.cwd() / 'hetstream-embedding'}/run-" in lines[2]
    assert lines[2].endswith(" --name 1 --drain-s 0")
    assert "HETSTREAM_EMBEDDING_SERVERS=2" in lines[-1]
    assert "HETSTREAM_SERVICE=file:/tmp/hetstream-XXXXXXXX/address" in lines[-1]
    assert ("HETSTREAM_HOOK=1" in lines[-1]) == bool(others)
    assert not Path("hetstream-embedding").exists()
