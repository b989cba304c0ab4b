"""On which embedding server each part of a rank's rows lies. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping


def place(parts: Collection[int], holders: Mapping[int, str], servers: Collection[str]) -> dict[int, str]:
    """Divide parts among servers, so that no server has two more than another, and as few as possible move.

    Args:
        parts: of one rank.
        holders: where parts lie now; a part that lies nowhere, or on a server that is not in `servers`, has to move.
        servers: that may have parts, at least one.

    Returns:
        The server of each part. It follows from the arguments alone, not from their order.
    """
    placed: dict[int, str] = {}
    of_server: dict[str, list[int]] = {server: [] for server in sorted(servers)}
    homeless = []
    for part in sorted(parts):
        if holders.get(part) in of_server:
            of_server[holders[part]].append(part)
        else:
            homeless.append(part)
    # Those with the most keep one more where the parts cannot be divided evenly.
    least, num_more = divmod(len(parts), len(of_server))
    by_load = sorted(of_server, key=lambda server: (-len(of_server[server]), _mark(server)))
    room = {server: least + (index < num_more) for index, server in enumerate(by_load)}
    for server, kept in of_server.items():
        kept.sort(key=lambda part: _mark(f"{server} {part}"))
        homeless += kept[room[server] :]
        del kept[room[server] :]
        placed |= dict.fromkeys(kept, server)
    for part in sorted(homeless):
        server = max(
            (server for server in of_server if len(of_server[server]) < room[server]),
            key=lambda server: _mark(f"{server} {part}"),
        )
        of_server[server].append(part)
        placed[part] = server
    return placed


def _mark(text: str) -> bytes:
    """What ranks servers for a part (rendezvous hashing): the same in every process."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
