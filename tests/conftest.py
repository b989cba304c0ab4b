"""Fixtures for every test: a shared throw-away Slurm cluster, waiting with a deadline, and leak checks."""

from __future__ import annotations

import functools
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Before anything loads torch, and for all programs that tests start: threads of OpenMP that wait for each other sleep.
# By default they spin. Where several programs share two cores, that was half of what tests of models took.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from tests.clusters import Devcluster, running_cluster
from tests.devcluster.kernel import mount_memory, unshare_mounts
from tests.devcluster.programs import missing_programs
from tests.devcluster.roots import HOST
from tests.huge_pages import move_into_huge_pages

pytest_plugins = ("tests.skips",)

# How long an example takes says nothing where several test processes share a core.
hypothesis.settings.register_profile("hetstream", deadline=None)
hypothesis.settings.load_profile("hetstream")

# Slurm's releases that a test marked `every_release` runs on: the host's, and beside the slow tests the newer ones.
RELEASES = (HOST, *(pytest.param(release, marks=pytest.mark.slow) for release in ("24.11", "26.05")))

# Threads and processes that were told to stop may need this long to be gone.
LEAK_GRACE_S = 3.0
POLL_INTERVAL_S, LONGEST_POLL_INTERVAL_S = 0.02, 0.5

WaitUntil = Callable[..., None]

# A shell that runs this in the background has it ignore SIGINT, and so would every program that is started here.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure() -> None:
    """Give each of several test processes a /dev/shm of its own (see unshare(2)): what others have there is no leak."""
    # Until all is collected: modules and tests stay, and to look at them again and again took each process ten seconds.
    gc.disable()
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    try:
        unshare_mounts()
        mount_memory("/dev/shm")
    except OSError as error:
        problem = "several test processes need a mount namespace each; run pytest without -n"
        raise OSError(error.errno, f"{problem}: {error.strerror}") from error


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `slow.txt` names, and of tests with many cases all but one of some."""
    slow, one_of = slow_tests()
    num_cases: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if not slow.isdisjoint((item.nodeid, name)):
            item.add_marker(pytest.mark.slow)
        elif name in one_of and item.get_closest_marker("slow") is None:
            if num_cases[name] % one_of[name]:
                item.add_marker(pytest.mark.slow)
            num_cases[name] += 1


def slow_tests() -> tuple[frozenset[str], dict[str, int]]:
    """The lines of `slow.txt`: tests and cases; and tests of which one case of some is quick, with how many."""
    lines = Path(__file__).with_name("slow.txt").read_text().splitlines()
    parts = {line: re.fullmatch(r"(.*)\[1 of (\d+)\]", line) for line in lines if not line.startswith("#")}
    return frozenset(line for line, part in parts.items() if not part), {
        part[1]: int(part[2]) for part in parts.values() if part
    }


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several test processes, one of them has the files that boot Slurm."""
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.sharing_out import SlurmInOneProcess

    return SlurmInOneProcess(config, log)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that is marked `every_release` on each."""
    if metafunc.definition.get_closest_marker("every_release"):
        metafunc.parametrize("release", RELEASES, indirect=True)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Test processes share the tests by their names, so these are the same in each."""
    if " at 0x" in item.nodeid:
        raise pytest.UsageError(f"{item.nodeid}: a name with an address in memory; give ids= to parametrize")


def pytest_collection_finish() -> None:
    """Modules and tests are there until the end: collecting garbage, as leak checks do, does not look at them again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _cheap_forks() -> None:
    """Before each module: what the last one has imported is collected no more, here or in a child.

    And what was written to while a child lived is in small pages since.
    """
    gc.collect()
    gc.freeze()
    move_into_huge_pages()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of real daemons where they cannot run, saying why."""
    if item.get_closest_marker("slurm"):
        if os.geteuid() != 0:
            pytest.skip("booting Slurm needs root")
        missing = missing_programs()
        if missing:
            pytest.skip(f"Slurm is not installed ({', '.join(missing)}): devcluster install")


@pytest.fixture(scope="session")
def wait_until() -> WaitUntil:
    """A function that polls `condition` until it is true, and fails the test after `timeout_s`."""

    def wait(condition: Callable[[], object], timeout_s: float = 10.0, what: str = "the condition") -> None:
        asked_at = time.monotonic()
        deadline = asked_at + timeout_s
        while not condition():
            answered_at = time.monotonic()
            if answered_at > deadline:
                pytest.fail(f"{what} was not reached within {timeout_s:g} s")
            # Slurm's commands are not to take the cores from what is waited for.
            time.sleep(max(POLL_INTERVAL_S, min(4 * (answered_at - asked_at), LONGEST_POLL_INTERVAL_S)))
            asked_at = time.monotonic()

    return wait


@pytest.fixture
def common_place() -> Iterator[Path]:
    """A directory that every user can reach and write to, with the sticky bit, as /tmp is."""
    path = Path(tempfile.mkdtemp(prefix="hetstream-users-"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def devclusters() -> Iterator[Callable[[str], Devcluster]]:
    """A function from a release ("host", "24.11", "26.05") to the session's cluster of it, booted on first use."""
    with ExitStack() as undo:
        yield functools.cache(lambda release: undo.enter_context(running_cluster("shared", release=release)))


@pytest.fixture(scope="module")
def release(request: pytest.FixtureRequest) -> str:
    """The Slurm that the test runs on: the host's, unless it is marked `every_release`."""
    return str(getattr(request, "param", HOST))


@pytest.fixture(scope="module")
def devcluster(devclusters: Callable[[str], Devcluster], release: str) -> Devcluster:
    """The session's cluster of `release`: 2 GPU nodes with 4 fake GPUs, 4 CPU nodes, partitions gpu and cpu."""
    return devclusters(release)


@dataclass(frozen=True)
class _Holdings:
    """What this process holds that a test could leave behind."""

    threads: frozenset[str]
    children: frozenset[str]
    descriptors: frozenset[str]
    shared_memory: frozenset[str]
    job_output: frozenset[str]
    share: frozenset[str]

    def beyond(self, before: _Holdings) -> list[str]:
        """What is held now and was not before, as text."""
        return [
            f"{kind}: {', '.join(sorted(extra))}"
            for kind, extra in (
                ("threads", self.threads - before.threads),
                ("child processes", self.children - before.children),
                ("file descriptors", self.descriptors - before.descriptors),
                ("/dev/shm", {name for name in self.shared_memory - before.shared_memory if not _is_foreign(name)}),
                ("the checkout's root", self.job_output - before.job_output),
                ("another share of the processor", self.share - before.share),
            )
            if extra
        ]


def _holdings(on_gpu: bool = False) -> _Holdings:
    # CUDA and its libraries open pipes, events and memory of their own when they are first used, and keep them.
    of_cuda = ("pipe:", "anon_inode:", "socket:", "/memfd:") if on_gpu else ()
    return _Holdings(
        threads=frozenset(f"{thread.name} ({thread.ident})" for thread in threading.enumerate()),
        children=frozenset(_children()),
        descriptors=frozenset(each for each in _descriptors() if not each.split(" -> ")[1].startswith(of_cuda)),
        shared_memory=frozenset(name for name in _shared_memory() if not (on_gpu and name.startswith("cuda.shm"))),
        # A job that is submitted from there writes there, unless it says otherwise.
        job_output=frozenset(map(str, Path(__file__).parents[1].glob("slurm-*"))),
        share=frozenset(_share_of_session()),
    )


def _share_of_session() -> Iterator[str]:
    """Linux may share the processor among sessions; with the least share, all that is tested afterwards would wait."""
    with suppress(OSError):
        yield Path("/proc/self/autogroup").read_text().strip()


def _shared_memory() -> list[str]:
    return os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []


def _children() -> Iterator[str]:
    for thread in os.listdir("/proc/self/task"):
        try:
            pids = Path(f"/proc/self/task/{thread}/children").read_text().split()
        except OSError:
            continue
        yield from pids


def _descriptors() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        # Libraries open devices on first use and keep them.
        if not target.startswith(("/dev/", "/proc/")):
            yield f"{number} -> {target}"


def _is_foreign(name: str) -> bool:
    """Whether shared memory belongs to another program on the machine: then it is not this test's leak."""
    maker = re.match(r"torch_(\d+)_", name)
    if maker:
        return _is_elsewhere(int(maker[1]))
    path = f"/dev/shm/{name}"
    return any(path in maps for maps in _maps_elsewhere()) or any(path in link for link in _links_elsewhere())


def _is_elsewhere(pid: int) -> bool:
    """Whether a process lives and does not descend from this one."""
    while pid > 1:
        if pid == os.getpid():
            return False
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            return False
    return True


def _links_elsewhere() -> Iterator[str]:
    """Paths of the files that processes elsewhere have open: a store's lock is held before anything is mapped."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and _is_elsewhere(int(entry)):
            with suppress(OSError):
                for number in os.listdir(f"/proc/{entry}/fd"):
                    with suppress(OSError):
                        yield os.readlink(f"/proc/{entry}/fd/{number}")


def _maps_elsewhere() -> Iterator[str]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and _is_elsewhere(int(entry)):
            try:
                yield Path(f"/proc/{entry}/maps").read_text(errors="replace")
            except OSError:
                continue


@pytest.fixture(scope="session", autouse=True)
def _resource_tracker() -> None:
    """Start multiprocessing's tracker now: the first test that shares memory would seem to leak it."""
    resource_tracker.ensure_running()


@pytest.fixture(autouse=True)
def _no_leaks(_resource_tracker: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, child process, file descriptor or shared memory behind."""
    on_gpu = request.node.get_closest_marker("gpu") is not None
    before = _holdings(on_gpu)
    yield
    leaked = _holdings(on_gpu).beyond(before)
    if leaked:
        gc.collect()  # may itself wait for processes that are on their way out
    deadline = time.monotonic() + LEAK_GRACE_S
    while leaked and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
        leaked = _holdings(on_gpu).beyond(before)
    if leaked:
        pytest.fail("the test left behind " + "; ".join(leaked))


@pytest.fixture(scope="session")
def horovod_bin() -> Path:
    """The `bin` folder of a virtual environment with horovod: this one, or the one that `.ci/install-horovod` makes."""
    venvs = [
        Path(sys.prefix),
        Path(os.environ.get("HETSTREAM_HOROVOD_VENV", Path(__file__).parents[1] / ".venv-horovod")),
    ]
    for venv in venvs:
        python = venv / "bin" / "python"
        if (
            python.exists()
            and subprocess.run([python, "-c", "import horovod.torch"], capture_output=True).returncode == 0
        ):
            return venv / "bin"
    pytest.skip(f"horovod is not importable in {' or '.join(map(str, venvs))}: .ci/install-horovod builds it")
