"""Runs the scenarios of `test_opened_by_name.py` in a small process: each forks some twenty times, and to fork a test
process, which has loaded everything, takes thirty times as long.

Each line of standard input is JSON, [SCENARIO, DIRT]; the answer is a line with what harm was done, or "".
"""

from __future__ import annotations

import json
import sys
import traceback

from tests.hostile_places import Dirt, harm_in, moments
from tests.test_opened_by_name import SCENARIOS


def harm_at_any_moment(name: str, dirt: Dirt) -> str:
    """What harm is done where the stranger acts before a scenario begins, or at one of its moments."""
    for moment in moments(dirt):
        harm, came = harm_in(dirt, SCENARIOS[name], moment)
        if harm:
            return f"{name}: {dirt.value}; the stranger acts at moment {moment}: {harm}"
        if not came:
            break
    return ""


def main() -> None:
    """See the module."""
    for line in sys.stdin:
        name, dirt = json.loads(line)
        try:
            answer = harm_at_any_moment(name, Dirt[dirt])
        except BaseException:  # noqa: BLE001, told to the test
            answer = traceback.format_exc()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
