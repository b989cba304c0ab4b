"""The leak checks of conftest.py find what they promise to find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LEAKS = {
    "threads": "import threading; threading.Thread(target=threading.Event().wait, args=(20,), daemon=True).start()",
    "child processes": (
        "import atexit, subprocess\n    kept.append(subprocess.Popen(['sleep', '20'])); atexit.register(kept[0].kill)"
    ),
    "file descriptors": "import socket; kept.append(socket.socket())",
    "/dev/shm": (
        "from multiprocessing import shared_memory\n"
        "    memory = shared_memory.SharedMemory(create=True, size=64); kept.append(memory); memory.close()"
    ),
    "another share of the processor": "import pathlib; pathlib.Path('/proc/self/autogroup').write_text('7')",
}


@pytest.mark.parametrize("kind", LEAKS)
def test_leak_is_found_and_named(kind: str, tmp_path: Path) -> None:
    if kind == "another share of the processor" and not Path("/proc/self/autogroup").exists():
        pytest.skip("this kernel does not share the processor among sessions")
    test_file = tmp_path / "test_leaky.py"
    test_file.write_text(
        f"import tests.conftest\ntests.conftest.LEAK_GRACE_S = 0.1\nkept = []\n\ndef test_leaky():\n    {LEAKS[kind]}\n"
    )
    options = ["-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={tmp_path}"]
    argv = [sys.executable, "-m", "pytest", *options, str(test_file)]
    # In a session of its own, whose share goes with it.
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"the test left behind {kind}:" in done.stdout


def test_what_cuda_keeps_open_is_no_leak_of_a_test_that_needs_a_gpu(tmp_path: Path) -> None:
    """Its events and pipes; sockets are among them, so those are not found there."""
    for mark, code in (("@pytest.mark.gpu", 0), ("", 1)):
        test_file = tmp_path / "test_cuda.py"
        test_file.write_text(f"import os, pytest\n\n{mark}\ndef test_cuda():\n    os.eventfd(0); os.pipe()\n")
        options = ["-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={tmp_path}"]
        argv = [sys.executable, "-m", "pytest", *options, str(test_file)]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stdout + done.stderr
