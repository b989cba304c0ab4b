"""Training programs in the style of well-known projects get from data workers what they get without hetstream.

Each program runs plain, under the hook without data workers, under the hook with two, and again while one of the two is
killed at an exact point. What is particular about each is told in `docs/real-programs.md`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hetstream.mpi_dataworkers.hook import environment
from tests.mpi_dataworkers.conftest import Service, Zygote

HERE = Path(__file__).parent
PROGRAM_TIMEOUT_S = 240.0  # two ranks import their framework in half a minute each, on a busy machine
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

WaitUntil = Callable[..., None]
Start = Callable[..., "Running"]


@dataclass(frozen=True)
class Program:
    """A program of `programs/`.

    Attributes:
        name: its file, without the suffix.
        is_random: it draws random numbers while it makes batches, so that these differ from the plain run's.
        exit_code: how it ends.
        launcher: words between Python and the file.
        quick: it runs in `make test`.
    """

    name: str
    is_random: bool = True
    exit_code: int = 0
    launcher: tuple[str, ...] = ()
    quick: bool = False


PROGRAMS = [
    Program("neighbours", quick=True),
    Program("saveable", is_random=False, quick=True),
    Program("infinite", quick=True),
    Program("random_states", quick=True),
    Program("prefetcher"),
    Program("lightning_ranks"),
    Program("huggingface_ranks", launcher=TORCHRUN),
    Program("nested", exit_code=3),
    Program("folds"),
    Program("changing"),
    Program("growing", is_random=False),
]
TWO_PROGRAMS = Program("two_programs", is_random=False)


@dataclass(frozen=True)
class Run:
    """What a program left.

    Attributes:
        lines: its ledger, of all ranks, each rank's in order.
        num_files: entries of its directory for temporary files, less those that torch's worker processes leave.
    """

    returncode: int
    lines: list[dict[str, Any]]
    stderr: str
    num_files: int

    def order(self) -> list[dict[str, Any]]:
        """The ledger without what depends on the bytes."""
        return [{name: value for name, value in line.items() if name != "digest"} for line in self.lines]


class Running:
    """A program that has been started, with all its processes; as a context manager it ends them.

    Args:
        program: what to start.
        folder: made for it: its output, its checkpoints, its temporary files.
        variables: added to the environment.
        working_dir: where it runs, if not in its folder.
    """

    def __init__(self, program: Program, folder: Path, variables: Mapping[str, str], working_dir: Path | None) -> None:
        folder.mkdir()
        self._folder = folder
        # Sockets lie there, whose paths are limited to 107 bytes.
        self._temporary = tempfile.TemporaryDirectory(prefix="real-")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HETSTREAM_", "SLURM_"))}
        own = {"OMP_NUM_THREADS": "1", "TMPDIR": self._temporary.name}
        script = str(HERE / "programs" / f"{program.name}.py")
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, *program.launcher, script, str(folder)],
                cwd=working_dir or folder,
                env=inherited | own | dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # by which all its processes are found
            )

    def finish(self, wait_until: WaitUntil) -> Run:
        """Wait for its end, and for that of every process that it started."""
        returncode = self._process.wait(PROGRAM_TIMEOUT_S)
        wait_until(lambda: not self._processes(), what="the end of all processes of the program")
        lines = [
            json.loads(line) for line in (self._folder / "out").read_text().splitlines() if line.startswith('{"rank"')
        ]
        lines.sort(key=lambda line: int(line["rank"]))
        num_files = sum(not name.startswith("pymp-") for name in os.listdir(self._temporary.name))
        return Run(returncode, lines, (self._folder / "err").read_text(), num_files)

    def _processes(self) -> list[int]:
        everything = map(int, filter(str.isdigit, os.listdir("/proc")))
        return [pid for pid in everything if _session_of(pid) == self._process.pid]

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._temporary.cleanup()


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


class TwoWorkers(Service):
    """A service of a dispatcher and two data workers.

    Args:
        marker: made when, after its third batch of a program, a data worker is killed; without, none is.
    """

    def __init__(self, directory: Path, zygote: Zygote, marker: Path | None = None) -> None:
        directory.mkdir()
        super().__init__(directory)
        self.zygote = zygote
        self._marker = marker

    def __enter__(self) -> TwoWorkers:
        self.start_dispatcher()
        with pytest.MonkeyPatch.context() as patch:
            if self._marker is not None:
                patch.setenv("HETSTREAM_FAULT", f"worker.batch_sent:3:kill:{self._marker}")
            self.start_workers(2)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def loaders(self) -> list[dict[str, Any]]:
        """What each loader got, once the service has ended."""
        rows: list[dict[str, Any]] = json.loads((self.directory / "work" / "summary.json").read_text())["loaders"]
        return rows


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """Forks the processes of the services."""
    one = Zygote()
    with one.process:
        yield one


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a program in a folder of this name; what still runs after the test is ended."""
    with ExitStack() as running:

        def begin(
            program: Program, name: str, variables: Mapping[str, str], working_dir: Path | None = None
        ) -> Running:
            return running.enter_context(Running(program, tmp_path / name, variables, working_dir))

        yield begin


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "program", [pytest.param(one, id=one.name, marks=() if one.quick else pytest.mark.slow) for one in PROGRAMS]
)
def test_a_program_gets_from_data_workers_what_it_gets_without_hetstream(
    program: Program, tmp_path: Path, zygote: Zygote, start: Start, wait_until: WaitUntil
) -> None:
    marker = tmp_path / "killed"
    hooked = functools.partial(environment, in_process_loaders=True)
    local = [start(program, "plain", {}), start(program, "without workers", hooked(None))]
    runs = [one.finish(wait_until) for one in local]
    with TwoWorkers(tmp_path / "service", zygote) as sound, TwoWorkers(tmp_path / "hurt", zygote, marker) as hurt:
        streamed = [start(program, f"on {one.directory.name}", hooked(one.name)) for one in (sound, hurt)]
        runs += [one.finish(wait_until) for one in streamed]
    assert zygote.children() == set(), "processes of a service are left"
    assert_same(program, *runs)
    assert marker.exists(), "no data worker was killed"
    for service, run in zip((sound, hurt), runs[2:], strict=True):
        assert_streamed(service.loaders(), run)


def assert_same(program: Program, plain: Run, without_workers: Run, *streamed: Run) -> None:
    """Fail where a run differs from the plain one, or one under the hook from another one."""
    for run in (plain, without_workers, *streamed):
        assert run.returncode == program.exit_code, run.stderr
        assert run.order() == plain.order()
        assert run.num_files == plain.num_files, "something is left in the directory for temporary files"
    for run in streamed:
        assert run.lines == without_workers.lines
    assert (without_workers.lines != plain.lines) == program.is_random


def assert_streamed(loaders: list[dict[str, Any]], run: Run) -> None:
    """Fail where batches were made in the training process, or hetstream had anything to say."""
    assert sum(row["steps"] for row in loaders) > 0
    assert [row for row in loaders if row["local_steps"]] == []
    assert "hetstream: " not in run.stderr


ROWS = """
import torch
from torch.utils.data import Dataset


class Rows(Dataset):
    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 40

    def __getitem__(self, index):
        numbers = [float(word) for word in self.path.read_text().split()]  # relative to the program's directory
        return EXPRESSION, index
"""


def write_program(folder: Path, expression: str, first: int) -> None:
    """The module and the data of a program, under the same names in each folder."""
    folder.mkdir(exist_ok=True)
    (folder / "dataset.py").write_text(ROWS.replace("EXPRESSION", expression))
    (folder / "rows.txt").write_text(" ".join(str(first + number) for number in range(40)))


@pytest.mark.slow
@pytest.mark.parametrize("is_hurt", [False, True], ids=["sound", "hurt"])
def test_two_programs_on_one_service_get_each_its_own_data(
    is_hurt: bool, tmp_path: Path, zygote: Zygote, start: Start, wait_until: WaitUntil
) -> None:
    marker = tmp_path / "killed"
    folders = {name: tmp_path / name for name in ("first", "second")}
    write_program(folders["first"], "torch.tensor(numbers[index])", 0)
    write_program(folders["second"], "torch.tensor(numbers[index]) * 2", 1000)
    runs: list[Run] = []

    def run(how: str, variables: Mapping[str, str], *names: str) -> None:
        started = [start(TWO_PROGRAMS, f"{name}, {how}", variables, folders[name]) for name in names]
        runs.extend(one.finish(wait_until) for one in started)

    with TwoWorkers(tmp_path / "service", zygote, marker if is_hurt else None) as service:
        run("plain", {}, "first", "second")
        run("without workers", environment(None), "first", "second")
        run("streamed", environment(service.name), "first", "second")
        write_program(folders["first"], "torch.tensor([numbers[index], -1.0])", 5000)
        run("edited, plain", {}, "first")
        run("edited, without workers", environment(None), "first")
        run("edited, streamed", environment(service.name), "first")
    assert zygote.children() == set(), "processes of the service are left"
    firsts, seconds, edited = runs[0:6:2], runs[1:6:2], runs[6:]  # each plain, without workers, streamed
    assert firsts[0].lines != seconds[0].lines != edited[0].lines != firsts[0].lines, "the same data would show nothing"
    for plain, without_workers, streamed in (firsts, seconds, edited):
        assert_same(TWO_PROGRAMS, plain, without_workers, streamed)
    assert marker.exists() == is_hurt
    assert_streamed(service.loaders(), firsts[2])


# --- the page that tells users --------------------------------------------------------------------------------------


def test_the_page_tells_of_every_program_and_every_program_is_run() -> None:
    files = {path.stem for path in (HERE / "programs").glob("*.py")} - {"ledger"}
    assert files == {program.name for program in [*PROGRAMS, TWO_PROGRAMS]}
    page = (HERE.parents[1] / "docs" / "real-programs.md").read_text()
    told = re.findall(r"^\| `(\w+)\.py` \|", page, re.MULTILINE)
    assert sorted(told) == sorted(files)
