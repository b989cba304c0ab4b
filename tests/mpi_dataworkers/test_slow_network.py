"""A network that is slower than a data worker: what is on the way is not taken for lost, and nothing is made twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import needs

PROGRAM = Path(__file__).with_name("programs") / "slow_network.py"


@pytest.mark.slow
@needs("tc")
@pytest.mark.skipif(os.geteuid() != 0, reason="a slow network of its own needs root")
def test_batches_that_wait_for_a_slow_network_are_not_taken_for_lost(tmp_path: Path) -> None:
    """The loader's window would be on its way for longer than a sent lease may take to arrive."""
    done = subprocess.run(
        ["unshare", "--net", sys.executable, str(PROGRAM), str(tmp_path)],
        env=os.environ | {"HETSTREAM_TRANSPORT": "tcp"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["stats"]["transport"] == {"tcp": 36}
    assert (found["stats"]["local_steps"], found["stats"]["duplicates_dropped"]) == (0, 0)
    assert "revoked" not in found["log"]
