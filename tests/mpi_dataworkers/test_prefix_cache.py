"""The prefix cache: batches are byte for byte those without it, whatever happens to files, entries and processes."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

import hetstream
from hetstream import DataLoader
from hetstream.base.errors import ConfigError, OptionsError
from hetstream.mpi_dataworkers.generators import making_sample, sample_generator
from hetstream.mpi_dataworkers.ops import prefix_cache
from hetstream.mpi_dataworkers.ops.cache_store import CacheStore, Claim, Damaged, Entry, store_path, victims
from hetstream.mpi_dataworkers.ops.cached_values import NotKept, packed, unpacked
from hetstream.mpi_dataworkers.ops.prefix_cache import PrefixCache
from hetstream.mpi_dataworkers.process.config import CachePlace, parse_cache
from hetstream.mpi_dataworkers.wire.codec import aligned

NUM_FILES = 24


def work(data: bytes) -> torch.Tensor:
    """What takes a millisecond and gives 4 KiB."""
    made = hashlib.pbkdf2_hmac("sha256", data, b"", 1000, dklen=32) * 128
    return torch.frombuffer(bytearray(made), dtype=torch.uint8)


@hetstream.deterministic
def load(path: Any) -> torch.Tensor:
    return work(Path(path).read_bytes())


@hetstream.deterministic
def with_label(path: str, label: int) -> dict[str, Any]:
    return {"x": work(Path(path).read_bytes()).numpy(), "label": label, "name": ("a", None, 2.5)}


@hetstream.deterministic
def drawn(path: str) -> torch.Tensor:
    return work(Path(path).read_bytes()) + random.randrange(2)


@hetstream.deterministic
def drawn_of_sample(path: str) -> torch.Tensor:
    return work(Path(path).read_bytes()) + sample_generator().randrange(2)


@hetstream.deterministic
def clock(path: str) -> torch.Tensor:
    return work(f"{path}{time.time_ns()}".encode())


@hetstream.deterministic
def with_set(path: str) -> set[int]:
    return set(work(path.encode()).tolist())


@hetstream.deterministic
def when_told(path: str, directory: str) -> torch.Tensor:
    """Says that it is being made, and goes on when it may."""
    Path(directory, "begun").touch()
    while not Path(directory, "go").exists():
        time.sleep(0.005)
    return work(Path(path).read_bytes())


LAST: dict[str, int] = {}


@hetstream.deterministic
def into_a_global(path: str) -> torch.Tensor:
    made = work(Path(path).read_bytes())
    LAST["first"] = int(made[0])
    return made


@hetstream.deterministic
def into_its_argument(path: str, found: dict[str, int]) -> torch.Tensor:
    made = work(Path(path).read_bytes())
    found["first"] = int(made[0])
    return made


class Samples(torch.utils.data.Dataset[Any]):
    """Augments behind the front, in place."""

    def __init__(self, paths: list[str], front: Callable[[str], torch.Tensor] = load) -> None:
        self.paths, self.front = paths, front

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = self.front(self.paths[index])
        sample += random.randrange(100)
        return sample + torch.randint(100, sample.shape, dtype=torch.uint8)


class ByMethod(Samples):
    scale = 3

    @hetstream.deterministic
    def read(self, path: str) -> torch.Tensor:
        return work(Path(path).read_bytes()) // self.scale

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.read(self.paths[index]) + random.randrange(100)


class IntoItself(Samples):
    last = 0

    @hetstream.deterministic
    def read(self, path: str) -> torch.Tensor:
        made = work(Path(path).read_bytes())
        self.last = int(made[0])
        return made

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.read(self.paths[index]) + self.last


class IntoAGlobal(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        return into_a_global(self.paths[index]) + LAST["first"]


class IntoItsArgument(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        found: dict[str, int] = {}
        return into_its_argument(self.paths[index], found) + found["first"]


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    made = []
    for number in range(NUM_FILES):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(np.random.default_rng(number).bytes(100))
        made.append(str(path))
    time.sleep(2 * prefix_cache._YOUNG_S)
    return made


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def epochs(dataset: Any, cache: str, num: int = 3, **options: Any) -> tuple[list[bytes], dict[str, Any]]:
    with DataLoader(dataset, batch_size=4, shuffle=True, seed=7, cache=cache, **options) as loader:
        batches = [batch.numpy().tobytes() for _ in range(num) for batch in loader]
        return batches, loader.stats()


@pytest.mark.shows("batches with a prefix cache are byte for byte those without")
@pytest.mark.parametrize("made_by", ["data workers", "processes", "the program"])
@pytest.mark.parametrize("kind", [Samples, ByMethod])
def test_batches_are_those_without_a_cache(made_by: str, kind: Any, paths: list[str], place: str, three: Any) -> None:
    options = {"data workers": {"service": three.name}, "processes": {"num_workers": 2}, "the program": {}}[made_by]
    expected, _ = epochs(kind(paths), "off", **options)
    found, stats = epochs(kind(paths), place, **options)
    assert found == expected
    assert stats["cache_hits"] + stats["cache_misses"] == 3 * NUM_FILES
    assert stats["cache_hits"] >= 2 * NUM_FILES - 4, "a step may be made twice"
    assert stats["cache_bytes"] > 3 * NUM_FILES * 4096
    assert stats["cache_saved_s"] > 0
    later, stats = epochs(kind(paths), place, **options)
    assert (later, stats["cache_misses"]) == (expected, 0)


def test_in_memory_it_ends_with_the_program(paths: list[str], run_program: Any, tmp_path: Path) -> None:
    source = f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_prefix_cache import Samples, epochs, store_path, parse_cache
        found, stats = epochs(Samples({paths!r}), "memory:16M", num_workers=1)
        assert stats["cache_hits"] == 48, stats
        print(store_path(parse_cache("memory:16M")).exists())
    """
    done = run_program(textwrap.dedent(source), tmp_path)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr
    assert not store_path(parse_cache("memory:16M")).exists()


@pytest.fixture
def call(paths: list[str], place: str) -> Iterator[Any]:
    """Calls a front as a sample does, with a cache of its own for each program."""

    class Program:
        def __init__(self) -> None:
            self.cache = PrefixCache(f"{place}:1M", [], None)

        def __call__(self, front: Any, *args: Any) -> Any:
            with making_sample(1, self.cache):
                return front(*args)

        def counts(self) -> tuple[int, int, list[str]]:
            report = self.cache.take_report()
            return (report.hits, report.misses, report.said) if report is not None else (0, 0, [])

    return Program


def test_a_changed_file_is_read_anew(call: Any, paths: list[str]) -> None:
    program = call()
    before = program(load, paths[0])
    status = os.stat(paths[0])
    Path(paths[0]).write_bytes(bytes(100))  # as long as before
    os.utime(paths[0], ns=(status.st_atime_ns, status.st_mtime_ns))  # and, as far as it says, as old
    assert torch.equal(program(load, paths[0]), work(bytes(100)))
    assert not torch.equal(program(load, paths[0]), before)
    assert program.counts()[:2] == (0, 1), "it may change once more within one tick of the clock"
    time.sleep(2 * prefix_cache._YOUNG_S)
    for _ in range(2):
        assert torch.equal(program(load, paths[0]), work(bytes(100)))
    assert program.counts()[:2] == (1, 1)


def test_arguments_and_code_are_part_of_the_key(call: Any, paths: list[str]) -> None:
    program = call()
    for label in (1, 2, 1):
        found = program(with_label, paths[0], label)
        assert (found["label"], found["name"]) == (label, ("a", None, 2.5))
        found["x"][:] = 0  # what a sample does to its own is its own
    assert np.array_equal(program(with_label, paths[0], 1)["x"], load(paths[0]).numpy())
    assert program.counts()[:2] == (2, 2)

    def front(factor: int) -> Any:
        return hetstream.deterministic(lambda path: work(Path(path).read_bytes()) // factor)

    digests = {prefix_cache.digest_of_front(front(factor)) for factor in (2, 3, 2)}
    assert len(digests) == 2


@hetstream.deterministic
def turned(image: Any) -> Any:
    return image.resize((200, 200)).rotate(5).resize((20, 20))


def test_an_image_among_the_arguments_is_known_by_its_pixels(call: Any) -> None:
    image_module = pytest.importorskip("PIL.Image")
    program = call()
    for shade in (10, 20, 10):
        image = image_module.new("L", (400, 400), shade)
        assert program(turned, image).tobytes() == turned(image).tobytes()
    assert program.counts()[:2] == (1, 2)


def test_the_key_is_the_same_whatever_else_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL.ImageFile")
    loaded = prefix_cache.digest_of_front(load)
    monkeypatch.delitem(sys.modules, "PIL.ImageFile")
    assert prefix_cache.digest_of_front(load) == loaded


@pytest.mark.shows("a front that draws random numbers is not kept, and a line says so")
@pytest.mark.parametrize("front", [drawn, drawn_of_sample])
def test_a_front_that_draws_is_not_kept(front: Any, call: Any, paths: list[str], place: str) -> None:
    program = call()
    program(front, paths[0])
    program(front, paths[0])
    hits, misses, said = program.counts()
    assert (hits, misses) == (0, 0)
    assert said == [f"{front.__name__}({paths[0]!r},) draws random numbers: its values are not kept any more"]
    expected, _ = epochs(Samples(paths, front), "off")
    assert epochs(Samples(paths, front), place)[0] == expected


@pytest.mark.shows("a front that leaves something behind for what augments the sample is not kept, and a line says so")
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (IntoItself, "leaves something behind: IntoItself.last: "),
        (IntoAGlobal, "LAST['first']: "),
        (IntoItsArgument, "changes its arguments"),
    ],
)
def test_a_front_that_leaves_something_behind_is_not_kept(
    kind: Any, what: str, paths: list[str], place: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = epochs(kind(paths), "off")
    found, stats = epochs(kind(paths), place)
    assert found == expected
    assert stats["cache_hits"] == 0
    later, stats = epochs(kind(paths), place)
    assert (later, stats["cache_hits"]) == (expected, 0)
    assert any(what in line and "not kept any more" in line for line in caplog.messages)


@pytest.mark.shows("hits are made again and compared: a front that is not deterministic ends its cache, with a line")
def test_what_differs_when_it_is_made_again_ends_the_cache(call: Any, paths: list[str]) -> None:
    program = call()
    made = [bytes(program(clock, paths[0]).numpy()) for _ in range(4)]
    assert len(set(made)) == 4, "each is what the program would have without a cache"
    hits, misses, said = program.counts()
    assert (hits, misses) == (0, 1)
    assert len(said) == 1
    assert "gave another value when it was made again" in said[0]
    later = call()
    later(clock, paths[0])
    assert "gave another value" in later.counts()[2][0], "another process of this user is told, too"


def test_what_a_method_calls_is_part_of_the_key(call: Any, paths: list[str]) -> None:
    def kind(helper: Any) -> Any:
        names = {"__module__": __name__, "prepared": helper}
        return type("Prepares", (ByMethod,), names | {"read": hetstream.deterministic(Prepares.read)})(paths)

    def made(helper: Any) -> torch.Tensor:
        return call()(kind(helper).read, paths[0])

    class Prepares(ByMethod):
        def read(self, path: str) -> torch.Tensor:
            return self.prepared(work(Path(path).read_bytes()))  # type: ignore[attr-defined, no-any-return]

    raw = work(Path(paths[0]).read_bytes())
    assert torch.equal(made(lambda _, data: data + 1), raw + 1)
    assert torch.equal(made(lambda _, data: data + 2), raw + 2)


class Scales:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, path: str) -> torch.Tensor:
        return scaled(path, self.factor)


def scaled(path: str, factor: int) -> torch.Tensor:
    return work(Path(path).read_bytes()) * factor


@pytest.mark.parametrize("kind", [Scales, lambda factor: functools.partial(scaled, factor=factor)])
def test_what_can_be_called_is_a_front(kind: Any, call: Any, paths: list[str]) -> None:
    for factor in (2, 3):
        program, front = call(), hetstream.deterministic(kind(factor))
        for _ in range(2):
            assert torch.equal(program(front, paths[0]), scaled(paths[0], factor))
        assert program.counts() == (1, 1, [])


def test_a_front_that_is_not_found_under_its_name_travels_itself() -> None:
    front = hetstream.deterministic(scaled)  # under that name there is another one
    assert cloudpickle.loads(cloudpickle.dumps(front)).function is scaled
    assert cloudpickle.loads(cloudpickle.dumps(load)) is load


def test_a_package_that_is_installed_anew_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "theirs-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = []
    for content in ("a", "b", "a"):
        record.write_text(content)
        found.append(prefix_cache._installed.__wrapped__())
    assert found[0] == found[2] != found[1]


def test_a_clock_that_counts_seconds_hides_more() -> None:
    def may_change(age_s: float) -> bool:
        return prefix_cache._may_change_unseen([10, 0, int((time.time() - age_s) * 1e9) | 1, 7])

    whole_s = int(time.time()) * 1_000_000_000
    assert prefix_cache._may_change_unseen([10, 0, whole_s - 1_000_000_000, 7])
    assert not prefix_cache._may_change_unseen([10, 0, whole_s - 10_000_000_000, 7])
    assert not may_change(10.0)
    assert not may_change(-3600.0), "the clock was set back"
    assert not prefix_cache._may_change_unseen([])


def test_what_cannot_be_kept_is_named(call: Any, paths: list[str]) -> None:
    program = call()
    assert program(with_set, paths[0]) == program(with_set, paths[0])
    assert program.counts()[2] == [
        "with_set is made anew each time: builtins.set is no plain value, array, tensor or PIL.Image.Image"
    ]


def entries_of(place: str) -> list[Path]:
    return [
        path for path in store_path(CachePlace("disk", place)).rglob("*") if len(path.name) == 32 and path.is_file()
    ]


@pytest.mark.shows("a damaged entry of the prefix cache is made again")
@pytest.mark.parametrize("damage", ["a bit", "its end", "empty", "a link", "a directory"])
def test_a_damaged_entry_is_made_again(damage: str, call: Any, paths: list[str], place: str, tmp_path: Path) -> None:
    expected = call()(load, paths[0])
    (entry,) = entries_of(place)
    data = bytearray(entry.read_bytes())
    if damage == "a bit":
        data[-1] ^= 1
        entry.write_bytes(data)
    elif damage in ("its end", "empty"):
        entry.write_bytes(data[: len(data) // 2 if damage == "its end" else 0])
    else:
        entry.unlink()
        (tmp_path / "elsewhere").write_bytes(data)
        entry.symlink_to(tmp_path / "elsewhere") if damage == "a link" else entry.mkdir()
    program = call()
    assert torch.equal(program(load, paths[0]), expected)
    assert len(said := program.counts()[2]) == 1 + (damage == "a directory")
    assert "an entry is made again" in said[0]
    assert torch.equal(call()(load, paths[0]), expected)


@pytest.mark.shows("a process that is killed while it writes an entry leaves none")
def test_killed_in_the_middle_of_a_write(call: Any, paths: list[str], place: str) -> None:
    source = f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from hetstream.base.files import Directory
        from hetstream.mpi_dataworkers.generators import making_sample
        from hetstream.mpi_dataworkers.ops.prefix_cache import PrefixCache
        from test_prefix_cache import load
        Directory.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        with making_sample(1, PrefixCache({place!r}, [], None)):
            load({paths[0]!r})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert entries_of(place) == []
    (left,) = list(store_path(CachePlace("disk", place)).rglob(".*"))
    os.utime(left, (0, 0))
    program = call()
    program.cache._store = store = CacheStore(parse_cache(f"{place}:64K"))
    program.cache._is_open = True
    for path in paths:
        assert torch.equal(program(load, path), load(path))
    assert not left.exists()
    assert sum(entry.stat().st_size for entry in entries_of(place)) <= store.bound_bytes


KEY, OTHER = f"{7:032x}", f"{7 << 100:032x}"


@pytest.fixture
def two_stores(place: str) -> Iterator[tuple[CacheStore, CacheStore]]:
    """Of two processes: locks belong to open files."""
    stores = CacheStore(parse_cache(place)), CacheStore(parse_cache(place))
    yield stores
    for store in stores:
        store.close()


def test_one_process_makes_an_entry_and_others_wait(two_stores: tuple[CacheStore, CacheStore]) -> None:
    first, second = two_stores
    claim, was_held = first.wait_for_maker("group", KEY, 30.0)
    assert claim is not None
    assert not was_held
    assert second.wait_for_maker("group", KEY, 0.0) == (None, True), "for so long"
    other, was_held = second.wait_for_maker("group", OTHER, 0.0)
    assert other is not None
    assert not was_held
    assert first.put("group", KEY, [b"value"], 1.0)
    assert second.wait_for_maker("group", KEY, 3600.0) == (None, True), "what is there is waited for no longer"
    claim.give_back()
    assert second.wait_for_maker("group", KEY, 0.0)[1] is False


@pytest.mark.shows("a process that is killed while it makes an entry holds nobody up")
def test_the_claim_of_a_dead_process_is_gone(two_stores: tuple[CacheStore, CacheStore], place: str) -> None:
    source = f"""
        import time
        from hetstream.mpi_dataworkers.ops.cache_store import CacheStore
        from hetstream.mpi_dataworkers.process.config import parse_cache
        store = CacheStore(parse_cache({place!r}))
        print(store.wait_for_maker("group", {KEY!r}, 0.0)[1], flush=True)
        time.sleep(3600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(source)], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        said, before = maker.stdout.readline(), two_stores[0].wait_for_maker("group", KEY, 0.0)
        maker.kill()
    assert (said, before) == ("False\n", (None, True))
    claim, was_held = two_stores[0].wait_for_maker("group", KEY, 30.0)
    assert claim is not None
    assert not was_held


@pytest.mark.shows("jobs that begin together make no sample twice")
def test_who_would_make_the_same_waits_for_it(
    call: Any, paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    waits, take = threading.Event(), Claim.take

    def taken(claim: Claim) -> bool:
        found = take(claim)
        if not found:
            waits.set()
        return found

    monkeypatch.setattr(Claim, "take", taken)
    monkeypatch.setattr(prefix_cache, "_WAIT_S", 60.0)
    programs = call(), call()
    with ThreadPoolExecutor() as threads:
        first = threads.submit(programs[0], when_told, paths[0], str(tmp_path))
        wait_until((tmp_path / "begun").exists, timeout_s=30, what="the first")
        second = threads.submit(programs[1], when_told, paths[0], str(tmp_path))
        assert waits.wait(30)
        (tmp_path / "go").touch()
        assert torch.equal(first.result(), second.result())
    assert [program.counts()[:2] for program in programs] == [(0, 1), (1, 0)]


def test_nobody_waits_for_what_is_not_kept(call: Any, paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room, all would make their samples at the pace of one."""
    asked = []

    def wait_for_maker(_: CacheStore, group: str, key: str, timeout_s: float) -> tuple[None, bool]:
        asked.append((group, key, timeout_s))
        return None, True

    monkeypatch.setattr(CacheStore, "wait_for_maker", wait_for_maker)
    program = call()
    for path in paths[:3]:
        program(load, path)
    assert len(asked) == 1


@pytest.mark.shows("the prefix cache stays within its bound")
def test_the_bound_holds_and_what_is_there_stays(paths: list[str], place: str) -> None:
    expected, _ = epochs(Samples(paths), "off")
    found, stats = epochs(Samples(paths), f"{place}:50K", num_workers=2)
    assert found == expected
    assert sum(entry.stat().st_size for entry in entries_of(place)) <= 50 << 10
    # Entries of like worth do not change places in each epoch.
    assert stats["cache_hits"] >= 2 * len(entries_of(place)) * 0.5


def test_no_room_on_the_disk_is_said_and_harms_nobody(paths: list[str], place: str) -> None:
    source = f"""
        import resource, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_prefix_cache import Samples, epochs, entries_of
        expected, _ = epochs(Samples({paths!r}), "off")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        assert epochs(Samples({paths!r}), {place!r})[0] == expected
        assert entries_of({place!r}) == []
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("hetstream: cache: nothing is written for 60 s: File too large") == 1


@pytest.mark.shows("two jobs may fill one prefix cache at once")
def test_two_programs_at_once(paths: list[str], place: str) -> None:
    source = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_prefix_cache import Samples, epochs
        expected, _ = epochs(Samples({paths!r}), "off")
        assert epochs(Samples({paths!r}), "{place}:60K")[0] == expected
    """
    command = [sys.executable, "-c", textwrap.dedent(source)]
    programs = [subprocess.Popen(command) for _ in range(2)]
    assert [program.wait(240) for program in programs] == [0, 0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
@pytest.mark.parametrize("kind", ["directory", "link", "parent"])
def test_a_directory_of_another_user_is_not_used(
    kind: str, call: Any, paths: list[str], place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = store_path(CachePlace("disk", place))
    made.parent.mkdir()
    if kind == "link":
        (tmp_path / "theirs").mkdir()
        made.symlink_to(tmp_path / "theirs")
        os.chown(made, 65534, 65534, follow_symlinks=False)
    else:
        made.mkdir()
        os.chown(made if kind == "directory" else made.parent, 65534, 65534)
    expected, _ = epochs(Samples(paths), "off")
    found, stats = epochs(Samples(paths), place)
    assert (found, stats["cache_misses"]) == (expected, 0)
    lines = [line for line in caplog.messages if f"cache={place} is not used" in line]
    assert len(lines) == 1


def test_it_says_that_it_has_no_effect(paths: list[str], place: str, caplog: pytest.LogCaptureFixture) -> None:
    dataset = torch.utils.data.TensorDataset(torch.zeros(8))
    with DataLoader(dataset, batch_size=4, cache=place) as loader:
        list(loader)
    (line,) = [line for line in caplog.messages if "cache" in line]
    assert "has no effect: samples of TensorDataset have no front that is known to be deterministic" in line


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
@pytest.mark.shows("users never share entries of a prefix cache")
def test_two_users_have_two_caches() -> None:
    source = """
        import os, sys
        from pathlib import Path
        from test_prefix_cache import load, making_sample, PrefixCache, work
        place, path = sys.argv[1:]
        os.setgroups([]), os.setgid(65534), os.setuid(65534)
        cache = PrefixCache(place, [], None)
        with making_sample(1, cache):
            load(path)
        report = cache.take_report()
        print(report.hits, report.misses, sorted(os.listdir(place)))
        os.listdir(f"{place}/hetstream-cache-0")
    """
    with tempfile.TemporaryDirectory() as directory:
        path, place = Path(directory, "file"), Path(directory, "scratch")
        path.write_bytes(bytes(100))
        place.mkdir()
        for made in (path, place, Path(directory)):
            made.chmod(0o1777)
        time.sleep(2 * prefix_cache._YOUNG_S)
        cache = PrefixCache(str(place), [], None)
        with making_sample(1, cache):
            load(str(path))
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(source), str(place), str(path)],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.stdout == "0 1 ['hetstream-cache-0', 'hetstream-cache-65534']\n", done.stderr
    assert "PermissionError" in done.stderr


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_it_says_that_streams_are_not_kept(place: str, caplog: pytest.LogCaptureFixture) -> None:
    with DataLoader(Stream(), batch_size=4, cache=place) as loader:
        list(loader)
    (line,) = [line for line in caplog.messages if "cache" in line]
    assert "has no effect: elements of an IterableDataset (Stream) are not kept" in line


@pytest.mark.parametrize("text", ["memory", "memory:0G", "8G", "cache", "memory:8", "/a\nb", "/local:0G"])
def test_a_place_is_checked(text: str) -> None:
    with pytest.raises(ConfigError, match="must be memory:SIZE"):
        parse_cache(text)
    with pytest.raises(OptionsError, match="cache="):
        DataLoader([1], cache=text)


def test_places_are_read() -> None:
    assert parse_cache("memory:8G") == CachePlace("memory", "", 8 << 30)
    assert parse_cache("/local/dir:1.5T") == CachePlace("disk", "/local/dir", 3 << 39)
    assert parse_cache("/local/a:b") == CachePlace("disk", "/local/a:b", 0)


_BASE = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
VALUES = [
    _BASE,
    _BASE.permute(2, 0, 1),
    _BASE[:, 1:3],
    torch.tensor(3),
    torch.zeros(0, 3),
    torch.zeros(1).expand(5, 5),
    torch.ones(3, dtype=torch.bfloat16),
    np.arange(6).reshape(2, 3).T,
    np.float32(2.5),
    np.array(5),
    [{"a": (1, None, True, 2.5, b"x")}, "ä"],
]


def copied(value: Any) -> tuple[Any, bytes]:
    joined = b"".join(memoryview(part).tobytes() for part in packed(value))
    data = aligned(len(joined))
    data[:] = np.frombuffer(joined, np.uint8)
    return unpacked(data), joined


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_come_back_as_they_were(value: Any) -> None:
    found, joined = copied(value)
    assert type(found) is type(value)
    assert copied(found)[1] == joined
    if isinstance(value, torch.Tensor):
        assert torch.equal(found, value)
        assert (found.stride(), found.dtype) == (value.stride(), value.dtype)
    elif isinstance(value, np.ndarray):
        assert np.array_equal(found, value)
        assert found.strides == value.strides
    else:
        assert found == value


def test_what_was_one_object_stays_one() -> None:
    found = copied({"a": _BASE, "b": _BASE})[0]
    assert found["a"] is found["b"]


@pytest.mark.parametrize(
    "value",
    [
        {1},
        object(),
        torch.nn.Parameter(_BASE),
        (_BASE, _BASE[0]),
        np.arange(9)[::-1],
        print,
        _BASE[:, :, ::5][:1],
        1j,
        _BASE[:, 0, 0],
    ],
    ids=["set", "object", "parameter", "shared", "turned", "function", "part", "complex", "attribute"],
)
def test_what_would_not_come_back_as_it_was_is_not_kept(value: Any) -> None:
    if isinstance(value, torch.Tensor) and value.numel() == 3:
        value = torch.zeros(3)
        value.label = 1  # type: ignore[attr-defined]
    elif isinstance(value, torch.Tensor) and value.numel() == 4:
        value = torch.zeros(1000, 100)[:, 0]
    with pytest.raises(NotKept):
        packed(value)


def test_reading_names_no_code() -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return print, ("run",)

    head = pickle.dumps(Runs())
    joined = len(head).to_bytes(8, "little") + head
    data = aligned(len(joined))
    data[:] = np.frombuffer(joined, np.uint8)
    with pytest.raises(pickle.UnpicklingError, match="names no code"):
        unpacked(data)


def test_images_come_back_as_they_were() -> None:
    image_module = pytest.importorskip("PIL.Image")
    image = image_module.effect_noise((31, 17), 50).convert("RGB")
    image.info = {"dpi": (72, 72), "exif": b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0"}
    found, _ = copied(image)
    assert (found.tobytes(), found.size, found.info) == (image.tobytes(), image.size, image.info)
    image.getexif()
    assert copied(image)[1] == copied(found)[1]
    image.label = 1
    with pytest.raises(NotKept, match="attribute label"):
        packed(image)


def test_idle_fronts_go_first_then_those_of_less_benefit() -> None:
    entries = [
        Entry("used", "cheap", 10, 1.0, 50.0),
        Entry("used", "dear", 10, 9.0, 10.0),
        Entry("idle", "old", 10, 99.0, 1.0),
        Entry("idle", "new", 10, 99.0, 60.0),
    ]

    def names(need_bytes: int, benefit: float) -> tuple[list[str], bool]:
        chosen, refused = victims(entries, {"idle"}, need_bytes, benefit, 100.0)
        return [entry.name for entry in chosen], refused < benefit

    assert names(5, 1.0) == (["old"], True)
    assert names(15, 1.0) == (["old", "new"], True)
    assert names(25, 1.0) == (["old", "new"], False), "one of like worth stays"
    assert names(25, 2.0) == (["old", "new", "cheap"], True)
    assert names(0, 1.0) == ([], True)


def test_a_store_says_that_an_entry_is_damaged(place: str) -> None:
    store = CacheStore(parse_cache(place))
    assert store.put("group", "key", [b"value"], 1.0)
    (file,) = list(store_path(parse_cache(place)).rglob("key"))
    file.write_bytes(b"no entry")
    with pytest.raises(Damaged):
        store.get("group", "key")
    assert store.get("group", "key") is None
    store.close()


def test_the_evaluation_recipe_of_our_own_folder_is_kept(tmp_path: Path, place: str) -> None:
    image_module = pytest.importorskip("PIL.Image")
    (tmp_path / "images" / "a").mkdir(parents=True)
    for number in range(8):
        image_module.effect_noise((300, 200), 30).convert("RGB").save(tmp_path / "images" / "a" / f"{number}.jpg")
    time.sleep(2 * prefix_cache._YOUNG_S)
    found = []
    for cache in ("off", place):
        folder = hetstream.ImageFolder(
            tmp_path / "images", hetstream.EvaluationRecipe(64), mean=[0.5] * 3, std=[0.5] * 3
        )
        with DataLoader(folder, batch_size=4, shuffle=True, seed=1, cache=cache) as loader:
            found.append([images.numpy().tobytes() for _ in range(2) for images, _ in loader])
            hits = loader.stats()["cache_hits"]
    assert found[0] == found[1]
    assert hits == 8


FOLDER = """
import sys
import numpy as np, torch
from PIL import Image
from pathlib import Path
try:
    import torchvision
except RuntimeError:  # a build for another torch
    sys.modules.pop("torchvision", None)
    raise SystemExit(77)
except ModuleNotFoundError:
    raise SystemExit(77)
from torchvision.transforms import transforms as v1, v2
import hetstream

root, place = Path(sys.argv[1]) / "images", sys.argv[2]
(root / "a").mkdir(parents=True)
for number in range(12):
    pixels = np.random.default_rng(number).integers(0, 255, (120, 160, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(root / "a" / f"{number}.png")
normal = v1.Normalize([0.5] * 3, [0.5] * 3)
recipes = [
    v1.Compose([v1.Resize(64), v1.RandomCrop(48), v1.RandomHorizontalFlip(), v1.ToTensor(), normal]),
    v1.Compose([v1.Resize(64), v1.CenterCrop(48), v1.ToTensor(), normal]),
    v2.Compose([v2.ToImage(), v2.Resize(64), v2.RandomResizedCrop(48), v2.ToDtype(torch.float32, scale=True)]),
    v1.Compose([v1.RandomResizedCrop(48), v1.ToTensor()]),
]
for recipe in recipes:
    found = {}
    for cache in ("off", place):
        dataset = torch.utils.data.Subset(torchvision.datasets.ImageFolder(root, recipe), range(12))
        loader = hetstream.DataLoader(dataset, batch_size=4, shuffle=True, seed=1, num_workers=1, cache=cache)
        found[cache] = [batch.numpy().tobytes() for _ in range(2) for batch, _ in loader]
        hits, misses = loader.stats()["cache_hits"], loader.stats()["cache_misses"]
    assert found["off"] == found[place], recipe
    assert hits + misses == 24, (hits, misses)
    assert hits >= 8, (hits, misses)
"""


@pytest.mark.shows("the front of torchvision's folder datasets is found by type")
def test_folders_of_torchvision(run_program: Any, tmp_path: Path, place: str) -> None:
    done = run_program(FOLDER, tmp_path, str(tmp_path), place)
    if done.returncode == 77:
        pytest.skip("no torchvision for this torch")
    assert done.returncode == 0, done.stderr
