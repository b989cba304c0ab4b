"""Which parts of the tables an embedding server has, for whom, and which changes it has made. Pure.

`Parts` follows from the changes in their order: the same in the server that makes them, in one that reads its log after
a crash, and in whoever looks in a log for a generation. It knows no rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

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

# Clients that were replaced last are told so when they ask.
_MOST_REPLACED = 256

Expectation = ExpectParts | AdoptParts | RestoreGeneration
Change = WriteRows | Expectation | DropParts | MarkGeneration
Request = ReadRows | SendParts | Change
Applied = OpenTables | Change | PartRows | PartsSent
# Of each part that was emptied: the tables that had rows of it.
Emptied = dict[int, list[EmbeddingTable]]


class Client(msgspec.Struct):
    """A trainer.

    Attributes:
        made: the largest number of a change; they are made in order.
        adopted: the same of `AdoptParts`, which overtake what waits for their parts.
    """

    rank: int
    tables: dict[str, EmbeddingTable] = {}
    made: int = 0
    adopted: int = 0


class Parts(msgspec.Struct, tag=True):
    """See the module.

    Attributes:
        clients: by their names, in the order in which they came.
        replaced: names of those whose place others have taken.
        holder: for each part, who has it here; "" where it is not here.
        since: the number of the change with which it came to be here; 0 for `OpenTables`.
        begin: the place in the log of the change that last emptied it.
        expected: parts that are to come.
    """

    clients: dict[str, Client] = {}
    replaced: list[str] = []
    holder: list[str] = msgspec.field(default_factory=lambda: [""] * EMBEDDING_PARTS)
    since: list[int] = msgspec.field(default_factory=lambda: [0] * EMBEDDING_PARTS)
    begin: list[int] = msgspec.field(default_factory=lambda: [0] * EMBEDDING_PARTS)
    expected: dict[int, Expectation] = {}

    # What is asked

    def has_opened(self, said: OpenTables) -> bool:
        """Return whether there is nothing to be done for an `OpenTables`.

        Raises:
            EmbeddingError: it is refused.
        """
        if said.client in self.replaced:
            raise EmbeddingError(
                f"client {said.client} of rank {said.rank} was replaced by another trainer of this rank: end this one"
            )
        for table in said.tables:
            check_table(table)
        known = self.clients.get(said.client)
        if known is None:
            return False
        has_parts = known.made or known.adopted or all(self.holder[part] == said.client for part in said.parts)
        return bool(has_parts) and all(table.name in known.tables for table in said.tables)

    def has_made(self, said: Request) -> bool:
        """Return whether a request comes again, or late, that was done before."""
        client = self.clients[said.client]
        if isinstance(said, SendParts):  # of before `DropParts`
            return said.number <= client.made and not all(self.whose(part) for part in said.parts)
        return isinstance(said, Change) and said.number <= (
            client.adopted if isinstance(said, AdoptParts) else client.made
        )

    def are_here(self, said: Request, parts: Iterable[int]) -> bool:
        """Return whether parts are here; if not, they are expected.

        Raises:
            EmbeddingError: they are not.
        """
        is_here = True
        for part in parts:
            if self.holder[part] == said.client:
                continue
            if self.whose(part) != said.client:
                raise EmbeddingError(
                    f"{type(said).__name__} {said.number} of client {said.client} needs part {part}, which does not "
                    "lie on this server. Ask the server that has it"
                )
            is_here = False
        return is_here

    def table_of(self, said: ReadRows | WriteRows | PartRows) -> EmbeddingTable:
        """Return the table that is meant.

        Raises:
            EmbeddingError: there is none.
        """
        tables = self.clients[said.client].tables
        if said.table not in tables:
            raise EmbeddingError(
                f"{type(said).__name__} {said.number} of client {said.client}: table {said.table!r} is not open. "
                f"It has opened {', '.join(map(repr, tables)) or 'none'}"
            )
        return tables[said.table]

    def check_may_have(self, said: Expectation | DropParts) -> None:
        """Refuse parts that are those of a client that came later, or would come over what lies here.

        Raises:
            EmbeddingError: they are such.
        """
        order = list(self.clients)
        for part in said.parts:
            whose = self.whose(part)
            if whose and order.index(whose) > order.index(said.client):
                raise EmbeddingError(
                    f"{type(said).__name__} {said.number} of client {said.client}: part {part} is that of client "
                    f"{whose}, which came later. Each part is one rank's: end the trainer that has begun earlier"
                )
            if isinstance(said, ExpectParts) and self.holder[part] == said.client:
                raise EmbeddingError(
                    f"ExpectParts {said.number} of client {said.client}: part {part} lies here already. Drop it first"
                )

    def expects(self, said: PartRows | PartsSent, part: int) -> bool:
        """Return whether what comes of a part is wanted."""
        wanted = self.expected.get(part)
        return wanted is not None and wanted.client == said.client and said.number >= wanted.number

    def overtakes(self, said: Request) -> bool:
        """Return whether a request says where parts come from that others wait for."""
        return isinstance(said, AdoptParts) and any(
            part in self.expected and self.expected[part].client == said.client for part in said.parts
        )

    def awaits(self, client: str, number: int) -> bool:
        """Return whether parts are to come that a client has named under this number."""
        return any((wanted.client, wanted.number) == (client, number) for wanted in self.expected.values())

    def owners(self) -> set[str]:
        """Return the clients that have parts here, or expect some."""
        return {*self.holder, *(wanted.client for wanted in self.expected.values())} - {""}

    def tables(self) -> set[EmbeddingTable]:
        """Return the tables of all clients."""
        return {table for client in self.clients.values() for table in client.tables.values()}

    def whose(self, part: int) -> str:
        """Return who has a part here, or expects it; "" for nobody."""
        return self.holder[part] or (self.expected[part].client if part in self.expected else "")

    # What is done

    def apply(self, said: Applied, at: int) -> Emptied:
        """Make a change that was let through, or that a log has at this place; return the parts that are emptied."""
        emptied: Emptied = {}
        if isinstance(said, OpenTables):
            self._open(said, emptied)
        elif isinstance(said, Expectation | DropParts):
            for part in said.parts:
                if isinstance(said, AdoptParts) and self.holder[part] == said.client:
                    continue  # it had come whole from the server that is lost
                self._empty(part, emptied)
                if not isinstance(said, DropParts):
                    self.expected[part] = said
        elif isinstance(said, PartsSent):
            for part in said.parts:
                self.since[part] = self.expected.pop(part).number
                self.holder[part] = said.client
        elif isinstance(said, MarkGeneration):
            self._replace([name for name, client in self.clients.items() if client.rank >= said.world_size], emptied)
        if isinstance(said, AdoptParts):
            self.clients[said.client].adopted = said.number
        elif not isinstance(said, OpenTables | PartRows | PartsSent):
            self.clients[said.client].made = said.number
        for part in emptied:
            self.begin[part] = at
        return emptied

    def give_up(self, client: str) -> Emptied:
        """Expect nothing more of a client, which has failed; return the parts that are emptied."""
        emptied: Emptied = {}
        for part in [part for part, wanted in self.expected.items() if wanted.client == client]:
            self._empty(part, emptied)
        return emptied

    def _open(self, said: OpenTables, emptied: Emptied) -> None:
        if said.client not in self.clients:
            self._replace([name for name, client in self.clients.items() if client.rank == said.rank], emptied)
        client = self.clients.setdefault(said.client, Client(said.rank))
        client.tables |= {table.name: table for table in said.tables}
        if not (client.made or client.adopted):
            for part in said.parts:
                self._empty(part, emptied)
                self.holder[part], self.since[part] = said.client, 0

    def _replace(self, names: Iterable[str], emptied: Emptied) -> None:
        for name in names:
            for part in range(EMBEDDING_PARTS):
                if self.whose(part) == name:
                    self._empty(part, emptied)
            del self.clients[name]
            self.replaced = [*self.replaced, name][-_MOST_REPLACED:]

    def _empty(self, part: int, emptied: Emptied) -> None:
        whose = self.whose(part)
        self.holder[part] = ""
        self.expected.pop(part, None)
        emptied.setdefault(part, []).extend(self.clients[whose].tables.values() if whose else ())
