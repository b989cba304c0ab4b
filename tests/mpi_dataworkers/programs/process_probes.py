"""Asks a process that makes samples what it is: in torch's worker process and in a data worker.

Used by `test_like_torch_process.py`: `python process_probes.py FILE plain|own|hook [PROBE ...]` writes what each gave.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import locale
import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

# Of `sys.flags`: what other probes ask for, and no flags.
NOT_ASKED = ("count", "index", "hash_randomization", "int_max_str_digits")
PROBES: dict[str, Callable[[], Any]] = {}


def probe(ask: Callable[[], Any]) -> Callable[[], Any]:
    PROBES[ask.__name__] = ask
    return ask


@probe
def daemon() -> Any:
    return multiprocessing.current_process().daemon


@probe
def kind_and_name() -> Any:
    process = multiprocessing.current_process()
    return type(process).__name__, process.name.partition("-")[0]


@probe
def parent_process() -> Any:
    parent = multiprocessing.parent_process()
    return parent is not None and (parent.name, parent.is_alive(), parent.pid == os.getppid())


@probe
def authkey() -> Any:
    return len(multiprocessing.current_process().authkey)


@probe
def identity() -> Any:
    return len(multiprocessing.current_process()._identity)


@probe
def child() -> Any:
    child = multiprocessing.Process(target=int)
    child.start()
    child.join()
    return child.exitcode


@probe
def start_method() -> Any:
    return multiprocessing.get_start_method()


@probe
def sharing_strategy() -> Any:
    return torch.multiprocessing.get_sharing_strategy()


@probe
def handler_of_interrupt() -> Any:
    return str(signal.getsignal(signal.SIGINT)).partition(" at ")[0]


@probe
def handler_of_end() -> Any:
    return str(signal.getsignal(signal.SIGTERM)).partition(" at ")[0]


@probe
def ignored_signal() -> Any:
    return signal.getsignal(signal.SIGUSR1)


@probe
def other_handlers() -> Any:
    return [signal.getsignal(number) for number in (signal.SIGPIPE, signal.SIGHUP, signal.SIGSEGV)]


@probe
def handler_of_children() -> Any:
    return callable(signal.getsignal(signal.SIGCHLD))


@probe
def blocked_signals() -> Any:
    return sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))


@probe
def arguments() -> Any:
    return len(sys.argv) > 2, os.path.basename(sys.argv[0])


@probe
def main_module() -> Any:
    return os.path.basename(getattr(sys.modules["__main__"], "__file__", ""))


@probe
def mp_main() -> Any:
    return "__mp_main__" in sys.modules


@probe
def module_of_class() -> Any:
    return Probes.__module__, Probes.__qualname__


@probe
def main_thread() -> Any:
    return threading.current_thread() is threading.main_thread(), threading.main_thread().name


@probe
def tracebacks_of_faults() -> Any:
    return faulthandler.is_enabled()


@probe
def num_threads() -> Any:
    return torch.get_num_threads()


@probe
def num_interop_threads() -> Any:
    return torch.get_num_interop_threads()


@probe
def umask() -> Any:
    umask = os.umask(0)
    os.umask(umask)
    return umask


@probe
def working_dir() -> Any:
    return os.getcwd()


@probe
def environment() -> Any:
    return os.environ.get("MINE"), os.environ.get("HOME")


@probe
def hash_seed() -> Any:
    return os.environ.get("PYTHONHASHSEED")


@probe
def standard_input() -> Any:
    return sys.stdin.read(3), os.readlink("/proc/self/fd/0")


@probe
def standard_error() -> Any:
    return sys.stderr.encoding, sys.stderr.errors


@probe
def standard_output() -> Any:
    return sys.stdout.encoding


@probe
def errors_of_output() -> Any:
    return sys.stdout.errors


@probe
def locale_of_process() -> Any:
    return locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False)


@probe
def collection_of_garbage() -> Any:
    return gc.isenabled(), gc.get_threshold()


@probe
def flags() -> Any:
    return [getattr(sys.flags, name) for name in dir(sys.flags) if name[0] != "_" and name not in NOT_ASKED]


@probe
def warn_options() -> Any:
    return sys.warnoptions


@probe
def depth_of_recursion() -> Any:
    return sys.getrecursionlimit()


@probe
def digits_of_numbers() -> Any:
    return getattr(sys, "get_int_max_str_digits", int)()


@probe
def switching_of_threads() -> Any:
    return sys.getswitchinterval()


@probe
def limits() -> Any:
    return [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT")]


@probe
def cpus() -> Any:
    return sorted(os.sched_getaffinity(0))


@probe
def niceness() -> Any:
    return os.nice(0)


@probe
def python() -> Any:
    return os.path.realpath(sys.executable), sys.prefix


@probe
def first_of_path() -> Any:
    return sys.path[0]


@probe
def hooks() -> Any:
    return sys.excepthook is sys.__excepthook__, threading.excepthook is threading.__excepthook__


@probe
def gradients() -> Any:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


@probe
def tracing() -> Any:
    return sys.gettrace() is None, sys.getprofile() is None


@probe
def user() -> Any:
    return os.getuid(), os.getgid(), sorted(os.getgroups())


@probe
def memory_killer() -> Any:
    with open("/proc/self/oom_score_adj") as file:
        return file.read()


@probe
def name_for_kernel() -> Any:
    with open("/proc/self/comm") as file:
        return file.read()


@probe
def worker_info() -> Any:
    info = torch.utils.data.get_worker_info()
    return info is not None and (info.num_workers, type(info.dataset).__name__)


class Probes(Dataset[tuple[str, str]]):
    """Each sample is what a probe gives."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[str, str]:
        name = self.names[index]
        try:
            return name, repr(PROBES[name]())
        except Exception as error:  # noqa: BLE001, which is what it gives
            return name, repr(error)


def main() -> None:
    """Set what a program may set, and ask."""
    gc.set_threshold(500, 5, 5)
    sys.setrecursionlimit(1234)
    sys.setswitchinterval(0.01)
    os.umask(0o027)
    os.environ["MINE"] = "set by the program"
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(5000)
    faulthandler.enable()
    path, how, *names = sys.argv[1:]
    loader: Any = DataLoader
    if how == "own":
        from hetstream import DataLoader as loader
    given = dict(loader(Probes(names or list(PROBES)), batch_size=None, num_workers=2))
    with open(path, "w") as file:
        json.dump(given, file)


if __name__ == "__main__":
    main()
