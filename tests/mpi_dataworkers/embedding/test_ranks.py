"""Programs of several ranks with embedding servers, and programs that are killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hetstream.mpi_dataworkers.wire.address import ServiceAddress
from tests.mpi_dataworkers.embedding.conftest import MakeServer

ROOT = Path(__file__).parents[3]
STEPS = 30


def run(
    state: Path, num_ranks: int, address: ServiceAddress | None = None, num_servers: int = 0, dies_at: int = -1
) -> list[float]:
    """Return the losses of a program; [] if it died where it was to."""
    state.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HETSTREAM_")}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    environment |= {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    if address is not None:
        environment |= {"HETSTREAM_SERVICE": f"file:{address.file}", "HETSTREAM_EMBEDDING_SERVERS": str(num_servers)}
    argv = [sys.executable, "-m", "tests.mpi_dataworkers.embedding.trainer", str(state), str(STEPS), str(dies_at)]
    errors = None if dies_at < 0 else subprocess.DEVNULL
    ranks = [
        subprocess.Popen(
            argv, env=environment | {"RANK": str(rank)}, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        for rank in range(num_ranks)
    ]
    try:
        if dies_at >= 0:
            assert ranks[-1].wait(120) == -signal.SIGKILL
            return []
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * num_ranks
        return list(json.loads(outputs[0].splitlines()[-1]))
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.slow
@pytest.mark.shows("several ranks train with embedding servers as without, and go on after a kill at another size")
def test_ranks_train_as_without_servers_and_go_on_after_a_kill(
    address: ServiceAddress, server_of: MakeServer, tmp_path: Path
) -> None:
    one = run(tmp_path / "one", 1)
    two = run(tmp_path / "two", 2)
    assert two == pytest.approx(one, rel=1e-5)
    servers = [server_of("a").start(), server_of("b").start()]
    assert run(tmp_path / "served", 2, address, 2) == two
    # The last rank dies in step 25; what it had since step 20 is lost, and the rest goes on.
    assert run(tmp_path / "killed", 2, address, 2, dies_at=25) == []
    assert run(tmp_path / "killed", 2, address, 2) == two
    # And once more, at a third of the servers, by one rank.
    assert run(tmp_path / "smaller", 2, address, 2, dies_at=25) == []
    servers[0].end()
    again = run(tmp_path / "smaller", 1, address, 1)
    assert again == pytest.approx(one, rel=1e-5)
