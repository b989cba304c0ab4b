"""Traces, our own table, a site's export and clusters: what is read, and everything that is wrong, by line."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.job_lists import list_from, synthetic_trace
from hetstream.slurm_plugin.client.model import Node, ReservedPart
from hetstream.slurm_plugin.client.slurm_units import parse_gres
from hetstream.slurm_plugin.errors import SimulationInputError
from hetstream.slurm_plugin.simulate import workload
from hetstream.slurm_plugin.simulate.engine import simulate
from hetstream.slurm_plugin.simulate.scenario import Discipline, Request, Scenario
from hetstream.slurm_plugin.simulate.traces import HEAVY, LIGHT, READERS, Assumptions, ReadOptions, read_trace
from hetstream.slurm_plugin.simulate.workload import MOST_FIELD

PHILLY = "job_id,submit_s,duration_s,num_gpus,vc\n7,100,60,1,a\n8,40,120,8,b\n"
OWN = """\
submit_s,run_s,num_gpus,cpus_per_gpu,trainer_cpus_per_gpu,user,heterogeneous,time_limit_s
50,100,2,16,2,ann,yes,600
0,10,0,4,,bob,no,
"""
SACCT = """\
JobIDRaw|User|Account|State|Submit|Start|End|ElapsedRaw|NNodes|AllocCPUS|AllocTRES|TRESUsageInAve|TimelimitRaw
1|ann|lab|COMPLETED|2026-11-20T16:00:00|2026-11-20T16:01:00|2026-11-20T17:01:00|3600|2|16|cpu=16,mem=16G,gres/gpu=2||90
1.batch|||COMPLETED|2026-11-20T16:01:00|2026-11-20T16:01:00|2026-11-20T17:01:00|3600|2|16|cpu=16,gres/gpu=2|gres/gpuutil=80|
2|bob|lab|CANCELLED by 5|2026-11-20T16:00:00|None|2026-11-20T17:01:00|0|1|0|||60
3|bob|lab|RUNNING|2026-11-20T16:00:00|2026-11-20T16:30:00|Unknown|600|1|4|cpu=4||60
4|bob|lab|FAILED|2026-11-20T16:05:00|2026-11-20T16:05:00|2026-11-20T16:15:00|600|1|4|cpu=4||Partition_Limit
"""


def problems_of(text: str, form: str = "auto") -> tuple[str, ...]:
    with pytest.raises(SimulationInputError) as caught:
        read_trace("jobs.csv", text, form)
    return caught.value.problems


def test_philly_is_sorted_from_zero_and_gets_models() -> None:
    trace = read_trace("p", PHILLY)
    assert trace.form == "philly"
    assert trace.workload.submit_s.tolist() == [0, 60]
    assert trace.workload.work_s.tolist() == [120, 60]
    assert trace.workload.num_gpus.tolist() == [8, 1]
    assert set(trace.workload.ideal_cpus) <= {model.ideal_cpus for model in (*HEAVY, *LIGHT)}
    again = read_trace("p", PHILLY, options=ReadOptions(seed=0))
    assert again.workload.ideal_cpus.tolist() == trace.workload.ideal_cpus.tolist()


def test_a_line_with_a_zero_byte_is_a_problem() -> None:
    text = "submit_s,run_s,num_gpus\n0,1\0000,1\n\0\n0,10,1\n"
    with pytest.raises(SimulationInputError, match="line 2: a byte of it is 0") as raised:
        read_trace("t", text)
    assert [one.split(":")[0] for one in raised.value.problems] == ["line 2", "line 3"]
    assert len(read_trace("t", text, options=ReadOptions(skip_bad=True)).workload) == 1
    with pytest.raises(SimulationInputError, match=r"line 1: a byte of it is 0.* UTF-16"):
        read_trace("t", text.encode("utf-16-le").decode(), form="csv")


@pytest.mark.shows("traces, tables and exports of sacct are read; an export is first replayed as it happened")
def test_our_own_table() -> None:
    load = read_trace("t", OWN).workload
    assert load.names == ("2", "1")
    assert (load.units.tolist(), load.gpus.tolist()) == ([1, 2], [0, 1])
    assert (load.ideal_cpus.tolist(), load.trainer_cpus.tolist()) == ([4, 16], [4, 2])
    assert load.limit_s.tolist() == [np.inf, 600]
    assert load.is_het.tolist() == [False, True]
    assert load.user_names[load.users[1]] == "ann"


CURVES = """\
submit_s,run_s,num_gpus,cpus_per_gpu,trainer_cpus_per_gpu,overhead,curve
0,100,2,,2,,8:0.5 16:0.75 32:0.9
1,100,1,16,4,0.1,
2,100,0,,,,4:1
"""


DAY = "2026-11-20T"
HET = f"""\
JobID|JobIDRaw|User|Account|State|Submit|Start|End|ElapsedRaw|NNodes|AllocCPUS|AllocTRES|TRESUsageInAve|TimelimitRaw
7+0|7|ann|lab|COMPLETED|{DAY}16:00:00|{DAY}16:01:00|{DAY}17:01:00|3600|1|8|cpu=8,mem=16G,gres/gpu=2||90
7+0.0|7.0|||COMPLETED|{DAY}16:01:00|{DAY}16:01:00|{DAY}17:01:00|3600|1|8|cpu=8,gres/gpu=2|gres/gpuutil=80|
7+1|8|ann|lab|COMPLETED|{DAY}16:00:00|{DAY}16:01:00|{DAY}17:01:02|3602|3|24|cpu=24||90
9+0|9|bob|lab|COMPLETED|{DAY}16:00:00|{DAY}16:02:00|{DAY}16:12:00|600|1|8|cpu=8,gres/gpu=1||90
9+1|10|bob|lab|CANCELLED|{DAY}16:00:00|Unknown|{DAY}16:12:00|0|1|0|||90
11|11|bob|lab|COMPLETED|{DAY}16:05:00|{DAY}16:05:00|{DAY}16:15:00|600|1|4|cpu=4||
"""


def test_the_components_of_a_heterogeneous_job_are_one_gang() -> None:
    trace = read_trace("month.txt", HET)
    load = trace.workload
    assert load.names == ("7", "11")
    assert load.is_het.tolist() == [True, False]
    assert load.recorded is not None
    assert load.recorded.end_s.tolist() == [3662, 900]
    assert load.recorded.extra_cpus.tolist() == [24, 0]
    assert (load.units[0], load.gpus[0], load.recorded.cpus[0]) == (1, 2, 8)
    # 32 CPUs in all, with which it is 80 % busy; its trainers keep 3 for each GPU.
    assert (load.ideal_cpus[0], load.trainer_cpus[0]) == (40, 6)
    assert "1 job heterogeneous, of which a component did not run and end: left out" in trace.notes
    scenario = Scenario("recorded", Request.RECORDED, Discipline.EASY)
    outcome = simulate(load, workload.parse("gpus=2,cpus=12;3*cpus=8"), scenario)
    assert outcome.end_s - outcome.start_s == pytest.approx([3602, 600]), "as fast as it was, with all of its CPUs"
    alone = read_trace("month.txt", HET.replace("JobID|", "Cluster|", 1))
    assert alone.workload.names == ("7", "8", "9", "11")
    assert any("components of heterogeneous jobs count as jobs of their own" in note for note in alone.notes)


def test_a_table_may_have_measured_curves() -> None:
    load = read_trace("t", CURVES).workload
    assert load.curves is not None
    assert load.curves.cpus.tolist() == [[0, 16, 32, 64], [0, 12, 12, 12], [0, 4, 4, 4]]
    assert load.curves.speed[0].tolist() == [0, 0.5, 0.75, 0.9]
    assert load.demand.tolist() == [64, 12, 4]
    assert load.ideal_cpus.tolist() == [34, 16, 5]
    assert load.overhead.tolist() == pytest.approx([0.1, 0.1, 0.0])
    assert load.curves.speed_with(np.array([24.0, 6.0, 9.0])).tolist() == pytest.approx([0.625, 0.45, 1.0])
    assert load.only(np.array([2, 0])).demand.tolist() == [4, 64]
    assert read_trace("t", OWN).workload.curves is None


def test_all_wrong_curves_are_told_with_their_lines() -> None:
    wrong = ("8:2", "8:0.5 4:0.6", "8:0.1 16:0.9", "eight:1", "8:0.9 16:0.8", " ".join(["1:1"] * 17), "8", "0:0.5")
    rows = "".join(f"0,10,1,,{text}\n" for text in wrong) + "0,10,1,0.1,8:1\n0,10,1,,8:1\n"
    with pytest.raises(SimulationInputError) as raised:
        read_trace("t", f"submit_s,run_s,num_gpus,overhead,curve\n{rows}")
    problems = raised.value.problems
    assert [problem.split(":")[0] for problem in problems] == [f"line {line}" for line in range(2, 11)]
    for problem, said in zip(problems, ("must be CPUs:SPEED", "must rise", "steeper", "must be CPUs", "must rise",
                                        "17 points", "must be CPUs", "must be CPUs", "a curve and an overhead"),
                             strict=True):  # fmt: skip
        assert said in problem


def test_a_sites_export_has_what_really_happened() -> None:
    trace = read_trace("month.txt", SACCT)
    load = trace.workload
    assert load.names == ("1", "4")
    assert load.recorded is not None
    assert load.recorded.start_s.tolist() == [60, 300]
    assert load.recorded.end_s.tolist() == [3660, 900]
    # 2 nodes with 8 CPUs and a GPU each, 80 % busy: at full speed it would take 80 % of the time, with 10 CPUs a GPU.
    assert (load.units[0], load.gpus[0], load.ideal_cpus[0], load.trainer_cpus[0]) == (2, 1, 10, 3)
    assert load.work_s.tolist() == [2880, 600]
    assert load.memory_gib.tolist() == [8, 0]
    assert load.limit_s.tolist() == [5400, np.inf]
    assert "1 job never started: left out" in trace.notes
    assert "1 job still ran: left out" in trace.notes


def test_an_export_without_use_of_gpus_is_told_apart() -> None:
    plain = SACCT.replace("gres/gpuutil=80", "")
    options = ReadOptions(assumptions=Assumptions(gpu_share=0.5))
    assert read_trace("m", plain).workload.ideal_cpus[0] == 8
    assert read_trace("m", plain, options=options).workload.ideal_cpus[0] == 16
    assert any("known of 0" in note for note in read_trace("m", plain).notes)


@pytest.mark.shows("a malformed table or export is refused with all lines at once, by number")
def test_all_problems_come_at_once_with_their_lines() -> None:
    text = "job_id,submit_s,duration_s,num_gpus\n1,-5,60,1\n2,0,0,1\n3,0,x,1\n4,0,60,1.5\n5,0,60\n6,nan,60,1\n7,1,1,0\n"
    assert problems_of(text) == (
        'line 2: submit_s is "-5": must be a finite number of 0 or more',
        "line 3: duration_s is 0: must be above 0",
        'line 4: duration_s is "x": must be a number',
        "line 5: num_gpus is 1.5: must be a whole number of 1 or more",
        "line 6: 3 values and not 4",
        'line 7: submit_s is "nan": must be a finite number of 0 or more',
        "line 8: num_gpus is 0: must be a whole number of 1 or more",
    )


@pytest.mark.shows("a malformed table or export is refused with all lines at once, by number")
def test_all_problems_of_an_export_come_at_once_with_their_lines() -> None:
    line = "{job}|ann|lab|COMPLETED|{submit}|{start}|{end}|60|{nodes}|{cpus}|cpu=4||60\n"
    good = {"submit": f"{DAY}16:00:00", "start": f"{DAY}16:01:00", "end": f"{DAY}17:01:00", "nodes": "1", "cpus": "4"}
    wrong = [{"nodes": "-1"}, {"cpus": "4.5"}, {"submit": "yesterday"}, {"end": f"{DAY}15:00:00"}]
    rows = [line.format(job=at, **(good | one)) for at, one in enumerate(wrong)]
    told = problems_of(SACCT.splitlines()[0] + "\n" + "".join(rows))
    assert [problem.split(":")[0] for problem in told] == ["line 2", "line 3", "line 4", "line 5"]
    for problem, word in zip(told, ("NNodes", "AllocCPUS", "Submit", "ended"), strict=True):
        assert word in problem


def test_bad_lines_can_be_left_out_and_are_counted() -> None:
    trace = read_trace("p", PHILLY + "9,1,-1,1,a\n", options=ReadOptions(skip_bad=True))
    assert len(trace.workload) == 2
    assert "left out as wrong: 1 line" in trace.notes


def test_a_value_that_is_too_long_costs_its_line_and_no_other() -> None:
    head, *rows = SACCT.splitlines()
    several = "\n".join([head + "|AdminComment", *(f"{row}|{'x' * 200_000}" for row in rows)])
    assert len(read_trace("month.txt", several).workload) == 2, "what a site measured of a job may be long"
    rows[4] += "|" + "x" * (MOST_FIELD + 1)
    long = "\n".join([head + "|AdminComment", *(row + "|" for row in rows[:4]), rows[4]])
    assert problems_of(long) == ("line 6: a value has more than 4,194,304 characters",)
    wrong = long.replace("|2|16|cpu=16,mem", "|-2|16|cpu=16,mem")
    assert [problem.split(":")[0] for problem in problems_of(wrong)] == ["line 2", "line 6"]
    trace = read_trace("month.txt", long, options=ReadOptions(skip_bad=True))
    assert trace.workload.names == ("1",)
    assert "left out as wrong: 1 line" in trace.notes
    assert csv.field_size_limit() == 131_072, "the limit of other readers is as before"


@pytest.mark.shows("clocks that jump are found in exports, in the daemon and in the history")
def test_clocks_that_jump_in_an_export_are_problems() -> None:
    jumps = SACCT.replace(
        "2026-11-20T16:01:00|2026-11-20T17:01:00|3600|2|16|cpu=16,mem",
        "2026-11-20T15:00:00|2026-11-20T14:00:00|3600|2|16|cpu=16,mem",
    )
    assert problems_of(jumps) == (
        "line 2: it ended 3600 s before it started: a clock jumped",
        "line 2: it started 3600 s before it was submitted: a clock jumped",
    )
    both = problems_of(jumps.replace("|2|16|cpu=16,mem", "|-2|16|cpu=16,mem"))
    assert [problem.split(":")[0] for problem in both] == ["line 2"] * 3, "all that is wrong with a line, at once"
    wrong = SACCT.replace("|16|cpu=16,mem=16G", "|many|cpu=16,mem=16G").replace("2026-11-20T16:05:00|F", "x|F")
    assert problems_of(wrong)[0].startswith('line 2: AllocCPUS is "many"')
    assert problems_of("JobIDRaw|Submit|Start\n1|a|b\n", "sacct")[0] == "line 1: there is no column End"
    assert problems_of(SACCT.split("\n1|")[0] + "\n") == ("there is no job in it",)


@pytest.mark.shows("missing columns, and negative, infinite and huge numbers, are refused")
def test_numbers_of_an_export_that_no_float_holds_are_problems_of_their_lines() -> None:
    names = "JobIDRaw|State|Submit|Start|End|ElapsedRaw|NNodes|AllocCPUS|AllocTRES|TotalCPU"
    good = dict(
        zip(names.split("|"), f"1|F|{DAY}16:00:00|{DAY}16:01:00|{DAY}17:01:00|60|1|4||".split("|"), strict=True)
    )
    many = "9" * 400
    wrong = (
        ({"AllocTRES": f"gres/gpu={many}"}, "GRES 'gres/gpu=999"),
        ({"AllocTRES": f"gres/gpu:a100_1g.5gb={many}"}, "GRES 'gres/gpu:a100_1g.5gb=999"),
        ({"AllocTRES": f"mem={many}P"}, "AllocTRES: memory '999"),
        ({"TotalCPU": f"{many}:00"}, "CPU time '999"),
        ({"ElapsedRaw": "abc"}, 'ElapsedRaw is "abc": must be a number'),
        ({"AllocCPUS": "8.5"}, 'AllocCPUS is "8.5": must be a whole number'),
        ({"End": "9999-12-31T23:59:59"}, 'End is "9999-12-31T23:59:59": must be between 1970 and 2286'),
        ({"Submit": "1600-01-01T00:00:00"}, 'Submit is "1600-01-01T00:00:00": must be between 1970 and 2286'),
    )
    rows = ["|".join((good | {"JobIDRaw": str(at)} | change).values()) for at, (change, _) in enumerate(wrong)]
    told = problems_of("\n".join([names, *rows]) + "\n")
    assert len(told) == len(wrong)
    for line, (problem, (_, said)) in enumerate(zip(told, wrong, strict=True), start=2):
        assert problem.startswith(f"line {line}: ")
        assert said in problem
        assert len(problem) < 130, "the line's number says which it is"


@pytest.mark.shows("missing columns, and negative, infinite and huge numbers, are refused")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty, and must name the columns of one of these forms: philly: job_id"),
        (
            "a,b\n1,2\n",
            'it begins with "a,b", and must name the columns .*; csv: submit_s, run_s, num_gpus; sacct: Submit',
        ),
        ("\\xff\\xfes\0u\0b\0", "a byte of it is 0, which no text has. Is it UTF-16. Write it as UTF-8"),
        ("job_id,submit_s,duration_s\n1,2,3\n", "nearest to philly, and lacks num_gpus"),
        ("job,run_s,num_gpus\n1,2,3\n", "nearest to csv, and lacks submit_s"),
        ("submit_s,run_s,num_gpus,gpu\n1,2,3,4\n", 'column "gpu" is not known'),
        ("submit_s,run_s,num_gpus,num_gpus\n1,2,3,4\n", "num_gpus is there twice"),
        ("submit_s,run_s,num_gpus\n", "there is no job in it"),
        ("submit_s,run_s,num_gpus,overhead\n0,1,1,1\n", "overhead is 1: must be below 1"),
        ("submit_s,run_s,num_gpus,heterogeneous\n0,1,1,maybe\n", "must be yes or no"),
    ],
)
def test_tables_of_another_form_are_refused(text: str, said: str) -> None:
    with pytest.raises(SimulationInputError, match=said):
        read_trace("t", text)


@pytest.mark.shows("a malformed table or export is refused with all lines at once, by number")
@settings(max_examples=120, deadline=None)
@given(st.sampled_from([PHILLY, OWN, CURVES, SACCT]), st.data())
def test_damaged_tables_are_read_or_refused(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 30)))
    damaged = text[:start] + data.draw(st.text(max_size=10)) + text[end:]
    for form in ("auto", data.draw(st.sampled_from(sorted(READERS)))):
        try:
            load = read_trace("t", damaged, form).workload
        except SimulationInputError:
            continue
        assert np.isfinite(load.submit_s).all()
        assert (load.work_s > 0).all()
        assert (load.trainer_cpus <= load.ideal_cpus).all()


def test_clusters_of_text_json_and_a_sites_nodes() -> None:
    text = workload.parse("2*gpus=8,cpus=64,memory_gib=256;cpus=32")
    assert (text.gpus.tolist(), text.cpus.tolist()) == ([8, 8, 0], [64, 64, 32])
    assert text.memory_gib.tolist() == [256, 256, np.inf]
    json = workload.parse('{"nodes": [{"count": 2, "gpus": 8, "cpus": 64, "memory_gib": 256}, {"cpus": 32}]}')
    assert json.describe() == text.describe()
    gres = parse_gres("gpu:h100:4")
    nodes = [
        Node("g1", frozenset({"IDLE"}), ("gpu",), 64, 0, 262144, 0, gres),
        Node("g2", frozenset({"DOWN"}), ("gpu",), 64, 0, 262144, 0, gres),
    ]
    assert workload.of_nodes(nodes).describe() == "1 nodes, 4 GPUs, 64 CPUs"
    assert workload.of_nodes(nodes).notes == ()


@pytest.mark.parametrize(
    ("gres", "drained", "gpus"),
    [("gpu:h100_1g.10gb:14", "", 2), ("gpu:h100_3g.40gb:4,gpu:h100_1g.10gb:4", "", 3), ("gpu:a30_2g.12gb:2", "", 1),
     ("gpu:h100:2,gpu:h100_1g.10gb:7", "", 3), ("gpu:h100_1g.10gb:14", "gpu:h100_1g.10gb:7", 1)],
)  # fmt: skip
def test_instances_of_mig_are_the_gpus_that_they_make_up(gres: str, drained: str, gpus: int) -> None:
    divided = Node(
        "g", frozenset({"IDLE"}), ("gpu",), 64, 0, 1024, 0, parse_gres(gres), gres_drained=parse_gres(drained)
    )
    found = workload.of_nodes([divided])
    assert found.gpus.tolist() == [gpus]
    (note,) = found.notes
    assert note.startswith(f"{divided.mig} MIG instances of 1 node count as the whole GPUs")


def test_what_a_reservation_keeps_is_a_part_of_the_cluster() -> None:
    """Of 64 CPUs and 4 GPUs it keeps 16 and 2, of which its jobs hold 4 and 1."""
    part = ReservedPart("r", 16, 4, 2, 1)
    kept = Node(
        "g", frozenset({"IDLE"}), ("gpu",), 52, 4, 1024, 0, parse_gres("gpu:4"), parse_gres("gpu:1"),
        gres_drained=parse_gres("gpu:1"), reserved_parts=(part,),
    )  # fmt: skip
    assert workload.of_nodes([kept]).describe() == "1 nodes, 4 GPUs, 64 CPUs"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no node"),
        ("8 gpus", "must look like"),
        ("gpus=8,cores=4", "no key cores"),
        ("cpus=8,cpus=9", "cpus stands there twice"),
        ('{"nodes": [{"cpus": 8, "cpus": 9}]}', "cpus stands there twice"),
        ("gpus=1.5,cpus=4", "gpus is 1.5: must be whole"),
        ("{", "cannot be read as JSON"),
        ('{"nodes": 3}', 'no list "nodes"'),
        ("99999999999*gpus=8,cpus=8", "count is 1e\\+11: must be at most 1e\\+09"),
        ("999999*gpus=8,cpus=8;2*cpus=8", "group 2: with it there are more than 1,000,000 nodes"),
        ('{"nodes": [{"gpus": 8, "cpus": Infinity}]}', "cpus is inf: must be at most"),
        ('{"nodes": [{"cpus": %s}]}' % ("9" * 400), "cpus is 9{40}... .360 more characters.: must be at most 1e.09"),
        ('{"nodes": [{"memory_gib": %s}]}' % ("9" * 400), "memory_gib is 9{40}... .*: must be at most 1e.09"),
        ('{"nodes": ' + "[" * 100_000, "cannot be read as JSON: maximum recursion depth"),
        ('{"nodes": [{"gpus": -1, "cpus": true}]}', "gpus is -1: must be a number of 0 or more"),
    ],
)
def test_clusters_that_are_none_are_refused(text: str, said: str) -> None:
    with pytest.raises(SimulationInputError, match=said):
        workload.parse(text)


def test_lists_are_drawn_by_the_rule_and_from_their_seed() -> None:
    trace = synthetic_trace(20_000, 30.0, 0)
    load = list_from(*trace, 120, 5)
    assert len(load) == 120
    assert load.work_s.mean() == pytest.approx(12_000)
    assert load.submit_s.max() <= 8 * 3600
    assert load.num_gpus.max() <= 8
    assert load.work_s.tolist() == list_from(*trace, 120, 5).work_s.tolist()
    assert load.work_s.tolist() != list_from(*trace, 120, 6).work_s.tolist()


@pytest.mark.shows("missing columns, and negative, infinite and huge numbers, are refused")
def test_numbers_that_no_clock_tells_apart_are_refused() -> None:
    text = "submit_s,run_s,num_gpus\n0,10,1\n1e308,10,1\n0,1e26,1\n0,10,1e308\n"
    assert problems_of(text) == (
        'line 3: submit_s is "1e308": must be at most 1e+10',
        'line 4: run_s is "1e26": must be at most 1e+10',
        'line 5: num_gpus is "1e308": must be at most 1e+10',
    )


@pytest.mark.shows("a malformed table or export is refused with all lines at once, by number")
def test_a_quote_that_is_not_closed_swallows_no_jobs() -> None:
    text = 'submit_s,run_s,num_gpus,job\n0,10,1\n0,10,1,"first\n1,10,1,second\n2,10,1,third\n'
    assert problems_of(text) == (
        "line 2: 3 values and not 4",
        "line 3: unexpected end of data; is a quote of the record that begins here not closed?",
    )
