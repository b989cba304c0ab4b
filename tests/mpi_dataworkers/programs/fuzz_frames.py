"""One input of a fuzzer, through everything that reads bytes of a peer. Raises if any of it does more than refuse.

Used by hypothesis (`test_fuzz.py`) and, run as a program with libFuzzer's arguments, by atheris, which looks for inputs
that reach new lines.
"""

import contextlib
import sys

if __name__ == "__main__":
    import atheris
else:
    atheris = None

with atheris.instrument_imports(include=["hetstream.mpi_dataworkers"]) if atheris else contextlib.nullcontext():
    from hetstream.mpi_dataworkers.errors import ProtocolError, RemoteError
    from hetstream.mpi_dataworkers.ops import tree
    from hetstream.mpi_dataworkers.transports import auth, base, sockets
    from hetstream.mpi_dataworkers.wire import codec
    from hetstream.mpi_dataworkers.wire.messages import Batch, Batches

KEY = bytes(32)
LIMIT = 64


def refuse_pickle(*_: object) -> None:
    """Pickled leaves come only from peers that have proved the key: here nobody has."""
    raise RemoteError("pickle")


def feed(data: bytes) -> None:
    """Read the bytes as each kind of input in turn."""
    view = memoryview(bytearray(data))  # as it comes from a transport: writable
    with contextlib.suppress(ProtocolError, RemoteError):
        message = codec.decode(view)
        batches = message.batches if isinstance(message, Batches) else [message]
        for batch in batches:
            if isinstance(batch, Batch):
                tree.unflatten(batch.spec, codec.split([view, view[: LIMIT // 2], view[:0]], batch.buffers))
    with contextlib.suppress(ProtocolError):
        handshake = auth.LoaderHandshake(KEY, "tcp://h:1")
        for _ in range(2):
            handshake.answer(codec.decode(view))
            assert not handshake.proven
    with contextlib.suppress(ProtocolError):
        auth.WorkerHandshake(KEY, "w", "tcp://h:1").answer(codec.decode(view))
        raise AssertionError("a proof without the key")
    with contextlib.suppress(ProtocolError, RemoteError):
        tree.unflatten(data, [view[:8], view[:16], view[:0]])
    with contextlib.suppress(ProtocolError):
        sockets.decompress([view], [len(data)])
    with contextlib.suppress(ProtocolError):
        assert sum(frame.nbytes for frame in base.find_frames(view)) <= len(data)
    with contextlib.suppress(ProtocolError):
        pieces = [view[start : start + LIMIT] for start in range(0, len(data), LIMIT)]
        assert b"".join(codec.join(pieces, LIMIT)) == data


def main() -> None:
    """Run atheris with the arguments of libFuzzer."""
    tree.load_structure = refuse_pickle
    atheris.Setup(sys.argv, feed)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
