"""The network between two stages is cut without a word: each batch comes once, and none is waited for too long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import needs

PROGRAM = Path(__file__).with_name("programs") / "cut_stages.py"
# A batch that does not arrive is missed after 5 s, its data workers are asked no more, and a second later the step is
# made where it is wanted. A holder that is silent for 4 s is lost, and its steps are leased to another one.
LONGEST_WAIT_S = 20.0


@pytest.mark.shows("data workers of either stage may be killed at each point of the protocol")
@pytest.mark.slow
@pytest.mark.timeout(400)
@needs("tc")
@pytest.mark.skipif(os.geteuid() != 0, reason="hosts with networks of their own need root")
@pytest.mark.parametrize("how", ["first", "firsts", "holder"])
def test_a_cut_between_the_stages_loses_no_batch_and_hangs_nobody(how: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["unshare", "--net", sys.executable, str(PROGRAM), how, str(tmp_path)],
        env=os.environ | {"HETSTREAM_TRANSPORT": "tcp"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for moment, one in found["moments"].items():
        assert one["cut"], f"{moment}: it was not cut"
        assert one["got"] == found["expected"], moment
        assert one["again"] == found["expected"], moment
        assert one["longest_wait_s"] < LONGEST_WAIT_S, moment
        assert one["longest_wait_again_s"] < LONGEST_WAIT_S, moment
        if how == "holder":
            assert "revoked" in one["log"], moment
