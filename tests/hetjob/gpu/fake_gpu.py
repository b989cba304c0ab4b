"""A GPU under a virtual clock: real agents and the real coordinator's decisions, in no time and always the same.

The GPU does one kernel at a time, of the processes in turn, and whoever launches goes on at once, as with CUDA. Of its
memory it knows what PyTorch's caching allocator does (`emulation.py`). What it shows is policy; how the kernels of two
processes slow each other down on a real GPU it cannot know.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import threading
from collections.abc import Callable

from hetstream.hetjob.gpu.device import MemoryUse
from hetstream.hetjob.gpu.emulation import PYTORCH, Allocator, AllocatorRules, Block

# Kernels of a process that may wait for the GPU: what runs on when it is to pause.
_IN_FLIGHT = 2


class VirtualClock:
    """Time that goes by when everybody waits. One process runs at a time, so a run is the same each time."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000
        self._waiting: list[tuple[int, int, threading.Semaphore]] = []
        self._parked: dict[object, threading.Semaphore] = {}
        self._count = itertools.count()
        self._end_ns = 0
        self._over = threading.Semaphore(0)  # nobody is left
        self._is_over = False

    def wait_until(self, time_ns: int) -> None:
        """Called by a process: come back when it is that time.

        Raises:
            SystemExit: the run is over.
        """
        turn = threading.Semaphore(0)
        heapq.heappush(self._waiting, (max(time_ns, self.now_ns), next(self._count), turn))
        self._pass_on()
        turn.acquire()
        if self._is_over:
            raise SystemExit

    def park(self, key: object) -> None:
        """Called by a process: come back when somebody wakes this key.

        Raises:
            SystemExit: the run is over.
        """
        turn = self._parked[key] = threading.Semaphore(0)
        self._pass_on()
        turn.acquire()
        if self._is_over:
            raise SystemExit

    def wake(self, key: object) -> None:
        """Have the process that is parked there come back now; without one, nothing."""
        turn = self._parked.pop(key, None)
        if turn is not None:
            heapq.heappush(self._waiting, (self.now_ns, next(self._count), turn))

    def run(self, processes: list[Callable[[], None]], seconds: float) -> None:
        """Run processes side by side until it is so much later; what they raise is raised here."""
        errors: list[Exception] = []

        def follow(process: Callable[[], None], turn: threading.Semaphore) -> None:
            turn.acquire()
            try:
                if not self._is_over:
                    process()
            except SystemExit:
                pass
            except Exception as error:  # noqa: BLE001 - at the thread's boundary: it is raised in `run`
                errors.append(error)
                self._is_over = True
            self._pass_on()

        self._end_ns = self.now_ns + int(seconds * 1e9)
        threads = []
        for process in processes:
            turn = threading.Semaphore(0)
            heapq.heappush(self._waiting, (self.now_ns, next(self._count), turn))
            threads.append(threading.Thread(target=follow, args=(process, turn)))
        for thread in threads:
            thread.start()
        self._pass_on()
        self._over.acquire()
        for thread in threads:
            thread.join()
        self._is_over = False
        if errors:
            raise errors[0]

    def _pass_on(self) -> None:
        """Let the process run whose time comes first. Once the run is over, each ends when it is its turn."""
        if not self._waiting and self._parked:  # they wait for somebody who is gone
            self._is_over = True
            self.wake(next(iter(self._parked)))
        if not self._waiting:
            self._over.release()
            return
        time_ns, _, turn = heapq.heappop(self._waiting)
        if time_ns >= self._end_ns:
            self._is_over = True
        if not self._is_over:
            self.now_ns = time_ns
        turn.release()


class FakeGpuChip:
    """What the processes of one GPU share.

    Args:
        clock: of all of them; `serve` is one of its processes.
        capacity_bytes: of its memory.
        rules: by which allocators take it.
    """

    def __init__(self, clock: VirtualClock, capacity_bytes: int, rules: AllocatorRules = PYTORCH) -> None:
        self.clock, self.capacity_bytes, self.rules = clock, capacity_bytes, rules
        self.free_bytes = capacity_bytes
        self.queues: dict[object, collections.deque[int]] = {}

    def serve(self) -> None:
        """Do the kernels of all processes, one of each in turn."""
        while True:
            waiting = [(key, queue) for key, queue in self.queues.items() if queue]
            if not waiting:
                self.clock.park(self)
            for key, queue in waiting:
                self.clock.wait_until(self.clock.now_ns + queue[0])
                queue.popleft()
                self.clock.wake(key)

    def take(self, num_bytes: int) -> bool:
        """As `Allocator` asks."""
        if num_bytes > self.free_bytes:
            return False
        self.free_bytes -= num_bytes
        return True

    def give(self, num_bytes: int) -> None:
        """As `Allocator` gives."""
        self.free_bytes += num_bytes


class FakeGpu:
    """One process's view of it; a `Device`.

    Args:
        chip: the GPU.
        name: of it.
        host_capacity_bytes: memory of the host that may stand in.
    """

    def __init__(self, chip: FakeGpuChip, name: str, host_capacity_bytes: int = 0) -> None:
        self.name = name
        self._chip, self._clock = chip, chip.clock
        self._allocator = Allocator(chip.take, chip.give, chip.rules, host_capacity_bytes)
        self._queue = chip.queues[self] = collections.deque()
        self._busy_ns = 0

    def kernel(self, duration_ns: int) -> None:
        """Launch one."""
        self._queue.append(duration_ns)
        self._busy_ns += duration_ns
        self._clock.wake(self._chip)

    def finish(self) -> None:
        """Wait until all is done."""
        while self._queue:
            self._clock.park(self)

    def allocate(self, num_bytes: int) -> Block:
        """As `Allocator.allocate`."""
        return self._allocator.allocate(num_bytes)

    def free(self, block: Block) -> None:
        """As `Allocator.free`."""
        self._allocator.free(block)

    def memory(self) -> MemoryUse:
        """As `Device.memory`."""
        return self._allocator.memory()

    def begin_mini_batch(self) -> None:
        """As `Device.begin_mini_batch`."""
        self._allocator.begin_mini_batch()

    def set_limit(self, limit_bytes: int) -> None:
        """As `Device.set_limit`."""
        self._allocator.set_limit(limit_bytes)

    def is_idle(self) -> bool:
        """As `Device.is_idle`."""
        return not self._queue

    def launched(self) -> int:
        """As `Device.launched`."""
        while len(self._queue) > _IN_FLIGHT:
            self._clock.park(self)
        busy_ns, self._busy_ns = self._busy_ns, 0
        return busy_ns
