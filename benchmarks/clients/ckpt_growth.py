"""What grows from save to save: `ckpt_growth SYSTEM`: memory, descriptors and mappings of all its processes."""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path

from benchmarks.clients.ckpt_systems import end, make_state, running

# Looks at the beginning and at the end, of which the medians are compared.
_NUM_LOOKS = 9


def private_bytes(process: int) -> int:
    """Anonymous memory that is resident; pages of files and of shared memory are counted where they are."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def look(helpers: list[int]) -> dict[str, int]:
    """Sums over this process and its helpers."""
    processes = [os.getpid(), *helpers]
    mapped = [line for one in processes for line in Path(f"/proc/{one}/maps").read_text().splitlines()]
    return {
        "private_bytes": sum(map(private_bytes, processes)),
        "descriptors": sum(len(os.listdir(f"/proc/{process}/fd")) for process in processes),
        "mappings": len(mapped),
        "segments": sum("/dev/shm/" in line or "/torch_" in line or "/memfd:" in line for line in mapped),
        "processes": len(processes),
    }


def main() -> None:
    """Measure every case of the request."""
    request = json.loads(sys.argv[-1])
    for case, options in request["cases"].items():
        state = make_state(options["tensors"], options["bytes"])
        with running(sys.argv[1], request["folder"], state) as system:
            looks = []
            for step in range(request["warmup"] + request["saves"]):
                system.save(step, state)
                system.wait()
                if step < request["warmup"]:
                    continue
                at = step - request["warmup"]
                if at < _NUM_LOOKS or at >= request["saves"] - _NUM_LOOKS:
                    looks.append(look(system.helpers()))
        grown = {
            key: statistics.median(one[key] for one in looks[-_NUM_LOOKS:])
            - statistics.median(one[key] for one in looks[:_NUM_LOOKS])
            for key in looks[0]
        }
        mb = grown.pop("private_bytes") / 1e6
        sample = {"case": case, "private_mb": mb, **grown}
        print(json.dumps(sample), flush=True)
    end()


if __name__ == "__main__":
    main()
