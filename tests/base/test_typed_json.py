"""A type is looked at once, whatever threads ask."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from hetstream.base import typed_json


@dataclass
class Placed:
    here: Path
    there: Path | None


# Types that msgspec has not met, read by three threads at once, again and again.
PROGRAM = """
import sys, threading
import msgspec
from hetstream.base import typed_json

DEFINITION = '''
import msgspec
class Inner(msgspec.Struct):
    x: int = 0
class Outer(msgspec.Struct):
    a: Inner
    b: dict[str, Inner]
    c: list[Inner]
'''
sys.setswitchinterval(1e-6)
decode = {"ours": typed_json.decode, "msgspec": lambda data, kind: msgspec.json.decode(data, type=kind)}[sys.argv[1]]
for _ in range(int(sys.argv[2])):
    names, start, read = {}, threading.Barrier(3), []
    exec(DEFINITION, names)
    def run():
        start.wait()
        read.append(decode(b'{"a": {"x": 1}, "b": {"k": {}}, "c": [{}]}', names["Outer"]).a.x)
    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read == [1, 1, 1]
"""


def run(how: str, rounds: int) -> int:
    argv = [sys.executable, "-c", PROGRAM, how, str(rounds)]
    return subprocess.run(argv, timeout=120, capture_output=True, check=False).returncode


def test_threads_that_meet_a_type_at_once_read_it() -> None:
    assert run("ours", 300) == 0


@pytest.mark.slow
def test_msgspec_still_needs_that() -> None:
    assert run("msgspec", 10_000) != 0, "msgspec has become safe: typed_json.py can go"


def test_what_is_no_such_value_is_an_error_each_time() -> None:
    for _ in range(2):
        with pytest.raises(msgspec.ValidationError):
            typed_json.decode(b'{"a": "b"}', dict[str, int])


def test_paths_are_texts() -> None:
    data = typed_json.encode(Placed(Path("/scratch/ada"), None))
    assert data == b'{"here":"/scratch/ada","there":null}'
    assert typed_json.decode(data, Placed) == Placed(Path("/scratch/ada"), None)
    with pytest.raises(msgspec.MsgspecError):
        typed_json.decode(b'{"here":5,"there":null}', Placed)
