"""Loops that leave early, skip steps, validate in between or accumulate: what they read is what torch would read."""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hetstream
from hetstream.errors import EmbeddingError
from tests.mpi_dataworkers.embedding.conftest import Servers
from tests.mpi_dataworkers.embedding.programs import batches
from tests.mpi_dataworkers.embedding.servers import Server

NUM_ROWS, DIM = 5000, 16
DATA = [ids for ids, _ in batches(NUM_ROWS, 20)]


def _bag(cached_rows: int = 3000, name: str | None = None) -> hetstream.EmbeddingBag:
    torch.manual_seed(1)
    cache_bytes = cached_rows * 4 * (DIM + 1)
    optimizer = hetstream.RowWiseAdagrad(0.05)
    return hetstream.EmbeddingBag(NUM_ROWS, DIM, mode="sum", optimizer=optimizer, cache_bytes=cache_bytes, name=name)


def _ahead(bag: Any, data: list[torch.Tensor], steps: int = 8) -> Iterator[torch.Tensor]:
    return iter(hetstream.lookahead(data, {bag: lambda ids: ids}, steps=steps))


def _step(bag: Any, ids: torch.Tensor) -> float:
    loss = bag(ids).pow(2).sum()
    loss.backward()
    return loss.item()


def _stop_a_while(server: Server) -> None:
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    threading.Timer(0.5, server.process.send_signal, [signal.SIGCONT]).start()


def test_a_loop_that_is_left_with_rows_on_their_way_begins_again(servers: Servers) -> None:
    plain = _bag()
    expected = [_step(plain, ids) for ids in DATA]
    (server,) = servers(1)
    bag = _bag()
    _stop_a_while(server)
    for _ in _ahead(bag, DATA):
        break
    assert [_step(bag, ids) for ids in _ahead(bag, DATA)] == expected


def test_rows_on_their_way_to_a_coming_step_may_be_looked_up_before(servers: Servers) -> None:
    plain = _bag()
    with torch.no_grad():
        expected = plain(DATA[3])
    (server,) = servers(1)
    bag = _bag()
    _stop_a_while(server)
    loop = _ahead(bag, DATA)
    next(loop)
    with torch.no_grad():
        assert torch.equal(bag(DATA[3]), expected)


def test_rows_of_a_skipped_step_do_not_come_in_the_place_of_others(servers: Servers) -> None:
    plain = _bag()
    expected = [_step(plain, ids) for ids in DATA[::2]]
    made = servers(2)
    bag = _bag(600)
    got = []
    for number, ids in enumerate(_ahead(bag, DATA, 4)):
        if number == 4:
            _stop_a_while(made[0])
        if number % 2 == 0:
            got.append(_step(bag, ids))
    assert got == expected


def test_validation_has_room_among_coming_steps(servers: Servers) -> None:
    generator = torch.Generator().manual_seed(9)
    held_out = [torch.randint(NUM_ROWS, (64, 5), generator=generator) for _ in range(30)]

    def run(bag: Any, data: Any) -> list[float]:
        got = []
        for number, ids in enumerate(data):
            got.append(_step(bag, ids))
            if number % 8 == 5:
                with torch.no_grad():
                    got += [bag(ids).sum().item() for ids in held_out]
        return got

    expected = run(_bag(), DATA)
    servers(1)
    bag = _bag(1000)
    assert run(bag, _ahead(bag, DATA, 16)) == expected
    assert bag.stats.known_ahead == len(DATA)


def test_one_backward_of_several_steps_updates_their_rows(servers: Servers) -> None:
    def run(bag: Any, data: Any) -> list[float]:
        losses = []
        total = torch.zeros(())
        for number, ids in enumerate(data):
            loss = bag(ids).pow(2).sum()
            losses.append(loss.item())
            total = total + loss
            if number % 5 == 4:
                total.backward()
                total = torch.zeros(())
        return losses

    expected = run(_bag(), DATA)
    servers(1)
    bag = _bag(1200)
    assert run(bag, _ahead(bag, DATA, 4)) == expected


@pytest.mark.parametrize("num_servers", [0, 1])
def test_a_loop_in_a_step_of_another_one(servers: Servers, num_servers: int) -> None:
    plain = _bag()
    expected = [_step(plain, ids) for ids in [*DATA[:5], *DATA[:3], *DATA[5:]]]
    if num_servers:
        servers(num_servers)
    bag = _bag()
    got = []
    for number, ids in enumerate(_ahead(bag, DATA)):
        got.append(_step(bag, ids))
        if number == 4:
            got += [_step(bag, ids) for ids in _ahead(bag, DATA[:3])]
    assert got == expected
    assert bag.stats.known_ahead == len(expected), "both loops look ahead"


def test_a_loop_that_nobody_ended_ends_no_other() -> None:
    plain = _bag()
    expected = [_step(plain, ids) for ids in DATA]
    bag = _bag()
    left = _ahead(bag, DATA)
    next(left)
    got = []
    for number, ids in enumerate(_ahead(bag, DATA)):
        if number == 5:
            del left
        got.append(_step(bag, ids))
    assert got == expected
    assert bag.stats.known_ahead == len(expected)


def test_a_generation_has_weights_that_were_loaded_and_tables_that_are_new(servers: Servers) -> None:
    servers(1)
    bag = _bag(name="loops")
    bag.state_dict()
    bag.load_state_dict({"weight": torch.ones(NUM_ROWS, DIM)})
    other = _bag(name="loops, another")
    saved = bag.state_dict(prefix="bag.") | other.state_dict(prefix="other.")
    both = torch.nn.ModuleDict({"bag": bag, "other": other})
    first = other(DATA[0]).detach()
    for module in (bag, other):
        module.load_state_dict({"weight": torch.zeros(NUM_ROWS, DIM)})
    both.load_state_dict(saved)
    with torch.no_grad():
        assert torch.equal(bag(DATA[0]), torch.full((64, DIM), 5.0))
        assert torch.equal(other(DATA[0]), first)


def test_rows_come_ahead_where_the_program_makes_the_batches(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    def loader() -> hetstream.DataLoader:
        return hetstream.DataLoader([*torch.cat(DATA)], batch_size=64, shuffle=True, seed=3)

    plain = _bag()
    expected = [_step(plain, ids) for ids in loader()]
    servers(1)
    bag = _bag()
    monkeypatch.delenv("HETSTREAM_SERVICE")  # of no data workers
    loop = _ahead(bag, loader(), 4)
    first = next(loop)
    assert bag.stats.looked_up > 3 * len(first.unique()), "rows of four steps are asked for"
    assert [_step(bag, first), *(_step(bag, ids) for ids in loop)] == expected
    assert bag.stats.known_ahead == len(expected)


def test_a_module_with_rows_on_servers_is_not_copied(servers: Servers) -> None:
    servers(1)
    with pytest.raises(EmbeddingError, match=r"neither copied nor pickled.*state_dict\(\)"):
        copy.deepcopy(_bag())


def test_a_backward_after_a_restore_updates_the_rows_of_its_ids(servers: Servers) -> None:
    def run(bag: Any) -> torch.Tensor:
        weight = torch.ones(NUM_ROWS, DIM)
        loss = bag(DATA[0]).sum()
        bag.load_state_dict({"weight": weight})
        bag(DATA[1])
        loss.backward()
        with torch.no_grad():
            return torch.cat([bag(ids) for ids in DATA])

    expected = run(_bag())
    servers(1)
    assert torch.equal(run(_bag(600)), expected)
