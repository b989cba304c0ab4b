"""The process that makes samples is what torch's worker process is, as far as samples can ask."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HETSTREAM = str(Path(sys.executable).with_name("hetstream"))
PROGRAM = str(Path(__file__).with_name("programs") / "process_probes.py")

# What of a data worker is not as in torch's worker process, and why it stays so. A loader whose samples show it is made
# local by the comparison with the program's own steps.
REMAINING = {
    "handler_of_interrupt": "a data worker ends in order when told to; what samples start has Python's own handlers",
    "handler_of_end": "as above",
    "ignored_signal": "handlers that the program has set are for its own process",
    "main_module": "the script does not run again: its classes and functions travel by value",
    "hash_seed": "data workers order sets alike, so that what they make is the same whoever makes it",
    "errors_of_output": "`hetstream` writes names that the terminal's encoding lacks as escapes",
    "limits": "they are those of the data worker's host and job step",
    "memory_killer": "the kernel ends processes that make samples before all others, the trainer's among them",
    "name_for_kernel": "`ps` shows who a process belongs to",
}


def answers(path: Path, *words: str) -> tuple[dict[str, str], str]:
    """What the probes give, and standard error."""
    with open("/dev/null") as nothing:
        done = subprocess.run(words, stdin=nothing, capture_output=True, text=True, check=True, timeout=200)
    return json.loads(path.read_text()), done.stderr


def test_a_process_of_a_data_worker_is_what_torch_s_worker_process_is(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    run = [HETSTREAM, "run", "--data-workers", "2", "--", sys.executable]
    of_torch, _ = answers(path, sys.executable, PROGRAM, str(path), "plain")
    ours, _ = answers(path, *run, PROGRAM, str(path), "own")
    differing = {name: (ours[name], given) for name, given in of_torch.items() if ours[name] != given}
    assert differing.keys() == REMAINING.keys(), differing
    assert "daemonic processes are not allowed to have children" in ours["child"]
    # A program that does not know hetstream is compared, and nothing that its samples ask for differs.
    alike = [name for name in of_torch if name not in REMAINING]
    streamed, said = answers(path, *run, PROGRAM, str(path), "hook", *alike)
    assert streamed == {name: of_torch[name] for name in alike}
    assert f"{len(alike)} steps, {len(alike)} samples, 0 steps made in the trainer" in said
    assert ", 0 differed" in said
