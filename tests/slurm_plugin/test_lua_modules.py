"""The Lua modules in Lua's own interpreters, 5.1 to 5.4, with a `slurm` table in Slurm's place."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from hetstream.slurm_plugin.install.installation import LUA_DIR, hook_text
from tests.programs import needs

INTERPRETERS = [pytest.param(name, marks=needs(name)) for name in ("lua5.1", "lua5.3", "lua5.4")]

SLURM = """
slurm = { SUCCESS = 0, ERROR = -1 }
function slurm.log_user(...) print("user: " .. string.format(...)) end
function slurm.log_info(...) print("log: " .. string.format(...)) end
NO_VAL, NO_VAL16 = 4294967294, 65534
function job(fields)
  local unset = { num_tasks = NO_VAL, min_nodes = NO_VAL, cpus_per_task = NO_VAL16, ntasks_per_node = NO_VAL16 }
  for name, value in pairs(fields) do unset[name] = value end
  return unset
end
"""


@pytest.fixture(params=INTERPRETERS)
def lua(request: pytest.FixtureRequest, tmp_path: Path) -> object:
    """A function that runs Lua text and returns the lines that it prints."""

    def run(text: str, **environ: str) -> list[str]:
        path = tmp_path / "test.lua"
        path.write_text(SLURM + text)
        environ = {"PATH": "/usr/bin:/bin"} | environ
        done = subprocess.run([request.param, path], env=environ, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout.splitlines()

    return run


def guard(policy: str, before: str = "") -> str:
    return f'{before}\ndofile("{LUA_DIR / "job_submit.lua"}")({policy})\n'


@pytest.mark.shows("all ways to ask for GPUs are understood alike")
@pytest.mark.shows("no way to ask for GPUs goes round quotas or `cpus_per_gpu`")
@pytest.mark.parametrize(
    ("fields", "keep"),
    [
        ('tres_per_node = "gres:gpu:2"', 8),
        ('tres_per_node = "gres/gpu:2"', 8),
        ('tres_per_node = "gres/gpu:h200:2"', 8),
        ('tres_per_node = "gres/gpu:h200=2"', 8),
        ('tres_per_node = "gres/gpu=2"', 8),
        ('tres_per_node = "gpu"', 4),
        ('tres_per_node = "gres:gpu:a:1,gres:gpu:b:1"', 8),
        ('tres_per_node = "gres:gpumem:2"', None),
        ('tres_per_job = "gres/gpu:2"', 8),
        ('tres_per_task = "gres/gpu:2"', 8),
        ('tres_per_task = "cpu=16,gres/gpu:2"', 8),
        ('tres_per_socket = "gres/gpu:1", sockets_per_node = 2', 8),
        ("num_tasks = 4, ntasks_per_tres = 2", 2),
        ("min_nodes = 2, ntasks_per_tres = 1", 4),
        ('tres_per_job = "gres/gpu:2", ntasks_per_tres = 2', 2),
        ('tres_per_node = "gres:gpu:1", min_nodes = 2, ntasks_per_node = 2', 2),
        ('tres_per_job = "gres/gpu:4", num_tasks = 4', 4),
        ('tres_per_job = "gres/gpu:1", num_tasks = 8', 1),
        ('tres_per_job = "gres/gpu:4"', None),
        ('tres_per_job = "gres/gpu:2", min_mem_per_cpu = 1000', None),
        ('tres_per_node = "gres/shard:2"', None),
        ('tres_per_job = "gres/gpu:2", partition = "other"', None),
        ('tres_per_job = "gres/gpu:2", partition = "gpu,other"', None),
        ("", None),
    ],
)
def test_cpus_per_gpu(lua: object, fields: str, keep: int | None) -> None:
    text = guard('{cpus_per_gpu = {max = {gpu = 4}, action = "shrink"}}')
    text += f'local j = job{{partition = "gpu", cpus_per_task = 16, min_cpus = 16, {fields}}}\n'
    text += "local rc = slurm_job_submit(j, {}, 1000)\nprint(rc, j.cpus_per_task, j.tres_per_task)"
    lines = lua(text)  # type: ignore[operator]
    task = "nil" if "tres_per_task" not in fields else f"cpu={keep},gres/gpu:2" if "cpu=" in fields else "gres/gpu:2"
    assert lines[-1].split() == ["0", str(keep or 16), task]
    assert len(lines) == (2 if keep else 1)


@pytest.mark.parametrize(
    ("fields", "action", "lines"),
    [
        # 2 GPUs, at most 4 CPUs for each; --cpus-per-task is not given.
        # Steps have --cpus-per-gpu from their environment, so it is never changed.
        ('cpus_per_tres = "gres:gpu:16"', "shrink", ["Write --cpus-per-gpu=4, and", "-1 gres:gpu:16 nil"]),
        ('cpus_per_tres = "gres/gpu:h200:16"', "shrink", ["Write --cpus-per-gpu=4, and", "-1 gres/gpu:h200:16 nil"]),
        ('cpus_per_tres = "gpu:4"', "shrink", ["0 gpu:4 nil"]),
        ('tres_per_task = "cpu:16"', "shrink", ["--cpus-per-task=16 became 8", "0 nil cpu:8"]),
        ('tres_per_task = "cpu=16", num_tasks = 2', "shrink", ["--cpus-per-task=16 became 4", "0 nil cpu=4"]),
        ('tres_per_task = "cpu=16", min_mem_per_cpu = 5', "shrink", ["0 nil cpu=16"]),
        # Of other things whose names end alike nothing is taken away.
        (
            'tres_per_task = "license/mycpu:2,cpu=16,gres/vcpu:1,license/cpu:4,gres/cpu:30"',
            "shrink",
            ["--cpus-per-task=16 became 8", "0 nil license/mycpu:2,cpu=8,gres/vcpu:1,license/cpu:4,gres/cpu:30"],
        ),
        ('tres_per_task = "license/mycpu:2", cpus_per_task = 16', "shrink", ["became 8", "0 nil license/mycpu:2"]),
        ('tres_per_task = "cpu:1k"', "shrink", ["--cpus-per-task=1024 became 8", "0 nil cpu:8"]),
        ('tres_per_task = "cpu"', "shrink", ["0 nil cpu"]),
        ("num_tasks = 16", "shrink", ["0 nil nil"]),
        ('cpus_per_tres = "gres:gpu:16"', "refuse", ["Write --cpus-per-gpu=4, and", "-1 gres:gpu:16 nil"]),
        ('tres_per_task = "cpu:16"', "refuse", ["Write --cpus-per-task=8, and", "-1 nil cpu:16"]),
        ("num_tasks = 16", "refuse", ["16 CPUs for 2 GPUs in partition gpu", "-1 nil nil"]),
        ("num_tasks = 8", "refuse", ["0 nil nil"]),
        ("num_tasks = 16, cpus_per_task = 1", "refuse", ["Ask for fewer tasks", "-1 nil nil"]),
        ("num_tasks = 16, cpus_per_task = 1", "shrink", ["0 nil nil"]),
        ("num_tasks = 1, pn_min_cpus = 9", "refuse", ["Remove --mincpus", "-1 nil nil"]),
        ("num_tasks = 1, pn_min_cpus = 9", "shrink", ["Remove --mincpus", "-1 nil nil"]),
        ("num_tasks = 1, min_cpus = 9", "refuse", ["Remove --mincpus", "-1 nil nil"]),
        ("num_tasks = 2, min_nodes = 2, pn_min_cpus = 5", "refuse", ["10 CPUs for 2 GPUs", "-1 nil nil"]),
        ("num_tasks = 2, cpus_per_task = 4, min_cpus = 8, pn_min_cpus = 4", "refuse", ["0 nil nil"]),
    ],
)
def test_other_spellings_of_cpus(lua: object, fields: str, action: str, lines: list[str]) -> None:
    text = guard(f'{{cpus_per_gpu = {{max = {{gpu = 4}}, action = "{action}"}}}}')
    text += f'local j = job{{partition = "gpu", tres_per_job = "gres/gpu:2", {fields}}}\n'
    text += "local rc = slurm_job_submit(j, {}, 1000)\nprint(rc, j.cpus_per_tres, j.tres_per_task)"
    said = [" ".join(line.split()) for line in lua(text)]  # type: ignore[operator]
    assert len(said) == len(lines)
    assert said[-1] == lines[-1]
    assert all(part in line for part, line in zip(lines, said, strict=True))


# Each text field of Slurm's that the plugins read, and what a stranger writes there.
TEXT_FIELDS = (
    "account", "comment", "cpus_per_tres", "exc_nodes", "features", "partition", "prefer", "qos", "req_nodes",
    "reservation",
    "tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task",
)  # fmt: skip
# Numbers to Slurm, or what no plain user writes; of the script only whether there is one is looked at.
NO_TEXT_FIELDS = {
    "core_spec", "cores_per_socket", "cpus_per_task", "cron_job", "het_job_offset", "max_cpus", "max_nodes", "min_cpus",
    "min_mem_per_cpu", "min_nodes", "nice", "ntasks_per_core", "ntasks_per_node", "ntasks_per_socket",
    "ntasks_per_tres", "num_tasks", "pn_min_cpus", "priority", "requeue", "shared", "sockets_per_node", "thread_spec",
    "threads_per_core", "user_id",
    "admin_comment", "default_account", "default_qos", "script",
}  # fmt: skip


def test_each_field_that_the_guard_reads_is_tried_or_no_text() -> None:
    text = re.sub(r"--.*", "", (LUA_DIR / "job_submit.lua").read_text())
    names = set(re.findall(r"\b(?:job|change|record)\.(\w+)", text))
    for listed in re.findall(r"local (?:\w+_FIELDS|READ_EARLY) = \{(.*?)\}", text, re.S):
        names |= set(re.findall(r'"(\w+)"', listed))
    assert names == {*TEXT_FIELDS, *NO_TEXT_FIELDS}


FLOODS = (
    " ",
    "a",
    ",",
    "(",
    "7",
    "=",
    "gpu",
    "gres:gpu:",
    "gpu=1,",
    "a ",
    " \t",
    ":1",
    "hetstream:hold ",
    "gres/gpu:7(",
)
POLICIES = (
    "{}", '"broken"',
    '{cpus_per_gpu = {max = {gpu = 4}, action = "shrink"}, opportunistic = {partitions = {"opp"}, qos = {"q"}, '
    'hold = true, managers = {7}}, quota = {partitions = {"gpu"}}}',
)  # fmt: skip
# Milliseconds of the hook, for which the whole cluster waits. (The machine of a test may be busy: CPU time is counted.)
MOST_MS = 50


@pytest.mark.shows("each call of the job_submit hook takes less than 50 ms, whatever stands in its fields")
@pytest.mark.parametrize("num_bytes", [1_500_000, 1024])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_text_holds_up_slurmctld(lua: object, policy: str, num_bytes: int) -> None:
    """Every job of the cluster waits for the hook, and a pattern can take the square of a text's length."""
    floods = ", ".join(f'"{flood}"' for flood in FLOODS)
    text = guard(policy)
    text += f"""
    local plain = {{partition = "gpu,opp", tres_per_job = "gres/gpu:2", script = "x", num_tasks = 2, cpus_per_task = 3}}
    local fields = {{{", ".join(f'"{field}"' for field in TEXT_FIELDS)}}}
    local worst, where = 0, ""
    local function timed(what, call)
      collectgarbage()
      local began = os.clock()
      local rc = call()
      local took = (os.clock() - began) * 1000
      if took > worst then worst, where = took, what end
      return rc
    end
    local text_of = {{}}
    for _, flood in ipairs{{{floods}}} do
      text_of[flood] = (flood:rep(math.ceil({num_bytes} / #flood))):sub(1, {num_bytes})
    end
    for flood, text in pairs(text_of) do
      for _, field in ipairs(fields) do
        for _, partition in ipairs{{"gpu", "opp", "cpu"}} do
          local asked, changed = job(plain), job{{priority = 0, user_id = 1000}}
          asked.partition, asked[field], changed[field] = partition, text, text
          local record = {{partition = partition, user_id = 1000, priority = 5, tres_per_job = "gres/gpu:1",
            comment = ("x "):rep(500), admin_comment = "hetstream:guarded"}}
          timed("submit " .. field .. " " .. flood, function() return slurm_job_submit(asked, {{}}, 1000) end)
          timed("modify " .. field .. " " .. flood, function() return slurm_job_modify(changed, record, {{}}, 1000) end)
          record[field] = #text <= 1024 and text or record[field]
          timed("record " .. field .. " " .. flood, function()
            return slurm_job_modify(job{{priority = 0}}, record, {{}}, 1000)
          end)
        end
      end
    end
    print("worst", worst < {MOST_MS} or where .. " " .. worst)
    """
    lines = lua(text)  # type: ignore[operator]
    assert lines[-1] == "worst\ttrue"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("field", ["comment", "tres_per_node", "partition"])
@pytest.mark.parametrize(
    "hook", ["slurm_job_submit(j, {}, 1000)", "slurm_job_modify(j, job{partition = 'gpu'}, {}, 1000)"]
)
def test_a_text_beyond_slurms_own_limit_is_refused_before_it_is_read(
    lua: object, policy: str, field: str, hook: str
) -> None:
    text = guard(policy) + f'local j = job{{partition = "gpu"}}\nj.{field} = (" "):rep(1025)\nprint({hook})'
    *_, said, code = lua(text)  # type: ignore[operator]
    assert code == "-1"
    assert said == f"user: hetstream: {field} has more than 1024 characters (site rule: length)"


def test_the_default_partition_counts_and_a_refusal_says_what_to_write(lua: object) -> None:
    text = guard("{cpus_per_gpu = {max = {gpu = 4}}}")
    text += "local parts = {cpu = {flag_default = 0}, gpu = {flag_default = 1}}\n"
    text += 'print(slurm_job_submit(job{cpus_per_task = 16, tres_per_job = "gres/gpu:1"}, parts, 1000))'
    assert lua(text) == [  # type: ignore[operator]
        "user: hetstream: 16 CPUs for 1 GPU in partition gpu, where 4 for each GPU are allowed. Write "
        "--cpus-per-task=4, and let data workers load the data: #HETSTREAM --data-workers=0-4 "
        "(site rule: cpus_per_gpu)",
        "-1",
    ]


@pytest.mark.parametrize("request_", ["gres/gpu:1,gres/gpu:0", "gres/gpu:1,gres/gpu:2", "gres/gpu:a:1,gres/gpu:2"])
def test_gpus_that_are_named_twice_are_not_counted(lua: object, request_: str) -> None:
    """Of `gpu:2,gpu:0` slurmctld makes two GPUs, and of `gpu:1,gpu:2` two as well."""
    text = guard("{cpus_per_gpu = {max = {gpu = 2}}}")
    text += f'print(slurm_job_submit(job{{partition = "gpu", tres_per_node = "{request_}"}}, {{}}, 1000))'
    said, code = lua(text)  # type: ignore[operator]
    assert (code, "cannot be read. Write --gpus=N" in said) == ("-1", True)


@pytest.mark.parametrize(
    "fields", ['qos = "OPPQ"', 'qos = "oppq"', 'default_qos = "oppq"', 'qos = "", default_qos = "OppQ"']
)
def test_a_qos_is_one_name_in_any_case_and_by_default(lua: object, fields: str) -> None:
    """As slurmctld reads it (assoc_mgr compares without case); the default is that of the job's association."""
    text = guard('{opportunistic = {qos = {"OppQ"}, hold = true}}')
    text += f"""
    print(slurm_job_submit(job{{partition = "gpu", tres_per_job = "gres/gpu:1", {fields}}}, {{}}, 1000))
    local j = job{{partition = "gpu", {fields}}}
    j.script = "x"
    print(slurm_job_submit(j, {{}}, 1000), j.priority)
    print(slurm_job_modify(job{{qos = "OPPQ"}}, {{partition = "gpu"}}, {{}}, 1000))
    """
    lines = [line for line in lua(text) if not line.startswith(("user:", "log:"))]  # type: ignore[operator]
    assert lines == ["-1", "0\t0", "-1"]


def test_a_partition_with_an_opportunistic_qos_is_one(lua: object) -> None:
    """Slurm applies that QOS to all of its jobs, whose own is another one."""
    text = guard('{opportunistic = {partitions = {"opp"}, qos = {"OppQ"}, hold = true, managers = {64}}}')
    text += """
    local parts = {free = {qos = "oppq", state_up = 3}, gpu = {qos = "normal", state_up = 3}, opp = {state_up = 3}}
    local function submit(fields)
      local j = job(fields)
      j.script, j.qos = "x", "normal"
      print(slurm_job_submit(j, parts, 1000), j.priority, j.requeue)
    end
    submit{partition = "free", tres_per_job = "gres/gpu:1"}
    submit{partition = "free"}
    submit{partition = "free,opp"}
    submit{partition = "gpu,free"}
    submit{partition = "gpu", tres_per_job = "gres/gpu:1"}
    print(slurm_job_modify(job{partition = "free"}, {partition = "gpu", qos = "normal"}, parts, 1000))
    print(slurm_job_modify(job{priority = 5}, {partition = "free", qos = "normal"}, parts, 1000))
    print(slurm_job_modify(job{tres_per_node = "gres/gpu:1"}, {partition = "free", qos = "normal"}, parts, 1000))
    """
    lines = [line for line in lua(text) if not line.startswith(("user:", "log:"))]  # type: ignore[operator]
    assert lines == ["-1\tnil\tnil", "0\t0\t1", "0\t0\t1", "-1\tnil\tnil", "0\tnil\tnil", "-1", "-1", "-1"]


def test_a_closed_partition_is_its_alternate(lua: object) -> None:
    """slurmctld hands its jobs on, also through several that are closed (_alt_part_test)."""
    text = guard(
        '{cpus_per_gpu = {max = {gpu = 2}}, opportunistic = {partitions = {"opp"}, hold = true, managers = {64}}}'
    )
    text += """
    local parts = {
      open = {alternate = "opp", state_up = 3}, down = {alternate = "opp", state_up = 1},
      drain = {alternate = "opp", state_up = 2}, closed = {alternate = "drain", state_up = 0},
      circle = {alternate = "circle", state_up = 0}, opp = {state_up = 3},
      old = {alternate = "gpu", state_up = 0}, gpu = {state_up = 3}, unknown = {alternate = "opp"},
    }
    local function submit(fields)
      local j = job(fields)
      j.script = "x"
      print(j.partition, slurm_job_submit(j, parts, 1000), j.priority)
    end
    for _, name in ipairs{"open", "down", "drain", "closed", "circle", "unknown"} do
      submit{partition = name, tres_per_job = "gres/gpu:1"}
    end
    for _, name in ipairs{"drain", "closed", "open", "opp,drain", "open,drain"} do submit{partition = name} end
    submit{partition = "old", tres_per_job = "gres/gpu:1", cpus_per_task = 4}
    print(slurm_job_modify(job{partition = "drain"}, {partition = "gpu"}, parts, 1000))
    print(slurm_job_modify(job{partition = "open"}, {partition = "gpu"}, parts, 1000))
    """
    lines = [line.split() for line in lua(text) if not line.startswith(("user:", "log:"))]  # type: ignore[operator]
    assert lines == [
        ["open", "0", "nil"], ["down", "0", "nil"], ["drain", "-1", "nil"], ["closed", "-1", "nil"],
        ["circle", "0", "nil"],
        ["unknown", "-1", "nil"], ["drain", "0", "0"], ["closed", "0", "0"], ["open", "0", "nil"],
        ["opp,drain", "0", "0"], ["open,drain", "-1", "nil"], ["old", "-1", "nil"], ["-1"], ["0"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ('default_account = "a", tres_per_job = "gres/gpu:1"', "-1"),
        ('account = "a", tres_per_job = "gres/gpu:1"', "-1"),
        ('account = "a", ntasks_per_tres = 1', "-1"),
        ('account = "a", shared = 0', "-1"),
        ('account = "a", default_qos = "normal", tres_per_job = "gres/gpu:1"', "0"),
        ('account = "a", qos = "normal", tres_per_job = "gres/gpu:1"', "0"),
        ('account = "a"', "0"),
        ('tres_per_job = "gres/gpu:1"', "0"),
    ],
)
def test_gpus_need_a_qos_where_nobody_can_say_which_one_slurm_takes(lua: object, fields: str, code: str) -> None:
    """An association that may have one QOS alone gets that, and no hook is told."""
    text = guard('{opportunistic = {qos = {"oppq"}, managers = {64}}}')
    text += f'print(slurm_job_submit(job{{partition = "gpu", {fields}}}, {{}}, 1000))\n'
    text += f'print(slurm_job_submit(job{{partition = "gpu", {fields}}}, {{}}, 64))'
    *said, ours, managers = lua(text)  # type: ignore[operator]
    assert (ours, managers) == (code, "0")
    assert ("Write --qos=NAME" in "".join(said)) == (code == "-1")


@pytest.mark.parametrize("flag", ["true", "1"])
def test_a_job_of_scrontab_is_refused_where_the_site_starts_the_jobs(lua: object, flag: str) -> None:
    """Slurm lets nobody release it ("Cannot modify scrontab jobs"), so that it would wait for ever."""
    text = guard('{opportunistic = {partitions = {"opp"}, hold = true}, quota = {partitions = {"gpu"}}}')
    text += f"""
    for _, fields in ipairs{{{{"opp"}}, {{"gpu", "gres/gpu:1"}}, {{"gpu"}}, {{"cpu"}}}} do
      local j = job{{partition = fields[1], tres_per_job = fields[2], script = "x", cron_job = {flag}}}
      print(slurm_job_submit(j, {{}}, 1000), j.priority)
    end
    """
    lines = [line for line in lua(text) if not line.startswith(("user:", "log:"))]  # type: ignore[operator]
    assert lines == ["-1\tnil", "-1\tnil", "0\tnil", "0\tnil"]


def test_a_reservation_brings_no_partition_of_its_own(lua: object) -> None:
    """Slurm takes the reservation's partition in place of the default one, behind the hook."""
    text = guard('{opportunistic = {partitions = {"opp"}, hold = true, managers = {64}}}')
    text += """
    local parts = {cpu = {flag_default = 1}}
    for _, uid in ipairs{1000, 64} do print(slurm_job_submit(job{reservation = "r"}, parts, uid)) end
    print(slurm_job_submit(job{reservation = "r", partition = "cpu"}, parts, 1000))
    """
    said, *codes = lua(text)  # type: ignore[operator]
    assert ("Write --partition beside --reservation" in said, codes) == (True, ["-1", "0", "0"])


@pytest.mark.shows("an opportunistic job is held where the policy says so, and its owner cannot release it")
def test_jobs_are_opportunistic_by_partition_or_qos(lua: object) -> None:
    text = guard('{opportunistic = {partitions = {"opp"}, qos = {"spare"}, hold = true, managers = {64}}}')
    text += """
    for _, fields in ipairs{{partition = "opp"}, {partition = "gpu", qos = "spare"}, {partition = "gpu"}} do
      local j = job(fields)
      j.script = "#!/bin/sh"
      print(slurm_job_submit(j, {}, 1000), j.priority, j.requeue)
    end
    local record = {partition = "opp"}
    print(slurm_job_modify(job{priority = 7}, record, {}, 0), slurm_job_modify(job{priority = 7}, record, {}, 64))
    print(slurm_job_modify(job{partition = "opp"}, {partition = "gpu"}, {}, 1000))
    print(slurm_job_modify(job{qos = "normal"}, {partition = "gpu", qos = "spare"}, {}, 1000))
    print(slurm_job_modify(job{comment = "x", priority = NO_VAL, nice = NO_VAL}, record, {}, 1000))
    """
    assert lua(text) == [  # type: ignore[operator]
        "log: hetstream: class=opportunistic because of partition opp: held", "0\t0\t1",
        "log: hetstream: class=opportunistic because of QOS spare: held", "0\t0\t1",
        "0\tnil\tnil", "0\t0",
        "user: hetstream: a job does not become an opportunistic one (partition opp). scancel it and submit it there "
        "(site rule: opportunistic)", "-1",
        "user: hetstream: an opportunistic job (QOS spare) keeps its QOS. scancel it and submit with the other one "
        "(site rule: opportunistic)", "-1", "0",
    ]  # fmt: skip


QUOTA = '{opportunistic = {partitions = {"opp"}, hold = true, managers = {7}}, quota = {partitions = {"gpu"}}}'
OPPORTUNISTIC = '{opportunistic = {partitions = {"opp", "spare"}, hold = true, managers = {64}}}'


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ('partition = "gpu", tres_per_node = "gres:opp:p0:1"', "the site gives out GRES opp"),
        ('partition = "gpu", tres_per_job = "gres/gpu:1", tres_per_node = "gres/opp=1"', "the site gives out GRES opp"),
        ('partition = "opp", tres_per_task = "cpu=2,gres/opp:p0:1"', "the site gives out GRES opp"),
        ('partition = "gpu", comment = "hetstream:gpu=0"', "with hetstream:gpu= is the site's"),
        ('partition = "opp,gpu"', "cannot name other partitions, too"),
        ('partition = "gpu,opp"', "cannot name other partitions, too"),
        ('partition = "opp", script = false', "is a batch job"),
        ('partition = "opp,spare", comment = "hetstream: mine"', None),
        ('partition = "opp", script = false, het_job_offset = 1', None),
        ('partition = "gpu", tres_per_node = "gres:oppose:1"', None),
        ('partition = "gpu", tres_per_node = "xgres:opp:p0:1"', "the site gives out GRES opp"),
        ('partition = "gpu", tres_per_task = "cpu=1,license/opportunity=1"', None),
    ],
)
def test_what_belongs_to_the_packer_is_for_nobody_else(lua: object, fields: str, said: str | None) -> None:
    text = guard(OPPORTUNISTIC) + f"print(slurm_job_submit(job{{script = 'x', {fields}}}, {{}}, 1000))"
    *told, code = lua(text)  # type: ignore[operator]
    assert code == ("0" if said is None else "-1")
    assert said is None or said in told[0]


@pytest.mark.shows("the packer's marks are refused in any word of a Comment, whatever the policy")
@pytest.mark.parametrize(
    "policy", [*POLICIES, "{quota = {partitions = {'gpu'}}}", "{opportunistic = 7, quota = 7}", "nil"]
)
def test_a_mark_is_refused_in_any_word_whatever_the_policy(lua: object, policy: str) -> None:
    marks = ("hetstream:gpu=0,1", "hetstream:holds=7@0", "hetstream:upgrade=7:0@9999999999")
    before = ("", " ", "mine ", "hetstream:hold ", "\\t", "\\n", "\\226\\128\\131", "x;", "hetstream:")
    comments = [f"{word}{mark}" for word in before for mark in marks]
    text = guard(policy) + "".join(
        f"""
    for _, partition in ipairs{{"gpu", "opp", "cpu"}} do
      local fields = {{partition = partition, script = "x", user_id = 1000, comment = "{comment}"}}
      print(slurm_job_submit(job(fields), {{}}, 1000))
      print(slurm_job_modify(job{{comment = "{comment}"}}, {{partition = partition, user_id = 1000}}, {{}}, 1000))
    end
    """
        for comment in comments
    )
    codes = [line for line in lua(text) if not line.startswith(("user: ", "log: "))]  # type: ignore[operator]
    assert len(codes) == 6 * len(comments)
    assert [comments[at // 6] for at, code in enumerate(codes) if code != "-1"] == []


def test_the_packer_itself_may(lua: object) -> None:
    fields = "partition = 'gpu', tres_per_node = 'gres:opp:p0:1', comment = 'hetstream:gpu=0'"
    assert lua(guard(OPPORTUNISTIC) + f"print(slurm_job_submit(job{{{fields}}}, {{}}, 64))") == ["0"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("change", "record", "said"),
    [
        ('partition = "opp,gpu"', "", "keeps its partition"),
        ("requeue = 0", "", "can be requeued"),
        ('tres_per_node = "gres:opp:p1:1"', "", "the site gives out GRES opp"),
        ('comment = "hetstream:gpu=1"', "", "is the site's"),
        ('comment = "mine"', 'comment = "hetstream:gpu=0"', "no other comment"),
        ('req_nodes = "g1"', 'comment = "hetstream:gpu=0"', "no other req_nodes"),
        ('tres_per_node = "gres:nvme:1"', 'comment = "hetstream:gpu=0"', "no other tres_per_node"),
        ('req_nodes = ""', 'comment = "hetstream:gpu=0"', "no other req_nodes"),
        ('req_nodes = "g1", comment = "mine"', "", None),
        ("time_limit = 5", 'comment = "hetstream:gpu=0"', None),
    ],
)
def test_a_job_that_has_a_place_keeps_it(lua: object, change: str, record: str, said: str | None) -> None:
    text = guard(OPPORTUNISTIC)
    for uid in (1000, 64):
        text += f"print(slurm_job_modify(job{{{change}}}, {{partition = 'opp', {record}}}, {{}}, {uid}))\n"
    lines = lua(text)  # type: ignore[operator]
    assert lines[-1] == "0"
    assert lines[:-1] == ["0"] if said is None else said in lines[0]


@pytest.mark.parametrize(
    ("fields", "uid", "priority"),
    [
        ('partition = "gpu", tres_per_job = "gres/gpu:1"', 1000, "0"),
        ('partition = "cpu,gpu", tres_per_node = "gres:gpu:1"', 1000, "0"),
        ('partition = "gpu"', 1000, "nil"),
        ('partition = "cpu", tres_per_job = "gres/gpu:1"', 1000, "nil"),
        ('partition = "gpu", tres_per_job = "gres/gpu:1", comment = "hetstream:holds=7@0"', 7, "nil"),
    ],
)
def test_jobs_with_gpus_wait_where_these_have_quotas(lua: object, fields: str, uid: int, priority: str) -> None:
    text = guard(QUOTA) + f"local j = job{{{fields}}}\nprint(slurm_job_submit(j, {{}}, {uid}), j.priority)"
    assert lua(text)[-1].split() == ["0", priority]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("shared = 0", "--exclusive takes all GPUs"),
        ('shared = 0, partition = "opp", script = "x"', "cannot have whole nodes"),
        ('shared = 0, tres_per_node = "gres:gpu:1"', "--exclusive takes all GPUs"),
        ('tres_per_socket = "gres:gpu:1"', "--gpus-per-socket"),
        ('tres_per_node = "gres:gpu:1", min_nodes = 1, max_nodes = 2', "--nodes=N"),
        ('tres_per_task = "gres:gpu:1", num_tasks = 2, min_nodes = 1, max_nodes = 2', "--nodes=N"),
        ('tres_per_node = "gres:gpu:2", min_cpus = 17', "--nodes=N"),  # not by sbatch: a program with libslurm
        ('tres_per_node = "gres:gpu:2", min_cpus = 17, cpus_per_task = 8', "--nodes=N"),
        ('tres_per_node = "gres:gpu:2", min_cpus = 8, cpus_per_task = 8', None),
        ('tres_per_node = "gres:gpu:2", min_cpus = 1', None),
        ('tres_per_node = "gres:gpu:2", min_cpus = 8, cpus_per_tres = "gres:gpu:4"', None),
        ('tres_per_node = "gres:gpu:2", min_cpus = 9, cpus_per_tres = "gres/gpu:4"', "--nodes=N"),
        ('tres_per_node = "gres:gpu:2", min_cpus = 17, min_nodes = 2, max_nodes = 2', None),
        ('tres_per_node = "gres:gpu:1", min_cpus = 32, min_nodes = 1, max_nodes = 0', "--nodes=N"),
        ('tres_per_node = "gres:gpu:1", num_tasks = 16, min_nodes = 1, max_nodes = 0', "--nodes=N"),
        ('tres_per_task = "gres:gpu:1", num_tasks = 1, ntasks_per_node = 2', "--ntasks=N"),
        ('tres_per_task = "gres:gpu:1", num_tasks = 3, ntasks_per_node = 2', "--ntasks=N"),
        (
            'tres_per_task = "gres:gpu:1", num_tasks = 3, ntasks_per_node = 2, min_nodes = 2, max_nodes = 2',
            "--ntasks=N",
        ),
        ('tres_per_task = "gres:gpu:1", num_tasks = 4, ntasks_per_node = 2, min_nodes = 2, max_nodes = 2', None),
        ('tres_per_task = "gres:gpu:1", num_tasks = 4, ntasks_per_node = 2', None),
        ('tres_per_task = "gres:gpu:1", ntasks_per_node = 2, min_nodes = 2, max_nodes = 2', None),
        ('tres_per_task = "gres:gpu:1", num_tasks = 0, pn_min_cpus = 8', "--ntasks=N"),
        ('tres_per_task = "gres:gpu:1", num_tasks = 0, min_nodes = 1, max_nodes = 1', "--ntasks=N"),
        ('tres_per_task = "gres:gpu:1"', "--ntasks=N"),
        ('tres_per_node = "gres:gpu:1", num_tasks = 16', "--nodes=N"),
        ('tres_per_node = "gres:gpu:1", num_tasks = 1', None),
        ('tres_per_node = "gres:gpu:1", num_tasks = 16, min_nodes = 2, max_nodes = 2', None),
        ('tres_per_task = "gres:gpu:1", num_tasks = 16', None),
        ('tres_per_job = "gres:gpu:2", num_tasks = 16, min_nodes = 1, max_nodes = 2', None),
        ("min_nodes = 1, max_nodes = 2, num_tasks = 16", None),
    ],
)
def test_a_job_says_how_many_gpus_it_takes_where_these_have_quotas(lua: object, fields: str, said: str | None) -> None:
    text = guard(QUOTA) + f'print(slurm_job_submit(job{{partition = "gpu", {fields}}}, {{}}, 1000))'
    lines = lua(text)  # type: ignore[operator]
    assert lines[-1] == ("0" if said is None else "-1")
    assert said is None or said in lines[0]


@pytest.mark.parametrize(
    ("change", "record", "said"),
    [
        ("priority = 5", "", "are started by the site"),
        ("nice = 0", "", "are started by the site"),
        ('tres_per_node = "gres:gpu:8"', "", "have quotas"),
        ('tres_per_node = "gres:gpu:8"', 'tres_per_job = ""', "have quotas"),
        ('tres_per_job = "gres:gpu:0"', "", "keep their GPUs"),
        ('tres_per_job = ""', "", "keep their GPUs"),
        ('tres_per_node = "gres:gpu: 0:0"', "", "have quotas"),
        ('tres_per_node = "gres:license:1"', "", "keep their GPUs"),
        ('partition = "gpu"', 'partition = "cpu"', "GPUs of partition gpu have quotas"),
        ('account = "b"', 'account = "a"', "keep their account"),
        ("min_nodes = 4", "min_nodes = 1", "keep their min_nodes"),
        ("max_nodes = 4", "max_nodes = 1", "keep their max_nodes"),
        ("num_tasks = 4", "num_tasks = 1", "keep their num_tasks"),
        ("shared = 0", 'tres_per_job = ""', "--exclusive takes all GPUs"),
        ('comment = "hetstream:upgrade=7:0@9"', "", "is the site's"),
        ('partition = "opp"', "", "does not become an opportunistic one"),
        ("time_limit = 5", "", None),
        ("priority = 5", 'tres_per_job = ""', None),
        ("priority = 5", 'partition = "cpu"', None),
        ('comment = "mine"', "", None),
    ],
)
def test_nobody_gets_round_the_quotas(lua: object, change: str, record: str, said: str | None) -> None:
    fields = f'partition = "gpu", tres_per_job = "gres/gpu:1", {record}'
    text = guard(QUOTA) + f"print(slurm_job_modify(job{{{change}}}, {{{fields}}}, {{}}, 1000))"
    lines = lua(text)  # type: ignore[operator]
    assert lines[-1] == ("0" if said is None else "-1")
    assert said is None or said in lines[0]


# Of such texts slurmctld makes GPUs that no plain reading counts: numbers are strtoull's, with units and signs, and of
# two fields one may raise the other (gres.c, _test_gres_cnt; slurm_protocol_defs.c, slurm_get_next_tres).
NOT_COUNTED_PLAINLY = (
    'tres_per_node = "gres:gpu:2,gres:gpu:0"', 'tres_per_node = "gres:gpu:4,gres:gpu:a:0"',
    'tres_per_node = "gres:gpu: 0:0"', 'tres_per_node = "gres:gpu:x/y:0"', 'tres_per_node = "gres:gpu:2T"',
    'tres_per_node = "gres:gpu:2KB"', 'tres_per_node = "gres:gpu:-18446744073709551614"',
    'tres_per_job = "gres/gpu:1", tres_per_task = "gres/gpu:1", num_tasks = 4',
    'tres_per_job = "gres/gpu:0", tres_per_node = "gres/gpu:4"',
    'tres_per_job = "gres/gpu:1", tres_per_node = "gres/gpu:4"',
)  # fmt: skip


@pytest.mark.parametrize("fields", NOT_COUNTED_PLAINLY)
def test_gpus_that_are_not_counted_plainly_are_refused(lua: object, fields: str) -> None:
    text = guard(QUOTA.removesuffix("}") + ", cpus_per_gpu = {max = {ruled = 2}}}")
    text += f"""
    for _, partition in ipairs{{"gpu", "opp", "ruled"}} do
      print(slurm_job_submit(job{{partition = partition, script = "x", cpus_per_task = 2, {fields}}}, {{}}, 1000))
      print(slurm_job_modify(job{{{fields}}}, {{partition = partition, tres_per_job = "gres/gpu:1"}}, {{}}, 1000))
    end
    print(slurm_job_submit(job{{partition = "cpu", script = "x", {fields}}}, {{}}, 1000))
    """
    codes = [line for line in lua(text) if not line.startswith(("user: ", "log: "))]  # type: ignore[operator]
    assert codes == ["-1"] * 6 + ["0"]


@pytest.mark.parametrize(
    "fields",
    ['cpus_per_tres = "gres:gpu:8,gres:gpu:1"', 'cpus_per_tres = "gres:gpu: 8"', 'tres_per_task = "cpu:16,cpu:1"',
     'tres_per_task = "cpu= 16"', 'cpus_per_task = 1, tres_per_task = "cpu:16"'],
)  # fmt: skip
def test_cpus_that_are_not_counted_plainly_are_too_many_or_refused(lua: object, fields: str) -> None:
    text = guard("{cpus_per_gpu = {max = {gpu = 4}}}")
    text += f'print(slurm_job_submit(job{{partition = "gpu", tres_per_job = "gres/gpu:1", {fields}}}, {{}}, 1000))'
    assert lua(text)[-1] == "-1"  # type: ignore[operator]


BY_QOS = '{opportunistic = {partitions = {}, qos = {"OppQ"}, hold = true, managers = {7}}}'


@pytest.mark.parametrize(
    ("fields", "code", "priority"),
    [
        ("qos = \"'oppq'\"", "0", "0"),
        ('qos = "normal,oppq"', "-1", "nil"),
        ('default_qos = "normal", tres_per_job = "gres/gpu:1"', "0", "nil"),
        ('default_qos = "oppq", tres_per_job = "gres/gpu:1"', "-1", "nil"),
        ('default_qos = "oppq", shared = 0', "-1", "nil"),
        ('default_qos = "oppq"', "0", "0"),
        ('tres_per_job = "gres/gpu:1", qos = "normal"', "0", "nil"),
        ("", "0", "nil"),
    ],
)
def test_opportunistic_qos_of_all_spellings_take_no_gpus(lua: object, fields: str, code: str, priority: str) -> None:
    text = guard(BY_QOS) + f'local j = job{{partition = "gpu", script = "x", {fields}}}\n'
    text += "print(slurm_job_submit(j, {}, 1000), j.priority, j.partition)"
    assert lua(text)[-1].split() == [code, priority, "gpu"]  # type: ignore[operator]


def test_no_change_leads_into_another_qos(lua: object) -> None:
    text = (
        guard(BY_QOS)
        + """
    for _, qos in ipairs{"OPPQ", "'oppq'", "normal,oppq", "", "high"} do
      print(slurm_job_modify(job{qos = qos}, {partition = "gpu", qos = "normal"}, {}, 1000))
    end
    print(slurm_job_modify(job{qos = ""}, {partition = "gpu", qos = "OppQ"}, {}, 1000))
    """
    )
    codes = [line for line in lua(text) if not line.startswith("user: ")]  # type: ignore[operator]
    assert codes == ["-1"] * 4 + ["0", "-1"]


def test_a_job_without_a_partition_is_given_the_default_one(lua: object) -> None:
    """Slurm would take that of a reservation which `scontrol update` brings later."""
    text = guard(QUOTA) + "local j = job{}\nprint(slurm_job_submit(j, {cpu = {flag_default = 1}}, 1000), j.partition)"
    assert lua(text) == ["0\tcpu"]  # type: ignore[operator]


@pytest.mark.parametrize("names", ["gpu,", ",gpu", "gpu,,cpu", "gpu ,cpu", "opp,", " opp", ","])
def test_an_empty_name_of_a_partition_is_refused(lua: object, names: str) -> None:
    text = guard(QUOTA) + f'print(slurm_job_submit(job{{partition = "{names}", script = "x"}}, {{}}, 1000))\n'
    text += f'print(slurm_job_modify(job{{partition = "{names}"}}, {{partition = "cpu"}}, {{}}, 1000))'
    codes = [line for line in lua(text) if not line.startswith("user: ")]  # type: ignore[operator]
    assert codes == ["-1", "-1"]


@pytest.mark.parametrize(("num", "code"), [(1009, "0"), (1010, "-1")])
def test_a_comment_without_room_for_the_hold_is_refused_with_its_length(lua: object, num: int, code: str) -> None:
    text = (
        guard(QUOTA)
        + f"""
    local comment = ("x"):rep({num})
    local held = job{{partition = "opp", script = "x", priority = 0, comment = comment}}
    print(slurm_job_submit(held, {{}}, 1000))
    print(slurm_job_modify(job{{priority = 0}}, {{partition = "opp", user_id = 1000, comment = comment}}, {{}}, 1000))
    """
    )
    lines = lua(text)  # type: ignore[operator]
    assert [line for line in lines if not line.startswith(("user: ", "log: "))] == [code, code]
    text_of = (
        "user: hetstream: comment has more than 1009 characters: hetstream adds hetstream:hold (site rule: length)"
    )
    assert {line for line in lines if line.startswith("user: ")} == (set() if code == "0" else {text_of})


# Each way to GPUs of slurmctld's (gres.c, job_mgr.c and slurm.h of 22.05, 24.11, 26.05), also by an RPC of one's own.
WAYS_TO_GPUS = (
    'tres_per_job = "gres/gpu:1"', 'tres_per_job = "gres:gpu:1"', 'tres_per_node = "gres/gpu"',
    'tres_per_node = "gres:gpu:a:1"', 'tres_per_task = "cpu=2,gres/gpu:1", num_tasks = 1',
    'tres_per_socket = "gres/gpu:1"', "num_tasks = 2, ntasks_per_tres = 1", "min_nodes = 2, ntasks_per_tres = 1",
    "ntasks_per_tres = 1", 'tres_per_node = "x,gres:gpu:1"', 'tres_per_node = "xgres:gpu:1"',
    'tres_per_job = "gresgpu:1"', 'tres_per_job = "gres/gres/gpu:1"', 'tres_per_node = "gres:gpu: 1"',
    'tres_per_node = "gres:gpu:+1"', 'tres_per_node = "gres:gpu:1KiB"',
    'tres_per_node = "gres:gpu:99999999999999999999"', 'tres_per_node = "license/gres/gpu:1"',
    'tres_per_node = "gres:gpu:4,gres:gpu:0,gres:gpu: 0:0"', 'tres_per_node = "gres:gpu:2,gres:gpu:0"',
    'tres_per_job = "gres/gpu:2,gres/gpu:0"', 'tres_per_task = "gres/gpu:1,gres/gpu:0", num_tasks = 1',
    'tres_per_node = "gres/gpu:a:2,gres/gpu:a:0"', 'tres_per_node = "gres/gpu:a:0,gres/gpu:0,gres/gpu:0"',
    'tres_per_node = "gres/gpu: 0:0"', 'tres_per_node = "gres/gpu:x/y:0"', 'tres_per_node = "gres/gpu:0,gres/gpu:a:0"',
    'tres_per_node = "gres/shard:4"', 'tres_per_node = "gres:mps:100"', "shared = 0", "shared = 4", "shared = 65535",
    "core_spec = 1", "thread_spec = 1",
)  # fmt: skip


@pytest.mark.shows("no way to ask for GPUs goes round quotas or `cpus_per_gpu`")
@pytest.mark.parametrize("fields", WAYS_TO_GPUS)
def test_no_way_to_gpus_goes_round_the_quotas_or_into_an_opportunistic_partition(lua: object, fields: str) -> None:
    """What is not understood could name GPUs: the job is held where they have quotas, or refused."""
    text = (
        guard(QUOTA)
        + f"""
    local j = job{{partition = "gpu", script = "x", {fields}}}
    local rc = slurm_job_submit(j, {{}}, 1000)
    print(rc, j.priority, j.admin_comment)
    print(slurm_job_submit(job{{partition = "opp", script = "x", {fields}}}, {{}}, 1000))
    print(slurm_job_modify(job{{{fields}}}, {{partition = "gpu"}}, {{}}, 1000))
    print(slurm_job_modify(job{{{fields}}}, {{partition = "gpu", admin_comment = "hetstream:guarded"}}, {{}}, 1000))
    print(slurm_job_modify(job{{{fields}}}, {{partition = "opp"}}, {{}}, 1000))
    """
    )
    codes = [line for line in lua(text) if not line.startswith(("user: ", "log: "))]  # type: ignore[operator]
    assert codes[0] in ("-1\tnil\tnil", "0\t0\thetstream:guarded")
    assert codes[1:] == ["-1"] * 4


@pytest.mark.parametrize(
    "fields", ["", 'tres_per_node = "gres:nvme:1"', 'tres_per_node = "gres/gpumem:2"', 'tres_per_job = "gres/gpu:0"',
               'tres_per_task = "cpu=4,license/gputool=1"', "shared = 1", "shared = 2", "ntasks_per_tres = 0"],
)  # fmt: skip
def test_a_job_without_gpus_waits_for_no_quota(lua: object, fields: str) -> None:
    text = (
        guard(QUOTA)
        + f'local j = job{{partition = "gpu", {fields}}}\nprint(slurm_job_submit(j, {{}}, 1000), j.priority)'
    )
    expected = ["-1", "nil"] if "license" in fields else ["0", "nil"]
    assert lua(text)[-1].split() == expected  # type: ignore[operator]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("num_tasks = 4, ntasks_per_tres = 2", "gres:gpu:2"),
        ("num_tasks = 4, ntasks_per_tres = 2, partition = 'cpu,gpu'", "gres:gpu:2"),
        ('num_tasks = 4, ntasks_per_tres = 2, min_nodes = 1, max_nodes = 1, tres_per_node = "gres/gpu:2"', "nil"),
        ("num_tasks = 3, ntasks_per_tres = 2", "--ntasks is not --ntasks-per-gpu"),
        ("num_tasks = 1, ntasks_per_tres = 2", "--ntasks is not --ntasks-per-gpu"),
        ("ntasks_per_tres = 2", "says no number of GPUs"),
        ('num_tasks = 64, ntasks_per_tres = 1, tres_per_job = "gres/gpu:1"', "--ntasks is not --ntasks-per-gpu"),
        ('tres_per_job = "gres/gpu:a:1", tres_per_node = "gres/gpu:b:4"', "two of its options name GPUs"),
        ('tres_per_job = "gres/gpu:2", tres_per_node = "gres/gpu:1"', "two of its options name GPUs"),
        ('tres_per_job = "gres/gpu:1", num_tasks = 3, ntasks_per_node = 1', "more nodes than it has GPUs"),
        ('tres_per_job = "gres/gpu:1", num_tasks = 20, cpus_per_task = 2', "more nodes than it has GPUs"),
        ('tres_per_job = "gres/gpu:2", num_tasks = 20, min_nodes = 1, max_nodes = 2', "gres/gpu:2"),
        ('tres_per_job = "gres/gpu:2", num_tasks = 2, min_nodes = 1, max_nodes = 3', "more nodes than it has GPUs"),
        ('tres_per_job = "gres/gpu:4", num_tasks = 4', "gres/gpu:4"),
        ('tres_per_job = "gres/gpu:4"', "gres/gpu:4"),
    ],
)
def test_gpus_that_slurm_makes_of_tasks_are_written_down(lua: object, fields: str, said: str) -> None:
    """The record says them then, so that who waits for quota, and with how many GPUs, is seen by all."""
    text = (
        guard(QUOTA)
        + f'local j = job{{partition = "gpu", {fields}}}\nprint(slurm_job_submit(j, {{}}, 1000), j.tres_per_job)'
    )
    lines = lua(text)  # type: ignore[operator]
    if "gpu:" in said or said == "nil":
        assert lines[-1].split() == ["0", said]
    else:
        assert said in lines[-2]


@pytest.mark.parametrize(
    "change",
    [
        "num_tasks = 8", "ntasks_per_tres = 1", "min_cpus = 64", "cpus_per_task = 8", "ntasks_per_node = 4",
        "pn_min_cpus = 8", "sockets_per_node = 2", 'req_nodes = "g[1-4]"', "core_spec = 1", "shared = 4",
        'partition = "old"',
    ],
)  # fmt: skip
@pytest.mark.parametrize("asked", ["tres_per_node", "tres_per_job"])
def test_a_job_that_has_quota_keeps_its_size(lua: object, asked: str, change: str) -> None:
    record = f'{asked} = "gres/gpu:1", admin_comment = "hetstream:guarded"'
    old = "partition = " in change
    text = (
        guard(QUOTA)
        + f"""
    local parts = {{old = {{alternate = "gpu"}}, gpu = {{}}}}
    local record = {{partition = "{"cpu" if old else "gpu"}", {record}}}
    print(slurm_job_modify(job{{{change}}}, record, parts, 1000), slurm_job_modify(job{{{change}}}, record, parts, 0))
    """
    )
    assert lua(text)[-1].split() == ["-1", "0"]  # type: ignore[operator]


def test_a_partition_whose_jobs_go_to_one_with_quotas_counts(lua: object) -> None:
    text = (
        guard(QUOTA)
        + """
    local j = job{partition = "old", tres_per_job = "gres/gpu:1"}
    print(slurm_job_submit(j, {old = {alternate = "gpu"}, gpu = {}}, 1000), j.priority)
    """
    )
    assert lua(text)[-1].split() == ["0", "0"]  # type: ignore[operator]


def test_what_an_operator_submits_is_marked_and_starts(lua: object) -> None:
    text = (
        guard(QUOTA)
        + """
    local j = job{partition = "gpu", tres_per_job = "gres/gpu:1"}
    print(slurm_job_submit(j, {}, 0), j.priority, j.admin_comment)
    """
    )
    assert lua(text)[-1].split() == ["0", "nil", "hetstream:guarded"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("change", "record", "code"),
    [
        ("num_tasks = 8", "", "-1"),
        ('cpus_per_tres = "gres/gpu:8"', "", "-1"),
        ("min_cpus = 64", "", "-1"),
        ('tres_per_job = "gres/gpu:1"', 'tres_per_job = ""', "-1"),
        ('partition = "gpu"', 'partition = "other", min_cpus = 64', "-1"),
        ('partition = "gpu"', 'partition = "other", min_cpus = 4', "0"),
        ("num_tasks = 8", 'tres_per_job = ""', "0"),
        ("num_tasks = 8", 'partition = "other"', "0"),
        ("time_limit = 5", "", "0"),
    ],
)
def test_cpus_for_each_gpu_stay_as_they_were_looked_at(lua: object, change: str, record: str, code: str) -> None:
    text = (
        guard("{cpus_per_gpu = {max = {gpu = 4}}}")
        + f"""
    local record = {{partition = "gpu", tres_per_job = "gres/gpu:1", {record}}}
    print(slurm_job_modify(job{{{change}}}, record, {{}}, 1000))
    """
    )
    assert lua(text)[-1] == code  # type: ignore[operator]


def test_where_the_site_starts_jobs_an_error_of_ours_starts_none(lua: object) -> None:
    """The policy's mistake is met after the partition is known."""
    policy = QUOTA.removesuffix("}") + ", cpus_per_gpu = 7}"
    text = (
        guard(policy)
        + """
    for _, partition in ipairs{"gpu", "opp", "cpu"} do
      local j = job{partition = partition, tres_per_job = "gres/gpu:1", script = "x"}
      print(slurm_job_submit(j, {}, 1000), j.priority)
    end
    print(slurm_job_modify(job{num_tasks = 5}, {partition = "gpu"}, {}, 1000))
    """
    )
    codes = [line for line in lua(text) if not line.startswith(("user: ", "log: "))]  # type: ignore[operator]
    assert codes == ["0\t0", "-1\tnil", "0\tnil", "-1"]


@pytest.mark.parametrize(
    "record", ['partition = "opp"', 'partition = "gpu", tres_per_job = "gres/gpu:1"'], ids=["opportunistic", "quota"]
)
def test_an_owners_hold_is_a_word_of_the_comment(lua: object, record: str) -> None:
    text = guard(QUOTA)
    text += f"""
    local held = job{{script = "x", priority = 0, comment = "mine", {record}}}
    slurm_job_submit(held, {{}}, 1000)
    print(held.priority, held.comment)
    local own = job{{priority = 0}}  -- a job of the packer's user, which it is about to hold
    local its = {{user_id = 7, priority = 5, admin_comment = "hetstream:taking", {record}}}
    print(slurm_job_modify(own, its, {{}}, 7), own.priority, own.comment)
    local function change(uid, fields, comment)
      local changed = job(fields)
      local rc = slurm_job_modify(changed, {{user_id = 1000, priority = 0, comment = comment, {record}}}, {{}}, uid)
      print(rc, changed.priority, changed.comment)
      return changed
    end
    change(1000, {{priority = 0}}, "mine")
    change(7, {{priority = 0}}, "mine")
    change(1000, {{priority = 4294967295}}, "mine hetstream:hold")
    change(7, {{comment = "packer"}}, "mine hetstream:hold")
    change(1000, {{comment = ""}}, "mine hetstream:hold")
    -- One change is handed to all records of an array.
    local released = change(1000, {{priority = 4294967295}}, "hetstream:hold a")
    local task = {{user_id = 1000, priority = 0, comment = "hetstream:gpu=1 hetstream:hold", {record}}}
    print(slurm_job_modify(released, task, {{}}, 1000), released.priority, released.comment)
    """
    found = [line for line in lua(text) if not line.startswith("log: ")]  # type: ignore[operator]
    assert found == [
        "0\tmine hetstream:hold", "0\t0\tnil", "0\t0\tmine hetstream:hold", "0\t0\tnil", "0\t4294967294\tmine  ",
        "0\tnil\tpacker hetstream:hold", "0\tnil\thetstream:hold", "0\t4294967294\ta  ",
        "0\t4294967294\thetstream:gpu=1  ",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "record", ['partition = "opp"', 'partition = "gpu", tres_per_job = "gres/gpu:1"'], ids=["opportunistic", "quota"]
)
def test_an_operators_hold_of_a_job_that_was_let_go_is_a_word_too(lua: object, record: str) -> None:
    text = guard(QUOTA)
    text += f"""
    local function change(uid, priority, comment, fields, admin_comment)
      local changed = job(fields)
      local record = {{user_id = 1000, priority = priority, comment = comment, admin_comment = admin_comment, {record}}}
      print(slurm_job_modify(changed, record, {{}}, uid), changed.comment)
    end
    for _, uid in ipairs({{0, 7, 55}}) do change(uid, 100, "mine", {{priority = 0}}) end
    change(7, 100, "mine", {{priority = 0}}, "a hetstream:taking")  -- the packer
    change(0, 0, "mine", {{priority = 0}})  -- back to the packer: uhold of what `hold` has held, or the guard
    change(0, 0, "mine hetstream:operators-hold", {{priority = 0}})
    change(0, 0, "mine hetstream:operators-hold", {{priority = 4294967295}})
    change(7, 0, "mine hetstream:operators-hold", {{comment = "packer"}})
    change(1000, 0, "mine hetstream:operators-hold", {{comment = "other"}})
    """
    found = [line for line in lua(text) if not line.startswith("log: ")]  # type: ignore[operator]
    held = "hetstream:operators-hold"
    assert found == [
        *[f"0\tmine {held}"] * 3, "0\tnil", "0\tnil", "0\tmine  ", "0\tmine  ", f"0\tpacker {held}", f"0\tother {held}",
    ]  # fmt: skip


@pytest.mark.shows("the hook composes with a site's own Lua, and uninstall restores its files byte for byte")
def test_the_sites_own_functions_come_first_and_keep_their_word(lua: object) -> None:
    site = """
    function slurm_job_submit(j, parts, uid)
      print("site", uid)
      j.cpus_per_task = 16
      if uid == 3 then error("the site's own") end
      return uid == 2 and 2049 or slurm.SUCCESS
    end
    """
    text = guard("{cpus_per_gpu = {max = {gpu = 4}}}", site)
    text += """
    local function fields() return job{partition = "gpu", tres_per_job = "gres/gpu:1"} end
    print(slurm_job_submit(fields(), {}, 2))
    print(pcall(slurm_job_submit, fields(), {}, 3))
    print(slurm_job_modify(job{}, {partition = "gpu"}, {}, 1))
    print(slurm_job_submit(fields(), {}, 1))
    """
    lines = lua(text)  # type: ignore[operator]
    assert lines[:2] == ["site\t2", "2049"]
    assert lines[2] == "site\t3"
    assert lines[3].startswith("false")
    assert lines[4:6] == ["0", "site\t1"]
    assert lines[-1] == "-1"


@pytest.mark.shows("any error of hetstream's Lua leaves the job as it is, on all versions")
@pytest.mark.parametrize("policy", ["{cpus_per_gpu = 7}", "{cpus_per_gpu = {max = {gpu = {}}}}", '"no such file"'])
def test_no_error_of_ours_stops_a_job(lua: object, policy: str) -> None:
    text = guard(policy)
    text += 'print(slurm_job_submit(job{partition = "gpu", cpus_per_task = 9, tres_per_job = "gres/gpu:1"}, {}, 1))'
    lines = lua(text)  # type: ignore[operator]
    assert lines[-1] == "0"
    assert lines[0].startswith(("log: hetstream: job accepted as it is", "log: hetstream: no policy"))


PLAN = """\
#!/bin/sh
echo {victim}
echo 'exec echo forged'
echo "hetstream-plan-0123"
echo 'echo forged, too'
echo "hetstream-end-0123"
if [ {tells} = yes ]; then
  printf 'no end of line\\nhetstream-plan-%s\\n' "$HETSTREAM_FILTER_NONCE"
  echo 'echo submitted; exit 7'
  echo "hetstream-end-$HETSTREAM_FILTER_NONCE"
fi
echo {victim}
"""


@pytest.mark.parametrize("tells", ["yes", "no"])
def test_what_else_the_converter_prints_is_neither_run_nor_removed(lua: object, tmp_path: Path, tells: str) -> None:
    victim, script, converter = tmp_path / "victim", tmp_path / "job.sh", tmp_path / "converter"
    victim.mkdir()
    (victim / "thesis").write_text("years of work")
    script.write_text("#!/bin/sh\n#HETSTREAM --data-workers=2\n")
    converter.write_text(PLAN.format(victim=victim, tells=tells))
    converter.chmod(0o755)
    text = f"""
io.stderr = io.stdout
slurm.json_cli_options = function() return '{{"argv": ["{script}"]}}' end
os.exit = function(code) print("exit " .. code) error("sbatch would have ended", 0) end
dofile("{LUA_DIR / "cli_filter.lua"}")({{}}, "{converter}")
print(slurm_cli_pre_submit({{ type = "sbatch" }}, 0))
"""
    lines = lua(text)  # type: ignore[operator]
    if tells == "yes":
        assert lines[:2] == ["submitted", "exit 7"]
    else:
        assert lines == ["hetstream: submitted without data workers: exit code 0", "0"]
    assert (victim / "thesis").read_text() == "years of work"


@pytest.mark.parametrize("flood", [*FLOODS, '"argv": ["', '"argv":', "\\\\", "hetstream: x\\n", "\\n", "#HETSTREAM\\n"])
def test_no_text_holds_up_a_users_own_sbatch(lua: object, tmp_path: Path, flood: str) -> None:
    """Of the options, of the script, and what the converter prints and says."""
    script, converter, words = tmp_path / "job.sh", tmp_path / "converter", tmp_path / "words"
    text = (flood.replace("\\n", "\n").replace("\\t", "\t") * 1_500_000)[:1_500_000]
    script.write_text(f"#!/bin/sh\n#HETSTREAM --data-workers=2\n{text}")
    words.write_text(text)
    converter.write_text(f"#!/bin/sh\ncat {words}\ncat {words} >&2\nexit 1\n")
    converter.chmod(0o755)
    code = f"""
io.stderr = {{ write = function() end }}
local words = io.open("{words}"):read(1500000)
slurm.json_cli_options = function() return '{{"argv": ["{script}"], "comment": "' .. words .. '"}}' end
dofile("{LUA_DIR / "cli_filter.lua"}")({{}}, "{converter}")
local began = os.clock()
local rc = slurm_cli_pre_submit({{ type = "sbatch", comment = words }}, 0)
print(rc, os.clock() - began < 1)
"""
    assert lua(code) == ["0\ttrue"]  # type: ignore[operator]


def test_what_the_converter_notes_reaches_the_user_of_plain_sbatch(lua: object, tmp_path: Path) -> None:
    script, converter = tmp_path / "job.sh", tmp_path / "converter"
    script.write_text("#!/bin/sh\n#HETSTREAM: --data-workers=2\n")
    converter.write_text("#!/bin/sh\necho 'hetstream: job.sh line 2: a comment' >&2\necho 'their own' >&2\nexit 3\n")
    converter.chmod(0o755)
    text = f"""
io.stderr = io.stdout
slurm.json_cli_options = function() return '{{"argv": ["{script}"]}}' end
dofile("{LUA_DIR / "cli_filter.lua"}")({{}}, "{converter}")
print(slurm_cli_pre_submit({{ type = "sbatch" }}, 0))
"""
    assert lua(text) == ["hetstream: job.sh line 2: a comment", "0"]  # type: ignore[operator]


@pytest.mark.parametrize("name", ["cli_filter.lua", "job_submit.lua"])
def test_a_hook_without_its_module_does_nothing(lua: object, name: str, tmp_path: Path) -> None:
    hook = hook_text(name, tmp_path / "none", tmp_path / "policy.lua", "/none", None).removesuffix(
        "return slurm.SUCCESS\n"
    )
    called = "slurm_cli_pre_submit({}, 0)" if name == "cli_filter.lua" else "slurm_job_submit({}, {}, 0)"
    *said, code = lua(f"{hook}print({called})")  # type: ignore[operator]
    assert code == "0"
    # What the cli_filter logs appears on the terminal of whoever runs srun.
    assert [line.startswith("log: hetstream: cannot open") for line in said] == [True] * (name == "job_submit.lua")


def test_a_module_of_the_cli_filter_that_is_broken_is_said_to_be(lua: object, tmp_path: Path) -> None:
    (tmp_path / "cli_filter.lua").write_text("return 7 7\n")
    hook = hook_text("cli_filter.lua", tmp_path, tmp_path / "policy.lua", "/none", None).removesuffix(
        "return slurm.SUCCESS\n"
    )
    said, code = lua(f"{hook}print(slurm_cli_pre_submit({{}}, 0))")  # type: ignore[operator]
    assert said.startswith("log: hetstream: ")
    assert code == "0"


@pytest.mark.shows("the hook composes with a site's own Lua, and uninstall restores its files byte for byte")
def test_a_hook_loads_the_sites_file_first(lua: object, tmp_path: Path) -> None:
    site = tmp_path / "job_submit.site.lua"
    site.write_text('function slurm_job_submit() print("site"); return 0 end\nreturn 0\n')
    (tmp_path / "policy.lua").write_text("return {}\n")
    hook = hook_text("job_submit.lua", LUA_DIR, tmp_path / "policy.lua", "/none", site).removesuffix(
        "return slurm.SUCCESS\n"
    )
    assert lua(f"{hook}print(slurm_job_submit(job{{}}, {{}}, 1))") == ["site", "0"]  # type: ignore[operator]


def test_the_shipped_policy_asks_for_nothing(lua: object) -> None:
    text = f'for name in pairs(dofile("{LUA_DIR / "policy.lua"}")) do print(name) end'
    assert lua(text) == []  # type: ignore[operator]
    shown = (LUA_DIR / "policy.lua").read_text()
    rules = "\n".join(rule for rule in re.findall(r"^  -- (\w+ = .*)", shown, re.MULTILINE) if "function" not in rule)
    text = (
        f"local policy = {{{rules}\n}}\nprint(policy.cpus_per_gpu.max.gpu, policy.opportunistic.hold, policy.timeout_s)"
    )
    assert lua(text) == ["4\ttrue\t10"]  # type: ignore[operator]
