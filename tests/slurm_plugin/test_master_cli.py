"""`hetstream internal master start`: what a script's own environment becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from hetstream.slurm_plugin.cli import main, master


@pytest.mark.parametrize(
    ("options", "exported"),
    [(["--offload=all"], "export HETSTREAM_OFFLOAD=all\n"), ([], ""), (["--offload=off"], "HETSTREAM_OFFLOAD=off")],
)
def test_the_program_is_told_what_of_its_forward_may_move(
    options: list[str], exported: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(_config: Any, _client: Any, _environ: Any, hook: Callable[[str], Mapping[str, str]]) -> Mapping[str, str]:
        return hook("file:/jobs/7/address")

    monkeypatch.setattr(master, "start", start)
    monkeypatch.delenv("HETSTREAM_OFFLOAD", raising=False)
    assert main(["internal", "master", "start", "--data-workers=2", "--data-worker-cpus=4", *options]) == 0
    printed = capsys.readouterr().out
    assert "export HETSTREAM_SERVICE=file:/jobs/7/address" in printed
    assert exported in printed
    assert ("HETSTREAM_OFFLOAD" in printed) == bool(options)
