"""Training with real embedding servers against training without: the same losses, whatever happens to the servers."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetstream
from hetstream.errors import EmbeddingError
from hetstream.mpi_dataworkers.embedding import client as client_module
from hetstream.mpi_dataworkers.embedding import connection
from hetstream.mpi_dataworkers.wire.address import ServiceAddress
from tests.mpi_dataworkers.embedding.conftest import MakeServer, Servers, end_connection
from tests.mpi_dataworkers.embedding.programs import batches, train
from tests.mpi_dataworkers.embedding.servers import until

NUM_ROWS, DIM, STEPS = 5000, 16, 60
ROW_BYTES = 4 * (DIM + 1)


def _bag(cached_rows: int = 1500, **options: Any) -> hetstream.EmbeddingBag:
    torch.manual_seed(1)
    options = {"optimizer": hetstream.RowWiseAdagrad(0.05), "mode": "sum", **options}
    return hetstream.EmbeddingBag(NUM_ROWS, DIM, cache_bytes=cached_rows * ROW_BYTES, **options)


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """Losses of a run without servers."""
    return train(_bag(), DIM, batches(NUM_ROWS, STEPS))


def _ahead(bag: nn.Module, data: Any, steps: int = 8) -> Any:
    return hetstream.lookahead(data, {bag: lambda batch: batch[0]}, steps=steps)


@pytest.mark.shows("losses with embedding servers are those without, whatever their number and the look-ahead")
@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("steps", [0, 1, 16])
def test_losses_are_those_without_servers(
    servers: Servers, expected: list[float], num_servers: int, steps: int
) -> None:
    servers(num_servers)
    bag = _bag()
    data = batches(NUM_ROWS, STEPS)
    assert train(bag, DIM, _ahead(bag, data, steps) if steps else data) == expected
    assert bag.stats.looked_up > bag.stats.hits > 0
    assert bag.stats.known_ahead == (STEPS if steps else 0)
    assert connection._client is not None
    assert connection._client.num_written > NUM_ROWS, "rows were written back"


def test_lookups_of_data_workers_are_used(servers: Servers, expected: list[float]) -> None:
    servers(2)
    bag = _bag()
    collate = hetstream.with_lookups(lambda batch: batch, bag.ids_of(lambda batch: batch[0]))
    data = [collate(batch) for batch in batches(NUM_ROWS, STEPS)]
    assert train(bag, DIM, _ahead(bag, data)) == expected


@pytest.mark.shows("an embedding server may be killed at any step of training: losses are as without")
def test_servers_are_killed_and_started_again(servers: Servers, expected: list[float]) -> None:
    made = servers(2)
    bag = _bag()

    def kill(step: int) -> None:
        if step % 15 == 7:
            made[step % 2].end()
            made[step % 2].start()

    assert train(bag, DIM, _ahead(bag, batches(NUM_ROWS, STEPS)), before_step=kill) == expected


def test_a_stopped_server_is_waited_for(servers: Servers, expected: list[float]) -> None:
    made = servers(2)
    bag = _bag()

    def stop(step: int) -> None:
        process = made[0].process
        assert process is not None
        if step == 20:
            process.send_signal(signal.SIGSTOP)
        if step == 25:
            process.send_signal(signal.SIGCONT)

    assert train(bag, DIM, _ahead(bag, batches(NUM_ROWS, STEPS), 16), before_step=stop) == expected


@pytest.mark.shows("embedding servers join, drain and are lost while training goes on: losses are as without")
def test_servers_join_drain_and_are_lost(
    servers: Servers, expected: list[float], server_of: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "LOST_AFTER_S", 0.5)
    monkeypatch.setattr(client_module, "_JOIN_AFTER_S", 0.0)
    made = servers(2)
    bag = _bag()
    client = connection._client
    assert client is not None

    def change(step: int) -> None:
        if step == 10:
            made.append(server_of("s2").start())
            until(lambda: len(client._servers["s2"].parts) > 80 if "s2" in client._servers else False, "s2 has parts")
        if step == 25:
            assert made[0].process is not None
            made[0].process.send_signal(signal.SIGTERM)
            assert made[0].wait() == 0
        if step == 40:
            made[1].end()  # and nobody starts it again

    assert train(bag, DIM, _ahead(bag, batches(NUM_ROWS, STEPS)), before_step=change) == expected
    until(lambda: set(client._servers) == {"s2"}, "only s2 is left")
    assert len(client._servers["s2"].parts) == 256


def test_parts_move_to_a_server_that_joins_although_another_was_never_asked(
    servers: Servers, server_of: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All load is on one server, which one more is to relieve."""
    monkeypatch.setattr(client_module, "_JOIN_AFTER_S", 0.0)
    servers(2)
    bag = _bag()
    client = connection._client
    assert client is not None
    hot = [part for part, name in client._holders.items() if name == "s0"]
    bag(torch.tensor([hot])).sum().backward()
    server_of("s2").start()
    until(lambda: "s2" in client._servers and len(client._servers["s2"].parts) > 80, "s2 has parts")
    assert len([part for part in hot if client._holders[part] == "s2"]) >= 40


def test_a_lost_server_that_comes_back_gets_no_old_rows(
    servers: Servers, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "LOST_AFTER_S", 0.3)
    monkeypatch.setattr(client_module, "_JOIN_AFTER_S", 0.0)
    made = servers(2)
    bag = _bag()
    client = connection._client
    assert client is not None

    def change(step: int) -> None:
        if step == 15:
            made[0].end()
            until(lambda: len(client._servers) == 1, "it is given up")
        if step == 30:
            made[0].start()
            until(lambda: len(client._servers["s0"].parts) == 128 if "s0" in client._servers else False, "it is back")

    assert train(bag, DIM, _ahead(bag, batches(NUM_ROWS, STEPS)), before_step=change) == expected


@pytest.mark.shows("a generation of embedding tables is restored at another number of servers")
@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_training_goes_on_from_a_generation(servers: Servers, expected: list[float], num_servers: int) -> None:
    data = batches(NUM_ROWS, STEPS)
    made = servers(2)
    bag = _bag(name="first")
    torch.manual_seed(2)
    head = nn.Linear(DIM, 1)
    assert train(bag, DIM, _ahead(bag, data[:30]), head=head) == expected[:30]
    state = {name: value.clone() for name, value in bag.state_dict().items()}
    kept = {name: value.clone() for name, value in head.state_dict().items()}
    train(bag, DIM, data[30:40], head=head)  # what is lost
    for server in made:
        server.end()
    servers(num_servers, first=10)
    del bag
    other = _bag(name="another name")
    with pytest.raises(RuntimeError, match="another name"):
        other.load_state_dict(state)
    del other
    end_connection()
    again = _bag(name="first")
    again.load_state_dict(state)
    head.load_state_dict(kept)
    assert train(again, DIM, _ahead(again, data[30:]), head=head) == expected[30:]


def test_rows_that_come_into_being_are_the_same_with_and_without(servers: Servers) -> None:
    data = batches(NUM_ROWS, STEPS)
    plain = train(_bag(new_rows=0.1), DIM, data)
    servers(2)
    bag = _bag(new_rows=0.1)
    assert train(bag, DIM, _ahead(bag, data)) == plain


def test_without_servers_there_is_one_clear_error(
    address: ServiceAddress, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HETSTREAM_SERVICE", f"file:{address.file}")
    monkeypatch.setenv("HETSTREAM_EMBEDDING_SERVERS", "2")
    monkeypatch.setattr(connection, "DEADLINE_S", 0.2)
    began = time.monotonic()
    with pytest.raises(EmbeddingError, match="0 of 2 embedding servers, of 0 in"):
        _bag()
    assert time.monotonic() - began < 10.0


def test_lookups_of_which_nobody_keeps_the_gradients_do_not_fill_the_cache(servers: Servers) -> None:
    """As in an evaluation that forgets torch.no_grad(), also within a step of training."""
    servers(1)
    bag = _bag(cached_rows=1500)
    whole = bag.state_dict()
    del whole
    data = batches(NUM_ROWS, STEPS)
    for number, _ in enumerate(_ahead(bag, data[:4], 2)):
        for ids, _ in data[10 * number : 10 * number + 10]:
            bag(ids)
    kept = [bag(ids) for ids, _ in data[:4]]
    with pytest.raises(EmbeddingError, match="lookups that wait for"):
        kept += [bag(ids) for ids, _ in data]
    del kept
    bag(data[0][0])


def test_memory_for_one_step_is_enough_while_the_loss_before_is_kept(servers: Servers) -> None:
    servers(1)
    data = batches(NUM_ROWS, STEPS)
    bag = _bag(cached_rows=max(len(ids.unique()) for ids, _ in data))
    kept = [bag(data[0][0]).sum()]
    for ids, _ in data:
        kept[-1].backward(retain_graph=True)
        kept.append(bag(ids).sum())


def test_a_step_that_does_not_fit_is_named(servers: Servers) -> None:
    servers(1)
    bag = _bag(cached_rows=100)
    with pytest.raises(EmbeddingError, match="there is memory for 100 in all"):
        bag(torch.arange(200)[:, None])
