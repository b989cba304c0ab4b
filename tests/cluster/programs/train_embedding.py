"""A training program whose table grows with new ids, until a file `stop` is there; then it reads its rows again."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch

import hetstream

NUM_ROWS, DIM, IDS, STEP_S = 1 << 22, 32, 20_000, 0.5


def main() -> None:
    folder = Path(os.environ["HETSTREAM_SERVICE"].removeprefix("file:")).parent / "embedding-servers"
    table = hetstream.Embedding(NUM_ROWS, DIM, optimizer=hetstream.RowSGD(lr=1.0), cache_bytes=16 << 20, new_rows=0.0)
    logs = {path.stem: json.loads(path.read_text())["log"] for path in folder.glob("*.json")}
    Path("seen.new").write_text(json.dumps(logs))
    Path("seen.new").rename("seen")
    step = 0
    while not Path("stop").exists() and (step + 1) * IDS <= NUM_ROWS:
        ids = torch.arange(step * IDS, (step + 1) * IDS)
        table(ids).sum().backward()
        step += 1
        time.sleep(STEP_S)
    # Of zeros, after a step with a gradient of one each.
    wrong = sum(int((table(torch.arange(at * IDS, (at + 1) * IDS)) != -1.0).sum()) for at in range(step))
    Path("result").write_text(json.dumps({"steps": step, "wrong": wrong}))


if __name__ == "__main__":
    main()
