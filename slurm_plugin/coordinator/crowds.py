"""How often each user connects: a crowd of one of them costs the others nothing, and the log few lines. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _User:
    left: float
    at_s: float
    said_s: float | None = None
    num_unsaid: int = 0
    last: str = ""


class Crowds:
    """Turns away whoever connects again and again, and says who was turned away: once, then how many more.

    Args:
        most: connections of a user at once.
        per_s: in the long run.
        said_s: so long after a line about a user comes the next one.
    """

    def __init__(self, most: int, per_s: float, said_s: float) -> None:
        self._most, self._per_s, self._said_s = most, per_s, said_s
        self._users: dict[int, _User] = {}

    def may_enter(self, uid: int, now_s: float) -> bool:
        """Whether a user may have another connection now, which is counted."""
        user = self._user(uid, now_s)
        user.left = min(float(self._most), user.left + (now_s - user.at_s) * self._per_s)
        user.at_s = now_s
        if user.left < 1:
            return False
        user.left -= 1
        return True

    def turned_away(self, uid: int, why: str, now_s: float) -> str:
        """What to say of a connection that was refused; empty if it is only counted."""
        user = self._user(uid, now_s)
        if user.said_s is not None and now_s - user.said_s < self._said_s:
            user.num_unsaid, user.last = user.num_unsaid + 1, why
            return ""
        user.said_s = now_s
        return why

    def to_say(self, now_s: float) -> list[str]:
        """What was counted and is to be said by now. Who has long been away is forgotten."""
        lines = []
        for uid, user in list(self._users.items()):
            if user.said_s is not None and now_s - user.said_s < self._said_s:
                continue
            if user.num_unsaid:
                lines.append(f"{user.num_unsaid} more connections of user {uid} came to nothing, the last: {user.last}")
                user.num_unsaid, user.said_s = 0, now_s
            elif now_s - user.at_s > self._most / self._per_s:
                del self._users[uid]
        return lines

    def _user(self, uid: int, now_s: float) -> _User:
        return self._users.setdefault(uid, _User(float(self._most), now_s))
