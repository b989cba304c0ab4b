"""Tables fit the terminal: no word is broken, what is left out is said, and what a name holds stays in its place."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from recorded import Recorded, hours_ago, job

from hetstream.slurm_plugin.render.tables import RED, Column, table, wrapped

COLUMNS = (
    Column("job", "JOB", left=True),
    Column("name", "NAME", left=True, priority=2),
    Column("cpus", "CPUS"),
    Column("memory", "MEMORY", priority=1),
    Column("text", "BECAUSE", left=True, wraps=True),
    Column("step", "NEXT STEP", left=True, below=True),
)
TEXT = "it needs sixteen CPUs on a node and the most that is free is fifteen"


def row(*texts: str) -> list[tuple[str, str]]:
    return [(text, "") for text in texts]


ROWS = [
    row("8123", "resnet", "16", "64.0", TEXT, "scontrol release 8123"),
    row("8124", "bert", "4", "8.0", "-", "-"),
]


def test_where_there_is_room_each_row_has_one_line_and_one_for_what_stands_below() -> None:
    assert table(COLUMNS, ROWS, color=False) == [
        "JOB   NAME    CPUS  MEMORY  BECAUSE",
        f"8123  resnet    16    64.0  {TEXT}",
        "    next step: scontrol release 8123",
        "8124  bert       4     8.0  -",
    ]


@pytest.mark.parametrize("width", range(40, 110, 3))
def test_no_word_is_broken_and_no_line_is_too_long_at_any_width(width: int) -> None:
    lines = table(COLUMNS, ROWS, color=False, width=width)
    assert [line for line in lines if len(line) > width] == []
    said = {word for line in lines for word in line.replace("because: ", "").split()}
    assert set(TEXT.split()) <= said
    for title, texts in (("NAME", {"resnet", "bert"}), ("MEMORY", {"64.0", "8.0"})):
        left_out = title in "".join(lines).partition("left out:")[2]
        assert left_out != (texts <= said)


def test_columns_of_the_highest_number_go_first_and_sentences_then_stand_below() -> None:
    assert table(COLUMNS, ROWS, color=False, width=50)[-1] == "left out: NAME (| less -S shows all)"
    narrow = table(COLUMNS, ROWS, color=False, width=30)
    assert narrow[0] == "JOB   NAME    CPUS  MEMORY"
    assert narrow[2].startswith("    because: it needs")
    assert table(COLUMNS, ROWS, color=False, width=20)[-2:] == ["left out: NAME (|", "  less -S shows all)"]


def test_a_name_that_is_longer_than_the_terminal_is_cut_and_a_wide_one_counts_its_cells() -> None:
    columns = (Column("", "SCRIPT", left=True), Column("", "JOBS"))
    _, line = table(columns, [row("x" * 200, "7")], color=False, width=40)
    assert line == f"{'x' * 33}…" + "     7"[-6:]
    head, line = table(columns, [row("深度学习", "7")], color=False)
    assert (head, line) == ("SCRIPT    JOBS", "深度学习     7")


def test_what_a_cell_holds_does_nothing_to_a_terminal() -> None:
    lines = table(COLUMNS, [row("1", "a\x1b[2J\nb\rc", "1", "1", "x \x1b]0;owned\x07 y", "\x1b[31m")], True, 60)
    assert all(
        "\x1b[2J" not in line and "\x1b]" not in line and "\n" not in line and "\r" not in line for line in lines
    )
    assert "\x1b[31m" not in "".join(lines)


def test_directives_that_take_several_lines_are_several_directives() -> None:
    line = "    next step: #HETSTREAM --data-workers=2 --data-worker-partition=cpu --data-worker-cpus=4"
    assert wrapped(line, 60, 6) == [
        "    next step: #HETSTREAM --data-workers=2",
        "      #HETSTREAM --data-worker-partition=cpu",
        "      #HETSTREAM --data-worker-cpus=4",
    ]


def test_colours_mark_cells_and_no_blanks_beside_them_are_counted() -> None:
    rows = [[*row("1", "a", "1", "1", "b"), ("-", "")]]
    rows[0][2] = ("1", RED)
    plain, colored = (table(COLUMNS, rows, color)[1] for color in (False, True))
    assert colored.replace(RED, "").replace("\x1b[0m", "") == plain


def test_ten_thousand_rows_take_a_moment() -> None:
    rows = [row(str(number), "name", "1", "2.0", TEXT, "-") for number in range(10_000)]
    began_s = time.process_time()
    table(COLUMNS, rows, color=False, width=80)
    assert time.process_time() - began_s < 5


@pytest.fixture
def cluster(tmp_path: Path) -> Recorded:
    cluster = Recorded(tmp_path)
    waiting = job(
        "41", "PENDING", Name="a-rather-long-name-of-a-training", NumCPUs="16", **{"tres-per-node": "gres:gpu:4"}
    )
    running = job("42", "RUNNING", NodeList="g1", StartTime=hours_ago(3), **{"tres-per-node": "gres:gpu:1"})
    cluster.write("queue", waiting + running)
    return cluster


@pytest.mark.shows("tables fit 80 columns, and say what they leave out")
@pytest.mark.parametrize(
    "line", ["frag", "jobs", "why 41", "advise", "doctor", "util", "job 41", "job 42", "gpu jobs -p gpu", "job --me"]
)
def test_each_table_fits_eighty_columns(cluster: Recorded, line: str) -> None:
    shown = cluster.run(line, COLUMNS="80", NO_COLOR="1")
    assert [one for one in shown.stdout.splitlines() if len(one) > 80] == []
    wide = cluster.run(line, COLUMNS="1000", NO_COLOR="1").stdout
    assert "left out:" not in wide
    # Times go on between the two.
    words = {word for word in shown.stdout.split("left out:")[0].split() if not any(map(str.isdigit, word))}
    assert {word for word in words if "…" not in word} <= {*wide.split(), "#HETSTREAM", "because:"}


@pytest.mark.shows("tables fit 80 columns, and say what they leave out")
def test_a_terminal_of_eighty_columns_has_no_line_that_is_longer(cluster: Recorded) -> None:
    ours, theirs = pty.openpty()
    environ = {**os.environ, "PATH": f"{cluster.directory}:/usr/bin:/bin", "TERM": "xterm", "NO_COLOR": "1"}
    environ.pop("COLUMNS", None)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    argv = [sys.executable, "-m", "hetstream", "jobs"]
    with subprocess.Popen(argv, stdout=theirs, stderr=theirs, env=environ) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                more = os.read(ours, 65536)
            except OSError:
                break
            if not more:
                break
            seen += more
    os.close(ours)
    assert process.returncode == 0, seen
    lines = seen.decode().replace("\r", "").splitlines()
    assert any(line.startswith("left out") for line in lines)
    assert [line for line in lines if len(line) > 80] == []
    assert "\x1b" not in seen.decode()


def test_columns_that_say_nothing_make_room_first() -> None:
    columns = [Column("name", "NAME", left=True, cuts=True), Column("gpu", "GPU"), Column("note", "NOTE", left=True)]
    rows = [[("train-resnet50-imagenet", ""), ("-", ""), ("waits for its data", "")] for _ in range(2)]
    lines = table(columns, rows, color=False, width=44)
    assert lines[0].split() == ["NAME", "NOTE"]
    assert "train-resnet50-imagenet  waits for its data" in lines[1]
