"""Whatever happens in whichever order, the rows are those of a plain dict: real servers, killed, moved and restored."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from hetstream.mpi_dataworkers.wire.messages import EMBEDDING_PARTS, EmbeddingTable, PartsHeld, WriteRows
from tests.mpi_dataworkers.embedding.conftest import MakeClient, MakeServer
from tests.mpi_dataworkers.embedding.servers import Client, Server

TABLES = (EmbeddingTable("wide", 700, 24), EmbeddingTable("small", 90, 4))
Oracle = dict[tuple[str, int], bytes]
# Bases are written all the time.
OPTIONS = ("--segment", "2000", "--generations", "3")


class World:
    """Servers and trainers, and what the rows should be."""

    def __init__(self, server_of: MakeServer, client_of: MakeClient, seed: int) -> None:
        self.chance = random.Random(seed)
        self._server_of, self._client_of = server_of, client_of
        self.servers: dict[str, Server] = {}
        self.lost: list[str] = []
        self.clients: list[Client] = []
        self.holder: dict[int, str] = {}
        self.oracle: Oracle = {}
        self.generations: dict[str, tuple[Oracle, list[str]]] = {}
        self.logs: dict[str, Server] = {}
        self.num_servers = self.num_generations = 0

    def add_server(self) -> str:
        name = f"s{self.num_servers}"
        self.num_servers += 1
        self.servers[name] = self.logs[name] = self._server_of(name).start(*OPTIONS)
        for client in self.clients:
            client.open(self.servers[name], [])
        return name

    def begin_training(self, world_size: int) -> None:
        """Trainers that know nothing of those before; the tables are empty."""
        for client in self.clients:
            client.close()
        self.clients = [self._client_of(rank, *TABLES) for rank in range(world_size)]
        self.holder = {part: self.chance.choice(list(self.servers)) for part in range(EMBEDDING_PARTS)}
        for name, server in self.servers.items():
            for client in self.clients:
                client.open(server, [part for part in self.parts_of(client) if self.holder[part] == name])
        self.oracle = {}

    def parts_of(self, client: Client) -> list[int]:
        return [part for part in range(EMBEDDING_PARTS) if part % len(self.clients) == client.rank]

    def by_server(self, client: Client, ids: list[int]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for row_id in ids:
            if row_id % EMBEDDING_PARTS % len(self.clients) == client.rank:
                found.setdefault(self.holder[row_id % EMBEDDING_PARTS], []).append(row_id)
        return found

    def write(self) -> None:
        table = self.chance.choice(TABLES)
        ids = self.chance.sample(range(table.num_rows), self.chance.randrange(1, table.num_rows // 2))
        for client in self.clients:
            for name, mine in self.by_server(client, ids).items():
                rows = {row_id: self.chance.randbytes(table.row_bytes) for row_id in mine}
                client.write(self.servers[name], table.name, rows, wait=False)
                self.oracle |= {(table.name, row_id): row for row_id, row in rows.items()}

    def compare(self) -> None:
        for table in TABLES:
            found = {}
            for client in self.clients:
                for name, mine in self.by_server(client, list(range(table.num_rows))).items():
                    found |= client.read(self.servers[name], table.name, mine)
            assert found == {row_id: row for (name, row_id), row in self.oracle.items() if name == table.name}

    def move(self) -> None:
        client, target = self.chance.choice(self.clients), self.chance.choice(list(self.servers))
        for source in self.servers:
            parts = [part for part in self.parts_of(client) if self.holder[part] == source]
            if source != target and parts:
                parts = self.chance.sample(parts, self.chance.randrange(1, len(parts) + 1))
                expect, send = client.begin_move(self.servers[source], self.servers[target], parts)
                self.holder |= dict.fromkeys(parts, target)
                if self.chance.random() < 0.5:
                    self.write()  # they may have to wait
                client.answer(PartsHeld, expect)
                client.end_move(self.servers[source], send, parts)

    def mark(self) -> None:
        name = f"generation {self.num_generations}"
        self.num_generations += 1
        for client in self.clients:
            client.mark(name, len(self.clients), list(self.servers.values()))
        self.generations[name] = dict(self.oracle), list(self.servers)
        while len(self.generations) > 3:
            del self.generations[next(iter(self.generations))]

    def kill(self) -> None:
        name = self.chance.choice(list(self.servers))
        self.servers[name].end()
        if self.chance.random() < 0.5:
            self.write()  # to the dead, too
        self.servers[name].start(*OPTIONS)
        for client in self.clients:
            client.open(self.servers[name])

    def lose(self) -> None:
        """A server does not come back; others adopt its parts."""
        if len(self.servers) == 1:
            self.add_server()
        name = self.chance.choice(list(self.servers))
        lost = self.servers.pop(name)
        lost.end()
        for client in self.clients:
            parts = [part for part in self.parts_of(client) if self.holder[part] == name]
            target = self.chance.choice(list(self.servers))
            self.holder |= dict.fromkeys(parts, target)
            if parts:
                client.adopt(self.servers[target], parts, lost.log)
            for message, frames in client.unkept.pop(name, []):
                assert isinstance(message, WriteRows)
                again = WriteRows(client.name, client.next(), message.table)
                client.change(self.servers[target], again, *frames)

    def restore(self) -> None:
        """Go back to a generation: the same trainers, or others on another number of servers."""
        if not self.generations:
            return
        name = self.chance.choice(list(self.generations))
        if self.chance.random() < 0.6:
            wanted = self.chance.randrange(1, 5)
            while len(self.servers) < wanted:
                self.add_server()
            for extra in list(self.servers)[wanted:]:
                self.servers.pop(extra).end()
            self.begin_training(self.chance.randrange(1, 4))
        oracle, logs = self.generations[name]
        for client in self.clients:
            for server_name, server in self.servers.items():
                parts = [part for part in self.parts_of(client) if self.holder[part] == server_name]
                if parts:
                    client.restore(server, name, parts, self.logs[self.chance.choice(logs)].log)
        self.oracle = dict(oracle)

    def lives(self, num_actions: int) -> None:
        actions: list[Callable[[], None]] = [self.move, self.mark, self.mark, self.kill, self.lose, self.restore]
        for _ in range(num_actions):
            self.write()
            if self.chance.random() < 0.6:
                self.chance.choice(actions)()
            if self.chance.random() < 0.5:
                self.compare()
        self.compare()


@pytest.mark.shows("rows of embedding servers are exact, whatever is killed, moved and restored")
@pytest.mark.parametrize("seed", range(3))
def test_rows_are_those_of_a_dict(server_of: MakeServer, client_of: MakeClient, seed: int) -> None:
    world = World(server_of, client_of, seed)
    for _ in range(1 + seed % 3):
        world.add_server()
    world.begin_training(1 + seed % 2)
    world.lives(30)
