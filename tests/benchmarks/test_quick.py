"""Each benchmark runs from its command line with --quick and writes its file. The figures mean nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import overhead
from benchmarks.clients.images import Photographs
from benchmarks.gpu_machines import CLIENTS, ON_CPU, ON_CUDA, Sizes, why_no_gpu
from hetstream.mpi_dataworkers.features import native

ROOT = Path(__file__).resolve().parents[2]


def run(name: str, out: Path, systems: str, *more: str) -> dict[str, dict[str, object]]:
    """Run a benchmark; return its rows by system (the last case wins)."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--out", str(out), "--systems", systems, *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((out / f"{name}.json").read_text())
    assert "--quick" in document["command"]
    assert document["versions"]["hetstream"]
    return {row["system"]: row for row in document["rows"]}


@pytest.mark.slow
@pytest.mark.parametrize("systems", ["memcpy,raw,queue", "torch DataLoader"])
def test_transport_limits_and_peers(tmp_path: Path, systems: str) -> None:
    rows = run("transport", tmp_path, systems)
    assert rows
    assert all(row["value"] is not None for row in rows.values()), rows


@pytest.mark.slow
def test_transport_of_hetstream_itself(tmp_path: Path) -> None:
    rows = run("transport", tmp_path, "hetstream,raw TCP")
    for system in ("hetstream tcp", "hetstream shm"):
        assert rows[system]["value"] is not None, rows
        assert rows[system]["note"] == ""


@pytest.mark.slow
def test_leases(tmp_path: Path) -> None:
    rows = run("leases", tmp_path, "hetstream,CURVE")
    assert {"hetstream", "CURVE ping-pong", "hetstream / CURVE ping-pong"} <= set(rows)
    assert rows["hetstream"]["value"] is not None, rows


@pytest.mark.slow
def test_tensors(tmp_path: Path) -> None:
    rows = run("tensors", tmp_path, "hetstream")
    assert all(row["value"] is not None for row in rows.values()), rows
    for transport in ("hetstream tcp", "hetstream shm"):
        ratio = f"{transport}, 141 tensors / {transport}, 1 tensor"
        assert rows[ratio]["target"] == "<= 1.1"
        assert float(str(rows[f"{ratio}: least"]["value"])) > 1, "what the ratio is at least, beside it"


@pytest.mark.slow
def test_features_beside_loops(tmp_path: Path) -> None:
    """It measures its own process; each operator has computed the same as the loop, else it fails."""
    rows = run("features", tmp_path, "width 8,256 rows")
    assert {"hetstream", "torch loop", "NumPy loop", "torch loop / hetstream", "hetstream: of memcpy"} <= set(rows)
    judged = "hetstream, native" if native.compiler() else "hetstream"
    assert rows[f"torch loop / {judged}"]["target"] == ">= 3"
    cases = {row["case"] for row in json.loads((tmp_path / "features.json").read_text())["rows"]}
    assert len(cases) == 12


@pytest.mark.slow
def test_fusion(tmp_path: Path) -> None:
    rows = run("fusion", tmp_path, "hetstream")
    assert all(row["value"] is not None for row in rows.values()), rows
    assert rows["hetstream, 141 tensors together / hetstream, one by one"]["target"] == ">= 1.3"


@pytest.mark.slow
def test_tensors_of_peers(tmp_path: Path) -> None:
    rows = run("tensors", tmp_path, "torch DataLoader,tf.data,Ray")
    for peer in ("torch DataLoader", "tf.data service", "Ray Data"):
        ratio = rows[f"{peer}, 141 tensors / {peer}, 1 tensor"]
        assert ratio["target"] is None, "it is shown, and is no goal of ours"
        assert ratio["value"] is not None or "run the benchmark without --quick" in str(
            rows[f"{peer}, 1 tensor"]["note"]
        )


@pytest.mark.slow
def test_overhead(tmp_path: Path) -> None:
    rows = run("overhead", tmp_path, "in-process,hetstream")
    assert {"in-process loop", "hetstream", "hetstream / in-process loop"} <= set(rows)
    assert all(row["value"] is not None for row in rows.values()), rows


@pytest.mark.slow
def test_step_terms(tmp_path: Path) -> None:
    rows = run("step_terms", tmp_path, "")
    assert rows["with timers / without"]["target"] == "<= 1.01"
    assert rows["with timers"]["value"]


@pytest.mark.slow
def test_scale(tmp_path: Path) -> None:
    rows = run("scale", tmp_path, "hetstream")
    assert {"linear", "hetstream", "hetstream / linear"} <= set(rows)
    assert all(row["value"] is not None for row in rows.values()), rows


@pytest.mark.slow
def test_threads(tmp_path: Path) -> None:
    rows = run("threads", tmp_path, "P=1 T=2")
    assert rows["hetstream P=1 T=2"]["value"] is not None, rows
    assert rows["hetstream P=1 T=2"]["unit"] == "MB PSS"


@pytest.mark.shows("a data worker that is killed in mid-shard costs nothing, and its leases are free at once")
def test_kill(tmp_path: Path) -> None:
    rows = run("kill", tmp_path, "hetstream")
    assert all(row["value"] is not None for row in rows.values()), rows
    document = json.loads((tmp_path / "kill.json").read_text())
    found = {row["unit"]: row["value"] for row in document["rows"] if row["system"] == "hetstream"}
    assert (found["batches lost"], found["batches twice"]) == (0, 0)


@pytest.mark.slow
def test_sharing(tmp_path: Path) -> None:
    rows = run("sharing", tmp_path, "2 jobs")
    assert rows["2 jobs, shared"]["value"] is not None, rows


@pytest.mark.slow
def test_resume(tmp_path: Path) -> None:
    rows = run("resume", tmp_path, "in process")
    assert rows["hetstream in process"]["value"] is not None, rows


@pytest.mark.slow
def test_startup(tmp_path: Path) -> None:
    rows = run("startup", tmp_path, "hetstream,fork")
    for system in ("hetstream", "hetstream, second loader", "torch DataLoader, fork"):
        assert rows[system]["value"] is not None, rows


def test_hdf5(tmp_path: Path) -> None:
    rows = run("hdf5", tmp_path, "hetstream,plain")
    assert all(row["value"] is not None for row in rows.values()), rows
    assert {"hetstream", "plain h5py", "hetstream / plain h5py"} == set(rows)


@pytest.mark.slow
def test_compared(tmp_path: Path) -> None:
    rows = run("compared", tmp_path, "hetstream, compared,torch")
    assert {"hetstream, compared", "torch DataLoader"} <= set(rows)
    assert all(row["value"] is not None for row in rows.values()), rows


@pytest.mark.slow
def test_coordinated(tmp_path: Path) -> None:
    rows = run("coordinated", tmp_path, "hetstream")
    assert all(row["value"] is not None for row in rows.values()), rows


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ckpt_save", "ckpt_restore"])
def test_checkpoints(tmp_path: Path, name: str) -> None:
    rows = run(name, tmp_path, "hetstream")
    assert rows["hetstream"]["value"] is not None, rows
    assert rows["memcpy"]["value"] is not None, rows


@pytest.mark.slow
@pytest.mark.timeout(900)  # several systems save many times, beside other tests
@pytest.mark.parametrize("name", ["ckpt_save", "ckpt_stall", "ckpt_disk", "ckpt_growth"])
def test_checkpoints_and_their_peers(tmp_path: Path, name: str) -> None:
    rows = run(name, tmp_path, "")
    assert all(row["value"] is not None for row in rows.values()), rows


@pytest.mark.slow
def test_twelve_kills_of_a_training_tear_and_mix_nothing(tmp_path: Path) -> None:
    run("ckpt_kill", tmp_path, "")
    document = json.loads((tmp_path / "ckpt_kill.json").read_text())
    goals = [row for row in document["rows"] if row["target"]]
    assert len(goals) == 4
    assert all(row["met"] for row in goals), goals
    assert sum(row["value"] for row in document["rows"] if row["unit"] == "kills") == 12


def test_synthetic_photographs_can_be_read(tmp_path: Path) -> None:
    overhead.write_synthetic(tmp_path / "jpeg", 5)
    source = Photographs(tmp_path / "jpeg", 375)
    assert len(source) == 5
    assert len(source.classes) == 4
    image, _ = source[0]
    assert image.shape == (375, 375, 3)
    assert image.std() > 10, "a picture without detail is no stand-in for a photograph"


@pytest.mark.shows("a reading of the cluster has a bounded number of requests")
def test_slurm_parse() -> None:
    """It needs no clients: it measures its own process."""
    command = [sys.executable, "-m", "benchmarks.slurm_parse", "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert (document["num_jobs"], document["num_nodes"]) == (500, 200)
    assert set(document["as_used_cpu_s"]) == {"22.05", "24.11", "26.05"}


@pytest.mark.slow
def test_schedules_of_preprocessing(tmp_path: Path) -> None:
    rows = run("rap_plan", tmp_path, "")
    assert rows["hetstream"]["value"] is not None
    assert rows["hetstream less RAP's Algorithm 1"]["met"], "never worse"
    assert rows["hetstream less Algorithm 1, two resources"]["met"]


@pytest.mark.slow
def test_features_mapped_over_gpus(tmp_path: Path) -> None:
    rows = run("rap_map", tmp_path, "")
    assert {"data-parallel", "data-local", "hetstream", "data-parallel / hetstream"} <= set(rows)
    assert "Simulated" in json.loads((tmp_path / "rap_map.json").read_text())["notes"][0]


@pytest.mark.slow
def test_latencies_of_kernels(tmp_path: Path) -> None:
    run("rap_predict", tmp_path, "")
    rows = json.loads((tmp_path / "rap_predict.json").read_text())["rows"]
    cases = ("1D Ops", "FirstX", "Ngram", "Onehot", "Bucketize", "plan 0")
    assert {row["case"] for row in rows} >= {f"{case}, CPU" for case in cases}


def test_allocator(tmp_path: Path) -> None:
    """It measures its own process, too."""
    command = [sys.executable, "-m", "benchmarks.allocator", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "allocator.txt").read_text() == done.stdout
    for name in ("share", "fair", "maxtp", "srtf", "dlrover", "stretch"):
        assert f" {name} " in done.stdout
    assert "the daemon's table from reports" in done.stdout


@pytest.mark.slow
@pytest.mark.slurm
def test_site_load(tmp_path: Path) -> None:
    rows = run("site_load", tmp_path, "")
    assert rows["jobs with a limit from the daemon"]["value"] == 20
    assert rows["requests to slurmctld, with hetstream"]["target"] == "<= 5"
    assert rows["looks at companions that were due, in all"]["value"] is not None
    assert rows["median"]["value"], "hetstream why"


@pytest.mark.slow
def test_gpu_sharing_on_an_emulated_gpu(tmp_path: Path) -> None:
    rows = run("gpu_sharing", tmp_path, "", "--cpu")
    assert all(row["value"] is not None for row in rows.values()), rows
    assert rows["hetstream / alone"]["target"] == "<= 1.03"
    assert rows["guaranteed, hetstream / alone"]["target"] is None, "in so short a time nothing has settled"
    document = json.loads((tmp_path / "gpu_sharing.json").read_text())
    assert document["notes"][0].startswith("EMULATION")
    assert {row["case"].partition(":")[0] for row in document["rows"]} == {
        "table 2",
        "figure 10",
        "figure 11",
        "figure 12",
    }
    assert "shrink" in rows
    assert "grow" in rows


@pytest.mark.slow
def test_what_a_real_gpu_is_asked_runs_on_an_emulated_one(tmp_path: Path) -> None:
    run("gpu_sharing", tmp_path, "interference,killed,real jobs", "--cpu")
    rows = json.loads((tmp_path / "gpu_sharing.json").read_text())["rows"]
    missing = {row["system"]: row["note"] for row in rows if row["value"] is None}
    assert {name for name in missing if "suspend A" not in name} <= {"MPS", "Pack / alone", "UMem / alone"}, missing
    assert "too few to be extrapolated" in missing.get("UMem / alone", "too few to be extrapolated")
    systems = {row["system"].partition(":")[0] for row in rows if row["case"].startswith("interference")}
    assert systems == {"packed", "AntMan", "TGS-like", "hetstream", "MPS"}
    goals = {row["system"]: row["met"] for row in rows if row["target"]}
    assert goals["Pack runs out of memory"]
    assert goals["hetstream: largest difference from alone"], "in what a job computes sharing changes nothing"
    assert goals["opportunistic, from 1 s on"], "without a coordinator it pauses"


def test_gpu_sharing_says_why_it_measures_nothing_on_a_real_gpu(tmp_path: Path) -> None:
    if why_no_gpu() == "":
        pytest.skip("there is a GPU")
    rows = run("gpu_sharing", tmp_path, "figure 12")
    assert rows["hetstream"]["value"] is None
    assert "--cpu" in str(rows["hetstream"]["note"])


def test_gpu_sharing_asks_of_a_real_gpu_what_antman_shows() -> None:
    """The larger job needs nearly all of the memory, and the other one has no room beside it."""
    large, small = (ON_CUDA.large, ON_CUDA.small)

    def needed_bytes(request: Mapping[str, Any]) -> int:
        width, rows, layers = (int(request[name]) for name in ("width", "rows", "layers"))
        return 4 * (2 * layers * width * width + (2 * layers + 1) * width * rows)

    assert 0.8 <= needed_bytes(large) / ON_CUDA.capacity_bytes <= 0.95
    assert needed_bytes(large) + needed_bytes(small) > 0.95 * ON_CUDA.capacity_bytes
    assert (ON_CUDA.guaranteed_at_most, ON_CUDA.opportunistic_at_most) == (1.01, 1.03)
    assert (ON_CUDA.shrink_ms, ON_CUDA.grow_ms) == (17, 60)


@pytest.mark.parametrize("sizes", [ON_CPU, ON_CUDA], ids=["emulated", "CUDA"])
def test_what_the_smaller_job_of_table_2_keeps_fits_beside_the_larger_one(sizes: Sizes) -> None:
    """As AntMan's: "Job-B uses 30 GB GPU memory and Job-A uses the 2 GB left over", of 32."""
    width, rows, layers = (int(sizes.small[name]) for name in ("width", "rows", "layers"))
    kept_bytes = 4 * (2 * layers * width * width + width * rows)  # parameters, gradients and a batch
    assert kept_bytes <= 2 / 32 * sizes.capacity_bytes


@pytest.mark.slow
def test_the_probe_of_a_gpu_says_of_each_fact_why_it_is_not_known() -> None:
    if why_no_gpu() == "":
        pytest.skip("there is a GPU")
    argv = [sys.executable, str(CLIENTS / "gpu_probe.py"), "{}"]
    facts = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert len(facts) == 15
    assert all(isinstance(fact, str) and fact for fact in facts.values()), facts


@pytest.mark.slow
def test_model(tmp_path: Path) -> None:
    rows = run("model", tmp_path, "fit,plan,joint,warm,memory")
    assert all(row["value"] is not None for name, row in rows.items() if "pymoo" not in name), rows
    assert rows["parameter servers"]["target"] == ">= 0.99"


@pytest.mark.slow
def test_frag_without_traces(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.frag", "--quick", "--out", str(tmp_path), "--traces", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "made up with a seed" in done.stdout
    assert "0 of 0 targets met" in done.stdout
