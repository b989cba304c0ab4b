"""What another user of the host tries, who knows all addresses but not the key. Prints what it got, one line each.

Run with the loader's and the dispatcher's addresses, the address file and recorded bytes of a handshake.
"""

import json
import os
import socket
import sys
import time

import zmq

from hetstream.mpi_dataworkers.transports.base import PeerUnreachable, lay_out
from hetstream.mpi_dataworkers.transports.shm import ShmBatchSender
from hetstream.mpi_dataworkers.transports.sockets import SocketBatchSender
from hetstream.mpi_dataworkers.wire.codec import encode
from hetstream.mpi_dataworkers.wire.messages import Batch, Hello, Program, Proof, ProvidePipeline, RegisterWorker

known = json.loads(sys.argv[1])
forged = Batch(known["session"], 5, 1 << 60, 8, b"\xc0", [])
got = []


def attempt(name, action, *arguments):
    try:
        result = action(*arguments)
    except (OSError, zmq.ZMQError, PeerUnreachable) as error:
        result = None
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    if result:
        got.append(f"{name}: {result!r}")


def read_file(path):
    with open(path) as stream:
        return stream.read()


def open_file(path, flags=os.O_RDONLY):
    os.close(os.open(path, flags))
    return "opened"


def send_signal(pid):
    os.kill(pid, 0)  # whether he might
    return "sent"


def talk_zmq(address, frames):
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.sndtimeo = 500
        dealer.connect(address)
        for frame in frames:
            dealer.send(frame)
        return dealer.recv() if dealer.poll(300) else None


def talk_seqpacket(address, frames):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(0.5)
        connection.connect(address.removeprefix("shm:").replace("@", "\0", 1))
        for frame in frames:
            connection.send(frame)
        return connection.recv(4096)


def connect(address):
    if address.startswith("ipc:"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(address.removeprefix("ipc://").replace("@", "\0", 1))
    else:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        connection.connect((host, int(port)))
    connection.settimeout(5)
    return connection


def framed(text):
    table, _, total = lay_out([len(text)])
    return total.to_bytes(8, "little") + table + text


def talk_stream(address, texts):
    """What comes after the challenge, which anybody gets."""
    with connect(address) as connection:
        for text in texts:
            connection.sendall(framed(text))
        heard = b""
        while more := connection.recv(4096):
            heard += more
        return heard if heard.count(b"HET") > 1 else None


def fill(address):
    """Send a message of many megabytes; whoever keeps all of it can be made to hold memory."""
    with connect(address) as connection:
        connection.sendall((1 << 26).to_bytes(8, "little"))
        for _ in range(1 << 10):
            connection.sendall(bytes(1 << 16))
            time.sleep(0.001)  # not faster than a network
        return "took 64 MiB"


def deliver(sender, address):
    sender.send(address, forged, [])
    return "delivered"


# Not before the imports: another user cannot read the interpreter that root has.
os.setgroups([])
os.setgid(known["uid"])
os.setuid(known["uid"])
attempt("address file", read_file, known["address_file"])
attempt("journal", read_file, known["journal"])
attempt("directory of the service", os.listdir, os.path.dirname(known["journal"]))
for pid in known["pids"]:
    attempt(f"files of {pid}", os.listdir, f"/proc/{pid}/fd")
    for what in ("environ", "mem", "maps", "io", "stack"):
        attempt(f"{what} of {pid}", read_file, f"/proc/{pid}/{what}")
    attempt(f"a signal to {pid}", send_signal, pid)
for name in os.listdir("/dev/shm"):
    attempt(f"shared memory {name}", open_file, f"/dev/shm/{name}")
for name in (f"{known['address_file']}.forged", f"{os.path.dirname(known['journal'])}/summary.json"):
    attempt(f"a new file {name}", open_file, name, os.O_WRONLY | os.O_CREAT)
pickled = encode(ProvidePipeline("d", Program("/", []), b"", b"cos\nsystem\n(S'touch /tmp/intruder'\ntR."))
attempt("dispatcher", talk_zmq, known["dispatcher"], [encode(RegisterWorker("h", 1, "", [])), pickled])
for address in known["receivers"]:
    talk = talk_seqpacket if address.startswith("shm:") else talk_stream
    attempt(address, talk, address, [encode(Hello("w", address, bytes(32))), encode(Proof(bytes(32))), encode(forged)])
    replayed = [bytes.fromhex(text) for text in known["recorded"][address]]
    attempt(f"{address} replay", talk, address, [*replayed, encode(forged)])
    if talk is talk_stream:
        attempt(f"{address} filled", fill, address)
for guess in ("00" * 32, "ff" * 32):
    for sender in (ShmBatchSender(guess, "w"), SocketBatchSender(guess, "w")):
        for address in known["receivers"]:
            if address.startswith("shm:") == isinstance(sender, ShmBatchSender):
                attempt(f"{address} with a guessed key", deliver, sender, address)
        sender.close(0)
print(json.dumps(got))
