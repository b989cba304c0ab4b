"""On which embedding server each part of a rank's rows lies. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def place(parts: Collection[int], holders: Mapping[int, str], servers: Collection[str]) -> dict[int, str]:
    """Divide parts among servers, so that no server has two more than another, and as few as possible move.

    Which server has one more than another depends on the parts, so that ranks do not all give it to the same one.

    Args:
        parts: of one rank, at least one.
        holders: where parts lie now; a part that lies nowhere, or on a server that is not in `servers`, has to move.
        servers: that may have parts, at least one.

    Returns:
        The server of each part. It follows from the arguments alone, not from their order.
    """
    names = sorted(servers)
    kept: dict[str, list[int]] = {name: [] for name in names}
    homeless: list[int] = []
    for part in sorted(parts):
        kept.get(holders.get(part, ""), homeless).append(part)

    def fewest_first(part: int) -> list[str]:
        return sorted(names, key=lambda name: (len(kept[name]), (names.index(name) - part) % len(names)))

    least, num_more = divmod(len(parts), len(names))
    for index, name in enumerate(reversed(fewest_first(min(parts)))):
        # Those with the most keep one more where the parts cannot be divided evenly.
        room = least + (index < num_more)
        homeless += kept[name][room:]
        del kept[name][room:]
    for part in homeless:
        kept[fewest_first(part)[0]].append(part)
    return {part: name for name in names for part in kept[name]}
