"""Stores: who gets which, what a save overwrites, what is refused, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetstream.base.errors import OptionsError
from hetstream.checkpoint.errors import CheckpointError, DamagedSegment, ForeignOwner, SharedMemoryFull, StoreInUse
from hetstream.checkpoint.memory.segment import Segment
from hetstream.checkpoint.memory.slots import MappedSlots
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.store_files import (
    StoreFiles,
    StoreIdentity,
    WriterStatus,
    list_stores,
    stores_prefix,
)
from hetstream.checkpoint.memory.view import StoreView, find_stores
from hetstream.checkpoint.record.layout import Generation
from tests.checkpoint.mounted import mounted_memory
from tests.checkpoint.programs.store_reader import newest_unpersisted
from tests.checkpoint.programs.store_trainer import check, payload_of, save, size_at

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (sys.executable, "-m", "tests.checkpoint.programs.store_trainer")
SIZE = 80_000
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a file system or gives a file away")


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A folder of /dev/shm that must be empty at the end."""
    with tempfile.TemporaryDirectory(prefix="hetstream-test-", dir="/dev/shm") as name:
        yield Path(name)
        assert os.listdir(name) == []


@pytest.fixture
def identity(tmp_path: Path) -> StoreIdentity:
    return StoreIdentity("77", 0, 0, tmp_path)


@pytest.fixture
def store(identity: StoreIdentity, shared_memory: Path) -> Iterator[Store]:
    with Store.open(identity, shared_memory=shared_memory) as opened:
        yield opened


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """Shared memory with room for two slots of SIZE and no third."""
    with mounted_memory(tmp_path / "tiny", "260k") as place:
        yield place
        assert os.listdir(place) == []


def start(*words: object, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """The program of `store_trainer`."""
    return subprocess.Popen(
        [*PROGRAM, *map(str, words)],
        cwd=ROOT,
        env=os.environ | (environment or {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def running(*words: object) -> Iterator[subprocess.Popen[str]]:
    """The program, until the end of the block at the latest."""
    with start(*words) as process:
        try:
            yield process
        finally:
            process.kill()


def steps(store: Store) -> list[int]:
    """What is in memory, newest first; each is whole."""
    found = []
    for content in store.held():
        with content.open() as segment:
            found.append(check(segment))
    return found


# --- saves ----------------------------------------------------------------------------------------------------------


def test_the_newest_generations_are_held(store: Store) -> None:
    assert steps(store) == []
    for step in range(1, 8):
        save(store, step, SIZE)
        assert steps(store) == list(range(step, max(0, step - 3), -1))


@pytest.mark.shows("the payload may change its size from save to save, also while an older one is read")
def test_sizes_may_change_from_save_to_save(store: Store) -> None:
    for step in range(1, 40):
        save(store, step, size_at(step, SIZE, grows=True))
        assert steps(store)[0] == step
    assert len(list(store.path.glob("slot-*"))) == 3


@pytest.mark.shows("the payload may change its size from save to save, also while an older one is read")
def test_a_reader_keeps_what_a_growing_slot_held(store: Store) -> None:
    save(store, 1, SIZE)
    (first,) = store.held()
    with first.open() as segment:
        for step in range(2, 9):
            save(store, step, SIZE * step)
        assert check(segment) == 1


def test_a_slot_that_is_replaced_gives_its_memory_back_though_it_is_mapped(store: Store) -> None:
    mapped = MappedSlots()
    for step in range(1, 4):
        save(store, step, SIZE)
    newest, _, oldest = store.held()
    with mapped.open(oldest) as old:
        pass
    with mapped.open(newest) as segment:
        pass
    with mapped.open(newest) as again:
        assert again is segment
    used_bytes = _allocated_bytes(old)
    assert used_bytes >= SIZE
    save(store, 4, SIZE * 8)
    assert _allocated_bytes(old) == 0
    with pytest.raises(DamagedSegment, match="step 1 of attempt 1"), mapped.open(oldest):
        pass
    with mapped.open(store.held()[0]) as segment:
        assert check(segment) == 4
    with pytest.raises(ValueError, match="released"):
        old.payload  # noqa: B018, unmapped
    mapped.close()
    mapped.close()


def _allocated_bytes(segment: Segment) -> int:
    return os.fstat(segment._descriptor).st_blocks * 512


def test_a_view_of_a_generation_that_was_overwritten_says_so(store: Store) -> None:
    save(store, 1, SIZE)
    (first,) = store.held()
    for step in range(2, 5):
        save(store, step, SIZE)
    with pytest.raises(DamagedSegment, match="step 1 of attempt 1 has been overwritten"), first.open():
        pass


def test_the_trainer_reads_what_it_has_mapped(store: Store) -> None:
    for step in range(1, 4):
        save(store, step, SIZE)
    store.populate()
    newest, _, oldest = store.held()
    with store.read(newest) as segment, store.read(oldest) as old:
        assert check(segment) == 3
        # What is read is not overwritten: the save takes the one in between.
        save(store, 4, SIZE)
        assert check(old) == 1
    assert steps(store) == [4, 3, 1]
    save(store, 5, SIZE)
    with pytest.raises(DamagedSegment, match="step 1 of attempt 1 has been overwritten"), store.read(oldest):
        pass


def test_a_generation_with_damaged_metadata_is_not_read(store: Store) -> None:
    save(store, 11, SIZE)
    with store.held()[0].path.open("r+b") as file:
        file.seek(4096 + 20)
        file.write(b"?")
    (content,) = store.held()
    for reading in (content.open(), store.read(content)):
        with pytest.raises(DamagedSegment, match="metadata"), reading:
            pass


def test_an_abandoned_save_leaves_the_others(store: Store) -> None:
    save(store, 1, SIZE)
    with contextlib.suppress(ZeroDivisionError), store.begin(SIZE, 10) as slot:
        slot.payload[:100] = bytes(100)
        raise ZeroDivisionError
    assert steps(store) == [1]
    save(store, 2, SIZE)
    assert steps(store) == [2, 1]


def test_wrong_use_is_refused(store: Store) -> None:
    with store.begin(SIZE, 10) as slot:
        with pytest.raises(OptionsError, match="under way"):
            store.begin(SIZE, 10)
        slot.publish(Generation(2, 5), b"", "00" * 16)
        with pytest.raises(OptionsError, match="published or abandoned"):
            slot.publish(Generation(2, 6), b"", "00" * 16)
    with store.begin(SIZE, 10) as slot:
        with pytest.raises(OptionsError, match="step 4 of attempt 2 is older"):
            slot.publish(Generation(2, 4), b"", "00" * 16)
        with pytest.raises(OptionsError, match="from 0"):
            slot.publish(Generation(2, -4), b"", "00" * 16)
        with pytest.raises(OptionsError, match="metadata"):
            slot.publish(Generation(2, 6), bytes(1 << 20), "00" * 16)
    assert [content.header.generation for content in store.held()] == [Generation(2, 5)]
    store.close()
    with pytest.raises(OptionsError, match="closed"):
        store.begin(SIZE, 10)


def test_a_step_may_be_saved_twice_and_the_later_counts(store: Store) -> None:
    for text in (b"first", b"again"):
        with store.begin(5, 10) as slot:
            slot.payload[:] = text
            slot.publish(Generation(1, 9), b"", "00" * 16)
    with store.held()[0].open() as segment:
        assert bytes(segment.payload) == b"again"


@pytest.mark.shows("with three slots a save never waits; with two it waits and says how long")
@pytest.mark.parametrize("num_slots", [2, 3])
def test_a_save_waits_only_with_two_slots(identity: StoreIdentity, shared_memory: Path, num_slots: int) -> None:
    with Store.open(identity, num_slots, shared_memory) as store, StoreView(store.path) as view:
        save(store, 1, SIZE)
        with newest_unpersisted(view) as segment:
            assert segment is not None
            save(store, 2, SIZE)
            waited: list[float] = []
            thread = threading.Thread(target=lambda: waited.append(save(store, 3, SIZE)))
            thread.start()
            thread.join(0.2 if num_slots == 2 else 60)
            assert thread.is_alive() == (num_slots == 2)
            assert check(segment) == 1
        thread.join()
        assert (waited[0] > 0.1) == (num_slots == 2)
        assert steps(store)[0] == 3


def test_a_crash_before_the_first_save_leaves_nothing(identity: StoreIdentity, shared_memory: Path) -> None:
    store = Store.open(identity, shared_memory=shared_memory)
    store.prepare(SIZE, 1000)
    store.close(keep=True)
    assert os.listdir(shared_memory) == []


def test_memory_is_prepared_in_a_thread_while_saves_go_on(store: Store) -> None:
    thread = threading.Thread(target=store.prepare, args=(20_000_000, 1000))
    thread.start()
    for step in range(1, 10):
        save(store, step, 20_000_000)
        assert steps(store)[0] == step
    thread.join()
    for step in range(10, 13):
        save(store, step, 20_000_000)
    assert steps(store) == [12, 11, 10]


@pytest.mark.shows("later saves allocate nothing: the same files, descriptors and memory")
def test_a_prepared_store_allocates_nothing_for_a_save(store: Store) -> None:
    store.prepare(SIZE, 1000)
    slots = [path.stat().st_ino for path in sorted(store.path.glob("slot-*"))]
    for step in range(1, 6):
        with store.begin(SIZE, 1000) as slot:
            assert slot.allocated_s == 0
            slot.publish(Generation(1, step), b"x" * 1000, "00" * 16)
    assert slots == [path.stat().st_ino for path in sorted(store.path.glob("slot-*"))]


def test_preparing_spares_what_is_complete(store: Store) -> None:
    for step in range(1, 3):
        save(store, step, SIZE)
    store.prepare(10 * SIZE, 1000)
    assert steps(store) == [2, 1]


@pytest.mark.shows("later saves allocate nothing: the same files, descriptors and memory")
def test_a_thousand_saves_are_flat(store: Store) -> None:
    def holdings() -> tuple[int, int, list[str]]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return len(os.listdir("/proc/self/fd")), pages * resource.getpagesize(), sorted(os.listdir(store.path))

    with StoreView(store.path) as view:
        for step in range(1, 1101):
            save(store, step, SIZE)
            with newest_unpersisted(view) as segment:
                assert segment is not None
            view.report(WriterStatus(pid=os.getpid(), persisted=Generation(1, step)))
            if step == 100:
                descriptors, resident, files = holdings()
    assert steps(store) == [1100, 1099, 1098]
    now = holdings()
    assert (now[0], now[2]) == (descriptors, files)
    assert now[1] - resident < 1 << 20


# --- who has a store ------------------------------------------------------------------------------------------------


@pytest.mark.shows("jobs, components, ranks and directories have stores of their own, mode 0700")
def test_a_second_trainer_is_told_who_the_first_is(identity: StoreIdentity, shared_memory: Path) -> None:
    with running(identity.directory, shared_memory, "--waits") as first:
        assert first.stdout
        assert first.stdout.readline().startswith("open 0")
        with pytest.raises(StoreInUse, match=f"process {first.pid} "):
            Store.open(identity, shared_memory=shared_memory)
        first.communicate("", timeout=60)
    Store.open(identity, shared_memory=shared_memory).close()


@pytest.mark.shows("jobs, components, ranks and directories have stores of their own, mode 0700")
def test_twins_of_one_instant_get_one_store(identity: StoreIdentity, shared_memory: Path) -> None:
    twins = [start(identity.directory, shared_memory, "--waits") for _ in range(3)]
    try:
        lines = [twin.stdout.readline() for twin in twins if twin.stdout]
        assert [line[:6] for line in sorted(lines)] == ["", "", "open 0"]
        assert len(find_stores([shared_memory])) == 1
    finally:
        for twin in twins:
            _, errors = twin.communicate("", timeout=60)
            assert twin.returncode == 0 or "StoreInUse" in errors


@pytest.mark.shows("a restarted step adopts what the killed one held in memory; a requeued job resumes from disk")
def test_the_next_trainer_adopts_what_a_killed_one_held(identity: StoreIdentity, shared_memory: Path) -> None:
    with running(identity.directory, shared_memory, "--saves", 4, "--waits") as first:
        assert first.stdout
        path = Path(first.stdout.readline().split()[2])
        while first.stdout.readline().split()[1] != "4":
            pass
    (found,) = find_stores([shared_memory])
    assert (found.path, found.trainer_alive, found.writer_alive, found.closed) == (path, False, False, False)
    assert found.generations == [Generation(1, 4), Generation(1, 3), Generation(1, 2)]
    assert (found.holder.job, found.holder.rank, found.holder.pid) == ("77", 0, first.pid)
    assert found.holder.directory == str(identity.directory)
    with Store.open(identity, shared_memory=shared_memory) as store:
        assert store.path == path
        assert steps(store) == [4, 3, 2]
        save(store, 5, SIZE)
        assert steps(store) == [5, 4, 3]


def test_fewer_slots_than_a_dead_trainer_had_keep_the_newest(identity: StoreIdentity, shared_memory: Path) -> None:
    with Store.open(identity, 5, shared_memory) as first:
        for step in range(1, 6):
            save(first, step, SIZE)
        first.close(keep=True)
    with Store.open(identity, 2, shared_memory) as second:
        assert steps(second) == [5, 4]
        second.close(keep=True)
    with Store.open(identity, 3, shared_memory) as third:
        save(third, 6, SIZE)
        assert steps(third) == [6, 5, 4]


@pytest.mark.shows("a restarted step adopts what the killed one held in memory; a requeued job resumes from disk")
def test_a_closed_store_that_its_writer_still_needs_is_adopted(identity: StoreIdentity, shared_memory: Path) -> None:
    with Store.open(identity, shared_memory=shared_memory) as first, StoreView(first.path) as view:
        view.become_writer()
        save(first, 1, SIZE)
        first.close()
        assert view.closed
        with Store.open(identity, shared_memory=shared_memory) as second:
            assert second.path == first.path
            assert steps(second) == [1]
            assert not view.closed
            assert not view.remove()
            second.close()
        assert view.remove()


@pytest.mark.shows("jobs do not collide, and what others can read does not depend on the umask")
@pytest.mark.shows("jobs, components, ranks and directories have stores of their own, mode 0700")
def test_other_jobs_ranks_components_and_directories_have_stores_of_their_own(
    tmp_path: Path, shared_memory: Path
) -> None:
    identities = [
        StoreIdentity("77", 0, 0, tmp_path),
        StoreIdentity("78", 0, 0, tmp_path),
        StoreIdentity("77", 1, 0, tmp_path),
        StoreIdentity("77", 0, 1, tmp_path),
        StoreIdentity("77", 0, 0, tmp_path / "other"),
    ]
    with contextlib.ExitStack() as stores:
        for identity in identities:
            store = stores.enter_context(Store.open(identity, shared_memory=shared_memory))
            save(store, identity.rank + 1, SIZE)
            assert store.path.stat().st_mode & 0o777 == 0o700
            assert all(path.stat().st_mode & 0o777 == 0o600 for path in store.path.glob("slot-*"))
        found = {
            (one.holder.job, one.holder.component, one.holder.rank, one.holder.directory)
            for one in find_stores([shared_memory])
        }
        assert found == {(one.job, one.component, one.rank, str(one.directory)) for one in identities}


@pytest.mark.parametrize("job", ["", "a/b", "..//", "a b", "x" * 65])
def test_a_job_that_is_no_name_is_refused(job: str, tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="job"):
        StoreIdentity(job, 0, 0, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_a_stranger_calls_by_our_names_is_looked_at_once(tmp_path: Path) -> None:
    """Anybody can make 100,000 such names in shared memory, and a checkpoint writer looks there again and again."""
    names = [f"{stores_prefix()}7-0-{number}-00000000-00000000" for number in range(2)]
    for name, owner in zip(names, (0, 54321), strict=True):
        (tmp_path / name).mkdir()
        os.chown(tmp_path / name, owner, owner)
    assert [store.path.name for store in list_stores(tmp_path, stores_prefix())] == names[:1]
    assert [store.path.name for store in list_stores(tmp_path, stores_prefix(), of_others=True)] == names
    assert list_stores(tmp_path / "missing", stores_prefix()) == []


@pytest.mark.shows("another user's checkpoint directory, or memory, is not touched")
@pytest.mark.shows("jobs, components, ranks and directories have stores of their own, mode 0700")
@needs_root
def test_another_users_directory_under_our_name_is_not_touched(
    identity: StoreIdentity, shared_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = shared_memory / f"{identity.prefix}00000000"
    foreign.mkdir(0o700)
    (foreign / "slot-0").write_bytes(b"not ours")
    os.chown(foreign, 65534, 65534)
    with Store.open(identity, shared_memory=shared_memory) as store:
        assert store.path != foreign
    assert "owner 65534" in caplog.text
    with pytest.raises(ForeignOwner, match="65534"):
        StoreView(foreign)
    assert find_stores([shared_memory]) == []
    assert (foreign / "slot-0").read_bytes() == b"not ours"
    (foreign / "slot-0").unlink()
    foreign.rmdir()


@pytest.mark.shows("locks of `/dev/shm` and squatted names there hold no trainer up")
@needs_root
def test_a_crowd_of_squatted_names_is_one_line(
    identity: StoreIdentity, shared_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    squatted = [shared_memory / f"{identity.prefix}{number:08x}" for number in range(2000)]
    squatted += [shared_memory / f"{stores_prefix()}lock-{number}" for number in range(20)]
    for path in squatted:
        path.mkdir(0o700)
        os.chown(path, 65534, 65534)
    Store.open(identity, shared_memory=shared_memory).close()
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert "owner 65534" in lines[0]
    assert "1999 more" in lines[0]
    for path in squatted:
        path.rmdir()


@pytest.mark.shows("locks of `/dev/shm` and squatted names there hold no trainer up")
def test_who_locks_shared_memory_holds_no_trainer_up(
    identity: StoreIdentity, shared_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Any user can lock a directory that all can open."""
    descriptor = os.open(shared_memory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        Store.open(identity, shared_memory=shared_memory).close()
    finally:
        os.close(descriptor)
    assert "locked by another process" not in caplog.text
    assert "has held the lock" not in caplog.text


def test_a_directory_that_is_open_to_others_is_not_used(identity: StoreIdentity, shared_memory: Path) -> None:
    loose = shared_memory / f"{identity.prefix}00000000"
    loose.mkdir()
    loose.chmod(0o777)
    with Store.open(identity, shared_memory=shared_memory) as store:
        assert store.path != loose
    loose.rmdir()


@pytest.mark.shows("no lock is freed by a process that does not own it")
@pytest.mark.shows("nothing is left after a normal end; after SIGKILL only what belongs to nobody alive is removed")
def test_a_forked_child_holds_nothing_and_ends_nothing(identity: StoreIdentity, shared_memory: Path) -> None:
    with Store.open(identity, shared_memory=shared_memory) as store:
        save(store, 1, SIZE)
        ready, done = os.pipe(), os.pipe()
        child = os.fork()
        if not child:
            code = 1
            os.close(done[1])  # so that it ends with its parent
            with contextlib.suppress(BaseException):
                try:
                    store.begin(SIZE, 10)
                except OptionsError:
                    store.close()
                    os.write(ready[1], b"x")
                    os.read(done[0], 1)
                    code = 0
            os._exit(code)
        assert os.read(ready[0], 1) == b"x"
        # The child has given up its copies of the locks, and not the trainer's locks.
        with pytest.raises(StoreInUse):
            Store.open(identity, shared_memory=shared_memory)
        save(store, 2, SIZE)
        store.close(keep=True)
        # The child lives, and the trainer that comes next is not kept out by it.
        with Store.open(identity, shared_memory=shared_memory) as second:
            assert steps(second) == [2, 1]
        os.write(done[1], b"x")
        assert os.waitpid(child, 0)[1] == 0
        for descriptor in (*ready, *done):
            os.close(descriptor)


@pytest.mark.shows("nothing is left after a normal end; after SIGKILL only what belongs to nobody alive is removed")
def test_an_interrupted_trainer_leaves_nothing(identity: StoreIdentity, shared_memory: Path) -> None:
    with running(identity.directory, shared_memory, "--waits") as process:
        assert process.stdout
        while not process.stdout.readline().startswith("saved 5"):
            pass
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert os.listdir(shared_memory) == []


@pytest.mark.shows("nothing is left after a normal end; after SIGKILL only what belongs to nobody alive is removed")
def test_pythons_resource_tracker_is_not_used() -> None:
    heavy = ("multiprocessing", "numpy", "torch")
    words = "import sys, hetstream.checkpoint.memory.store, hetstream.checkpoint.memory.view; "
    words += f"print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- full memory ----------------------------------------------------------------------------------------------------


@pytest.mark.shows("`/dev/shm` is full: refused before a byte is written, and training goes on")
@pytest.mark.shows("shared memory that is too small is refused before a byte is written, and a file takes its place")
@needs_root
def test_full_shared_memory_is_refused_before_anything_is_written(identity: StoreIdentity, tiny: Path) -> None:
    with Store.open(identity, shared_memory=tiny) as store:
        save(store, 1, SIZE)
        before = {path.name: path.read_bytes() for path in store.path.glob("slot-*")}
        for _ in range(3):
            with pytest.raises(SharedMemoryFull, match=r"tiny/hetstream.* 1\d{6} bytes: \d+ bytes are free"):
                save(store, 2, 1_000_000)
        assert {path.name: path.read_bytes() for path in store.path.glob("*slot-*")} == before
        save(store, 3, SIZE)
        assert steps(store) == [3, 1]


@pytest.mark.shows("shared memory that is too small is refused before a byte is written, and a file takes its place")
@needs_root
def test_with_room_for_two_slots_two_are_used(
    identity: StoreIdentity, tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Store.open(identity, shared_memory=tiny) as store:
        store.prepare(SIZE, 100)
        for step in range(1, 8):
            save(store, step, SIZE)
            assert steps(store)[0] == step
        assert steps(store) == [7, 6]
    assert "a slot less" in caplog.text


@pytest.mark.shows("shared memory that is too small is refused before a byte is written, and a file takes its place")
@needs_root
def test_preparing_says_that_memory_is_too_small(identity: StoreIdentity, tiny: Path) -> None:
    with Store.open(identity, shared_memory=tiny) as store, pytest.raises(SharedMemoryFull):
        store.prepare(2 * SIZE, 100)


def num_links(store: Store) -> int:
    return sum(path.is_symlink() for path in store.path.glob("slot-*"))


@pytest.mark.shows("shared memory that is too small is refused before a byte is written, and a file takes its place")
@needs_root
def test_what_does_not_fit_into_memory_is_a_file_elsewhere(
    identity: StoreIdentity, tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fallback = tmp_path / "fallback"
    fallback.mkdir()
    with Store.open(identity, shared_memory=tiny, fallback=fallback) as store:
        for step in range(1, 6):
            save(store, step, SIZE)
        assert steps(store) == [5, 4, 3]
        assert num_links(store) == 1
        assert "leave shared memory" in caplog.text
        for step in range(6, 12):
            save(store, step, 10 * SIZE)
        assert steps(store) == [11, 10, 9]
        assert num_links(store) == 3
        with StoreView(store.path) as view, newest_unpersisted(view) as segment:
            assert segment is not None
            assert check(segment) == 11
        store.close(keep=True)
    with Store.open(identity, shared_memory=tiny, fallback=fallback) as store:
        assert steps(store) == [11, 10, 9]
        for step in range(12, 15):
            save(store, step, SIZE // 10)
        assert steps(store) == [14, 13, 12]
    assert os.listdir(fallback) == []


@pytest.mark.shows("shared memory that is too small is refused before a byte is written, and a file takes its place")
@pytest.mark.parametrize("place", ["missing", "file"])
def test_without_shared_memory_the_store_is_elsewhere(
    identity: StoreIdentity, tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    fallback = tmp_path / "fallback"
    fallback.mkdir()
    for _ in range(2):
        with Store.open(identity, shared_memory=tmp_path / place, fallback=fallback) as store:
            assert store.path.parent == fallback
            save(store, 1, SIZE)
            assert steps(store) == [1]
    assert os.listdir(fallback) == []
    assert "leave shared memory" in caplog.text
    with pytest.raises(OSError, match=place):
        Store.open(identity, shared_memory=tmp_path / place)


@pytest.mark.shows("shared memory that is too small is refused before a byte is written, and a file takes its place")
def test_more_than_the_hosts_memory_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetstream.checkpoint.memory.segment.available_bytes", lambda: 1000)
    with pytest.raises(SharedMemoryFull, match="only 1000 bytes of memory"):
        save(store, 1, SIZE)


# --- the checkpoint writer's side
# -----------------------------------------------------------------------------------------------


def test_a_writer_gets_each_newest_generation_once(store: Store) -> None:
    with StoreView(store.path) as view:
        with newest_unpersisted(view) as segment:
            assert segment is None
        for step in (1, 2):
            save(store, step, SIZE)
        with newest_unpersisted(view) as segment:
            assert segment is not None
            assert check(segment) == 2
            view.report(WriterStatus(pid=1, persisted=segment.header.generation, persist_s=0.5))
        with newest_unpersisted(view) as segment:
            assert segment is None
        status = store.status()
        assert status is not None
        assert (status.persisted, status.persist_s) == (Generation(1, 2), 0.5)
    # The checkpoint writer after this one knows it too.
    with StoreView(store.path) as view:
        assert view.persisted == Generation(1, 2)


def test_a_writer_is_woken_by_a_generation_and_by_the_end(store: Store) -> None:
    with StoreView(store.path) as view:
        view.become_writer()
        assert not select.select([view], [], [], 0)[0]
        save(store, 1, SIZE)
        assert select.select([view], [], [], 60)[0]
        view.drain()
        assert not select.select([view], [], [], 0)[0]
        store.close()
        assert select.select([view], [], [], 60)[0]
        assert view.closed
        assert view.remove()


def test_a_writer_that_never_looks_does_not_hold_up_saves(store: Store) -> None:
    for _ in range(1 << 17):
        store.wake()
    save(store, 1, 8)


def test_a_writer_asks_the_trainer_to_stop_and_its_successor_is_not_asked(
    identity: StoreIdentity, shared_memory: Path
) -> None:
    store = Store.open(identity, shared_memory=shared_memory)
    assert store.stop_reason() == ""
    with StoreView(store.path) as view:
        view.ask_to_stop("job 77 ends at 12:00")
    assert store.stop_reason() == "job 77 ends at 12:00"
    store.close(keep=True)
    with Store.open(identity, shared_memory=shared_memory) as successor:
        assert successor.stop_reason() == ""


@pytest.mark.shows("two checkpoint writers never write at once")
def test_a_store_has_one_writer(store: Store) -> None:
    with StoreView(store.path) as first, StoreView(store.path) as second:
        first.become_writer()
        first.become_writer()
        assert store.is_writer_alive()
        with pytest.raises(StoreInUse, match="writer"):
            second.become_writer()
        first.close()
        second.become_writer()


@pytest.mark.shows("nothing is left after a normal end; after SIGKILL only what belongs to nobody alive is removed")
def test_only_what_nobody_uses_is_removed(identity: StoreIdentity, shared_memory: Path) -> None:
    with Store.open(identity, shared_memory=shared_memory) as store:
        save(store, 1, SIZE)
        with StoreView(store.path) as writer, StoreView(store.path) as other:
            assert not other.remove()
            writer.become_writer()
            store.close(keep=True)
            assert not other.remove()
            assert steps(store) == [1] or store.path.exists()
            writer.close()
            assert other.remove()
            assert not other.remove()
        with pytest.raises(CheckpointError, match="no store"):
            StoreView(store.path)


def test_a_store_that_goes_while_stores_are_listed_is_none(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = StoreFiles(store.path.with_name(store.path.name[:-8] + "00000000"))
    monkeypatch.setattr("hetstream.checkpoint.memory.view.list_stores", lambda *_: [gone, StoreFiles(store.path)])
    assert [one.path for one in find_stores()] == [store.path]


@pytest.mark.shows("the payload may change its size from save to save, also while an older one is read")
def test_readers_never_see_a_mixture(store: Store, wait_until: Callable[..., None]) -> None:
    """A reader beside a trainer whose payload changes size all the time."""
    seen: list[int] = []
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            with StoreView(store.path) as view:
                while not stop.is_set():
                    with newest_unpersisted(view) as segment:
                        if segment:
                            seen.append(check(segment))
        except BaseException as error:  # noqa: BLE001, shown by the test
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for step in range(1, 500):
        save(store, step, size_at(step, SIZE, grows=True))
    wait_until(lambda: failures or 499 in seen, 60)
    stop.set()
    thread.join()
    assert failures == []
    assert seen == sorted(seen)


def test_logs_name_the_store(identity: StoreIdentity, shared_memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), Store.open(identity, shared_memory=shared_memory) as store:
        assert f"checkpoint store job=77+0 rank=0 directory={identity.directory}" in caplog.text
        assert str(store.path) in caplog.text
        assert payload_of(1, 16) == b"\x01\0\0\0\0\0\0\0" * 2
