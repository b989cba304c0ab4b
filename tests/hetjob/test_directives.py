"""`#HETSTREAM` lines: where they count, how they are written, and what the errors say."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetstream.hetjob.convert.directives import (
    OPTIONS,
    WITH_VALUE,
    from_command_line,
    late_directives,
    near_misses,
    prologue_length,
    read_directives,
    written,
)
from hetstream.hetjob.convert.sbatch_options import parse_words
from hetstream.hetjob.convert.spec import JobSpec, read_spec
from hetstream.hetjob.errors import DataWorkersMissing, DirectiveError


def spec_of(script: str, *command_line: str) -> JobSpec | None:
    options, _ = parse_words(command_line, "command line", extra=WITH_VALUE)
    return read_spec([*read_directives(script, "train.sbatch"), *from_command_line(options)], "train.sbatch")


def test_several_lines_make_one_spec() -> None:
    script = (
        "#!/bin/bash\n#SBATCH -c 4\n#HETSTREAM --data-workers=2-8 --data-worker-cpus 6  # six each\n\n"
        "# a comment\n#HETSTREAM --data-worker-partition='cpu,big mem' --trainer-cpus=3\necho\n"
    )
    assert spec_of(script) == JobSpec(
        data_workers_min=2, data_workers_max=8, data_worker_cpus=6, data_worker_partition="cpu,big mem", trainer_cpus=3
    )


def test_the_command_line_wins() -> None:
    script = "#!/bin/bash\n#HETSTREAM --data-workers=2-8 --data-worker-partition=cpu\n"
    assert spec_of(script, "--data-workers=4", "-p", "gpu") == JobSpec(4, 4, data_worker_partition="cpu")
    assert spec_of("#!/bin/bash\n", "--data-workers", "0-3") == JobSpec(0, 3)


@pytest.mark.parametrize("line", ["# HETSTREAM --data-workers=2", " #HETSTREAM --x", "#HETSTREAMS --x", "#hetstream y"])
def test_other_comments_are_not_directives(line: str) -> None:
    assert spec_of(f"#!/bin/bash\n{line}\n") is None


def test_comments_that_were_meant_as_directives_are_found() -> None:
    near = [
        "#HETSTREAM: --data-workers=2",
        "#HETSTREAM--data-workers=2",
        "#hetstream x",
        "  #HETSTREAM x",
        "# HetStream",
    ]
    other = ["#HETSTREAM --data-workers=2", "#HETSTREAMS --x", "# with hetstream", "echo", "#hetstream late"]
    script = "\n".join(["#!/bin/bash", *near, *other])
    assert near_misses(script) == [2, 3, 4, 5, 6]


def test_directives_after_the_first_command_do_not_count() -> None:
    script = "#!/bin/bash\nset -e\n#HETSTREAM --data-workers=2\ncat <<X\n#HETSTREAM --nonsense\nX\n"
    assert spec_of(script) is None
    assert late_directives(script) == [3, 5]


def test_every_problem_is_reported_at_once_with_its_line() -> None:
    script = "#!/bin/bash\n#HETSTREAM --data-worker=2-8\n#HETSTREAM --data-workers=8-2x --data-worker-cpus\n"
    with pytest.raises(DirectiveError) as caught:
        spec_of(script)
    text = str(caught.value)
    assert text.startswith("train.sbatch line 2: --data-worker is unknown (did you mean --data-workers?); line 3")
    assert "line 3: --data-workers=8-2x: write MIN or MIN-MAX" in text
    assert "line 3: --data-worker-cpus needs a value: --data-worker-cpus=[MIN-]N" in text
    assert "\n" not in text


def test_wrong_values_are_reported_at_once_with_their_lines() -> None:
    script = "#!/bin/bash\n#HETSTREAM --data-workers=8-2 --data-worker-cpus=0 --foo=1\n#HETSTREAM --trainer-cpus=0\n"
    with pytest.raises(DirectiveError) as caught:
        spec_of(script, "--data-worker-mem=lots", "--data-worker-qos=a\nb")
    counts, cpus, foo, names, trainer, memory, qos = str(caught.value).split("; ")
    assert counts == "train.sbatch line 2: --data-workers=8-2: MIN is at least 0, MAX at least 1 and not below MIN"
    assert cpus == "line 2: --data-worker-cpus=0: at least 1"
    assert foo.startswith("line 2: --foo is unknown")
    assert names.startswith("valid are")
    assert trainer == "line 3: --trainer-cpus=0: at least 1"
    assert memory == "command line: --data-worker-mem=lots: a size such as 16G or 8000M"
    assert qos == "command line: --data-worker-qos='a\\nb': a name, not empty and on one line"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--data-worker-threads=0", "line 2: --data-worker-threads=0: at least 1"),
        ("--data-worker-threads=129", "line 2: --data-worker-threads=129: at most 128"),
        ("--data-worker-threads=two", "line 2: --data-worker-threads=two: write a whole number"),
        ("--data-worker-threads=3", "--data-worker-threads=3: must divide --data-worker-cpus=4"),
    ],
)
def test_threads_of_data_workers(words: str, said: str) -> None:
    script = "#!/bin/bash\n#HETSTREAM --data-workers=2 {}\nsrun hostname\n"
    with pytest.raises(DirectiveError) as caught:
        spec_of(script.format(words))
    assert said in str(caught.value)
    assert spec_of(script.format("--data-worker-threads=2")) == JobSpec(2, 2, data_worker_threads=2)


def test_a_spec_keeps_the_same_rules() -> None:
    with pytest.raises(DirectiveError) as caught:
        JobSpec(2, 1, data_worker_cpus=0, data_worker_mem="lots", data_worker_partition="")
    assert str(caught.value) == (
        "--data-workers=2-1: MIN is at least 0, MAX at least 1 and not below MIN; --data-worker-cpus=0: at least 1; "
        "--data-worker-partition='': a name, not empty and on one line; "
        "--data-worker-mem='lots': a size such as 16G or 8000M"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--data-worker-cpus=0", "--data-worker-cpus=0: at least 1"),
        ("--data-workers=all", "line 2: --data-workers=all: write MIN or MIN-MAX, such as 4, 2-8 or 0-8, or auto"),
        ("--data-workers=2 --gpu-data-workers=auto", "such as 4, 2-8 or 0-8"),
        ("--data-workers=8-2", "not below MIN"),
        ("--data-workers=2 --offload=some", "line 2: --offload=some: one of off, auto, all"),
        ("--data-workers=2 --offload", "line 2: --offload needs a value: --offload=HOW"),
        ("--data-workers=0", "line 2: --data-workers=0: MIN is at least 0, MAX at least 1"),
        ("--data-workers=2 --data-worker-cpus=0", "line 2: --data-worker-cpus=0: at least 1"),
        ("--data-workers=2 --trainer-cpus=-1", "write a whole number"),
        ("--data-workers=2 --data-worker-mem=lots", "line 2: --data-worker-mem=lots: a size such as 16G"),
        ("--data-workers=2 --data-worker-partition=", "line 2: --data-worker-partition=: a name, not empty"),
        ("--checkpoint=ckpt", "--checkpoint=DIR and --checkpoint-size=SIZE belong together"),
        ("--checkpoint-size=8G", "--checkpoint=DIR and --checkpoint-size=SIZE belong together"),
        ("--checkpoint=ckpt --checkpoint-size=big", "line 2: --checkpoint-size=big: a size such as 16G"),
        ("--data-workers=1 --checkpoint-shared=8G", "--checkpoint-shared=8G: only with --checkpoint=DIR"),
        ("--checkpoint=ckpt --checkpoint-size=8G --checkpoint-shared=all", "--checkpoint-shared=all: a size such as"),
        ("--checkpoint=c --checkpoint-size=8G --checkpoint-shared=9000M", "at most --checkpoint-size=8G, of which it"),
        ("--checkpoint=ckpt --checkpoint-size=8G --checkpoint-replicas=2", "--checkpoint-replicas=2: 0 or 1"),
        ("--data-workers=2 --checkpoint-replicas=1", "--checkpoint-replicas=1: only with --checkpoint=DIR"),
        ("--checkpiont=ckpt --checkpoint-size=8G", "did you mean --checkpoint?"),
        ("", "line 2: #HETSTREAM without an option"),
        ("# --data-workers=2", "line 2: #HETSTREAM without an option"),
        ("data-workers=2", "line 2: 'data-workers=2' is not an option"),
        ("--data-workers='2", "line 2: No closing quotation"),
    ],
)
def test_wrong_directives(words: str, said: str) -> None:
    with pytest.raises(DirectiveError) as caught:
        spec_of(f"#!/bin/bash\n#HETSTREAM {words}\n")
    assert said in str(caught.value)


_NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 256), _NAMES, st.booleans())
def test_what_is_written_is_what_is_read(low: int, more: int, cpus: int, partition: str, split: bool) -> None:
    words = [f"--data-workers={low}-{low + more + 1}", f"--data-worker-cpus={cpus}"]
    words.append(f"--data-worker-partition={partition}")
    # As in a #SBATCH line, a backslash escapes also within quotes.
    quoted = [shlex.quote(word).replace("\\", "\\\\") for word in words]
    lines = [f"#HETSTREAM {word}" for word in quoted] if split else [f"#HETSTREAM {' '.join(quoted)}"]
    spec = spec_of("\n".join(["#!/bin/bash", *lines, "srun hostname"]))
    assert spec == JobSpec(low, low + more + 1, data_worker_cpus=cpus, data_worker_partition=partition)


@given(st.text())
def test_no_text_breaks_the_reader(text: str) -> None:
    script = f"#!/bin/bash\n#HETSTREAM {text}\n"
    with contextlib.suppress(DirectiveError):
        spec_of(script)
    assert 0 < prologue_length(script.split("\n")) <= len(script.split("\n"))


def test_the_reference_lists_every_option() -> None:
    reference = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    for name, option in OPTIONS.items():
        row = f"| `{written(name).replace('|', '')}` | {option.meaning} | {option.default} |"
        assert row in reference, name


def test_an_option_without_a_value() -> None:
    expected = JobSpec(2, 2, stream_in_process_loaders=True)
    script = "#!/bin/bash\n#HETSTREAM --data-workers=2\n"
    assert spec_of(f"{script}#HETSTREAM --stream-in-process-loaders\n") == expected
    assert spec_of(f"{script}#HETSTREAM --stream-in-process-loaders --data-worker-cpus=4\n") == expected
    assert spec_of(script, "--stream-in-process-loaders", "--data-workers", "2") == expected
    options, others = parse_words(
        ["--stream-in-process-loaders", "train.sbatch", "-x"], "command line", extra=WITH_VALUE
    )
    assert ([option.name for option in options], others) == (["stream-in-process-loaders"], ["train.sbatch", "-x"])
    for written_so in ("--stream-in-process-loaders=1", "--stream-in-process-loaders yes"):
        with pytest.raises(DirectiveError, match=r"line 3: --stream-in-process-loaders=\w+: takes no value"):
            spec_of(f"{script}#HETSTREAM {written_so}\n")


@pytest.mark.shows("a script that asks for data workers needs no number: `auto` is as many as pay")
@pytest.mark.parametrize(
    "words",
    [
        "--data-workers=auto",
        "--data-worker-cpus=2",
        "--offload=auto",
        "--cache=off",
        "--checkpoint=c --checkpoint-size=8G --trainer-cpus=2",
    ],
)
def test_without_a_number_the_controller_finds_how_many_pay(words: str) -> None:
    directives = read_directives(f"#!/bin/sh\n#HETSTREAM {words}\n", "train.sbatch")
    spec = read_spec(directives, "train.sbatch")
    assert spec is not None
    assert (spec.data_workers_min, spec.data_workers_max) == (0, 16)


def test_what_past_jobs_were_to_say_is_not_made_up() -> None:
    directives = read_directives("#!/bin/sh\n#HETSTREAM --data-worker-cpus=2\n", "train.sbatch")
    with pytest.raises(DataWorkersMissing, match=r"line 2: --data-workers=MIN\[-MAX\] is missing"):
        read_spec(directives, "train.sbatch", counts_from_history=True)
