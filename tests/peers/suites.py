"""Peers' own test suites, run against hetstream: what passes, what fails, and what is excluded for which reason.

    python tests/peers/suites.py [--peers DIR ...] [--write] [SUITE ...]

The peers' files are no part of this project. They are read from each DIR (see docs/peers.md), adapted in a temporary
directory, where the import of the loader is replaced, and run there by pytest in a process of its own. The outcome of
each test is compared with `expected/SUITE.json`; a test that did not do what is expected runs once more by itself
before it is believed. A suite under the hook of which no step was streamed has failed, too: it would show nothing. So
has one of which more steps of data workers were not torch's own than is stored and explained: its tests pass all the
same, as a loader is local from such a step on. Suites of checkpoints run with `programs/checkpoints.py`, by which
hetstream saves and restores what they save and restore; a file of which it did not do both has failed.
`--write` stores what was found as the new expectation, and brings docs/peers.md up to date.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DOCUMENT = ROOT / "docs" / "peers.md"
# Of each suite when it last ran as a whole, with which packages, and how many of its steps data workers made.
RECORDED = HERE / "expected" / "recorded.json"
BUILD = ROOT / "build"  # logs, and under the hook the summaries of `hetstream run`
# Folders of peers' files: those that are given, and those that suite_files.py collects.
PEERS = (ROOT.parent / "shared" / "peers", BUILD / "peers")
_PACKAGES = ("torch", "torchdata", "accelerate", "speechbrain", "pytorch-ignite", "skorch", "torch-geometric")
_PACKAGES += ("datasets", "lightning", "monai", "timm", "torchtitan")
# A test of theirs that takes longer has failed; the slowest takes 60 s on two quiet cores.
_TEST_LIMIT_S = 300
_FILE_LIMIT_S = 3600
_SCRIPT_LIMIT_S = 600
# A suite with fewer steps of data workers says little about them: the document calls it hollow.
_FEW_STEPS = 100
_SUMMARY = "summary.json"
# Of a suite of checkpoints: the plugin that has hetstream save and restore them, and a line for each time it did.
_PLUGIN, _COUNTS = "hetstream_checkpoints", "counts.txt"
# Where passes of streams are to wait for data workers: a plugin from `programs`, too.
_WAITING = "waiting"
# With fewer of each a suite of checkpoints is hollow, too.
_FEW_CHECKPOINTS = 10
_CHECKPOINT_SUITES = ("-checkpoints", "-checkpoints-flash")
_PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "--rootdir", ".")
_BEGIN, _END = "<!-- written by tests/peers/suites.py -->", "<!-- end -->"
_STATEFUL, _TORCH = "torchdata.stateful_dataloader.StatefulDataLoader", "torch.utils.data.DataLoader"

Outcomes = dict[str, str]  # of the tests of one file: passed, failed or skipped, by their names


@dataclass(frozen=True)
class Suite:
    """Files of one peer, and how they meet hetstream.

    Attributes:
        name: on the command line, and of its file of expectations.
        title: in documents.
        files: below the folder of peers; or modules, which are run as scripts.
        loader: what takes the place of the loaders in `replaced`, as `module.Class`; "" to leave them.
        data_workers: under `hetstream run` with so many; None without.
        plain: the suite without hetstream that this one is compared with.
        is_in_process: its loaders have num_workers=0: they stay local unless the user asks otherwise.
        tests: patterns of names; other tests of its files make no loader, and are no part of it.
        replaced: classes of loaders, as `module.Class`.
        stays_local: why data workers make none of its steps; "" where they shall.
        differs: why steps of data workers are not torch's own, as many as were stored; "" where none may differ.
        checkpoints: whether hetstream saves and restores its checkpoints, by `programs/checkpoints.py`.
        waits: whether passes of its streams wait for data workers, by `programs/waiting.py`: they are short.
    """

    name: str
    title: str
    files: tuple[str, ...]
    loader: str = ""
    data_workers: int | None = None
    plain: str = ""
    is_in_process: bool = False
    tests: tuple[str, ...] = ("*",)
    replaced: tuple[str, ...] = (_STATEFUL,)
    stays_local: str = ""
    differs: str = ""
    checkpoints: bool = False
    waits: bool = False

    @property
    def is_scripts(self) -> bool:
        """Whether its files are modules that run as scripts with two ranks, each of them a test."""
        return not self.files[0].endswith(".py")

    @property
    def expectation(self) -> Path:
        """Where the expected outcomes are."""
        return HERE / "expected" / f"{self.name}.json"

    def missing(self, peers: Sequence[Path]) -> list[str]:
        """Its files that are in no folder of peers; modules come with their package."""
        return [] if self.is_scripts else [file for file in self.files if home(file, peers) is None]


# Files of which data workers make no step, in suites of which they make some, and why.
LOCAL_FILES = {
    "accelerate.test_utils.scripts.test_distributed_data_loop": "it replaces a function of its own module by a lambda, "
    "or its loaders have an iterator of their own",
    "datasets/tests/test_arrow_dataset.py": "its loader has num_workers=0",
    "datasets/tests/test_distributed.py": "its passes, of a program of its own, end before data workers have begun",
}
# Why steps of data workers differ, by the name of the suite.
_DIFFERS = {
    "monai-inverse-hook": "a padded batch holds the `id()` of a transform, which a copy does not have",
    "monai-data-hook": "two steps fail, and in torch's own worker, which collates into shared memory, with other words",
    "torch-hook": "two loaders whose worker_init_fn raises, and one whose sample sleeps beyond timeout=: torch's own "
    "workers then make the step, and raise what they raise without hetstream",
}


def _with_hook(name: str, title: str, files: tuple[str, ...], *tests: str) -> tuple[Suite, Suite]:
    """A suite of which loaders have num_workers=0, and the same under the hook."""
    plain = Suite(name, title, files, tests=tests or ("*",))
    hook = replace(plain, name=f"{name}-hook", title="the same under the hook", data_workers=2, plain=name)
    return plain, replace(hook, is_in_process=True, differs=_DIFFERS.get(hook.name, ""))


def _with_checkpoints(name: str, title: str, files: tuple[str, ...], *tests: str) -> tuple[Suite, Suite]:
    """A suite of checkpoints, and the same with hetstream's in their place."""
    plain = Suite(f"{name}-checkpoints", title, files, tests=tests or ("*",))
    ours = replace(plain, name=f"{plain.name}-flash", title="the same with hetstream's checkpoints", plain=plain.name)
    return plain, replace(ours, checkpoints=True)


# Not its test_incremental_state.py, which tests classes of its own and makes no loader.
_TORCHDATA = tuple(f"torchdata/test_{name}.py" for name in ("dataloader", "state_dict", "sampler", "hugging_face"))
_SCRIPTS = tuple(
    f"accelerate.test_utils.scripts.{name}" for name in ("test_script", "test_distributed_data_loop", "test_sync")
)


def _files(pattern: str, names: str) -> tuple[str, ...]:
    """The files of a folder by the names that its pattern lacks."""
    return tuple(pattern.format(name) for name in names.split())


# Those of its loaders that need no sampler of its own in C++: pyg-lib has no build on PyPI.
_PYG = _files(
    "pytorch_geometric/test/{}.py",
    "loader/test_dataloader loader/test_dynamic_batch_sampler loader/test_imbalanced_sampler"
    " loader/test_random_node_loader loader/test_temporal_dataloader test_edge_index test_index test_hash_tensor",
)
_LIGHTNING = "pytorch-lightning/tests/tests_pytorch/{}.py"
_LIGHTNING_LOOPS = _files(
    _LIGHTNING.format("loops/{}"),
    "optimization/test_automatic_loop test_evaluation_loop test_evaluation_loop_flow test_fetchers test_loops"
    " test_training_loop test_training_loop_flow_dict",
)
_LIGHTNING_DATA = _files(
    _LIGHTNING,
    "trainer/test_dataloaders trainer/connectors/test_data_connector trainer/flags/test_overfit_batches"
    " utilities/test_combined_loader",
)
_LIGHTNING_SEED = _files(
    "pytorch-lightning/tests/{}.py", "tests_fabric/utilities/test_seed tests_pytorch/utilities/test_seed"
)
_MONAI_DATA = _files("MONAI/tests/data/{}.py", "test_arraydataset test_dataloader")
_MONAI_INVERSE = _files("MONAI/tests/{}.py", "integration/test_pad_collation data/utils/test_decollate")
_TIMM = _files("pytorch-image-models/tests/{}.py", "test_scheduled_sampler")
_HF = _files("datasets/tests/{}.py", "test_arrow_dataset test_distributed test_iterable_dataset")
_HF_TESTS = ("*dataloader*", "*distributed_run*", "*worker*", "*is_torch*", "test_interleave_dataset_with_sharding*")
_HF_TESTS += ("*with_format_torch", "*deterministic_across_iterations")
_TORCHTITAN = _files(
    "torchtitan/tests/unit_tests/test_{}.py",
    "checkpoint state_dict_keys optimizer_param_groups fused_qkv fused_swiglu",
)
_ACCELERATE = _files("accelerate/tests/test_{}.py", "state_checkpointing accelerator")
_ACCELERATE_TESTS = ("*CheckpointTest*", "*save_load*", "*stateful*")
_LIGHTNING_CHECKPOINTS = _files(
    _LIGHTNING,
    "checkpointing/test_trainer_checkpoint trainer/connectors/test_checkpoint_connector models/test_restore"
    " plugins/test_checkpoint_io_plugin core/test_saving",
)
SUITES = {
    suite.name: suite
    for suite in (
        Suite("own", "torchdata's suite on hetstream's DataLoader", _TORCHDATA, "hetstream.DataLoader"),
        Suite("torch", "the same test_dataloader.py on torch's DataLoader", _TORCHDATA[:1], _TORCH),
        Suite(
            *("torch-hook", "the same on torch's DataLoader under the hook", _TORCHDATA[:1], _TORCH, 2, "torch"),
            differs=_DIFFERS["torch-hook"],
        ),
        *_with_hook("accelerate", "accelerate's test_data_loader.py", ("accelerate/test_data_loader.py",)),
        Suite("accelerate-scripts", "accelerate.test_utils.scripts with two ranks", _SCRIPTS),
        Suite("accelerate-scripts-hook", "the same under the hook", _SCRIPTS, "", 2, "accelerate-scripts", True),
        *_with_hook("speechbrain", "SpeechBrain's test_dataloader.py", ("speechbrain/test_dataloader.py",)),
        *_with_hook("ignite", "ignite's test_deterministic.py", ("ignite/tests/ignite/engine/test_deterministic.py",)),
        *_with_hook("lightning-loops", "Lightning's tests of loops", _LIGHTNING_LOOPS),
        *_with_hook("lightning-data", "Lightning's tests of loaders and their connector", _LIGHTNING_DATA),
        *_with_hook(
            "lightning-restart", "Lightning's tests of restarts", _files(_LIGHTNING, "utilities/test_auto_restart")
        ),
        Suite("lightning-seed", "Lightning's tests of seeds", _LIGHTNING_SEED),
        Suite(
            "lightning-seed-hook",
            "the same under the hook",
            _LIGHTNING_SEED,
            data_workers=2,
            plain="lightning-seed",
            stays_local="its tests make no loader",
        ),
        *_with_hook("monai-data", "MONAI's test_arraydataset.py and test_dataloader.py", _MONAI_DATA),
        *_with_hook("monai-inverse", "MONAI's tests of padded batches and inverse transforms", _MONAI_INVERSE),
        *_with_hook("timm", "timm's tests with a loader", _TIMM, "*loader*"),
        *_with_hook("pyg", "PyTorch Geometric's tests with a loader", _PYG, "*loader*", "*sampler*"),
        *_with_hook("skorch", "skorch's test_dataset.py", ("skorch/skorch/tests/test_dataset.py",)),
        Suite("datasets", "Hugging Face datasets' tests with a loader", _HF, tests=_HF_TESTS),
        Suite(
            "datasets-hook",
            "the same under the hook",
            _HF,
            data_workers=2,
            plain="datasets",
            tests=_HF_TESTS,
            waits=True,
        ),
        Suite(
            "datasets-own",
            "its streams on hetstream's DataLoader with data workers",
            _HF[2:],
            "hetstream.DataLoader",
            2,
            "datasets",
            tests=_HF_TESTS,
            replaced=(_STATEFUL, _TORCH),
        ),
        *_with_checkpoints("torchtitan", "torchtitan's tests of checkpoints and states", _TORCHTITAN),
        *_with_checkpoints("accelerate", "accelerate's tests of save_state", _ACCELERATE, *_ACCELERATE_TESTS),
        *_with_checkpoints("lightning", "Lightning's tests of checkpoints", _LIGHTNING_CHECKPOINTS),
    )
}

# As the conftest.py of Lightning's Fabric does; that one imports much more.
_RESTORED_ENVIRONMENT = """\
import os
import pytest

@pytest.fixture(autouse=True)
def restored_environment():
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
"""

# SpeechBrain's package asks for these when it is imported, and its tests of loaders for the fixture `device`.
# Its loaders use no audio, and torchaudio has no build for every torch.
_STANDINS = {
    "speechbrain": {
        "torchaudio.py": '__version__ = "2.11.0"\n',
        "conftest.py": 'import pytest\n\n\n@pytest.fixture\ndef device():\n    return "cpu"\n',
    },
    "pytorch-lightning": {"tests/tests_fabric/conftest.py": _RESTORED_ENVIRONMENT},
    "pytorch-image-models": {"torchvision/__init__.py": (HERE / "programs" / "torchvision.py").read_text()},
}

# Lightning's tests allow no thread that a test leaves behind, and wait 20 s for one that feeds a worker process.
# hetstream's thread, and the worker process whose batches it compares, live as long as the loader that they are for.
_REPLACED = {
    "pytorch-lightning/tests/tests_pytorch/conftest.py": (
        ('thread.name == "fsspecIO"', 'thread.name in ("fsspecIO", "hetstream-loader")'),
        ("thread.join(timeout=20)", "thread.join(timeout=0.1)"),
    ),
    # A function of a package that a session of tests has exchanged keeps loaders local; there is no network here.
    "datasets/tests/fixtures/hub.py": (
        ('monkeypatch.setattr("huggingface_hub.utils._headers._http_user_agent", _http_ci_user_agent)', "pass"),
    ),
    # asyncio.wait() takes no coroutines since Python 3.11.
    "datasets/tests/utils.py": (
        ("await asyncio.wait(\n        [", "await asyncio.gather(\n        *["),
        ("        timeout=timeout,\n    )\n    return _RunOutput", "    )\n    return _RunOutput"),
    ),
}

# torchtitan's tests replace torch's save and load by functions of their own, which hand over to hetstream instead; and
# where they load a state into an object, it is saved before, and restored into the object.
_CHECKPOINTED = {
    # Its test of plugins has a CheckpointIO of its own.
    "pytorch-lightning": (
        (r"^import os$", f"import {_PLUGIN}\nimport os\nimport shutil"),
        (r"^( +)torch\.save\(checkpoint, path\)$", rf"\1{_PLUGIN}.save_lightnings(checkpoint, path)"),
        (r"^( +)os\.remove\(path\)$", r"\1shutil.rmtree(path)"),
    ),
    "torchtitan": (
        (r"^import torch$", f"import {_PLUGIN}\nimport torch"),
        (r"torch\.save\(sd_to_save, .*\)$", f"{_PLUGIN}.save(checkpoint_id, state_dict)"),
        (r"^( +)loaded = torch\.load\(path, .*\)$", rf"\1return {_PLUGIN}.restore(checkpoint_id, states)"),
        (r"^(def fake_async_save.*)$", rf'\1\n    {_PLUGIN}.save(kwargs["checkpoint_id"], args[0])'),
        (r"^( +)([\w.]+)\.load_state_dict\(([^=\n]+)\)$", rf"\1{_PLUGIN}.restore_into(\2, \3)"),
        (r"load_flat_optim_state_dict\(optim, flat\)", f"load_flat_optim_state_dict(optim, {_PLUGIN}.restored(flat))"),
    ),
}

# accelerate joins inputs of unequal length on GPUs only; without, these functions wait for the other rank for ever.
_SCRIPT = """\
import {module} as script

for name in dir(script):
    if name.startswith("test_") and "_join_" in name:
        setattr(script, name, lambda *arguments: None)
script.main()
"""


def adapt(source: str, loader: str, instead_of: str = _STATEFUL) -> str:
    """A test file with a loader in the place of another one, also in the programs that it has as text."""
    module, _, kind = loader.rpartition(".")
    other_module, _, other_kind = instead_of.rpartition(".")
    imported = re.compile(rf"^( *)from {re.escape(other_module)} import (.*\b{other_kind}\b.*)$", re.MULTILINE)

    def replaced(match: re.Match[str]) -> str:
        indent, names = match[1], [name.strip() for name in match[2].split(",")]
        ours = next(name for name in names if name.split(" ")[0] == other_kind)
        others = [name for name in names if name != ours]
        alias = ours.partition(" as ")[2] or other_kind
        lines = [f"{indent}from {module} import {kind} as {alias}"]
        if others:
            lines.append(f"{indent}from {other_module} import {', '.join(others)}")
        return "\n".join(lines)

    return imported.sub(replaced, source)


def checkpointed(source: str, peer: str) -> str:
    """A test file of a peer that saves and restores by hetstream, as far as the plugin alone cannot do that."""
    for pattern, replacement in _CHECKPOINTED.get(peer, ()):
        source = re.sub(pattern, replacement, source, flags=re.MULTILINE)
    return source


def home(file: str, peers: Sequence[Path]) -> Path | None:
    """The first folder of peers that has a file; None if none has."""
    return next((folder for folder in peers if (folder / file).is_file()), None)


def excluded(suite: str) -> dict[str, list[str]]:
    """Reasons why tests of a suite are not run, each with the patterns of their names."""
    reasons: dict[str, list[str]] = json.loads((HERE / "excluded.json").read_text()).get(suite, {})
    return reasons


def is_excluded(name: str, reasons: Mapping[str, Iterable[str]]) -> bool:
    """Whether some reason names a test."""
    return any(fnmatch.fnmatchcase(name, pattern) for patterns in reasons.values() for pattern in patterns)


def expected(suite: str) -> dict[str, Outcomes]:
    """The stored outcomes: those of a file by its name; excluded tests have the outcome `excluded`."""
    stored: dict[str, dict[str, list[str]]] = json.loads(SUITES[suite].expectation.read_text())
    return {
        file: {name: outcome for outcome, names in outcomes.items() for name in names}
        for file, outcomes in stored.items()
    }


# --- run --------------------------------------------------------------------------------------------------------------


def run(
    suite: Suite, peers: Sequence[Path], only: Sequence[str] = (), with_excluded: bool = False
) -> dict[str, Outcomes]:
    """Run a suite.

    Args:
        suite: which one.
        peers: folders of the peers' files.
        only: names of tests; none for all.
        with_excluded: run those that are excluded, too.
    """
    reasons = {} if with_excluded else excluded(suite.name)
    found = {}
    for file in suite.files:
        if suite.is_scripts:
            name = file.rpartition(".")[2]
            if not only or name in only:
                found[file] = {name: "excluded" if is_excluded(name, reasons) else _run_script(suite, file)}
            continue
        with tempfile.TemporaryDirectory(prefix="hetstream-peers-") as directory:
            found[file] = _run_file(suite, home(file, peers) or peers[0], file, Path(directory), only, reasons)
    return found


def _run_file(
    suite: Suite, peers: Path, file: str, directory: Path, only: Sequence[str], reasons: Mapping[str, Sequence[str]]
) -> Outcomes:
    peer, _, name = file.partition("/")
    # All of the peer's: what a test imports beside it, and conftest.py.
    shutil.copytree(peers / peer, directory, dirs_exist_ok=True)
    for replaced in suite.replaced if suite.loader else ():
        (directory / name).write_text(adapt((directory / name).read_text(), suite.loader, replaced))
    if suite.checkpoints:
        shutil.copyfile(HERE / "programs" / "checkpoints.py", directory / f"{_PLUGIN}.py")
        (directory / name).write_text(checkpointed((directory / name).read_text(), peer))
    if suite.waits:
        shutil.copyfile(HERE / "programs" / f"{_WAITING}.py", directory / f"{_WAITING}.py")
    for changed, pairs in _REPLACED.items():
        if changed.startswith(f"{peer}/"):
            text = (directory / changed.removeprefix(f"{peer}/")).read_text()
            for before, after in pairs:
                text = text.replace(before, after)
            (directory / changed.removeprefix(f"{peer}/")).write_text(text)
    for standin, text in _STANDINS.get(peer, {}).items():
        (directory / standin).parent.mkdir(exist_ok=True)
        (directory / standin).write_text(text)
    collected = _collect(suite, directory, name)
    wanted = [test for test in collected if not is_excluded(test, reasons) and (not only or test in only)]
    outcomes = {test: "excluded" for test in collected if is_excluded(test, reasons) and not only}
    if wanted:
        chosen = directory / "chosen.txt"
        chosen.write_text("".join(f"{name}::{test}\n" for test in wanted))
        report = directory / "report.xml"
        options = ("-q", "--timeout", str(_TEST_LIMIT_S), f"--junitxml={report}", f"@{chosen.name}")
        plugin = ("-p", _PLUGIN) if suite.checkpoints else ("-p", _WAITING) if suite.waits else ()
        done = _run_python(suite, directory, (*_PYTEST, *plugin, *options), _FILE_LIMIT_S)
        if not report.exists():
            raise SystemExit(f"{suite.name}: {file} did not run to its end:\n{done.stdout[-4000:]}")
        ran = read_report(report.read_text(), name)
        outcomes |= {test: ran.get(test, "failed") for test in wanted}
        # What is run again by itself leaves the log and the steps of the whole run.
        _keep(suite, Path(name).stem + "-again" * bool(only), directory, done)
    return outcomes


def _collect(suite: Suite, directory: Path, name: str) -> list[str]:
    """Names of all tests of a file, `Class::test` or `test`."""
    command = (*_PYTEST, "--collect-only", "-q", name)
    done = _run_python(Suite(suite.name, "", suite.files), directory, command, _FILE_LIMIT_S)
    names = [line.split("::", 1)[1] for line in done.stdout.splitlines() if line.startswith(f"{name}::")]
    found = [test for test in names if any(fnmatch.fnmatchcase(test, pattern) for pattern in suite.tests)]
    if not found:
        raise SystemExit(f"{suite.name}: no tests in {name}:\n{done.stdout[-4000:]}")
    return found


def read_report(text: str, name: str) -> Outcomes:
    """What a JUnit report says of each test of a file; one with several entries has passed when all of them have."""
    outcomes: Outcomes = {}
    module = name.removesuffix(".py").replace("/", ".")
    for case in ElementTree.fromstring(text).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        classes = case.attrib["classname"].removeprefix(module).split(".")[1:]
        test = "::".join([*classes, case.attrib["name"]])
        outcomes[test] = "failed" if "failed" in (outcome, outcomes.get(test)) else outcome
    return outcomes


def _run_script(suite: Suite, module: str) -> str:
    with tempfile.TemporaryDirectory(prefix="hetstream-peers-") as directory:
        (Path(directory) / "script.py").write_text(_SCRIPT.format(module=module))
        ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        done = _run_python(suite, Path(directory), (*ranks, "script.py"), _SCRIPT_LIMIT_S)
        _keep(suite, module.rpartition(".")[2], Path(directory), done)
    return "passed" if done.returncode == 0 else "failed"


def _run_python(
    suite: Suite, directory: Path, arguments: Sequence[str], limit_s: float
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    if suite.data_workers is not None:
        command = [sys.executable, "-m", "hetstream.slurm_plugin.cli", "run", "--data-workers", str(suite.data_workers)]
        command += ["--stream-in-process-loaders"] * suite.is_in_process
        command += ["--json", str(directory / _SUMMARY), "--", sys.executable, *arguments]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HETSTREAM_", "SLURM_"))}
    # No display, no network, and no GPU, so that each run is like the other.
    environment |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    # Lightning chooses another logger where tensorboard is: only these suites shall find it.
    tensorboard = [str(Path(sys.prefix, "tensorboard"))] * suite.name.endswith(_CHECKPOINT_SUITES)
    environment["PYTHONPATH"] = os.pathsep.join([str(directory), *tensorboard])
    environment |= {"PEERS_CHECKPOINTS": suite.files[0].partition("/")[0], "PEERS_COUNTS": str(directory / _COUNTS)}
    with (directory / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # `hetstream run` ends what it has started
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
        output.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, output.read(), "")


def _keep(suite: Suite, name: str, directory: Path, done: subprocess.CompletedProcess[str]) -> None:
    """Leave the log of a file in BUILD, and its summary and counts if there are some."""
    BUILD.mkdir(exist_ok=True)
    kept = BUILD / f"peers-{suite.name}-{name}.log"
    kept.write_text(done.stdout)
    for counted in (_SUMMARY, _COUNTS):
        target = kept.with_suffix(Path(counted).suffix)
        target.unlink(missing_ok=True)
        if (directory / counted).exists():
            shutil.copyfile(directory / counted, target)


def _loaders(suite: Suite, file: str) -> list[dict[str, Any]]:
    """What each loader has counted when a file ran with data workers."""
    summary = BUILD / f"peers-{suite.name}-{file.rpartition('.')[2] if suite.is_scripts else Path(file).stem}.json"
    loaders: list[dict[str, Any]] = json.loads(summary.read_text())["loaders"] if summary.exists() else []
    return loaders


def streamed_steps(suite: Suite, file: str) -> int:
    """How many steps data workers made when a file ran with them."""
    return sum(loader["steps"] - loader["local_steps"] for loader in _loaders(suite, file))


def counted_steps(suite: Suite, file: str, name: str) -> int:
    """How many of these were compared with torch's own (`compared_steps`), or differed (`differing_steps`)."""
    return sum(loader.get(name, 0) for loader in _loaders(suite, file))


def counted_checkpoints(suite: Suite, file: str) -> dict[str, int]:
    """How often hetstream saved and restored when a file ran with its checkpoints."""
    counts = BUILD / f"peers-{suite.name}-{Path(file).stem}.txt"
    lines = counts.read_text().splitlines() if counts.exists() else []
    return {name: lines.count(name) for name in ("save", "restore")}


# --- compare ----------------------------------------------------------------------------------------------------------


def differences(found: Mapping[str, Outcomes], stored: Mapping[str, Outcomes]) -> Iterator[tuple[str, str, str, str]]:
    """(file, test, expected, found) of each test that did something else."""
    for file, outcomes in found.items():
        before = stored.get(file, {})
        for name in sorted({*outcomes, *before}):
            pair = before.get(name, "unknown"), outcomes.get(name, "missing")
            if pair[0] != pair[1]:
                yield (file, name, *pair)


def check(suite: Suite, peers: Sequence[Path]) -> list[str]:
    """Run a suite and compare it with what is expected: returns what got worse, in words."""
    found = run(suite, peers)
    print_table(suite, found)
    worse = hollow(suite, found) + unexplained(suite, found)
    if not suite.expectation.exists():
        return [*worse, f"{suite.name}: nothing is stored to compare it with; --write stores what is found"]
    stored = expected(suite.name)
    again = [name for _, name, _, now in differences(found, stored) if now == "failed"]
    if again:
        for file, outcomes in run(suite, peers, again).items():
            found[file] |= {name: outcome for name, outcome in outcomes.items() if name in again}
    for file, name, before, now in differences(found, stored):
        print(f"  {file} {name}: {before} is expected, {now} was found")
        if now != "passed":
            worse.append(f"{suite.name}: {file} {name}: {before} is expected, {now} was found")
    return worse


def hollow(suite: Suite, files: Iterable[str]) -> list[str]:
    """Files whose tests ran with hetstream and show nothing of it, in words."""
    if not suite.checkpoints:
        return not_streamed(suite, files)
    made = {file: counted_checkpoints(suite, file) for file in files}
    return [
        f"{suite.name}: {file}: hetstream did not {what}"
        for file, counts in made.items()
        for what, number in counts.items()
        if not number
    ]


def not_streamed(suite: Suite, files: Iterable[str]) -> list[str]:
    """Files that ran under the hook and had no use of it, in words; or had, against what is said of them."""
    made = {} if suite.data_workers is None else {file: streamed_steps(suite, file) for file in files}
    if suite.stays_local:
        steps = [f"{suite.name}: {file}: data workers made {number} steps" for file, number in made.items() if number]
        return [f"{step}, though {suite.stays_local}" for step in steps]
    return [
        f"{suite.name}: {file}: data workers made no step"
        for file, steps in made.items()
        if not steps and file not in LOCAL_FILES
    ]


def unexplained(suite: Suite, files: Iterable[str]) -> list[str]:
    """Files of which more steps differed from torch's own than is stored and explained, in words."""
    stored = recorded().get(suite.name, {}).get("differing_steps", {}) if suite.differs else {}
    made = {} if suite.data_workers is None else {file: counted_steps(suite, file, "differing_steps") for file in files}
    return [
        f"{suite.name}: {file}: {number} steps of data workers were not torch's own, {stored.get(file, 0)} of them are "
        "stored and explained"
        for file, number in made.items()
        if number > stored.get(file, 0)
    ]


def worse_than_plain(suite: Suite) -> list[str]:
    """Tests that pass without hetstream and fail with it, as far as they are not excluded."""
    plain, here = expected(suite.plain), expected(suite.name)
    return [
        f"{file}: {name}"
        for file, outcomes in here.items()
        for name, outcome in outcomes.items()
        if outcome == "failed" and plain[file].get(name) == "passed"
    ]


def count(outcomes: Outcomes) -> dict[str, int]:
    """How many tests have each outcome."""
    counted = Counter(outcomes.values())
    return {outcome: counted[outcome] for outcome in ("passed", "failed", "excluded", "skipped")}


def print_table(suite: Suite, found: Mapping[str, Outcomes]) -> None:
    print(f"\n{suite.name}: {suite.title}")
    print(f"{'file':44} {'passed':>7} {'failed':>7} {'excluded':>9} {'skipped':>8}")
    for file, outcomes in found.items():
        numbers = count(outcomes)
        print(
            f"{file:44} {numbers['passed']:7} {numbers['failed']:7} {numbers['excluded']:9} {numbers['skipped']:8}",
            flush=True,
        )


# --- write ------------------------------------------------------------------------------------------------------------


def store(suite: Suite, found: Mapping[str, Outcomes]) -> None:
    """Keep what was found as the expectation; what did not run now keeps its own."""
    whole: dict[str, Outcomes] = expected(suite.name) if suite.expectation.exists() else {}
    for file, outcomes in found.items():
        whole[file] = whole.get(file, {}) | outcomes
    stored: dict[str, Any] = {
        file: {
            outcome: sorted(name for name, one in outcomes.items() if one == outcome)
            for outcome in ("passed", "failed", "excluded", "skipped")
        }
        for file, outcomes in whole.items()
    }
    suite.expectation.write_text(json.dumps(stored, indent=1) + "\n")


def recorded() -> dict[str, dict[str, Any]]:
    """What is known of the last whole run of each suite."""
    known: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    return known


def record(suite: Suite, files: Iterable[str]) -> None:
    """Note that a suite has run as a whole."""
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    entry: dict[str, Any] = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": f"Python {platform.python_version()}, {packages}",
    }
    if suite.data_workers is not None:
        entry["streamed_steps"] = {file: streamed_steps(suite, file) for file in files}
        for name in ("compared_steps", "differing_steps"):
            entry[name] = {file: counted_steps(suite, file, name) for file in entry["streamed_steps"]}
    if suite.checkpoints:
        entry["checkpoints"] = {file: counted_checkpoints(suite, file) for file in files}
    RECORDED.write_text(json.dumps(recorded() | {suite.name: entry}, indent=1, sort_keys=True) + "\n")


def _total(suite: Suite) -> str:
    """Of all files of a suite, as cells, how many tests have each outcome."""
    counted: Counter[str] = Counter()
    for outcomes in expected(suite.name).values():
        counted.update(count(outcomes))
    return " | ".join(str(counted[outcome]) for outcome in ("passed", "failed", "excluded", "skipped"))


def _steps(suite: Suite, runs: Mapping[str, dict[str, Any]]) -> list[str]:
    """As cells, how many steps of it data workers made, how many were compared, and how many differed."""
    if suite.data_workers is None or suite.name not in runs:
        return ["", "", ""]
    run = runs[suite.name]
    number = sum(run.get("streamed_steps", {}).values())
    made = str(number) if number >= _FEW_STEPS else f"{number}, hollow"
    if suite.stays_local:
        made = f"{number}, hollow: {suite.stays_local}"
    compared, differed = (
        str(sum(run[what].values())) if what in run else "not counted" for what in ("compared_steps", "differing_steps")
    )
    if suite.differs and differed not in ("0", "not counted"):
        differed += f": {suite.differs}"
    return [made, compared, differed]


def tables() -> str:
    """The part of the document that follows from the stored expectations."""
    known = [suite for suite in SUITES.values() if suite.expectation.exists()]
    runs = recorded()
    lines = [
        "| suite | tests of it | passed | failed | excluded | skipped | steps of data workers | compared | differed |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for suite in (suite for suite in known if not suite.name.endswith(_CHECKPOINT_SUITES)):
        lines.append(f"| {suite.name} | {suite.title} | {_total(suite)} | {' | '.join(_steps(suite, runs))} |")
    lines += ["", "| suite | tests of it | passed | failed | excluded | skipped | saves by hetstream | restores |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for suite in (suite for suite in known if suite.name.endswith(_CHECKPOINT_SUITES)):
        cells = ["", ""]
        if suite.checkpoints and suite.name in runs:
            counts = runs[suite.name]["checkpoints"].values()
            numbers = [sum(of_file[what] for of_file in counts) for what in ("save", "restore")]
            cells = [str(number) if number >= _FEW_CHECKPOINTS else f"{number}, hollow" for number in numbers]
        lines.append(f"| {suite.name} | {suite.title} | {_total(suite)} | {' | '.join(cells)} |")
    dates = sorted({run["date"] for run in runs.values()})
    versions = {version: None for run in runs.values() for version in run["versions"].split(", ")}
    lines += ["", f"Run between {dates[0]} and {dates[-1]} with {', '.join(versions)}."] if dates else []
    for suite in known:
        plain = expected(suite.plain) if suite.plain else {}
        failed = [
            f"`{name}`"
            + ("" if plain.get(file, {}).get(name, "failed") == "passed" or not plain else " (without, too)")
            for file, outcomes in expected(suite.name).items()
            for name, outcome in outcomes.items()
            if outcome == "failed"
        ]
        if failed:
            lines += ["", f"{suite.name}: failed, {len(failed)}: {', '.join(failed)}."]
    return "\n".join(lines)


def write_document() -> None:
    """Bring docs/peers.md up to date."""
    before, _, rest = DOCUMENT.read_text().partition(_BEGIN)
    after = rest.partition(_END)[2]
    DOCUMENT.write_text(f"{before}{_BEGIN}\n\n{tables()}\n\n{_END}{after}")


def document_tables() -> str:
    """What the document has in that place."""
    return DOCUMENT.read_text().partition(_BEGIN)[2].partition(_END)[0].strip()


def main() -> int:
    parser = argparse.ArgumentParser(description="Run peers' test suites against hetstream.")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"default all: {', '.join(SUITES)}")
    parser.add_argument("--peers", type=Path, action="append", metavar="DIR", help="a folder of their files")
    parser.add_argument("--write", action="store_true", help="store what was found, and write docs/peers.md")
    parser.add_argument("--document", action="store_true", help="run nothing; write docs/peers.md")
    parser.add_argument("--all", action="store_true", help="run what is excluded, too; store nothing")
    parser.add_argument("--file", default="", metavar="TEXT", help="only files with this in their names")
    parser.add_argument("--only", nargs="*", default=(), metavar="TEST", help="only tests of these names")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.suites if name not in SUITES]
    if unknown:
        parser.error(f"unknown suites: {', '.join(unknown)}")
    if arguments.document:
        write_document()
        return 0
    peers = [folder.resolve() for folder in arguments.peers or PEERS]
    places = " and ".join(map(str, peers))
    if all(suite.missing(peers) for suite in SUITES.values() if not suite.is_scripts):
        parser.error(f"{places}: none of the peers' files is there; docs/peers.md says which belong there")
    worse: list[str] = []
    for name in arguments.suites or SUITES:
        suite = SUITES[name]
        if arguments.file:
            suite = replace(suite, files=tuple(file for file in suite.files if arguments.file in file))
        if not suite.files:
            continue
        if missing := suite.missing(peers):
            print(f"\n{name}: skipped, there is no {', '.join(missing)} in {places}")
            continue
        if arguments.all or ((arguments.only or arguments.file) and not arguments.write):
            found = run(suite, peers, arguments.only, arguments.all)
            print_table(suite, found)
            for file, outcomes in found.items():
                print(*(f"  {file} {test}" for test, one in outcomes.items() if one == "failed"), sep="\n")
        elif arguments.write:
            found = run(suite, peers, arguments.only)
            print_table(suite, found)
            store(suite, found)
            if not (arguments.only or arguments.file):
                record(suite, found)
                worse += hollow(suite, found) + unexplained(suite, found)
            write_document()
        else:
            worse += check(suite, peers)
    print(*worse, sep="\n")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
