"""Hides what another system's Python does not have, then makes batches as a user's script would there.

An emulation: this Python still runs on Linux. The lists are of Python's documentation ("Availability") and of the
branches for `sys.platform` in typeshed.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from importlib.abc import MetaPathFinder
from typing import Any

import numpy as np
import torch

NOT_ON_MACOS = {
    os: """memfd_create sched_getaffinity sched_setaffinity sendfile splice eventfd copy_file_range posix_fallocate
        posix_fadvise waitid pidfd_open setns unshare prlimit O_DIRECT O_PATH O_TMPFILE getrandom sched_yield""",
    signal: "sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT SIGPOLL",
    socket: "SO_PEERCRED SO_PASSCRED SCM_CREDENTIALS TCP_USER_TIMEOUT TCP_KEEPIDLE AF_NETLINK AF_VSOCK TCP_QUICKACK",
    select: "epoll",
    time: "CLOCK_BOOTTIME CLOCK_TAI",
}
NOT_ON_WINDOWS = {
    os: """fork forkpty register_at_fork getuid geteuid getgid getegid getgroups setuid setsid setpgid getpgid killpg
        uname mkfifo chown fchown fchmod lchown pread pwrite preadv pwritev readv writev statvfs fstatvfs waitid wait4
        WNOHANG WIFSIGNALED WTERMSIG WEXITSTATUS WIFEXITED O_CLOEXEC O_NOFOLLOW O_DIRECTORY O_NONBLOCK O_NOCTTY O_SYNC
        F_LOCK lockf sysconf sysconf_names getpriority setpriority getloadavg nice pipe2 confstr sync getsid ctermid
        posix_spawn EX_OK EX_USAGE RTLD_NOW RTLD_GLOBAL openpty minor major makedev mknod P_PID P_ALL WEXITED""",
    signal: """SIGKILL SIGCHLD SIGHUP SIGQUIT SIGSTOP SIGCONT SIGTSTP SIGUSR1 SIGUSR2 SIGALRM SIGPIPE SIGWINCH SIGURG
        SIGXCPU SIGXFSZ SIGPROF SIGVTALRM SIGTTIN SIGTTOU SIGSYS SIGTRAP SIGBUS SIGIO pthread_sigmask pthread_kill
        sigwait sigpending setitimer getitimer alarm pause siginterrupt SIG_BLOCK SIG_UNBLOCK SIG_SETMASK""",
    socket: "AF_UNIX SCM_RIGHTS CMSG_SPACE CMSG_LEN send_fds recv_fds MSG_DONTWAIT MSG_NOSIGNAL sethostname",
    select: "poll",
    time: "clock_settime tzset pthread_getcpuclockid",
}
MODULES = {"macos": set(), "windows": {"fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "syslog"}}


class Hidden(MetaPathFinder):
    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname in self.names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def hide(system: str) -> None:
    """Take away what a system lacks."""
    for name in MODULES[system]:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Hidden(MODULES[system]))
    for lacking in (NOT_ON_MACOS, NOT_ON_WINDOWS) if system == "windows" else (NOT_ON_MACOS,):
        for module, names in lacking.items():
            for name in names.split():
                if hasattr(module, name):
                    delattr(module, name)


class Squares(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return np.float32(index * index)


if __name__ == "__main__":
    hide(sys.argv[1])
    from hetstream import DataLoader

    loader = DataLoader(Squares(), batch_size=4, shuffle=True, seed=7)
    given = torch.cat([*loader])
    print(sorted(given.tolist()) == [index * index for index in range(10)], len(loader))
    loader.close()
