"""Bytes of messages: round trips, golden bytes of protocol version 6, and everything that must be refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetstream.mpi_dataworkers.errors import ProtocolError
from hetstream.mpi_dataworkers.wire import messages
from hetstream.mpi_dataworkers.wire.codec import FUSE_BELOW_BYTES, chop, decode, encode, fuse, join, split

GOLDEN = bytes.fromhex("4845540683a474797065ab46696e6973684c65617365a5746f6b656ecd0101a6627573795f73cb3fe0000000000000")


def examples() -> list[messages.Message]:
    """One message of every type, with every field filled by its type's plainest value."""
    order = messages.PlannedOrder(10, 2, 1, 0, False, True, 3)
    session = messages.SessionSpec("s", "d", 1, 2, order, ["tcp://h:1"])
    steps = messages.StepList(0, b"\1\0\0\0", b"\0" * 8)
    failure = messages.Failure(-1, ("builtins", "ValueError"), "why", "trace", "h", 5)
    stats = messages.LoaderStats(1, 2, 3, 4, 0.5, 0.25, 6, 7)
    return [
        messages.RegisterLoader("job", 0, 1, 2, "h", 3, "d", {"dataset": "A"}),
        messages.ProvidePipeline("d", messages.Program("/", ["/a"]), b"", b"blob"),
        messages.OpenSession(session, 5, 1, [(2, 3)], 8, steps),
        messages.ExtendSession("s", steps, -1),
        messages.ReportProgress("s", 1, [(2, 4)], 8, stats),
        messages.LoaderHeartbeat(stats),
        messages.CloseSession("s", 5, stats),
        messages.EndProcesses(),
        messages.ProcessesEnded(),
        messages.LeaveLoader(stats),
        messages.LoaderRegistered(True, 2),
        messages.Membership(3),
        messages.Notice("so it is"),
        messages.LeaseRevoked("s", 4),
        messages.StepsLost("s", 1, -1),
        messages.RegisterWorker("h", 5, "", [messages.HeldLease(1, "s", 2, 3)]),
        messages.WorkerHeartbeat([1, 2]),
        messages.FinishLease(257, 0.5),
        messages.FailLease(1, "why"),
        messages.FetchPipeline("d"),
        messages.EndOfShard("s", 3, 1),
        messages.Draining([(1, 5)]),
        messages.LeaveWorker(),
        messages.WorkerRegistered(1),
        messages.GrantLease(1, session, 2, 3, None),
        messages.TrimLease(1, 5),
        messages.DrainWorker(),
        messages.RenewWorker(),
        messages.AddProcess(),
        messages.RevokeLease(1, "s", True, "why"),
        messages.DropSession("s"),
        messages.ProvidePipeline("d", messages.Program("/", []), b"s", b"", messages.Contents([3], b"", "ab", True)),
        messages.NeedPipeline("d"),
        messages.DropPipeline("d"),
        messages.Alive(),
        messages.UnknownPeer(),
        messages.RequestStatus(),
        messages.SteerDataWorkers("0-4", "drain", 1, "why", ["7"]),
        messages.Status(
            1,
            2.0,
            [messages.DataWorkerStatus(0, "h", 5, "idle", 0, 3, 1.5, 0.5, 0, 9.0, 0.1)],
            [messages.LoaderStatus("job", 0, 1, 2, "h", 3, 0, 4, -1, 1, 8, 1, 1.5, 99.0, 0.25, stats)],
            1,
            0,
            3,
            0,
            1.5,
            "0-4",
            [messages.PastDecision(1.0, "grow", 2, "why")],
        ),
        messages.Refused("ServiceError", "why"),
        messages.ShutDown(),
        messages.Hello("w", "tcp://h:1", b"n"),
        messages.Challenge(b"n", b"p"),
        messages.Proof(b"p"),
        messages.Compressed([-1, 5], b"h"),
        messages.Batch("s", 1, 2, 3, b"spec", [(0, 0, 4)]),
        messages.Batches([messages.Batch("s", 1, 2, 3, b"spec", [(0, 0, 4)])]),
        messages.OpenTables("c", 1, ("ipc://@x",), [messages.EmbeddingTable("users", 10, 64)], [1, 3]),
        messages.ReadRows("c", 1, "users"),
        messages.WriteRows("c", 2, "users"),
        messages.ExpectParts("c", 3, [1]),
        messages.SendParts("c", 4, [1], ("tcp://h:1",)),
        messages.PartRows("c", 4, "users", 1),
        messages.PartsSent("c", 4, [1]),
        messages.DropParts("c", 5, [1]),
        messages.AdoptParts("c", 6, [1], "/logs/server-0"),
        messages.MarkGeneration("c", 7, "g", 2, ["/logs/server-0"]),
        messages.RestoreGeneration("c", 8, "g", [1], "/logs/server-0"),
        messages.RowsRead("s", 1),
        messages.WritesKept("s", 2),
        messages.PartsHeld("s", 3, [1]),
        messages.GenerationMarked("s", 7),
        messages.EmbeddingRefused("s", 8, "no"),
        messages.BatchFailed("s", 1, failure),
        messages.FailStep(1, 2, failure),
        messages.RegisterWorker("h", 5, "w", [], messages.Fate("ended with code 7", "s", 1, 2, failure)),
        messages.RegisterWorker("h", 5, "", [], slot="a", program=messages.Program("/", ["/a"], {"m": "d"})),
    ]


def test_every_message_type_has_an_example() -> None:
    assert {type(one) for one in examples()} == set(messages.Message.__subclasses__())


@pytest.mark.parametrize("message", examples(), ids=lambda message: type(message).__name__)
def test_round_trip(message: messages.Message) -> None:
    assert decode(encode(message)) == message


def test_golden_bytes_of_version_6() -> None:
    assert encode(messages.FinishLease(257, 0.5)) == GOLDEN
    assert decode(GOLDEN) == messages.FinishLease(257, 0.5)


@pytest.mark.parametrize("message", examples(), ids=lambda message: type(message).__name__)
def test_every_truncation_is_refused(message: messages.Message) -> None:
    whole = encode(message)
    for length in range(len(whole)):
        with pytest.raises(ProtocolError):
            decode(whole[:length])


def test_another_protocol_version_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match=r"protocol version 9, this side version 6\. Install the same"):
        decode(b"HET\x09" + GOLDEN[4:])


def test_unknown_types_and_foreign_bytes_are_refused() -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        decode(GOLDEN.replace(b"FinishLease", b"FinishLeash"))
    with pytest.raises(ProtocolError, match="no hetstream message"):
        decode(b"GET / HTTP/1.1")


@given(st.binary(max_size=300))
def test_random_bytes_never_do_more_than_raise(junk: bytes) -> None:
    for frame in (junk, GOLDEN[:4] + junk):
        with contextlib.suppress(ProtocolError):
            decode(frame)


@given(
    st.lists(st.sampled_from([0, 1, 63, 64, 65, 1000, FUSE_BELOW_BYTES - 1, FUSE_BELOW_BYTES, 200_000]), max_size=12)
)
def test_fuse_and_split_are_inverse(sizes: list[int]) -> None:
    buffers = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    frames, places = fuse(buffers)
    assert [bytes(view) for view in split([memoryview(frame) for frame in frames], places)] == buffers
    assert len(frames) <= 1 + sum(size >= FUSE_BELOW_BYTES for size in sizes)


@given(st.lists(st.integers(0, 40), max_size=8))
def test_chop_and_join_are_inverse(sizes: list[int]) -> None:
    frames = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    pieces = chop(frames, 10)
    assert all(memoryview(piece).nbytes <= 10 for piece in pieces)
    assert [bytes(frame) for frame in join([memoryview(piece) for piece in pieces], 10)] == frames
    if pieces and len(pieces[-1]) == 10:
        raise AssertionError("the end of a message is never open")


def test_a_message_that_ends_inside_a_frame_is_refused() -> None:
    with pytest.raises(ProtocolError, match="inside a frame, after 2 pieces"):
        join([memoryview(b"a"), memoryview(bytes(10))], 10)


def test_large_buffers_are_not_copied() -> None:
    large = bytearray(FUSE_BELOW_BYTES)
    frames, _ = fuse([b"small", large])
    assert frames[1] is large


@pytest.mark.parametrize("place", [(0, 0, 11), (0, 8, 3), (1, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, -1)])
def test_a_place_outside_its_frame_is_refused(place: tuple[int, int, int]) -> None:
    with pytest.raises(ProtocolError, match="truncated"):
        split([b"0123456789"], [place])
