"""Mutual proof of the job's key at the start of a batch connection. Pure; used by the transports.

Batches are not encrypted (encryption costs more CPU than all the rest of the transport), so CURVE stays on the control
connections and a batch connection starts with a challenge and a response in both directions, HMAC-SHA256 over both
nonces and the role, which a peer without the key can neither answer nor replay.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

NONCE_BYTES = 32


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
