"""The command that installs this copy of hetstream elsewhere, by how it came here."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hetstream.base.installed import _requirement, install_command

ROOT = Path(__file__).resolve().parents[2]


def test_from_a_checkout_it_is_the_checkout() -> None:
    assert shlex.split(install_command()) == ["pip", "install", str(ROOT)]
    assert shlex.split(install_command("metrics", "/env/bin/python")) == [
        "/env/bin/python", "-m", "pip", "install", f"{ROOT}[metrics]",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("direct_url", "requirement"),
    [
        (None, "hetstream[torch]==0.1.0"),
        ({"url": "file://{place}/wheels/hetstream-0.1.0%2Blocal.whl", "archive_info": {}},
         "{place}/wheels/hetstream-0.1.0+local.whl[torch]"),
        ({"url": "file://{place}/gone.whl", "archive_info": {}}, "hetstream[torch]"),
        ({"url": "https://site/hetstream.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
         "hetstream[torch] @ git+https://site/hetstream.git@abc"),
        ({"url": "https://site/hetstream-0.1.0.whl", "archive_info": {}},
         "hetstream[torch] @ https://site/hetstream-0.1.0.whl"),
        ("damaged", "hetstream[torch]==0.1.0"),
    ],
)  # fmt: skip
def test_by_how_it_was_installed(tmp_path: Path, direct_url: object, requirement: str) -> None:
    metadata = tmp_path / "hetstream-0.1.0.dist-info"
    metadata.mkdir()
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "hetstream-0.1.0+local.whl").touch()
    if direct_url is not None:
        (metadata / "direct_url.json").write_text(json.dumps(direct_url).replace("{place}", str(tmp_path)))
    assert _requirement("torch", tmp_path) == requirement.replace("{place}", str(tmp_path))


def test_the_hooks_advice_can_be_followed(tmp_path: Path) -> None:
    """In a Python that has torch and lacks hetstream."""
    (tmp_path / "torch.py").touch()
    hook = ROOT / "hetstream" / "mpi_dataworkers" / "hook" / "path"
    code = f"import sys; sys.path[:0] = [{str(hook)!r}, {str(tmp_path)!r}]; import sitecustomize"
    said = subprocess.run(
        [sys._base_executable, "-S", "-c", code],  # type: ignore[attr-defined]
        env={"HETSTREAM_HOOK": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert "not installed for" in said
    command = said.strip().partition("Install it there: ")[2]
    assert shlex.split(command)[1:] == ["-m", "pip", "install", str(ROOT)]
