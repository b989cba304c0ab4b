"""Two stages on four hosts of their own, whose network is cut at three moments; run in a network of its own, as root.

    cut_stages.py first|firsts|holder DIRECTORY

A bridge joins the hosts, which are network namespaces; dispatcher and trainer are at the bridge itself. `first` cuts
one data worker of the first stage off from those of the last, `firsts` all of them; the dispatcher reaches everybody.
These packets are dropped without a word. `holder` takes the cable from the host of one data worker of the last stage.
Prints for each moment what the loader gave and counted, the longest wait, and what the dispatcher wrote meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from hetstream import DataLoader

NUM_STEPS, BATCH_SIZE, SAMPLE_BYTES = 24, 4, 1 << 20
MARKED_STEP = 9
FIRSTS, LASTS = ("c0", "c1"), ("g0", "g1")
MOMENTS = ("before", "during", "after")
DEADLINE_S = 60.0


class Blocks(Dataset[Any]):
    """Samples that take their time on the way."""

    def __len__(self) -> int:
        return NUM_STEPS * BATCH_SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((SAMPLE_BYTES,), index, dtype=torch.uint8), index


class Stage:
    """Adds a number; at the marked step, the first time, it says where it is, and waits until it may go on."""

    def __init__(self, added: int, said: Path, waits: bool = True) -> None:
        self.added, self.said, self.waits = added, said, waits

    def __call__(self, batch: Any) -> Any:
        values, ids = batch
        if int(ids[0]) == MARKED_STEP * BATCH_SIZE and self.said.parent.exists():
            with contextlib.suppress(FileExistsError), self.said.open("x") as said:
                said.write(f"{os.readlink('/proc/self/ns/net')}\n")
                said.flush()
                deadline = time.monotonic() + DEADLINE_S
                while self.waits and not self.said.with_suffix(".go").exists() and time.monotonic() < deadline:
                    time.sleep(0.01)
        return values + self.added, ids


def shell(*lines: str) -> None:
    for line in lines:
        subprocess.run(line.split(), check=True)


def wait(until: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not until():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.01)


class Hosts:
    """The hosts, each with a data worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = folder / "work" / "address"
        self.running: dict[str, subprocess.Popen[str]] = {}
        shell(
            "ip link set lo up", "ip link add br0 type bridge", "ip addr add 10.9.0.1/24 dev br0", "ip link set br0 up"
        )
        work = f"--bind tcp://10.9.0.1:0 --work-dir {self.address.parent} --address-file {self.address}"
        self.start("dispatcher", f"internal dispatcher {work}", apart=False)
        for number, name in enumerate(FIRSTS + LASTS):
            device = "gpu" if name in LASTS else "cpu"
            one = self.start(
                name, f"internal worker --service file:{self.address} --processes 1 --device {device}", apart=True
            )
            wait(lambda pid=one.pid: self.network_of(pid) != self.network_of(os.getpid()), "a network of its own")
            inside = f"nsenter -t {one.pid} -n "
            shell(
                f"ip link add v{name} type veth peer name eth0 netns {one.pid}",
                f"ip link set v{name} master br0 up",
                f"{inside}ip link set lo up",
                f"{inside}ip addr add 10.9.0.{10 + number}/24 dev eth0",
                f"{inside}ip link set eth0 up",
                f"{inside}tc qdisc add dev eth0 root tbf rate 160mbit burst 256k latency 400ms",
            )
            assert one.stdin is not None
            one.stdin.close()  # now it begins

    def start(self, name: str, words: str, apart: bool) -> subprocess.Popen[str]:
        command = [str(Path(sys.executable).with_name("hetstream")), *words.split()]
        if apart:
            command = ["unshare", "--net", "sh", "-c", 'read -r _; exec "$@"', "sh", *command]
        with (self.folder / f"{name}.log").open("w") as log:
            self.running[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, text=True
            )
        return self.running[name]

    def network_of(self, pid: int) -> str:
        return os.readlink(f"/proc/{pid}/ns/net")

    def name_of(self, network: str) -> str:
        return next(name for name in FIRSTS + LASTS if self.network_of(self.running[name].pid) == network)

    def sent_bytes(self, name: str) -> int:
        argv = ["ip", "-json", "-stats", "link", "show", f"v{name}"]
        (shown,) = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
        return int(shown["stats64"]["rx"]["bytes"])

    def set_cut(self, how: str, name: str, is_cut: bool) -> None:
        """Cut the network, or mend it.

        Args:
            how: as the program's argument.
            name: the host at which it is cut, but for `firsts`.
            is_cut: cut or mended.
        """
        if how == "holder":
            shell(f"ip link set v{name} {'down' if is_cut else 'up'}")
            return
        for one in (*(FIRSTS if how == "firsts" else [name]), *LASTS):
            shell(f"bridge link set dev v{one} isolated {'on' if is_cut else 'off'}")

    def end(self) -> None:
        self.running["dispatcher"].terminate()
        for one in self.running.values():
            one.wait(30)


def read(loader: Any) -> Iterator[tuple[list[int], str, float]]:
    """Ids, a digest, and the wait of each batch."""
    began = time.monotonic()
    for values, ids in loader:
        yield ids.tolist(), hashlib.sha256(values.numpy().tobytes()).hexdigest(), time.monotonic() - began
        began = time.monotonic()


def scenario(hosts: Hosts, how: str, moment: str) -> dict[str, Any]:
    """One pass, with a cut at one moment, and another one when the network is whole again."""
    folder = hosts.folder / moment
    folder.mkdir()
    first = Stage(1, folder / "first", waits=moment == "before")
    last = Stage(2, folder / "last", waits=moment == "after")
    logged = len((hosts.folder / "dispatcher.log").read_text())
    cut: list[str] = []

    def begun(stage: Stage) -> bool:
        return stage.said.exists() and stage.said.read_text().endswith("\n")

    def cut_if_it_is_time() -> None:
        watched = last if moment == "after" else first
        if cut or not begun(watched):
            return
        at = hosts.name_of(watched.said.read_text().strip())
        if moment == "during":
            before = hosts.sent_bytes(at)
            wait(lambda: hosts.sent_bytes(at) > before + SAMPLE_BYTES, "a part of a batch")
        if how == "holder" and at in FIRSTS:
            at = LASTS[0]
        elif how == "first" and at in LASTS:
            at = FIRSTS[0]
        hosts.set_cut(how, at, is_cut=True)
        cut.append(at)
        watched.said.with_suffix(".go").touch()

    with DataLoader(
        Blocks(), BATCH_SIZE, seed=0, batch_stage=first, gpu_stage=last, service=f"file:{hosts.address}"
    ) as loader:
        wait(lambda: loader.stats()["num_data_workers"] == len(LASTS), f"{len(LASTS)} data workers of the last stage")
        ended = threading.Event()

        def watch() -> None:
            while not cut and not ended.wait(0.005):
                cut_if_it_is_time()

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            got = [*read(loader)]
        finally:
            ended.set()
            watching.join()
            if cut:
                hosts.set_cut(how, cut[0], is_cut=False)
        counted = loader.stats()
        again = [*read(loader)]
    log = (hosts.folder / "dispatcher.log").read_text()[logged:]
    names = ("steps", "local_steps", "duplicates_dropped")
    return {
        "got": [one[:2] for one in got],
        "again": [one[:2] for one in again],
        "longest_wait_s": max(one[2] for one in got),
        "longest_wait_again_s": max(one[2] for one in again),
        "cut": cut,
        "stats": {name: counted[name] for name in names},
        "log": log,
    }


def main(how: str, folder: Path) -> None:
    hosts = Hosts(folder)
    try:
        done = {moment: scenario(hosts, how, moment) for moment in MOMENTS}
        nowhere = folder / "nowhere" / "said"
        with DataLoader(
            Blocks(), BATCH_SIZE, seed=0, batch_stage=Stage(1, nowhere), gpu_stage=Stage(2, nowhere)
        ) as loader:
            expected = [one[:2] for one in read(loader)]
    finally:
        hosts.end()
    print(json.dumps({"expected": expected, "moments": done}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
