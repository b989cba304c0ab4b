"""Which parts of the tables an embedding server has, for whom, and which changes it has made. Pure.

`Parts` follows from the changes in their order: the same in the server that makes them, in one that reads its log after
a crash, and in whoever looks in a log for a generation. It knows no rows.

Each change of a client has a number, and comes to one of two ends: it is made, or refused. Both are noted, so that a
change that is repeated after a lost connection, or comes late over an old one, is not made again.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from hetstream.mpi_dataworkers.embedding.rows import check_table
from hetstream.mpi_dataworkers.errors import EmbeddingError
from hetstream.mpi_dataworkers.wire.messages import (
    EMBEDDING_PARTS,
    AdoptParts,
    DropParts,
    EmbeddingTable,
    ExpectParts,
    MarkGeneration,
    OpenTables,
    PartRows,
    PartsSent,
    ReadRows,
    RestoreGeneration,
    SendParts,
    WriteRows,
)

# Clients that were replaced, and refusals of one, that are remembered.
_MOST_REPLACED = 4096
_MOST_REFUSALS = 256

Expectation = ExpectParts | AdoptParts | RestoreGeneration
# What concerns whole parts, and may have to go before what waits for them.
OfParts = ExpectParts | AdoptParts | RestoreGeneration | DropParts
Change = WriteRows | ExpectParts | AdoptParts | RestoreGeneration | DropParts | MarkGeneration
Request = ReadRows | SendParts | Change
# Of each part that was emptied: the tables that had rows of it.
Emptied = dict[int, list[EmbeddingTable]]


class Refusal(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A change was refused. One whose parts were expected is given up."""

    client: str
    number: int
    text: str


Applied = OpenTables | Change | PartRows | PartsSent | Refusal


class Outcome(enum.Enum):
    """What becomes of a request."""

    DO = "do"
    WAIT = "wait"  # for parts that are expected
    DONE = "done"  # it was done before


class Client(msgspec.Struct):
    """A trainer.

    Attributes:
        opened: larger than of clients that came before.
        decided: the largest number of a change that was made or refused.
        waiting: smaller ones that are neither: they wait for parts that the larger one has planned anew.
        refused: why, by number.
    """

    rank: int
    opened: int
    tables: dict[str, EmbeddingTable] = {}
    decided: int = 0
    waiting: set[int] = set()
    refused: dict[int, str] = {}

    def has_decided(self, number: int) -> bool:
        """Return whether a change was made or refused."""
        return number <= self.decided and number not in self.waiting

    @property
    def decided_up_to(self) -> int:
        """All changes up to this number that have come here are decided."""
        return min(self.waiting) - 1 if self.waiting else self.decided


class Parts(msgspec.Struct, tag=True):
    """See the module.

    Attributes:
        clients: by their names.
        replaced: names of those whose place others have taken.
        holder: for each part, who has it here; "" where it is not here.
        since: the number of the change with which it came to be here; 0 for `OpenTables`.
        expected: parts that are to come.
    """

    clients: dict[str, Client] = {}
    replaced: list[str] = []
    holder: list[str] = msgspec.field(default_factory=lambda: [""] * EMBEDDING_PARTS)
    since: list[int] = msgspec.field(default_factory=lambda: [0] * EMBEDDING_PARTS)
    expected: dict[int, Expectation] = {}

    # What is asked

    def outcome_of_open(self, said: OpenTables) -> Outcome:
        """Say what becomes of an `OpenTables`.

        Raises:
            EmbeddingError: it is refused.
        """
        if said.client in self.replaced:
            raise EmbeddingError(
                f"client {said.client} of rank {said.rank} was replaced by another trainer of this rank: end this one"
            )
        _check_parts(said.parts)
        for table in said.tables:
            check_table(table)
        tables = {table.name: table for table in said.tables}
        if len(tables) < len(said.tables):
            raise EmbeddingError(f"rank {said.rank} opens a table twice: {[table.name for table in said.tables]}")
        known = self.clients.get(said.client)
        if known is None:
            return Outcome.DO
        for name, table in tables.items():
            if known.tables.get(name, table) != table:
                raise EmbeddingError(
                    f"rank {said.rank} opens table {name!r} as {table} and had opened it as {known.tables[name]}: a "
                    "table's size is the same for as long as a trainer runs"
                )
        has_parts = known.decided or all(self.holder[part] == said.client for part in said.parts)
        return Outcome.DONE if has_parts and tables.keys() <= known.tables.keys() else Outcome.DO

    def outcome_of(self, said: Request, touched: npt.NDArray[np.bool_] | None = None) -> Outcome:
        """Say what becomes of a request.

        Args:
            said: it.
            touched: for each part, whether rows of it are asked for.

        Raises:
            EmbeddingError: it is refused.
        """
        client = self.clients.get(said.client)
        if client is None:
            why = "was replaced by another trainer of its rank" if said.client in self.replaced else "has opened none"
            raise EmbeddingError(
                f"client {said.client} asks for {type(said).__name__}, and {why}. Open the tables first"
            )
        if isinstance(said, Change):
            if said.number < 1:
                raise EmbeddingError(f"{type(said).__name__} has number {said.number}: changes count from 1")
            if client.has_decided(said.number):
                return Outcome.DONE
        if isinstance(said, ReadRows | WriteRows):
            assert touched is not None
            return self._at_hand(said, np.flatnonzero(touched).tolist())
        if isinstance(said, MarkGeneration):
            _check_mark(said, client.rank)
            return Outcome.DO
        _check_parts(said.parts)
        if isinstance(said, SendParts):
            # One of before `DropParts`, which comes again or late.
            was_done = client.has_decided(said.number) and not all(self.whose(part) for part in said.parts)
            return Outcome.DONE if was_done else self._at_hand(said, said.parts)
        for part in said.parts:
            self._check_may_have(said, part, client)
        return Outcome.DO

    def table_of(self, said: ReadRows | WriteRows | PartRows) -> EmbeddingTable:
        """Return the table that is meant.

        Raises:
            EmbeddingError: there is none.
        """
        tables = self._client_of(said).tables
        if said.table not in tables:
            raise EmbeddingError(
                f"{type(said).__name__} {said.number} of client {said.client}: table {said.table!r} is not open. "
                f"It has opened {', '.join(map(repr, tables)) or 'none'}"
            )
        return tables[said.table]

    def _client_of(self, said: Request | PartRows) -> Client:
        client = self.clients.get(said.client)
        if client is None:
            why = "was replaced by another trainer of its rank" if said.client in self.replaced else "has opened none"
            raise EmbeddingError(f"{type(said).__name__} of client {said.client}, which {why}. Open the tables first")
        return client

    def _at_hand(self, said: Request, parts: Iterable[int]) -> Outcome:
        waits = False
        for part in parts:
            if self.holder[part] == said.client:
                continue
            if part not in self.expected or self.expected[part].client != said.client:
                whose = self.whose(part)
                raise EmbeddingError(
                    f"{type(said).__name__} {said.number} of client {said.client} needs part {part}, which "
                    f"{f'is that of client {whose}' if whose else 'does not lie on this server'}. Ask the server that "
                    "has it"
                )
            waits = True
        return Outcome.WAIT if waits else Outcome.DO

    def _check_may_have(self, said: OfParts, part: int, client: Client) -> None:
        whose = self.whose(part)
        if whose not in ("", said.client) and self.clients[whose].opened > client.opened:
            raise EmbeddingError(
                f"{type(said).__name__} {said.number} of client {said.client}: part {part} is that of client {whose}, "
                "which came later. Each part is one rank's: end the trainer that has begun earlier"
            )
        if isinstance(said, ExpectParts | AdoptParts) and self.holder[part] == said.client:
            raise EmbeddingError(
                f"{type(said).__name__} {said.number} of client {said.client}: part {part} lies here already. Drop it "
                "first"
            )

    def expects(self, said: PartRows | PartsSent, part: int) -> bool:
        """Return whether what comes of a part is wanted."""
        wanted = self.expected.get(part)
        return wanted is not None and wanted.client == said.client and said.number >= wanted.number

    def overtakes(self, said: Request | OpenTables) -> bool:
        """Return whether a request plans parts anew that are expected, so that it goes before what waits for them."""
        return isinstance(said, OfParts) and any(
            part in self.expected and self.expected[part].client == said.client for part in said.parts
        )

    def is_complete(self, wanted: Expectation) -> bool:
        """Return whether nothing of an expectation is to come any more."""
        return not any(self.expected.get(part) == wanted for part in wanted.parts)

    def expectations(self) -> Iterator[Expectation]:
        """Give each of them once."""
        yield from {(wanted.client, wanted.number): wanted for wanted in self.expected.values()}.values()

    def parts_of_client(self, client: str) -> list[int]:
        """Return the parts that it has here."""
        return [part for part in range(EMBEDDING_PARTS) if self.holder[part] == client]

    @property
    def is_empty(self) -> bool:
        """Whether no part lies here, or is expected."""
        return not self.expected and not any(self.holder)

    def tables(self) -> set[EmbeddingTable]:
        """Return the tables of all clients."""
        return {table for client in self.clients.values() for table in client.tables.values()}

    # What is done

    def apply(
        self, said: OpenTables | Change | PartRows | PartsSent | Refusal, waiting: Collection[int] = ()
    ) -> Emptied:
        """Make a change that `outcome_of` has let through, or that a log has.

        Args:
            said: it.
            waiting: numbers of changes that it has overtaken.

        Returns:
            Parts whose rows are gone.
        """
        emptied: Emptied = {}
        if isinstance(said, OpenTables):
            return self._open(said)
        if isinstance(said, OfParts):
            for part in said.parts:
                emptied[part] = self._empty(part)
                if not isinstance(said, DropParts):
                    self.expected[part] = said
        elif isinstance(said, PartsSent):
            for part in said.parts:
                self.since[part] = self.expected.pop(part).number
                self.holder[part] = said.client
        elif isinstance(said, MarkGeneration):
            for name, client in list(self.clients.items()):
                if client.rank >= said.world_size:
                    emptied |= self._replace(name)
        elif isinstance(said, Refusal):
            emptied = self._give_up(said)
        if not isinstance(said, PartRows | PartsSent) and (decided := self.clients.get(said.client)):
            decided.waiting = (decided.waiting | set(waiting)) - {said.number}
            decided.decided = max(decided.decided, said.number)
        return emptied

    def _open(self, said: OpenTables) -> Emptied:
        emptied: Emptied = {}
        tables = {table.name: table for table in said.tables}
        known = self.clients.get(said.client)
        if known is not None and known.decided:
            known.tables |= tables
            return emptied
        opened = max((client.opened for client in self.clients.values()), default=0) + 1
        for name, client in list(self.clients.items()):
            if client.rank == said.rank and client is not known:
                emptied |= self._replace(name)
        if known is None:
            known = self.clients[said.client] = Client(said.rank, opened)
        known.tables |= tables
        for part in said.parts:
            emptied[part] = [*emptied.get(part, ()), *self._empty(part)]
            self.holder[part], self.since[part] = said.client, 0
        return emptied

    def _replace(self, name: str) -> Emptied:
        parts = [part for part in range(EMBEDDING_PARTS) if self.whose(part) == name]
        emptied = {part: self._empty(part) for part in parts}
        del self.clients[name]
        self.replaced = [*self.replaced, name][-_MOST_REPLACED:]
        return emptied

    def _give_up(self, said: Refusal) -> Emptied:
        refused = self.clients[said.client].refused
        refused[said.number] = said.text
        if len(refused) > _MOST_REFUSALS:
            del refused[min(refused)]
        given_up = [
            part
            for part, wanted in self.expected.items()
            if (wanted.client, wanted.number) == (said.client, said.number)
        ]
        return {part: self._empty(part) for part in given_up}

    def _empty(self, part: int) -> list[EmbeddingTable]:
        whose = self.whose(part)
        self.holder[part] = ""
        self.expected.pop(part, None)
        return list(self.clients[whose].tables.values()) if whose else []

    def whose(self, part: int) -> str:
        """Return who has a part here, or expects it; "" for nobody."""
        return self.holder[part] or (self.expected[part].client if part in self.expected else "")


def _check_parts(parts: Collection[int]) -> None:
    if wrong := [part for part in parts if not 0 <= part < EMBEDDING_PARTS]:
        raise EmbeddingError(f"there is no part {wrong[0]}: parts are 0 to {EMBEDDING_PARTS - 1}")


def _check_mark(said: MarkGeneration, rank: int) -> None:
    if not said.name or not said.name.isprintable() or len(said.name) > 255:
        raise EmbeddingError(
            f"a generation is called {said.name!r}: its name must be printable text, of 1 to 255 characters"
        )
    if not rank < said.world_size:
        raise EmbeddingError(f"rank {rank} marks generation {said.name!r} of world size {said.world_size}")
    if not said.logs or any(not log.startswith("/") for log in said.logs):
        raise EmbeddingError(
            f"generation {said.name!r} names the logs {said.logs}: name the directory of each server, from the root on"
        )
