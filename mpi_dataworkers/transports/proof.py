"""Mutual proof of the job's key at the start of a batch connection. Pure; used by the transports.

Batches are not encrypted (encryption costs more CPU than all the rest of the transport), so CURVE stays on the control
connections and a batch connection starts with a challenge and a response in both directions, HMAC-SHA256 over both
nonces and the role, which a peer without the key can neither answer nor replay. ZeroMQ reads messages of its own
accord, so there a *ticket* under the same key comes first: without one, no message is read.
"""

from __future__ import annotations

import collections
import hashlib
import hmac
import secrets
from collections.abc import Sequence

NONCE_BYTES = 32
_TICKETS_REMEMBERED = 4096


def new_nonce() -> bytes:
    """Random bytes that are used once."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(key: bytes, role: str, worker_nonce: bytes, loader_nonce: bytes, receiver: str) -> bytes:
    """The answer that only a holder of `key` can give.

    Args:
        key: the job's batch key.
        role: "loader" or "worker", so that no side can send the other's answer back.
        worker_nonce, loader_nonce: both sides' nonces.
        receiver: the address the connection was made to, so that an answer cannot be relayed from another one.
    """
    text = b"\0".join([b"hetstream batch connection", role.encode(), receiver.encode(), worker_nonce, loader_nonce])
    return hmac.new(key, text, hashlib.sha256).digest()


def is_proof(given: bytes, key: bytes, role: str, worker_nonce: bytes, loader_nonce: bytes, receiver: str) -> bool:
    """Whether `given` is the answer of a holder of `key`, compared in constant time."""
    fresh = len(worker_nonce) == NONCE_BYTES and len(loader_nonce) == NONCE_BYTES
    return fresh and hmac.compare_digest(given, prove(key, role, worker_nonce, loader_nonce, receiver))


class TicketGate:
    """Lets a connection in for a ticket made with the key for one of `receivers`, once.

    A ticket that is seen again is refused while it is among the last few thousand; after that it would still open no
    more than the challenge and response.
    """

    def __init__(self, key: bytes, receivers: Sequence[str]) -> None:
        self._key = key
        self._receivers = receivers
        self._used: collections.OrderedDict[bytes, None] = collections.OrderedDict()

    def admits(self, name: bytes, ticket: bytes) -> bool:
        """Whether the ticket is good; it is not a second time."""
        good = any(hmac.compare_digest(ticket, _ticket(self._key, one, name)) for one in self._receivers)
        if not good or name in self._used:
            return False
        self._used[name] = None
        if len(self._used) > _TICKETS_REMEMBERED:
            self._used.popitem(last=False)
        return True


def new_ticket(key: bytes, receiver: str) -> tuple[bytes, bytes]:
    """A single-use name, and the ticket for it that only a holder of `key` can make."""
    name = secrets.token_hex(NONCE_BYTES).encode()
    return name, _ticket(key, receiver, name)


def _ticket(key: bytes, receiver: str, name: bytes) -> bytes:
    text = b"\0".join([b"hetstream ticket", receiver.encode(), name])
    return hmac.new(key, text, hashlib.sha256).hexdigest().encode()
