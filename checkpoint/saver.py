"""The saver: the process that brings a trainer's generations from shared memory to disk, and outlives the trainer.

    python -m checkpoint.saver --store /dev/shm/hetstream-ckpt-... --directory DIR     of one trainer, which starts it
    hetstream ckpt saver --job                                                          of all trainers of a job here

It decides by `turns.py` what to write, writes and commits by `commit.py`, and tells the trainer in the store's
`status.json`. With replicas it also sends them to another host's saver, and keeps others' (`replica/`). It never
imports torch, never holds a trainer up, and never changes a generation. When the trainer is gone it writes the newest
generation and ends; the memory stays for a restart, unless the trainer closed its store.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from checkpoint import commit
from checkpoint.config import environment_of_saver
from checkpoint.directory import CheckpointDirectory
from checkpoint.errors import CheckpointError, DamagedCheckpoint, DamagedSegment, SaverError, StoreInUse
from checkpoint.faults import reach
from checkpoint.formats.part import plan_part
from checkpoint.formats.plan import FilePlan
from checkpoint.generation import Generation
from checkpoint.layout import from_json
from checkpoint.manifest import Part
from checkpoint.replica.service import ReplicaService
from checkpoint.segment import Segment, split_metadata
from checkpoint.store_files import SaverStatus, SlotContent, list_stores, stores_prefix
from checkpoint.structure import Record
from checkpoint.turns import next_turn
from checkpoint.view import StoreView

_log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
# The least weight there is: a loop on one of two cores loses 1 to 3 %, one on both 9 to 18 % (28 % at niceness 10).
_NICENESS = 19
_AUTOGROUP = Path("/proc/self/autogroup")
# Sent to all processes of a step (sbatch --signal, scancel --signal), and meant for trainers.
_NOT_MEANT = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# How often to see whether trainers live, and whether other ranks have written their parts.
_IDLE_S = 0.5
_WAITING_S, _WAITING_LIMIT_S = 0.1, 2.0
# After a failure, doubling up to the limit.
_RETRY_S, _RETRY_LIMIT_S = 5.0, 60.0
_REPORT_S = 5.0


@dataclass(frozen=True)
class Options:
    """How a saver behaves.

    Attributes:
        linger_s: how long to wait at the end for other ranks' parts while nobody writes one.
        stays: serve stores of dead trainers on, for the next ones; it is a job's saver and ends by SIGTERM.
    """

    linger_s: float = 20.0
    stays: bool = False


class StoreSaver:
    """The saver of one store.

    Args:
        view: the store; this is its only saver.
        directory: of the checkpoints.
        is_ending: whether this process is about to end.

    Attributes:
        is_waiting: something in memory is not committed: look again soon.
        since_s: when it last got on, or a living trainer could still help.
    """

    def __init__(self, view: StoreView, directory: Path, is_ending: Callable[[], bool]) -> None:
        self.view = view
        self.directory = directory
        self._is_ending = is_ending
        self.rank = view.holder.rank
        self.is_waiting = False
        self.since_s = time.monotonic()
        self._status = SaverStatus(pid=os.getpid(), persisted=view.persisted)
        self._serial = 0
        self._seen_newest: Generation | None = None
        self._mine: set[Generation] = set()
        self._damaged: set[Generation] = set()
        self._unreadable: set[SlotContent] = set()
        self._retry_s = 0.0
        self._not_before_s = 0.0
        self._reporting = threading.Lock()
        self._replicas: ReplicaService | None = None
        self._no_replicas_before_s = 0.0
        self._report()

    def __str__(self) -> str:
        return f"rank={self.rank} directory={self.directory}"

    def advance(self, *, last_chance: bool) -> bool:
        """Do the next thing there is to do, if any.

        Args:
            last_chance: no newer generation will come, or there is no time to wait for it.

        Returns:
            Whether something was done; then there may be more.
        """
        found = [content for content in self.view.generations() if content not in self._unreadable]
        held = {content.header.generation: content for content in reversed(found)}
        self.is_waiting = bool(held)
        if not held or time.monotonic() < self._not_before_s:
            return False
        try:
            newest = self._commit_written(held)
            written = set(commit.written_by(self.directory, self.rank)) - self._damaged
            announced = set(commit.announced(self.directory)) - self._damaged
            turn = next_turn(held, written, announced, newest, last_chance=last_chance)
            self.is_waiting = newest is None or max(held) > newest
            if turn.generation is None:
                return False
            reach("saver.chosen")
            _log.debug("%s turn=%s: %s", self, turn.generation, turn.reason)
            try:
                with held[turn.generation].open() as segment:
                    self._persist(segment)
            except DamagedSegment as error:
                return self._pass_over(held[turn.generation], error)
            reach("saver.written")
            self._commit_written(held)
        except (OSError, CheckpointError) as error:
            self._fail(error)
            return False
        self._retry_s = 0.0
        self.since_s = time.monotonic()
        return True

    def serve_peers(self) -> None:
        """Begin, go on or end to send and to keep replicas, as the trainer wants. It never waits for a peer."""
        order = self.view.files.read_replica_order()
        if self._replicas and self._replicas.order == order:
            self._replicas.wake()
            return
        self.end_replicas()
        if order is None or time.monotonic() < self._no_replicas_before_s:
            return
        try:
            self._replicas = ReplicaService(self.view.files, self.directory, order, self._report_replica)
        except (OSError, CheckpointError) as error:
            self._no_replicas_before_s = time.monotonic() + _RETRY_S
            _log.warning("%s: no replicas, next try in %g s: %s", self, _RETRY_S, error)
            self._report(replica_error=str(error))

    def end_replicas(self) -> None:
        """End all transfers: the store is about to go, or to be left."""
        service, self._replicas = self._replicas, None
        if service:
            service.close()

    def _report_replica(self, replicated: Generation | None, error: str) -> None:
        if replicated:
            num_replicated = self._status.num_replicated + 1
            self._report(replicated=replicated, num_replicated=num_replicated, replica_error="")
        else:
            self._report(replica_error=error)

    def hurry(self) -> None:
        """Try at once what failed before, and count the time from now."""
        self._not_before_s = self._retry_s = 0.0
        self.since_s = time.monotonic()

    def unsaved(self) -> Generation | None:
        """The newest generation in memory, if it is in no committed checkpoint and in none that is newer."""
        newest = next((content.header.generation for content in self.view.generations()), None)
        with contextlib.suppress(OSError):
            committed = next(iter(commit.committed(self.directory)), None)
            if newest and committed and committed >= newest:
                return None
        return newest

    def is_hopeless(self, linger_s: float) -> bool:
        """Whether waiting for the other ranks is of no more use."""
        if time.monotonic() < self.since_s + linger_s:
            return False
        try:
            if any(commit.is_being_written(self.directory, one) for one in commit.announced(self.directory)):
                self.since_s = time.monotonic()
                return False
        except (OSError, CheckpointError) as error:
            _log.warning("%s: %s", self, error)
        return True

    def tell_missing(self) -> None:
        """Log what did not get to disk."""
        unsaved = self.unsaved()
        if unsaved is None:
            return
        try:
            written = commit.written_by(self.directory, self.rank)
            newest = next(iter(commit.committed(self.directory)), None)
        except OSError as error:
            _log.error("%s generation=%s is lost with this memory: %s", self, unsaved, error)
            return
        if unsaved in written:
            missing = commit.missing_ranks(self.directory, unsaved, written[unsaved])
            named = ", ".join(map(str, missing[:10])) + (f" and {len(missing) - 10} more" if missing[10:] else "")
            what = f"is not committed: the parts of rank(s) {named} of {written[unsaved]} are missing"
        else:
            what = f"did not get to disk: {self._status.error or 'there was no time'}"
        _log.error("%s generation=%s %s; the newest checkpoint is %s", self, unsaved, what, newest or "none")

    def _commit_written(self, held: Iterable[Generation]) -> Generation | None:
        """Commit what is complete; the newest checkpoint there is then."""
        before = next(iter(commit.committed(self.directory)), None)
        for generation, world_size in commit.written_by(self.directory, self.rank).items():
            if generation in self._damaged or (before and generation <= before):
                continue
            try:
                if not commit.commit(self.directory, generation, world_size):
                    reach("saver.committed")
                    break
            except DamagedCheckpoint as error:
                self._damaged.add(generation)
                _log.error("%s generation=%s cannot be committed, the next one will be: %s", self, generation, error)
        newest = next(iter(commit.committed(self.directory)), None)
        if newest and newest != self._seen_newest:
            self._seen_newest = newest
            if newest in self._mine or newest in held:
                self._report(persisted=newest)
                _log.info("%s generation=%s is committed", self, newest)
            self._mine = {generation for generation in self._mine if generation > newest}
            if self.rank == 0:
                self._clean_up()
        return newest

    def _pass_over(self, content: SlotContent, error: DamagedSegment) -> bool:
        """Whether a generation that could not be read is damaged, so that an older one has to do.

        If it is not, the trainer was faster, and there is a newer one.
        """
        is_spoilt = _is_spoilt(content)
        if is_spoilt:
            self._unreadable.add(content)
        _log.log(logging.WARNING if is_spoilt else logging.DEBUG, "%s: %s", self, error)
        return is_spoilt

    def _persist(self, segment: Segment) -> None:
        began_s = time.monotonic()
        part, plan = _plan_part(segment)
        self._report(persisting=part.generation)
        if self._is_ending():
            _log.info("%s generation=%s: the last %d bytes go to disk", self, part.generation, plan.num_bytes)
        commit.write_part(self.directory, part, plan, segment.payload, self._progress(plan.num_bytes))
        serial = segment.header.serial
        self._mine.add(part.generation)
        persist_s = time.monotonic() - began_s
        skipped = max(0, serial - self._serial - 1) if self._serial else 0
        self._serial = serial
        self._report(
            persisting=None,
            num_persisted=self._status.num_persisted + 1,
            num_skipped=self._status.num_skipped + skipped,
            error="",
            persist_s=persist_s,
            persist_bytes=plan.num_bytes,
        )
        _log.info(
            "%s generation=%s written: %d bytes in %.2f s, %.2f GB/s",
            self,
            part.generation,
            plan.num_bytes,
            persist_s,
            plan.num_bytes / max(persist_s, 1e-9) / 1e9,
        )

    def _progress(self, num_bytes: int) -> Callable[[int], None]:
        """Says while the process is about to end how much is still missing: it may be killed at any moment."""
        said_s = time.monotonic()

        def note(written_bytes: int) -> None:
            nonlocal said_s
            if self._is_ending() and time.monotonic() > said_s + _REPORT_S:
                said_s = time.monotonic()
                _log.warning("%s: %d of %d bytes are not on disk yet", self, num_bytes - written_bytes, num_bytes)

        return note

    def _clean_up(self) -> None:
        directory = CheckpointDirectory(self.directory)
        try:
            commit.clean_up(self.directory)
            owner = directory.owner()
            if owner and owner.keep.keep_last is not None:
                directory.retain(owner.keep)
        except (OSError, CheckpointError) as error:
            _log.warning("%s: old checkpoints stay for now: %s", self, error)

    def _fail(self, error: Exception) -> None:
        self._retry_s = min(_RETRY_LIMIT_S, 2 * self._retry_s or _RETRY_S)
        self._not_before_s = time.monotonic() + self._retry_s
        self.is_waiting = True
        _log.error("%s: nothing was written, next try in %g s: %s", self, self._retry_s, error)
        self._report(persisting=None, num_failed=self._status.num_failed + 1, error=str(error))

    def _report(self, **changes: object) -> None:
        with self._reporting:  # replicas report in threads
            self._status = msgspec.structs.replace(self._status, **changes)
            with contextlib.suppress(OSError):  # the store's memory is full; the trainer learns of it by itself
                self.view.report(self._status)


def _plan_part(segment: Segment) -> tuple[Part, FilePlan]:
    """What a rank's file holds of a generation: of what is equal everywhere only rank 0's has anything."""
    header = segment.header
    layout_json, structure = split_metadata(segment.metadata)
    layout, record = from_json(layout_json), Record.read(structure)
    part = Part(header.generation, record.rank, record.world_size, header.layout_digest, record.metrics, record.format)
    keys = None if record.rank == 0 else record.own
    return part, plan_part(part.format, layout.entries, record, segment.payload, keys)


def _is_spoilt(content: SlotContent) -> bool:
    """Whether a generation that could not be read is there, unwritten to, and cannot be read."""
    with contextlib.suppress(DamagedSegment), content.lock():
        if SlotContent.of(content.path) != content:
            return False
        try:
            Segment.open(content.path).close()
        except DamagedSegment:
            return True
    return False


class Saver:
    """Serves stores until there is nothing more to do.

    Args:
        find: the directories of the stores that there are now.
        directory: of the checkpoints; None: each store says its own.
        options: how.
        stop_reason: why trainers are to save once more and to end; "" as long as they are not.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[Path]],
        directory: Path | None,
        options: Options,
        stop_reason: Callable[[], str] = str,
    ) -> None:
        self._find = find
        self._directory = directory
        self._options = options
        self._stores: dict[Path, StoreSaver] = {}
        self._stop_reason = stop_reason
        self._stopping = False
        self._is_warned = False
        self._patience_s = _WAITING_S

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve until all trainers are gone, or in a job's saver until SIGTERM; then what is newest goes to disk.

        Args:
            on_ready: called once, when the stores that are there are served.

        Raises:
            StoreInUse: the only store has a saver already.
        """
        handlers: dict[int, Callable[[], None]] = {signal.SIGTERM: self._stop, signal.SIGINT: self._stop}
        if self._options.stays:
            handlers[signal.SIGUSR1] = self._warn
        with _awake_by_signals(handlers) as signals:
            try:
                self._take_up()
                on_ready()
                reach("saver.ready")
                has_said = False
                while self._stores or self._options.stays:
                    if self._stopping and not has_said:
                        has_said = True
                        self._begin_to_end()
                    for store in list(self._stores.values()):
                        self._serve(store)
                    self._ask_to_stop()
                    if has_said and not any(map(self._is_needed, self._stores.values())):
                        break
                    self._wait(signals)
                    if self._options.stays and not self._stopping:
                        self._take_up()
            finally:
                for store in self._stores.values():
                    store.tell_missing()
                    store.end_replicas()
                    store.view.close()

    def _stop(self) -> None:
        # In a signal handler: nothing that could be under way just now, such as logging.
        self._stopping = True

    def _warn(self) -> None:
        # In a signal handler, too.
        self._is_warned = True

    def _ask_to_stop(self) -> None:
        """Ask trainers to save once more and to end, those too that have come since."""
        reason = self._stop_reason() or ("SIGUSR1 came" if self._is_warned else "")
        if not reason:
            return
        for store in self._stores.values():
            if store.view.trainer_alive() and not store.view.files.stop_reason():
                _log.info("%s: the trainer is asked to stop: %s", store, reason)
                with contextlib.suppress(OSError):  # the store's memory is full
                    store.view.ask_to_stop(reason)

    def _begin_to_end(self) -> None:
        _log.info("told to end: what is newest in the memory of %d store(s) goes to disk first", len(self._stores))
        for store in self._stores.values():
            store.hurry()

    def _take_up(self) -> None:
        """Become the saver of stores that have come."""
        for path in self._find():
            if path in self._stores:
                continue
            try:
                self._take(path)
            except (OSError, CheckpointError) as error:
                if not self._options.stays:
                    raise
                _log.debug("%s is not served: %s", path, error)

    def _take(self, path: Path) -> None:
        view = StoreView(path)
        try:
            view.become_saver()
            directory = self._directory or Path(view.holder.directory)
            if not directory.is_absolute():
                raise SaverError(f"{path} does not say what its checkpoint directory is: --directory")
            view.fileno()
            self._stores[path] = StoreSaver(view, directory, lambda: self._stopping)
        except BaseException:
            view.close()
            raise
        _log.info("%s: saver of %s", self._stores[path], path)

    def _serve(self, store: StoreSaver) -> None:
        """Write what there is to write; let go of the store if there is nothing more to come."""
        view = store.view
        view.drain()
        ended = view.closed or not view.trainer_alive()
        if not ended and not self._stopping:
            store.since_s = time.monotonic()
        store.serve_peers()
        while store.advance(last_chance=ended or self._stopping):
            pass
        if not ended or self._is_unfinished(store):
            return
        is_over = view.closed or (self._stopping and self._options.stays)
        if is_over and store.unsaved() is None:
            store.end_replicas()
            # Who only looks at its lock may be in the way for a moment: then again.
            if view.remove() or not view.path.exists():
                self._drop(store)
        elif not self._options.stays:
            self._drop(store)

    def _is_unfinished(self, store: StoreSaver) -> bool:
        """Whether there is still something to write, or to wait for."""
        return store.unsaved() is not None and not store.is_hopeless(self._options.linger_s)

    def _is_needed(self, store: StoreSaver) -> bool:
        """Whether a saver that was told to end has still something to do.

        Who ends a job's saver ends its trainers, and a trainer that is told to end saves once more; then its memory is
        freed, if all is on disk.
        """
        if self._is_unfinished(store):
            return True
        is_over = self._options.stays or store.view.closed
        return is_over and (store.view.trainer_alive() or store.unsaved() is None)

    def _drop(self, store: StoreSaver) -> None:
        """End as a store's saver, unless a new trainer has come meanwhile and relies on this one."""
        store.tell_missing()
        store.end_replicas()
        store.view.close()
        if store.view.path.exists() and not self._stopping and store.view.trainer_alive():
            with contextlib.suppress(StoreInUse, OSError):
                store.view.become_saver()
                return
        del self._stores[store.view.path]

    def _wait(self, signals: int) -> None:
        poll = select.poll()
        poll.register(signals, select.POLLIN)
        for store in self._stores.values():
            poll.register(store.view.fileno(), select.POLLIN)
        if not any(store.is_waiting for store in self._stores.values()):
            self._patience_s = _WAITING_S
            poll.poll(1000 * _IDLE_S)
        elif poll.poll(1000 * self._patience_s):
            self._patience_s = _WAITING_S
        else:
            # Every look lists a directory that many ranks share; the last to come commits for all of them.
            self._patience_s = min(_WAITING_LIMIT_S, 1.5 * self._patience_s)
        with contextlib.suppress(BlockingIOError):
            os.read(signals, 4096)


@contextlib.contextmanager
def _awake_by_signals(handlers: Mapping[int, Callable[[], None]]) -> Iterator[int]:
    """Call the handlers of signals; yields a descriptor that is readable then."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    former = {number: signal.signal(number, lambda number, _: handlers[number]()) for number in handlers}
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in former.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


def serve_job(
    job: str,
    on_ready: Callable[[], None] = lambda: None,
    roots: Sequence[Path] = (SHARED_MEMORY,),
    stop_reason: Callable[[], str] = str,
) -> None:
    """Serve all stores of a job on this host, until SIGTERM. For a job step of its own.

    At SIGTERM it ends when no trainer lives and what is newest is on disk; the end of a step gives `KillWait` for that.
    At SIGUSR1, and when `stop_reason` says so, trainers are asked to save once more and to end.

    Args:
        job: Slurm's id; the leader's in a heterogeneous job.
        on_ready: called once, when it serves.
        roots: where stores are.
        stop_reason: why trainers are to stop; "" as long as they are not. Asked again and again.
    """
    _be_modest(0)
    prefix = f"{stores_prefix()}{job}-"

    def find() -> list[Path]:
        files = [one for root in roots for one in list_stores(root, prefix)]
        return [one.path for one in files if not one.path.name.startswith(".")]

    Saver(find, None, Options(stays=True), stop_reason).run(on_ready)


def spawn_saver(store: Path, directory: Path) -> subprocess.Popen[bytes]:
    """Start the saver of a store, in a session of its own: neither Ctrl-C nor the trainer's death ends it.

    It leaves at once if the store has a saver. What went wrong it logs to this process's stderr.

    Args:
        store: the store's directory.
        directory: of the checkpoints.

    Raises:
        SaverError: it cannot be started.
    """
    argv = [sys.executable, "-m", "checkpoint.saver", f"--store={store}", f"--directory={directory}", "--quiet"]
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # Python looks for modules there first: the program's directory may hold a checkpoint.py or a select.py.
            cwd="/",
            env=environment_of_saver(),
            start_new_session=True,
        )
    except OSError as error:
        raise SaverError(f"the checkpoint saver cannot be started: {error}; argv={argv}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one store."""
    parser = argparse.ArgumentParser(prog="python -m checkpoint.saver", description="Bring generations to disk.")
    parser.add_argument("--store", type=Path, required=True, help="the store's directory")
    parser.add_argument("--directory", type=Path, required=True, help="of the checkpoints")
    parser.add_argument(
        "--linger", type=float, default=Options.linger_s, metavar="S", help="for other ranks, at the end"
    )
    parser.add_argument("--quiet", action="store_true", help="log only what went wrong")
    args = parser.parse_args(argv)
    level = logging.WARNING if args.quiet else logging.INFO
    logging.basicConfig(format="%(asctime)s hetstream saver: %(message)s", level=level)
    try:
        _be_modest(StoreView(args.store).holder.rank)
        Saver(lambda: [args.store], args.directory.absolute(), Options(args.linger)).run()
    except StoreInUse as error:
        _log.info("%s", error)
        return 0
    except (OSError, CheckpointError) as error:
        if not args.store.exists():
            return 0  # its trainer has ended meanwhile, with nothing left to write
        _log.error("%s: %s", type(error).__name__, error)
        return 1
    return 0


def _be_modest(number: int) -> None:
    """Give way to trainers: low priority, and one core, another for each rank. Stay when signals for them come."""
    for signum in _NOT_MEANT:
        signal.signal(signum, signal.SIG_IGN)
    os.nice(_NICENESS)
    # Linux may share cores among sessions before it does among their processes, and the saver has its own session.
    with contextlib.suppress(OSError):
        _AUTOGROUP.write_text(str(_NICENESS))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1 - number % len(cores)]})


if __name__ == "__main__":
    sys.exit(main())
