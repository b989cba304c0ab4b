"""The gate of conversion: real scripts, plain and converted, are one job to Slurm. See docs/peers.md."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import running_cluster
from tests.devcluster.roots import DEFAULT_CACHE_DIR, choose_programs
from tests.peers import sbatch_corpus, sbatch_gate
from tests.peers.sbatch_gate import Case, Submitter, compare, differences, foreign
from tests.peers.sbatch_site import SHAPE, commands_after_boot, named_in, settings_of

OWN = Path(__file__).parent / "sbatch_scripts"
GateOn = Callable[[list[Path]], AbstractContextManager[tuple[Submitter, dict[str, Path]]]]


@pytest.fixture
def gate_on(release: str) -> GateOn:
    """A submitter on a cluster that has what the scripts of folders name, and the scripts."""

    @contextmanager
    def on(folders: list[Path]) -> Iterator[tuple[Submitter, dict[str, Path]]]:
        scripts = sbatch_gate.scripts_in(folders)
        named = named_in(sbatch_gate.text_of(scripts))
        with running_cluster("gate", SHAPE, release, settings=tuple(settings_of(named))) as cluster:
            commands = list(commands_after_boot(named))
            with sbatch_gate.submitter_on(cluster.state_dir, cluster.env, commands) as submitter:
                yield submitter, scripts

    return on


@pytest.mark.shows("46 scripts of the project are the same job plain and converted, field by field")
@pytest.mark.slurm
@pytest.mark.every_release
def test_own_scripts_are_the_same_job_converted(gate_on: GateOn, release: str) -> None:
    with gate_on([OWN]) as (submitter, scripts):
        report = compare(submitter, {name: Case(path) for name, path in scripts.items()})
    assert report.differences == [], report.text()
    assert set(report.documented) == {"c_shell.sbatch", "python_script.sbatch", "two_components.sbatch"}
    refused = {"no_interpreter.sbatch", "template.sbatch", "unknown_option.sbatch"}
    # --tres-per-task is younger than 22.05.
    assert set(report.refused) - {"by_task.sbatch"} == refused, report.text()
    assert len(report.accepted) >= 38


@pytest.mark.shows("474 public scripts of 59 repositories are the same job plain and converted")
@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.every_release
@pytest.mark.timeout(3600)
def test_public_scripts_are_the_same_jobs_converted(gate_on: GateOn) -> None:
    addresses = sbatch_corpus.stored_addresses()
    there = [address for address in addresses if address.is_in(sbatch_corpus.FOLDER)]
    if len(there) < sbatch_corpus.LEAST_SHARE * len(addresses):
        where = f"{len(there)} of {len(addresses)} public scripts are in {sbatch_corpus.FOLDER}"
        pytest.skip(f"{where}. Collect them: {sbatch_corpus.COLLECT}")
    with gate_on([sbatch_corpus.FOLDER]) as (submitter, scripts):
        report = compare(submitter, {name: Case(path) for name, path in scripts.items()})
    print(report.text())
    assert report.differences == []
    assert len(report.accepted) > 0.85 * len(there), "the cluster has too little of what they name"


# What sbatch reads from its environment, each with a value that it takes.
SCRIPT = "#!/bin/bash\n#SBATCH --nodes=1 --gpus=2 --cpus-per-task=8 --time=60\n#SBATCH --job-name=base\ntrue\n"
VARIABLES = {
    "SBATCH_ACCOUNT": "lab", "SBATCH_ACCTG_FREQ": "task=30", "SBATCH_ARRAY_INX": "0-3%2", "SBATCH_BATCH": "fast",
    "SBATCH_BURST_BUFFER": "#BB none", "SBATCH_CONSTRAINT": "fast", "SBATCH_CONTAINER": "/tmp/bundle",
    "SBATCH_CONTAINER_ID": "bundle", "SBATCH_CONTAINER_TYPE": "x", "SBATCH_CORE_SPEC": "2",
    "SBATCH_CPUS_PER_GPU": "4", "SBATCH_CPU_FREQ_REQ": "high", "SBATCH_DEBUG": "1", "SBATCH_DELAY_BOOT": "10",
    "SBATCH_DISTRIBUTION": "cyclic:block", "SBATCH_ERROR": "errors.txt", "SBATCH_EXCLUSIVE": "user",
    "SBATCH_EXPORT": "NONE", "SBATCH_GPUS": "4", "SBATCH_GPUS_PER_NODE": "2", "SBATCH_GPUS_PER_SOCKET": "1",
    "SBATCH_GPUS_PER_TASK": "2", "SBATCH_GPU_BIND": "closest", "SBATCH_GPU_FREQ": "high", "SBATCH_GRES": "disk:2",
    "SBATCH_GRES_FLAGS": "enforce-binding", "SBATCH_HINT": "nomultithread", "SBATCH_IGNORE_PBS": "1",
    "SBATCH_INPUT": "/dev/zero", "SBATCH_JOB_NAME": "named", "SBATCH_MEM_BIND": "local", "SBATCH_MEM_PER_CPU": "3G",
    "SBATCH_MEM_PER_GPU": "20G", "SBATCH_MEM_PER_NODE": "40G", "SBATCH_NETWORK": "single_sl", "SBATCH_NO_KILL": "1",
    "SBATCH_NO_REQUEUE": "1", "SBATCH_OPEN_MODE": "append", "SBATCH_OUTPUT": "output.txt", "SBATCH_OVERCOMMIT": "1",
    "SBATCH_PARTITION": "main", "SBATCH_POWER": "level", "SBATCH_PROFILE": "task", "SBATCH_QOS": "high",
    "SBATCH_REQUEUE": "1", "SBATCH_REQ_SWITCH": "1", "SBATCH_RESERVATION": "course", "SBATCH_SEGMENT_SIZE": "1",
    "SBATCH_SIGNAL": "USR1@60", "SBATCH_SPREAD_JOB": "1", "SBATCH_THREADS_PER_CORE": "1", "SBATCH_THREAD_SPEC": "2",
    "SBATCH_TIMELIMIT": "30", "SBATCH_TRES_BIND": "gres/gpu:closest", "SBATCH_TRES_PER_TASK": "gres/gpu:2",
    "SBATCH_USE_MIN_NODES": "1", "SBATCH_WAIT4SWITCH": "10:00", "SBATCH_WAIT_ALL_NODES": "1", "SBATCH_WCKEY": "paper",
    "SBATCH_CONSOLIDATE_SEGMENTS": "1", "SBATCH_SPREAD_SEGMENTS": "1", "SLURM_HINT": "nomultithread",
}  # fmt: skip
NOT_TRIED = {
    "SBATCH_CLUSTER_CONSTRAINT": "needs a federation",
    "SBATCH_CLUSTERS": "needs accounting",
    "SBATCH_GET_USER_ENV": "starts a login shell",
    "SBATCH_WAIT": "does not return while the job is held",
}


@pytest.mark.slurm
@pytest.mark.every_release
def test_variables_of_sbatch_are_the_trainers(gate_on: GateOn, release: str, tmp_path: Path) -> None:
    (tmp_path / "base.sbatch").write_text(SCRIPT)
    # Names that the cluster is to have.
    (tmp_path / "names.sbatch").write_text(
        "#!/bin/bash\n#SBATCH -C fast -p main --reservation=course --gres=disk:1\ntrue\n"
    )
    program = choose_programs(release, DEFAULT_CACHE_DIR, print)
    known = read_by(sbatch_of(program))
    assert known - VARIABLES.keys() == NOT_TRIED.keys() & known, "what sbatch reads is tried"
    with gate_on([tmp_path]) as (submitter, scripts):
        base = scripts["base.sbatch"]
        cases = {name: Case(base, {name: value}) for name, value in VARIABLES.items() if name in known}
        report = compare(submitter, cases)
    assert report.differences == [], report.text()
    assert len(report.accepted) > 0.8 * len(cases), report.text()


# What may stand beside one another: CPUs, threads, memory, GPUs, nodes.
BESIDE = (
    "SBATCH_CORE_SPEC", "SBATCH_CPUS_PER_GPU", "SBATCH_DISTRIBUTION", "SBATCH_EXCLUSIVE", "SBATCH_GPUS",
    "SBATCH_GPUS_PER_NODE", "SBATCH_GPUS_PER_SOCKET", "SBATCH_GPUS_PER_TASK", "SBATCH_GPU_BIND", "SBATCH_GRES_FLAGS",
    "SBATCH_HINT", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU", "SBATCH_MEM_PER_NODE", "SBATCH_OVERCOMMIT",
    "SBATCH_THREADS_PER_CORE", "SBATCH_THREAD_SPEC", "SBATCH_TRES_PER_TASK", "SLURM_HINT",
)  # fmt: skip
OPTIONS_BESIDE = (
    "--cpus-per-task=3", "--cpus-per-gpu=2", "--mincpus=4", "--ntasks-per-node=2", "--ntasks-per-gpu=1",
    "--ntasks-per-core=1", "--ntasks-per-socket=2", "--threads-per-core=1", "--extra-node-info=1:1",
    "--cores-per-socket=1", "--sockets-per-node=1", "--hint=compute_bound", "--mem=16G", "--mem-per-cpu=1G",
    "--mem-per-gpu=8G", "--gpus=2", "--gpus-per-node=2", "--gpus-per-task=1", "--gpus-per-socket=2", "--gres=disk:1",
    "--gres=gpu:2", "--core-spec=1", "--thread-spec=1", "--exclusive", "--oversubscribe", "--gpu-bind=none",
    "--gres-flags=disable-binding", "--tres-per-task=cpu:3", "--tres-per-task=gres/gpu:1", "--overcommit",
    "--distribution=block",
)  # fmt: skip
# The variable overwrites the script's line, which conversion leaves there: newer releases then say what is wrong.
REFUSED_ONCE_CONVERTED = "SBATCH_EXCLUSIVE script --oversubscribe"
# 22.05 refuses both, newer releases forget the variable.
OF_CPUS = ("SBATCH_CPUS_PER_GPU", "--cpus-per-task=3")


@pytest.mark.slurm
@pytest.mark.every_release
@pytest.mark.timeout(300)
def test_of_a_variable_and_an_option_the_same_one_wins_or_both_are_refused(gate_on: GateOn, tmp_path: Path) -> None:
    """The table of pairs is sbatch's own: those that it refuses, or of which it forgets one."""
    base = tmp_path / "base.sbatch"
    head = "#!/bin/bash\n#SBATCH --nodes=1 --ntasks=2 --gpus=2 --gres=disk:1 --time=60\n"
    base.write_text(f"{head}true\n")
    with gate_on([tmp_path]) as (submitter, _):
        plain = {
            (variable, option): Case(
                base, {variable: VARIABLES[variable]} if variable else {}, (option,) if option else ()
            )
            for variable in ("", *BESIDE)
            for option in ("", *OPTIONS_BESIDE)
        }
        said = {pair: submitter.plain(case) for pair, case in plain.items()}
        jobs = sbatch_gate.parse_jobs(submitter.run("scontrol", "show", "job"))
        submitter.run("scancel", "--user=root")

        def asked(variable: str, option: str) -> object:
            made = said[variable, option]
            own = ("JobId", "Time", "LastSchedEval", "SubmitLine", "Priority")
            return made.accepted and {key: value for key, value in jobs[made.job_id].items() if not key.endswith(own)}

        def one_wins(variable: str, option: str) -> bool:
            alone = asked(variable, ""), asked("", option)
            if not all(alone):
                return False
            return asked(variable, option) in (False, *alone) and asked("", "") not in alone

        pairs = [(variable, option) for variable in BESIDE for option in OPTIONS_BESIDE if one_wins(variable, option)]
        assert {OF_CPUS, ("SBATCH_MEM_PER_CPU", "--mem=16G")} <= {*pairs}
        cases = {f"{variable} {option}": plain[variable, option] for variable, option in pairs}
        for number, (variable, option) in enumerate(pairs):
            script = tmp_path / f"{number}.sbatch"
            script.write_text(f"{head}#SBATCH {option}\ntrue\n")
            cases[f"{variable} script {option}"] = Case(script, {variable: VARIABLES[variable]})
        report = compare(submitter, cases)
    # What the command line says of the trainer stands in the converted script.
    found = [name for name, what, *_ in report.differences if what != "SubmitLine"]
    assert {*found} <= {REFUSED_ONCE_CONVERTED}, report.text()


def sbatch_of(programs: Any) -> Path:
    """The program that users call."""
    if programs.root is not None:
        return Path(programs.root.commands_dir) / "sbatch"
    found = shutil.which("sbatch")
    assert found is not None
    return Path(found)


def read_by(sbatch: Path) -> set[str]:
    """The variables of a sbatch, from its own bytes."""
    names = re.findall(rb"\0((?:SBATCH_[A-Z][A-Z0-9_]+)|SLURM_HINT)(?=\0)", sbatch.resolve().read_bytes())
    return {name.decode() for name in names}


JOB = {
    "JobId": "5", "NumCPUs": "16", "CPUs/Task": "16", "MinMemoryCPU": "2G", "Features": "a100", "TimeLimit": "01:00:00",
    "TRES": "cpu=16,mem=32G,node=1,billing=16", "Command": "/home/train.sbatch", "TresPerNode": "gres:gpu:2",
    "SubmitTime": "2026-11-26T23:11:37",
}  # fmt: skip


@pytest.mark.shows("46 scripts of the project are the same job plain and converted, field by field")
@pytest.mark.parametrize(
    ("change", "different"),
    [
        ({"JobId": "6", "HetJobId": "6", "HetJobOffset": "0", "Command": "/tmp/x/train.sbatch"}, []),
        ({"NumCPUs": "4", "CPUs/Task": "4", "MinMemoryCPU": "8G", "TRES": "cpu=4,mem=32G,node=1,billing=4"}, []),
        ({"NumCPUs": "4", "TRES": "cpu=4,mem=8G,node=1,billing=4"}, ["memory"]),
        ({"NumCPUs": "4", "MinMemoryCPU": "4G"}, ["MinMemoryCPU"]),
        ({"NumCPUs": "32"}, ["NumCPUs"]),
        ({"TRES": "cpu=4,mem=32G,node=2,billing=4"}, ["TRES"]),
        ({"TRES": "cpu=16,mem=32G,node=1,billing=16,gres/gpu=1"}, ["TRES"]),
        ({"Features": "(null)"}, ["Features"]),
        ({"TresPerNode": "gres:gpu:1"}, ["TresPerNode"]),
        ({"Command": "/tmp/other.sbatch"}, ["Command"]),
        ({"SubmitTime": "2026-11-27T23:11:37"}, ["SubmitTime"]),
        ({"Reservation": "course"}, ["Reservation"]),
    ],
)  # fmt: skip
def test_the_gate_finds_what_conversion_would_lose(change: dict[str, str], different: list[str]) -> None:
    assert [name for name, *_ in differences(JOB, JOB | change, Counter())] == different


ALONE = {"NumCPUs": "4", "NumTasks": "2", "CPUs/Task": "2", "Features": "(null)", "Licenses": "(null)",
         "TRES": "cpu=4,mem=8G,node=1", "ReqB:S:C:T": "0:0:*:*", "TimeLimit": "UNLIMITED", "MinMemoryCPU": "4000M",
         "Dependency": "(null)", "ReqNodeList": "(null)", "ExcNodeList": "(null)"}  # fmt: skip


@pytest.mark.shows("46 scripts of the project are the same job plain and converted, field by field")
@pytest.mark.parametrize(
    ("change", "different"),
    [
        ({}, []),
        ({"TimeLimit": "01:00:00", "MinMemoryCPU": "2G", "ExcNodeList": "g[1-2]"}, []),
        ({"ExcNodeList": "g3"}, ["component 1 ExcNodeList"]),
        ({"Features": "a100"}, ["component 1 Features"]),
        ({"TresPerJob": "gres:gpu:1"}, ["component 1 TresPerJob"]),
        ({"TRES": "cpu=4,mem=8G,node=1,gres/gpu=1"}, ["component 1 TRES"]),
        ({"ReqB:S:C:T": "0:0:*:1"}, ["component 1 ReqB:S:C:T"]),
        ({"Dependency": "singleton(unfulfilled)"}, ["component 1 Dependency"]),
        ({"NumTasks": "8", "NumCPUs": "16"}, ["component 1 NumCPUs", "component 1 NumTasks"]),
    ],
)  # fmt: skip
def test_the_gate_finds_what_is_the_trainers_in_component_1(change: dict[str, str], different: list[str]) -> None:
    trainer = JOB | {"Dependency": "singleton(unfulfilled)", "ReqNodeList": "g1", "ExcNodeList": "g2"}
    assert [name for name, *_ in foreign(ALONE | change, trainer, ALONE)] == different


@pytest.mark.shows("474 public scripts of 59 repositories are the same job plain and converted")
def test_the_addresses_are_many_and_of_many_authors() -> None:
    addresses = sbatch_corpus.stored_addresses()
    assert len(addresses) >= 300
    assert len({address.sha256 for address in addresses}) == len(addresses)
    assert len({address.repository for address in addresses}) >= 40
    assert max(Counter(address.repository for address in addresses).values()) <= 60


def test_addresses_of_another_form_are_named() -> None:
    with pytest.raises(ValueError, match="line 1 is neither"):
        sbatch_corpus.read_addresses("owner/name main\n")


def test_scripts_are_collected_from_clones_and_what_is_gone_is_said(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path / "name"), "-c", "user.name=n", "-c", "user.email=e", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "name").mkdir()
    git("init", "-q")
    (tmp_path / "name" / "a.sbatch").write_text("#!/bin/bash\n#SBATCH -N1\n")
    git("add", ".")
    git("commit", "-qm", "a script")
    commit, digest = git("rev-parse", "HEAD"), hashlib.sha256(b"#!/bin/bash\n#SBATCH -N1\n").hexdigest()
    text = f"owner/name {commit}\n{digest}  a.sbatch\n{'0' * 64}  a.sbatch\n{'1' * 64}  gone.sbatch\n"
    addresses = sbatch_corpus.read_addresses(text)
    missing = sbatch_corpus.collect(addresses, tmp_path / "into", tmp_path)
    assert [address.is_in(tmp_path / "into") for address in addresses] == [True, False, False]
    assert missing == [
        "owner/name a.sbatch: its text is another one than it was",
        f"owner/name gone.sbatch: commit {commit[:12]} or the path is gone",
    ]
    addresses[0].file(tmp_path / "into").write_text("changed")
    assert not addresses[0].is_in(tmp_path / "into")
