"""Hosts in network namespaces on one switch of a given speed, for trainers and embedding servers of a benchmark.

Whoever makes them is in a network namespace of its own (`unshare --net`), so nothing is left of them at its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.processes import wait
from hetstream.mpi_dataworkers.wire.address import ServiceAddress, write_address_file

_SWITCH = "10.9.0.1"
_TCP_S, _TURNS = 1.0, 200
DEADLINE_S = 280.0


def _shell(*lines: str) -> None:
    for line in lines:
        subprocess.run(line.split(), check=True)


def _has_own_network(pid: int) -> bool:
    return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")


class Hosts:
    """Some hosts; a program on one of them is started by `start`."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._shells: list[subprocess.Popen[bytes]] = []
        self._programs: list[subprocess.Popen[str]] = []
        _shell("ip link set lo up", "ip link add br0 type bridge", f"ip addr add {_SWITCH}/24 dev br0")
        _shell("ip link set br0 up")
        for number in range(len(self.names)):
            # It ends with this process.
            shell = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            self._shells.append(shell)
            wait(partial(_has_own_network, shell.pid), "a network", every_s=0.01)
            inside = f"nsenter -t {shell.pid} -n"
            _shell(
                f"ip link add v{number} type veth peer name eth0 netns {shell.pid}",
                f"ip link set v{number} master br0 up",
                f"{inside} ip link set lo up",
                f"{inside} ip addr add {self.address(self.names[number])}/24 dev eth0",
                f"{inside} ip link set eth0 up",
            )

    def address(self, name: str) -> str:
        """The IP address of a host."""
        return f"10.9.0.{10 + self.names.index(name)}"

    def set_speed(self, mbit: int) -> None:
        """Limit what each host sends and receives."""
        limit = f"root tbf rate {mbit}mbit burst {max(256, mbit // 8)}kb latency 20ms"
        for number, shell in enumerate(self._shells):
            _shell(
                f"tc qdisc replace dev v{number} {limit}",
                f"nsenter -t {shell.pid} -n tc qdisc replace dev eth0 {limit}",
            )

    def start(
        self, name: str, argv: Sequence[str], cores: Sequence[int], log: Path, **variables: str
    ) -> subprocess.Popen[str]:
        """Start a program on a host; its output is a pipe, its complaints are in the log."""
        shell = self._shells[self.names.index(name)]
        on_cores = ["taskset", "-c", ",".join(map(str, cores))]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("HETSTREAM_")} | variables
        with log.open("a") as complaints:
            program = subprocess.Popen(
                ["nsenter", "-t", str(shell.pid), "-n", *on_cores, *argv],
                env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaints, text=True,
            )  # fmt: skip
        self._programs.append(program)
        return program

    def wire(self, log: Path, cores: Sequence[int]) -> dict[str, float]:
        """What one plain TCP connection between the first and the last host reaches."""
        words = [sys.executable, "-m", "benchmarks.clients.embedding_hosts"]
        receiver = self.start(self.names[0], [*words, "receive", self.address(self.names[0])], cores[:1], log)
        assert receiver.stdout is not None
        receiver.stdout.readline()  # it listens
        self.start(self.names[-1], [*words, "send", self.address(self.names[0])], cores[-1:], log)
        return dict(json.loads(receiver.communicate(timeout=60)[0]))

    def end_programs(self) -> None:
        """End all programs."""
        for program in self._programs:
            program.kill()  # a server that is told to end waits until its rows lie elsewhere
        for program in self._programs:
            program.communicate()
        self._programs.clear()

    def close(self) -> None:
        """End programs and hosts."""
        self.end_programs()
        for number, shell in enumerate(self._shells):
            _shell(f"ip link del v{number}")
            shell.kill()
            shell.wait()
        _shell("ip link del br0")


class Servers:
    """Embedding servers of one job, each on a host of its own."""

    def __init__(self, hosts: Hosts, folder: Path, cores: Sequence[int]) -> None:
        self.hosts, self.folder, self.cores = hosts, folder, cores
        self.address = folder / "address"
        self.running: dict[int, subprocess.Popen[str]] = {}
        keys = (secrets.token_hex(20), secrets.token_hex(20), secrets.token_hex(20), secrets.token_hex(32))
        # Trainers and servers find each other by files beside this one, so nobody is at the address.
        service = ServiceAddress(f"tcp://{_SWITCH}:9", *keys, self.address)
        write_address_file(self.address, service)

    def start(self, number: int) -> None:
        """Start one, also again."""
        words = f"internal embedding-server --service file:{self.address} --name {number} --memory 4G --directory"
        argv = [sys.executable, "-m", "hetstream.slurm_plugin.cli", *words.split(), str(self.folder / "servers")]
        self.running[number] = self.hosts.start(
            f"server{number}", argv, self.cores, self.folder / f"server{number}.log", OMP_NUM_THREADS="1"
        )

    def kill(self, number: int) -> None:
        """Kill one (SIGKILL)."""
        self.running[number].kill()
        self.running[number].wait()

    def variables(self, number: int) -> dict[str, str]:
        """Environment of a trainer that waits for so many."""
        return {"HETSTREAM_SERVICE": f"file:{self.address}", "HETSTREAM_EMBEDDING_SERVERS": str(number)}


def start_ranks(
    hosts: Hosts, asked: Mapping[str, Any], cores: Sequence[int], folder: Path, **variables: str
) -> list[subprocess.Popen[str]]:
    """Start the ranks of a training, each on a host of its own; with torch's RPC, its server on the last host."""
    ranks = []
    for rank in range(asked["world"] + (asked["holder"] == "rpc")):
        name, on = (f"trainer{rank}", cores) if rank < asked["world"] else (hosts.names[-1], asked["server_cores"])
        argv = [sys.executable, "-m", "benchmarks.clients.embedding_train", json.dumps({**asked, "rank": rank})]
        network = {"MASTER_ADDR": hosts.address("trainer0"), "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
        network |= {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
        ranks.append(hosts.start(name, argv, on, folder / f"rank{rank}.log", **network, **variables))
    return ranks


def found_by(ranks: Sequence[subprocess.Popen[str]], folder: Path, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
    """Wait for all ranks, and return what rank 0 has printed.

    Raises:
        SystemExit: one failed, with its last line.
    """
    printed = ranks[0].communicate(timeout=timeout_s)[0]
    for rank, program in enumerate(ranks):
        if program.wait(60):
            said = (folder / f"rank{rank}.log").read_text().strip().splitlines()
            # Libraries have words of their own behind an exception.
            why = next((line for line in reversed(said) if "Error: " in line), said[-1] if said else "it said nothing")
            raise SystemExit(f"rank {rank} ended with {program.returncode}: {why}")
    return dict(json.loads(next(line for line in printed.splitlines() if line.startswith("{"))))


@contextlib.contextmanager
def hosts_of(names: Sequence[str]) -> Iterator[tuple[Hosts, Path]]:
    """Hosts, and a folder for what programs on them write."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="hetstream-bench-") as folder:
        hosts = Hosts(names)
        try:
            yield hosts, Path(folder)
        finally:
            hosts.close()


def _receive(address: str) -> None:
    with socket.create_server((address, 29700)) as server:
        print("listens", flush=True)
        connection = server.accept()[0]
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begun = time.monotonic()
        for _ in range(_TURNS):
            connection.sendall(connection.recv(1))
        turn_s = (time.monotonic() - begun) / _TURNS
        buffer, count = bytearray(1 << 20), 0
        begun = time.monotonic()
        while got := connection.recv_into(buffer):
            count += got
        print(json.dumps({"mbit_s": 8e-6 * count / (time.monotonic() - begun), "turn_ms": 1e3 * turn_s}), flush=True)


def _send(address: str) -> None:
    with socket.create_connection((address, 29700)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_TURNS):
            connection.sendall(b"x")
            connection.recv(1)
        piece, until = bytes(1 << 20), time.monotonic() + _TCP_S
        while time.monotonic() < until:
            connection.sendall(piece)


if __name__ == "__main__":
    {"receive": _receive, "send": _send}[sys.argv[1]](sys.argv[2])
