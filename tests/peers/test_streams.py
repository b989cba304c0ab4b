"""Programs that train on streams of Hugging Face, webdataset, LitData and their own, unmodified: the same batches under
the hook, in all passes, and data workers have made them.

The programs are in `programs/stream_trainings.py`; what of their packages is missing skips a test.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
_WRITE = "write"
_LIMIT_S = 280

# Batches of all passes, and how many of them torch's own worker processes have made: one each in each pass.
# Kept workers change over once.
STREAMED = {
    "hf_shuffled": (360, 9),
    "hf_kept_workers": (360, 2),
    "hf_interleaved": (416, 4),
    "hf_by_node": (360, 9),
    "hf_resumed": (280, 4),
    "hf_from_map_style": (200, 4),
    "wds_shuffled": (240, 12),
    "wds_kept_workers": (192, 2),
    "wds_resampled": (360, 9),
    "wds_pipeline_by_node": (318, 6),
    "lit_shuffled": (180, 6),
    "lit_in_torchs_loader": (180, 6),
    "lit_resumed": (120, 6),
    "lit_combined": (164, 4),
    "packed_pretraining": (270, 6),
}
LOCAL = {
    "hf_stateful_loader": "StatefulDataLoader makes an iterator of its own",
    "wds_shuffled_by_the_time": "batch 0 of data workers is not torch's own",
    "mosaic_shuffled": "shared memory belongs to the processes of one host",
    "packed_pretraining_kept": "the program has left a pass",
}
RANKED = ("hf_by_node", "wds_pipeline_by_node", "packed_pretraining", "lit_shuffled")
_PACKAGES = {"hf": "datasets", "wds": "webdataset", "lit": "litdata", "mosaic": "streaming", "packed": "numpy"}
_WRITERS = {"hf": "rows", "wds": "tars", "lit": "optimised", "mosaic": "mosaic", "packed": "memmap"}
# What `streaming` imports of torchvision, which has no build for this torch.
_TORCHVISION = {"datasets.py": "VisionDataset = object\n", "transforms/functional.py": "to_tensor = None\n"}


def run(folder: Path, name: str, *arguments: str, before: tuple[str, ...] = ()) -> tuple[list[str], str]:
    """Lines about passes, in order, and what else was said."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("HETSTREAM_", "SLURM_"))}
    environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = str(folder / "standins")
    program = [str(PROGRAMS / "stream_trainings.py"), name, str(folder), *arguments]
    done = subprocess.run([*before, *program], env=environ, capture_output=True, text=True, timeout=_LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank")), done.stdout + done.stderr


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("streams")


def prepare(data: Path, name: str) -> None:
    """Have the data of a program's library, or skip the test."""
    library = name.partition("_")[0]
    if importlib.util.find_spec(_PACKAGES[library]) is None:
        pytest.skip("the packages that peers' tests need are not installed")
    for file, text in _TORCHVISION.items():
        place = data / "standins" / "torchvision" / file
        place.parent.mkdir(parents=True, exist_ok=True)
        (place.parent / "__init__.py").touch()
        place.write_text(text)
    if not (data / library).exists():
        run(data, _WRITE, _WRITERS[library], before=(sys.executable,))
        (data / library).touch()


def both(data: Path, name: str, python: tuple[str, ...] = (sys.executable,)) -> tuple[list[str], str, dict[str, int]]:
    """Assert that a program's passes are the same under the hook; gives them, what was said there, and what counted."""
    prepare(data, name)
    expected, _ = run(data, name, before=python)
    summary = data / f"{name}-{len(python)}.json"
    hook = (sys.executable, "-m", "hetstream.slurm_plugin.cli", "run", "--data-workers", "2", "--json", str(summary))
    found, said = run(data, name, before=(*hook, "--", *python, str(PROGRAMS / "waiting.py")))
    assert found == expected
    loaders = json.loads(summary.read_text())["loaders"]
    names = ("steps", "local_steps", "compared_steps", "differing_steps")
    return expected, said, {name: sum(loader.get(name, 0) for loader in loaders) for name in names}


@pytest.mark.parametrize("name", STREAMED)
def test_a_program_has_its_own_batches_and_data_workers_make_them(name: str, data: Path) -> None:
    _, said, counted = both(data, name)
    assert "stays local" not in said
    assert (counted["steps"], counted["local_steps"]) == STREAMED[name]
    assert (counted["compared_steps"], counted["differing_steps"]) == (STREAMED[name][1], 0)


@pytest.mark.parametrize("name", LOCAL)
def test_a_program_that_stays_local_says_why(name: str, data: Path) -> None:
    _, said, _ = both(data, name)
    assert LOCAL[name] in said


@pytest.mark.parametrize("name", RANKED)
def test_each_rank_has_its_own_batches(name: str, data: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    passes, said, counted = both(data, name, (sys.executable, *launcher))
    assert "stays local" not in said
    assert passes[0].split()[4] != passes[-1].split()[4]
    # Two ranks of at most three workers, in each pass.
    assert counted["local_steps"] <= 6 * len(passes) // 2
    assert counted["differing_steps"] == 0
