"""Other projects' test suites: what is stored agrees with the document and keeps its promises, and a few tests run.

All of them run in `make test-peers`; see docs/peers.md.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.peers import suite_files

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peers_suites", HERE / "suites.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


suites = _load()
STORED = [name for name, suite in suites.SUITES.items() if suite.expectation.exists()]
HOOKED = [name for name in STORED if suites.SUITES[name].plain and suites.SUITES[name].data_workers is not None]
CHECKPOINTED = [name for name in STORED if suites.SUITES[name].checkpoints]
# Of each kind of loading some tests that take a second or so.
SOME = (
    "TestStatefulDataLoaderIterable_shard0::test_no_mp",
    "TestStatefulDataLoaderGenerator_shard2::test_mp_x",
    "TestStatefulSampler_shard1::test_no_mp",
    "TestSnapshotZero_shard2::test_map_iterrupted_shuffle",
    "TestJsonSerDe_shard3::test_json_serde_multi_process",
    "TestStateInitializationDataset::test_inline",
)


def test_collected_files_lie_as_in_their_repository_and_each_collected_suite_has_its_own(tmp_path: Path) -> None:
    files = {file.file(tmp_path).relative_to(tmp_path).as_posix() for file in suite_files.stored_addresses()}
    assert len(files) == len(suite_files.stored_addresses())
    collected = {file.partition("/")[0] for file in files}
    # Those directly in a peer's folder are not collected: `shared/peers` has them.
    theirs = {file for suite in suites.SUITES.values() for file in suite.files if file.count("/") > 1}
    wanted = {file for file in theirs if file.partition("/")[0] in collected}
    assert wanted
    assert wanted <= files
    assert {f"{peer}/LICENSE" for peer in collected} <= files


def test_a_file_is_taken_from_the_first_folder_that_has_it(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, name in ((first, "a.py"), (second, "a.py"), (second, "b.py")):
        (folder / "peer").mkdir(parents=True, exist_ok=True)
        (folder / "peer" / name).touch()
    found = [suites.home(f"peer/{name}.py", (first, second)) for name in "abc"]
    assert found == [first, second, None]


def test_the_document_says_what_is_stored() -> None:
    assert suites.document_tables() == suites.tables(), "run: python tests/peers/suites.py --document"


def test_most_of_torchdatas_suite_passes_on_our_loader_and_little_is_excluded() -> None:
    total = {"passed": 0, "failed": 0, "excluded": 0, "skipped": 0}
    for outcomes in suites.expected("own").values():
        for outcome, number in suites.count(outcomes).items():
            total[outcome] += number
    assert total["passed"] >= 0.9 * (total["passed"] + total["failed"]), total
    assert total["excluded"] < 0.25 * sum(total.values()), total


@pytest.mark.parametrize("name", [name for name in STORED if suites.SUITES[name].plain])
def test_nothing_that_passes_without_hetstream_fails_with_it(name: str) -> None:
    assert suites.worse_than_plain(suites.SUITES[name]) == []


@pytest.mark.parametrize("name", HOOKED)
def test_each_file_that_ran_under_the_hook_was_streamed(name: str) -> None:
    steps = suites.recorded()[name]["streamed_steps"]
    assert set(steps) == set(suites.SUITES[name].files)
    is_local = bool(suites.SUITES[name].stays_local)
    assert all((number > 0) is not (is_local or file in suites.LOCAL_FILES) for file, number in steps.items()), steps


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_hetstream_saved_and_restored_in_each_file_of_checkpoints(name: str) -> None:
    counts = suites.recorded()[name]["checkpoints"]
    assert set(counts) == set(suites.SUITES[name].files)
    assert all(counts[file]["save"] and counts[file]["restore"] for file in counts), counts


@pytest.mark.parametrize("name", HOOKED)
def test_each_step_that_is_stored_as_another_than_torchs_is_explained(name: str) -> None:
    differing = suites.recorded()[name].get("differing_steps", {})
    assert suites.SUITES[name].differs or not any(differing.values()), differing


@pytest.mark.parametrize("name", STORED)
def test_each_exclusion_says_what_it_hides_and_excludes_something(name: str) -> None:
    tests = [test for outcomes in suites.expected(name).values() for test in outcomes]
    for reason, patterns in suites.excluded(name).items():
        said, _, hidden = reason.lower().partition("it hides ")
        assert len(said) > 20, reason
        assert len(hidden) > 20, reason
        for pattern in patterns:
            assert any(suites.is_excluded(test, {reason: [pattern]}) for test in tests), f"{pattern} names no test"


def test_the_import_is_replaced_also_in_programs_that_are_text() -> None:
    source = '''
from torchdata.stateful_dataloader import Stateful, StatefulDataLoader
PROGRAM = """\\
    from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader
"""
from torchdata.stateful_dataloader.sampler import RandomSampler
'''
    assert (
        suites.adapt(source, "hetstream.DataLoader")
        == '''
from hetstream import DataLoader as StatefulDataLoader
from torchdata.stateful_dataloader import Stateful
PROGRAM = """\\
    from hetstream import DataLoader as DataLoader
"""
from torchdata.stateful_dataloader.sampler import RandomSampler
'''
    )


def test_a_report_is_read_with_the_worst_of_each_test() -> None:
    report = """<testsuites><testsuite>
    <testcase classname="tests.test_x.TestA" name="test_one"/>
    <testcase classname="tests.test_x.TestA" name="test_two"><failure message="no"/></testcase>
    <testcase classname="tests.test_x.TestA" name="test_two"/>
    <testcase classname="tests.test_x" name="test_three[0]"><skipped/></testcase>
    <testcase classname="tests.test_x" name="test_four"><error message="teardown"/></testcase>
    </testsuite></testsuites>"""
    assert suites.read_report(report, "tests/test_x.py") == {
        "TestA::test_one": "passed",
        "TestA::test_two": "failed",
        "test_three[0]": "skipped",
        "test_four": "failed",
    }


def test_some_of_torchdatas_tests_pass_on_our_loader() -> None:
    peers = Path(os.environ.get("PEERS", ROOT.parent / "shared" / "peers"))
    if not (peers / "torchdata").is_dir():
        pytest.skip(f"{peers} has no folder torchdata: PEERS=DIR names the folder of peers' files")
    python = ROOT / ".venv-peers-tests" / "bin" / "python"
    if not (ROOT / ".venv-peers-tests" / ".ready").exists():
        pytest.skip("the packages that peers' tests need are not installed: make .venv-peers-tests/.ready")
    command = [str(python), str(HERE / "suites.py"), "--peers", str(peers), "own", "--file", "state_dict", "--only"]
    done = subprocess.run([*command, *SOME], capture_output=True, text=True, check=False, timeout=280)
    numbers = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("torchdata/test_state_dict.py")]
    assert numbers == [[str(len(SOME)), "0", "0", "0"]], done.stdout + done.stderr


def test_suites_whose_files_are_absent_are_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["suites.py", "--peers", str(tmp_path), "speechbrain"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="2"):
        suites.main()
    assert "none of the peers' files is there" in capsys.readouterr().err

    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "test_data_loader.py").touch()
    assert suites.main() == 0
    assert f"speechbrain: skipped, there is no speechbrain/test_dataloader.py in {tmp_path}" in capsys.readouterr().out


def test_what_is_worse_than_stored_fails_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = "speechbrain/test_dataloader.py"
    suite = suites.SUITES["speechbrain"]
    outcomes = dict.fromkeys(suites.expected("speechbrain")[file], "passed")
    one, *_, other = outcomes
    asked: list[list[str]] = []

    def run(_suite: object, _peers: list[Path], only: list[str] = []) -> dict[str, dict[str, str]]:  # noqa: B006
        asked.append(only)
        return {file: outcomes | {one: "failed", other: "passed" if only else "failed"}}

    monkeypatch.setattr(suites, "run", run)
    assert suites.check(suite, [tmp_path]) == [f"speechbrain: {file} {one}: passed is expected, failed was found"]
    assert asked == [[], [one, other]], "what fails is run once more by itself before it is believed"

    monkeypatch.setattr(suites.Suite, "expectation", tmp_path / "nothing.json")
    assert suites.check(suite, [tmp_path]) == [
        "speechbrain: nothing is stored to compare it with; --write stores what is found"
    ]


def test_a_suite_under_the_hook_that_was_not_streamed_fails_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = "speechbrain/test_dataloader.py"
    suite, plain = suites.SUITES["speechbrain-hook"], suites.SUITES["speechbrain"]
    monkeypatch.setattr(suites, "BUILD", tmp_path)
    monkeypatch.setattr(suites, "run", lambda suite, _peers: suites.expected(suite.name))
    hollow = [f"speechbrain-hook: {file}: data workers made no step"]
    assert suites.check(suite, [tmp_path]) == hollow, "it left no summary"

    summary = tmp_path / "peers-speechbrain-hook-test_dataloader.json"
    summary.write_text('{"loaders": [{"steps": 2, "local_steps": 2}, {"steps": 0, "local_steps": 0}]}')
    assert suites.check(suite, [tmp_path]) == hollow, "the program made all steps itself"

    summary.write_text('{"loaders": [{"steps": 2, "local_steps": 2}, {"steps": 3, "local_steps": 1}]}')
    assert suites.streamed_steps(suite, file) == 2
    assert suites.check(suite, [tmp_path]) == []
    assert suites.check(plain, [tmp_path]) == [], "without the hook there is nothing to stream"


def test_a_suite_of_which_more_steps_differ_than_is_explained_fails_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = "speechbrain/test_dataloader.py"
    suite = suites.SUITES["speechbrain-hook"]
    monkeypatch.setattr(suites, "BUILD", tmp_path)
    monkeypatch.setattr(suites, "RECORDED", tmp_path / "recorded.json")
    monkeypatch.setattr(suites, "version", lambda _: "1.0")  # this environment may lack some packages
    monkeypatch.setattr(suites, "run", lambda suite, _peers: suites.expected(suite.name))
    summary = tmp_path / "peers-speechbrain-hook-test_dataloader.json"
    made = '{"steps": 9, "local_steps": 0, "compared_steps": 8, "differing_steps": %d}'
    summary.write_text('{"loaders": [%s, %s, {"steps": 3, "local_steps": 1}]}' % (made % 0, made % 2))  # noqa: UP031
    suites.record(suite, [file])
    entry = suites.recorded()["speechbrain-hook"]
    assert [entry[name] for name in ("streamed_steps", "compared_steps", "differing_steps")] == [
        {file: 20},
        {file: 16},
        {file: 2},
    ]
    said = f"speechbrain-hook: {file}: 2 steps of data workers were not torch's own, 0 of them are stored and explained"
    assert suites.check(suite, [tmp_path]) == [said], "nobody has said why"
    explained = suites.replace(suite, differs="because")
    assert suites.check(explained, [tmp_path]) == []
    summary.write_text('{"loaders": [%s]}' % (made % 3))
    assert suites.check(explained, [tmp_path]) == [said.replace(": 2 steps", ": 3 steps").replace("0 of", "2 of")]
    assert suites.check(suites.SUITES["speechbrain"], [tmp_path]) == []


def test_a_suite_of_checkpoints_in_which_hetstream_did_nothing_fails_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = suites.SUITES["accelerate-checkpoints-flash"]
    file = suite.files[0]
    monkeypatch.setattr(suites, "BUILD", tmp_path)
    counts = tmp_path / f"peers-{suite.name}-test_state_checkpointing.txt"
    assert suites.hollow(suite, [file]) == [
        f"{suite.name}: {file}: hetstream did not {what}" for what in ("save", "restore")
    ]
    counts.write_text("save\nsave\n")
    assert suites.hollow(suite, [file]) == [f"{suite.name}: {file}: hetstream did not restore"]
    counts.write_text("save\nrestore\n")
    assert suites.hollow(suite, [file]) == []
    assert suites.hollow(suites.SUITES["accelerate-checkpoints"], [file]) == [], "the peer's own are not counted"


def test_torchtitans_functions_hand_over_to_hetstream() -> None:
    source = """import torch
def fake_async_save(*args, **kwargs):
    return None
class Test:
    def fake_load(self, states: dict, checkpoint_id=None):
        loaded = torch.load(path, weights_only="False")
    def test(self):
        torch.save(sd_to_save, os.path.join(checkpoint_id, "state_dict.pt"))
        container.load_state_dict(other.state_dict())
        states[key].load_state_dict(val)
"""
    assert (
        suites.checkpointed(source, "torchtitan")
        == """import hetstream_checkpoints
import torch
def fake_async_save(*args, **kwargs):
    hetstream_checkpoints.save(kwargs["checkpoint_id"], args[0])
    return None
class Test:
    def fake_load(self, states: dict, checkpoint_id=None):
        return hetstream_checkpoints.restore(checkpoint_id, states)
    def test(self):
        hetstream_checkpoints.save(checkpoint_id, state_dict)
        hetstream_checkpoints.restore_into(container, other.state_dict())
        states[key].load_state_dict(val)
"""
    )
