"""One embedding server or two, as processes: what is refused, what waits, and what a kill at each place leaves."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from hetstream.mpi_dataworkers.transports.base import PeerUnreachable
from hetstream.mpi_dataworkers.transports.choice import TransportSender
from hetstream.mpi_dataworkers.wire.address import ServiceAddress
from hetstream.mpi_dataworkers.wire.messages import (
    AdoptParts,
    Batch,
    EmbeddingRefused,
    EmbeddingTable,
    ExpectParts,
    OpenTables,
    PartRows,
    PartsHeld,
    PartsSent,
    ReadRows,
    RestoreGeneration,
    RowsRead,
    SendParts,
    WriteRows,
    WritesKept,
)
from tests.mpi_dataworkers.embedding.conftest import MakeClient, MakeServer
from tests.mpi_dataworkers.embedding.servers import HETSTREAM, Client, RefusedError, Server, until

TABLE = EmbeddingTable("t", 5000, 16)
EVEN, ODD = list(range(0, 256, 2)), list(range(1, 256, 2))


def rows_of(first: int, stop: int, word: bytes = b"row") -> dict[int, bytes]:
    return {row: word.ljust(8, b".") + row.to_bytes(8, "little") for row in range(first, stop)}


def everything(client: Client, server: Server) -> dict[int, bytes]:
    return client.read(server, "t", range(TABLE.num_rows))


def test_what_is_wrong_is_refused_and_nothing_changes(server_of: MakeServer, client_of: MakeClient) -> None:
    server = server_of("a").start()
    ids, row = np.zeros(1, np.int64), np.zeros(16, np.uint8)

    def refused(kind: type, *fields: object, frames: tuple[object, ...] = ()) -> str:
        """What a new client is told, of this and of all that it asks then; it ends, as a trainer does."""
        client = client_of(0, TABLE)
        client.open(server, EVEN)
        client.write(server, "t", {0: bytes(16)})
        size = (server.log / "000001.log").stat().st_size
        message = kind(client.name, client.next(), *fields)
        client.send(server, message, *frames)
        text = str(client.answer(EmbeddingRefused, message.number)[0].text)
        with pytest.raises(RefusedError) as error:
            client.read(server, "t", [0])
        assert str(error.value) == text
        assert kind in (AdoptParts, RestoreGeneration) or (server.log / "000001.log").stat().st_size == size
        return text

    assert "id 5000 is out of range" in refused(WriteRows, "t", frames=(np.array([5000]), row))
    assert "id -1 is out of range" in refused(ReadRows, "t", frames=(np.array([-1]),))
    assert "15 bytes of rows came with 1 ids" in refused(WriteRows, "t", frames=(ids, row[1:]))
    assert "table 'other' is not open" in refused(WriteRows, "other", frames=(ids, row))
    assert "needs part 1, which does not lie on this server" in refused(
        WriteRows, "t", frames=(np.array([0, 1]), np.zeros(32, np.uint8))
    )
    assert "index out of range" in refused(WriteRows, "t", frames=(ids,))
    assert "index out of range" in refused(ExpectParts, [256])
    assert "part 0 lies here already" in refused(ExpectParts, [0])
    assert "needs part 3" in refused(SendParts, [3], server.addresses)
    assert "cannot be read" in refused(AdoptParts, [1], "/nowhere")
    assert "has no generation 'g'" in refused(RestoreGeneration, "g", [0], str(server.log))
    impossible = client_of(0, EmbeddingTable("t", 2**40, 16))
    impossible.open(server)
    assert "Divide it into several" in impossible.answer(EmbeddingRefused, 0)[0].text
    client = client_of(0, TABLE)
    client.open(server, EVEN)
    client.write(server, "t", {0: bytes(16)})
    # Nobody is answered: of a stranger one knows no address.
    client.send(server, ReadRows("0" * 32, 1, "t"), ids)
    client.send(server, Batch("session", 0, 1, 1, b"", []))
    client.send(server, RowsRead("a", 1), ids)
    client.send(server, WritesKept("a", 1))
    client.send(server, PartRows(client.name, 1000, "t", 1), np.array([1]), row)
    assert client.read(server, "t", range(0, 5000, 2)) == {0: bytes(16)}
    server.end()
    server.start()
    client.open(server)
    assert client.read(server, "t", range(0, 5000, 2)) == {0: bytes(16)}


def test_a_stranger_is_not_let_in(server_of: MakeServer, address: ServiceAddress) -> None:
    server = server_of("a").start()
    stranger = TransportSender("00" * 32, "w")
    with pytest.raises(PeerUnreachable):
        stranger.send(server.addresses, OpenTables("c" * 32, 0, (), [TABLE], EVEN), [])
    stranger.close(0.0)
    registration = address.file.parent / "embedding-servers" / "a.json"
    assert registration.stat().st_mode & 0o777 == 0o600
    assert registration.parent.stat().st_mode & 0o777 == 0o700


def test_a_new_trainer_takes_the_place_of_the_one_before(server_of: MakeServer, client_of: MakeClient) -> None:
    server, before, other = server_of("a").start(), client_of(0, TABLE), client_of(1, TABLE)
    before.open(server, EVEN)
    other.open(server, ODD)
    before.write(server, "t", {0: bytes(16)})
    other.write(server, "t", {1: bytes(16)})
    after = client_of(0, TABLE, EmbeddingTable("more", 10, 4))
    after.open(server, EVEN)
    assert after.read(server, "t", range(0, 100, 2)) == {}
    assert other.read(server, "t", [1]) == {1: bytes(16)}
    assert "was replaced by another trainer of its rank" in before.answer(EmbeddingRefused, 0)[0].text
    with pytest.raises(TimeoutError):
        before.answer(WritesKept, before.write(server, "t", {0: bytes(16)}, wait=False), 0.3)
    before.open(server)
    assert "end this one" in before.answer(EmbeddingRefused, 0)[0].text
    server.end()
    server.start()
    before.open(server)
    assert "end this one" in before.answer(EmbeddingRefused, 0)[0].text
    # A smaller training: its first generation is the end of the ranks that are no more.
    after.open(server)
    other.open(server)
    after.mark("g", 1, [server])
    assert "was replaced" in other.answer(EmbeddingRefused, 0)[0].text


def test_changes_that_come_again_are_made_once(server_of: MakeServer, client_of: MakeClient) -> None:
    server, client = server_of("a").start(), client_of(0, TABLE)
    client.open(server)
    old = client.write(server, "t", rows_of(0, 10, b"old"))
    client.write(server, "t", rows_of(0, 10, b"new"))
    message, frames = WriteRows(client.name, old, "t"), (np.arange(10), np.zeros(160, np.uint8))
    for _ in range(2):  # as over a connection of before
        client.send(server, message, *frames)
        client.answer(WritesKept, old)
        assert everything(client, server) == rows_of(0, 10, b"new")
        server.end()
        server.start()
        client.open(server)
    assert client.read(server, "t", []) == {}


def test_rows_that_move_are_waited_for(server_of: MakeServer, client_of: MakeClient) -> None:
    one, two = server_of("a").start(), server_of("b").start()
    client, other = client_of(0, TABLE), client_of(1, TABLE)
    for server, parts in ((one, (EVEN, ODD)), (two, ([], []))):
        client.open(server, parts[0])
        other.open(server, parts[1])
    client.write(one, "t", {row: data for row, data in rows_of(0, 5000).items() if row % 2 == 0})
    expect = client.change(two, ExpectParts(client.name, client.next(), EVEN))
    reading = client.next()
    client.send(two, ReadRows(client.name, reading, "t"), np.array([0, 2]))
    written = client.write(two, "t", rows_of(2, 3, b"new"), wait=False)
    with pytest.raises(TimeoutError):
        client.answer(RowsRead, reading, 0.3)
    other.write(one, "t", rows_of(1, 2))  # nobody else waits
    send = client.change(one, SendParts(client.name, client.next(), EVEN, two.addresses))
    assert client.rows_read(reading, "t", [0, 2]) == rows_of(0, 1) | rows_of(2, 3)
    client.answer(WritesKept, written)
    for _ in range(2):  # what is sent again is not newer than what is here
        client.send(one, SendParts(client.name, send, EVEN, two.addresses))
        time.sleep(0.1)
        assert client.read(two, "t", [2]) == rows_of(2, 3, b"new")
    client.send(two, ExpectParts(client.name, expect, EVEN))
    assert client.answer(PartsHeld, expect)[0].parts == EVEN
    client.end_move(one, send, EVEN)
    client.send(one, SendParts(client.name, send, EVEN, two.addresses))  # late
    assert client.read(two, "t", [0, 2]) == rows_of(0, 1) | rows_of(2, 3, b"new")
    with pytest.raises(RefusedError, match="does not lie on this server"):
        client.read(one, "t", [0])


def test_another_plan_for_parts_goes_before_what_waits_for_them(server_of: MakeServer, client_of: MakeClient) -> None:
    one, two, client = server_of("a").start(), server_of("b").start(), client_of(0, TABLE)
    client.open(one)
    client.open(two, [])
    client.write(one, "t", rows_of(0, 512))
    client.mark("g", 1, [one, two])
    client.change(two, ExpectParts(client.name, client.next(), EVEN))
    written = client.write(two, "t", rows_of(2, 3, b"new"), wait=False)
    one.end()
    client.adopt(two, EVEN, one.log)
    client.answer(WritesKept, written)
    assert client.read(two, "t", [0, 2]) == rows_of(0, 1) | rows_of(2, 3, b"new")
    # A restart between: what waits is not taken for done, and neither is what goes before it.
    expect = client.change(two, ExpectParts(client.name, client.next(), ODD[:1]))
    waiting = client.write(two, "t", rows_of(1, 2, b"newer"), wait=False)
    with pytest.raises(TimeoutError):
        client.answer(WritesKept, waiting, 0.3)
    two.end()
    two.start()
    client.open(two)
    adopt = client.change(two, AdoptParts(client.name, client.next(), ODD[:1], str(one.log)))
    two.end()
    two.start()
    client.open(two)
    client.answer(PartsHeld, adopt)
    client.unkept[two.name] = [one for one in client.unkept[two.name] if one[0].number > expect]
    client.answer(WritesKept, waiting)
    assert client.read(two, "t", [1]) == rows_of(1, 2, b"newer")


@pytest.mark.parametrize("action", ["kill", "full"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_write_that_ends_inside_is_none(
    server_of: MakeServer, client_of: MakeClient, action: str, count: int
) -> None:
    """A process that is killed in a record, or a disk that is full there, leaves what was before."""
    server, client = server_of("a"), client_of(0, TABLE)
    marker = server.directory.parent / "marker"
    server.start(fault=f"embedding.in_record:{count + 1}:{action}:{marker}")
    client.open(server)
    for number in range(1, count):
        client.write(server, "t", rows_of(number, number + 10))
    if action == "full":
        with pytest.raises(
            RefusedError, match=r"WriteRows cannot be written to 000001.log .* No space left .* make room"
        ):
            client.write(server, "t", rows_of(3000, 3100))
        with pytest.raises(RefusedError, match="make room"):
            client.write(server, "t", rows_of(2000, 2100))
        server.end()
    else:
        client.write(server, "t", rows_of(100, 110), wait=False)
        server.wait()
    server.start()
    client.open(server)
    client.write(server, "t", rows_of(100, 110))
    assert client.read(server, "t", range(3000, 3100)) == {}
    expected = {row: data for number in range(1, count) for row, data in rows_of(number, number + 10).items()}
    assert everything(client, server) == expected | rows_of(100, 110)


@pytest.mark.parametrize("point", ["before_fsync", "before_answer"])
def test_a_kill_before_the_answer_costs_nothing(server_of: MakeServer, client_of: MakeClient, point: str) -> None:
    server, client = server_of("a"), client_of(0, TABLE)
    server.start(fault=f"embedding.{point}:1:kill:{server.directory.parent / 'marker'}")
    client.open(server)
    written = client.write(server, "t", rows_of(0, 1000), wait=False)
    server.wait()
    server.start()
    client.open(server)
    client.answer(WritesKept, written)
    assert everything(client, server) == rows_of(0, 1000)


@pytest.mark.parametrize("point", ["part_sent", "part_received", "before_held"])
def test_a_kill_in_a_move_costs_nothing(server_of: MakeServer, client_of: MakeClient, point: str) -> None:
    one, two, client = server_of("a"), server_of("b"), client_of(0, TABLE)
    fault = f"embedding.{point}:{1 if point == 'before_held' else 40}:kill:{one.directory.parent / 'marker'}"
    one.start(fault=fault)
    two.start(fault=fault)
    client.open(one)
    client.open(two, [])
    client.write(one, "t", rows_of(0, 5000))
    expect, send = client.begin_move(one, two, EVEN)
    hurt = one if point == "part_sent" else two
    hurt.wait()
    hurt.start()
    client.open(hurt)
    again = SendParts(client.name, send, EVEN, two.addresses)
    client.unkept[one.name] = [entry for entry in client.unkept[one.name] if entry[0].number != send]
    client.change(one, again)
    client.answer(PartsHeld, expect)
    client.end_move(one, send, EVEN)
    assert client.read(two, "t", range(0, 5000, 2)) == {
        row: row_ for row, row_ in rows_of(0, 5000).items() if row % 2 == 0
    }
    assert client.read(one, "t", range(1, 5000, 2)) == {row: row_ for row, row_ in rows_of(0, 5000).items() if row % 2}


@pytest.mark.parametrize(("point", "count"), [("base_written", 3), ("part_received", 1)])
def test_a_kill_while_the_log_is_put_in_order_costs_nothing(
    server_of: MakeServer, client_of: MakeClient, point: str, count: int
) -> None:
    server, client = server_of("a"), client_of(0, TABLE)
    server.start("--segment", "1000", fault=f"embedding.{point}:{count}:kill:{server.directory.parent / 'marker'}")
    client.open(server)
    client.write(server, "t", rows_of(0, 2000))
    client.mark("g", 1, [server])
    for number in range(60):
        client.write(server, "t", rows_of(0, 2000, b"%d" % number), wait=False)
        if point == "part_received" and number == 5:
            client.change(server, RestoreGeneration(client.name, client.next(), "g", EVEN, str(server.log)))
    server.wait()
    server.start("--segment", "1000")
    client.open(server)
    client.write(server, "t", rows_of(2000, 2001))
    assert everything(client, server) == rows_of(0, 2000, b"59") | rows_of(2000, 2001)
    client.restore(server, "g", [*EVEN, *ODD], server.log)
    assert everything(client, server) == rows_of(0, 2000)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small file system")
def test_a_full_disk_refuses_and_room_helps(server_of: MakeServer, client_of: MakeClient, folder: Path) -> None:
    (folder / "logs").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder / "logs"], check=True)
    try:
        server, client = server_of("a").start(), client_of(0, TABLE)
        client.open(server)
        (folder / "logs" / "ballast").write_bytes(bytes(900 << 10))
        kept: dict[int, bytes] = {}
        refused = ""
        for number in range(20):
            rows = rows_of(100 * number, 100 * number + 1000)
            try:
                client.write(server, "t", rows)
                kept |= rows
            except RefusedError as error:
                refused = str(error)
        assert "No space left on device" in refused
        (folder / "logs" / "ballast").unlink()
        server.end()
        server.start()
        client.open(server)
        assert everything(client, server) == kept
        client.write(server, "t", rows_of(4000, 4500))
        kept |= rows_of(4000, 4500)
        server.end()
        server.start()
        client.open(server)
        assert everything(client, server) == kept
        server.end()
    finally:
        subprocess.run(["umount", folder / "logs"], check=True)


def test_a_file_size_limit_refuses(server_of: MakeServer, client_of: MakeClient) -> None:
    server, client = server_of("a").start(), client_of(0, TABLE)
    client.open(server)
    client.write(server, "t", rows_of(0, 100))
    assert server.process is not None
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (10_000, 10_000))
    with pytest.raises(RefusedError, match="File too large"):
        client.write(server, "t", rows_of(0, 1000, b"large"))
    server.end()
    server.start()
    client.open(server)
    client.write(server, "t", rows_of(0, 10, b"small"))
    assert everything(client, server) == rows_of(0, 100) | rows_of(0, 10, b"small")


def test_rows_beyond_the_memory_are_refused(server_of: MakeServer, client_of: MakeClient) -> None:
    one, two, client = server_of("a").start("--memory", "30K"), server_of("b").start(), client_of(0, TABLE)
    client.open(one, [])
    client.open(two)
    client.write(two, "t", rows_of(0, 5000))
    _, send = client.begin_move(two, one, EVEN)
    refused = client.answer(EmbeddingRefused, send)[0]
    assert (refused.server, "and its limit is 30.7 kB. Start another server" in refused.text) == ("a", True)
    # Nobody is there to be told: parts that did not come whole are not taken for whole.
    client = client_of(0, TABLE)
    client.open(one, [])
    expect = client.change(one, ExpectParts(client.name, client.next(), EVEN))
    assert client.read(one, "t", []) == {}  # it is made
    one.end()
    one.start("--memory", "30K")
    ids = np.arange(0, 5000, 2)
    client.send(one, PartRows(client.name, expect + 1, "t", -1), ids, np.zeros(16 * len(ids), np.uint8))
    client.send(one, PartsSent(client.name, expect + 1, EVEN))
    client.open(one)
    assert "its limit is 30.7 kB" in client.answer(EmbeddingRefused, 0)[0].text
    client = client_of(0, TABLE)
    client.open(one, [])
    client.open(two)
    client.write(two, "t", rows_of(0, 5000))
    client.move(two, one, [0, 1])
    assert client.read(one, "t", [0, 1, 256]) == rows_of(0, 2) | rows_of(256, 257)
    assert one.registration["limit_bytes"] == 30720


def test_sigterm_waits_until_the_rows_are_elsewhere(server_of: MakeServer, client_of: MakeClient) -> None:
    one, two, client = server_of("a").start(), server_of("b").start(), client_of(0, TABLE)
    client.open(one)
    client.open(two, [])
    client.write(one, "t", rows_of(0, 5000))
    assert one.process is not None
    one.process.send_signal(signal.SIGTERM)
    until(lambda: one.registration["draining"], "it says that it drains", one)
    assert client.read(one, "t", [7]) == rows_of(7, 8)
    client.move(one, two, [*EVEN, *ODD])
    assert one.wait() == 0
    assert one.registration == {}
    last = json.loads((one.service.file.parent / "embedding-servers" / "a.ended").read_bytes())
    assert (last["name"], last["rows"], last["reads"], last["generations"]) == ("a", 0, 1, 0)
    assert everything(client, two) == rows_of(0, 5000)
    until(lambda: two.registration["rows"] == 5000, "it says what it has", two)
    # The end of the service is the end of what is left.
    two.service.file.unlink()
    assert two.wait() == 0
    assert two.registration == {}


def test_a_failed_adoption_leaves_nothing_to_wait_for(server_of: MakeServer, client_of: MakeClient) -> None:
    one, two, client = server_of("a").start(), server_of("b").start(), client_of(0, TABLE)
    client.open(one)
    client.open(two, [])
    client.write(one, "t", rows_of(0, 1000))
    client.write(one, "t", rows_of(1000, 2000))
    one.end()
    path = one.log / "000001.log"
    whole = path.read_bytes()
    path.write_bytes(whole[:-30000] + bytes([whole[-30000] ^ 1]) + whole[-29999:])
    with pytest.raises(RefusedError, match=r"000001.log .* is damaged: .* another checksum"):
        client.adopt(two, [*EVEN, *ODD], one.log)
    until(lambda: two.registration["rows"] == 0, "what had come of them is gone", two)
    # So it ends although the trainer that has failed fetches nothing.
    assert two.end(signal.SIGTERM) == 0
    path.write_bytes(whole)
    two.start()
    client.open(two)
    client.adopt(two, [*EVEN, *ODD], one.log)
    assert everything(client, two) == rows_of(0, 2000)


def test_sigterm_ends_it_in_time_all_the_same(server_of: MakeServer, client_of: MakeClient) -> None:
    server, client = server_of("a").start("--drain-s", "0.5"), client_of(0, TABLE)
    client.open(server)
    client.write(server, "t", rows_of(0, 10), wait=False)
    assert server.end(signal.SIGTERM) == 0
    server.start()
    client.open(server)
    assert everything(client, server) == rows_of(0, 10)


def test_a_second_server_of_the_name_is_refused(server_of: MakeServer) -> None:
    first, second = server_of("a").start(), server_of("a")
    second.begin()
    assert second.wait() == 1
    assert "another embedding server uses" in second.output
    assert first.process is not None
    assert first.process.poll() is None


def test_a_client_that_takes_nothing_holds_up_nobody(server_of: MakeServer, client_of: MakeClient) -> None:
    server, slow, other = server_of("a").start(), client_of(0, TABLE), client_of(1, TABLE)
    slow.open(server, EVEN)
    other.open(server, ODD)
    slow.write(server, "t", {row: data for row, data in rows_of(0, 5000).items() if row % 2 == 0})
    ids = np.tile(np.arange(0, 5000, 2), 40)
    for _ in range(20):
        slow.send(server, ReadRows(slow.name, slow.next(), "t"), ids)
    begun = time.monotonic()
    other.write(server, "t", rows_of(1, 2))
    assert time.monotonic() - begun < 10.0  # 30 MB wait for the slow one
    slow.close()
    assert other.read(server, "t", [1]) == rows_of(1, 2)


def test_nothing_is_left_in_a_server(server_of: MakeServer, client_of: MakeClient) -> None:
    one, two = server_of("a").start(), server_of("b").start()

    def held(server: Server) -> tuple[int, int]:
        assert server.process is not None
        proc = Path(f"/proc/{server.process.pid}")
        return len(list((proc / "fd").iterdir())), len(list((proc / "task").iterdir()))

    def a_training() -> None:
        client = client_of(0, TABLE)
        client.open(one)
        client.open(two, [])
        client.write(one, "t", rows_of(0, 5000))
        client.mark("g", 1, [one, two])
        client.move(one, two, EVEN)
        client.restore(two, "g", EVEN, one.log)
        client.close()

    for _ in range(6):
        a_training()
    before = held(one), held(two)
    for _ in range(6):
        a_training()
    until(lambda: held(one) <= before[0] and held(two) <= before[1], "it holds as little as before")


def test_the_command_says_what_is_wrong(address: ServiceAddress, tmp_path: Path) -> None:
    for words, text in (
        (["--memory", "much"], "--memory 'much': must be a number of bytes"),
        (["--name", "a/b"], "--name 'a/b': 1 to 64 letters"),
        (["--directory", ""], "--directory '': must name a path"),
    ):
        argv = [HETSTREAM, "internal", "embedding-server", "--service", f"file:{address.file}", "--name", "a"]
        argv += ["--directory", str(tmp_path), "--memory", "1G", *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert text in done.stderr
