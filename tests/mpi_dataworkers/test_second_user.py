"""What a second user of the host may try, all in one place: each attack, and the tests that show that it is blocked.

`ATTACKS` is the list, to be read by whoever answers for a site's security. Below it is the whole of it at once: a job
of one ordinary user, and another one who knows every address, every process and recorded handshakes, but no key. Both
are real users, so these tests need root.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sample_datasets as datasets

from hetstream import DataLoader
from hetstream.mpi_dataworkers.transports.auth import new_nonce, prove
from hetstream.mpi_dataworkers.wire.address import ServiceAddress
from hetstream.mpi_dataworkers.wire.codec import encode
from hetstream.mpi_dataworkers.wire.messages import Hello, Proof
from tests.base.users import STRANGER, VICTIM, needs_root
from tests.processes import children_of

TESTS = Path(__file__).parents[1]
PROGRAMS = Path(__file__).with_name("programs")
HERE = "mpi_dataworkers/test_second_user.py"
# What he tries -> the tests, as FILE::NAME below tests/.
ATTACKS: dict[str, tuple[str, ...]] = {
    # Directories and files that others can write to.
    "he makes `.hetstream`, or a job's directory in it, before the job does; a link in its place": (
        "base/test_private.py::test_what_a_stranger_has_prepared_is_refused",
        "base/test_private.py::test_where_anybody_can_swap_directories_nothing_is_kept",
    ),
    "he makes the dispatcher's --work-dir, to be given the keys": (
        "base/test_private.py::test_a_work_directory_that_a_stranger_made_gets_no_keys",
    ),
    "he plants a journal, its lock, the events or links in a work directory": (
        "base/test_private.py::test_files_that_a_stranger_has_planted_are_not_opened",
        "base/test_private.py::test_a_planted_link_gets_no_events",
    ),
    "he plants files for which a temporary name is taken, or second names of files": (
        "base/test_files.py::test_a_planted_temporary_file_is_not_written_through",
        "base/test_files.py::test_a_file_with_a_second_name_elsewhere_is_not_changed",
    ),
    "he owns, or can write to, a file that is read as instructions": (
        "base/test_files.py::test_a_strangers_files_are_not_used",
        "base/test_files.py::test_what_everybody_can_write_to_is_not_used",
    ),
    "he puts links or pipes where logs, events and records of jobs are read": (
        "slurm_plugin/test_red_team.py::test_what_a_job_left_is_shown_as_text",
        "slurm_plugin/test_red_team.py::test_events_are_read_from_no_link_and_no_pipe",
    ),
    "he puts a step, a pickle or a link into a directory of checkpoints": (
        "checkpoint/test_untrusted.py::test_a_step_that_another_user_put_there_is_not_restored",
        "checkpoint/test_untrusted.py::test_a_pickle_of_another_user_is_never_run",
        "checkpoint/test_untrusted.py::test_planted_files_of_the_directory_itself_are_not_written_through",
    ),
    "he takes the names in memory that a training's copies will have": (
        "checkpoint/test_store.py::test_another_users_directory_under_our_name_is_not_touched",
    ),
    # Crowds.
    "he fills the metrics port, `serve` or `exporter` with connections or questions": (
        "base/test_web.py::test_a_silent_crowd_takes_few_descriptors_no_threads_and_keeps_nobody_out",
        "base/test_web.py::test_a_flood_of_requests_costs_little",
    ),
    "he fills the dispatcher's port, with silence or with frames that he only announces": (
        "mpi_dataworkers/test_crowds.py::test_what_strangers_announce_is_given_back_when_they_are_gone",
        "mpi_dataworkers/test_zmq_connections.py::"
        "test_a_crowd_of_strangers_takes_few_descriptors_and_keeps_no_peer_out",
    ),
    "he fills a trainer's port": (
        "mpi_dataworkers/test_security.py::test_a_crowd_of_strangers_makes_room_for_data_workers",
        "mpi_dataworkers/test_security.py::test_a_stranger_cannot_make_a_loader_hold_memory",
    ),
    "he fills a checkpoint writer's port": (
        "checkpoint/test_replica_strangers.py::test_a_crowd_that_never_ends_keeps_no_peer_of_another_host_out",
    ),
    "he floods the site daemon": (
        "slurm_plugin/test_daemon.py::test_a_flood_of_one_user_leaves_the_others_their_answers",
    ),
    "he fills the socket of the coordinator of GPUs, or has a job of his talk without end": (
        "slurm_plugin/coordinator/test_coordinator.py::test_one_user_with_many_connections_shuts_out_himself_alone",
        "slurm_plugin/coordinator/test_strangers.py::test_who_sends_news_without_end_holds_up_nobodys_orders",
        "slurm_plugin/coordinator/test_strangers.py::"
        "test_who_is_faster_than_the_coordinator_rests_until_the_next_renewal",
    ),
    "he sends the coordinator of GPUs brackets without end, too much, or descriptors": (
        "slurm_plugin/coordinator/test_strangers.py::test_no_message_ends_the_coordinator",
        "slurm_plugin/coordinator/test_strangers.py::test_descriptors_that_are_sent_to_the_coordinator_do_not_stay",
    ),
    # In the place of somebody else.
    "he listens at the socket of the coordinator of GPUs": (
        "slurm_plugin/coordinator/test_strangers.py::test_an_agent_tells_nothing_to_a_user_who_is_not_the_coordinator",
    ),
    "he writes the orders of a job on a shared GPU": ("hetjob/gpu/test_pages.py::test_a_job_can_only_read_its_orders",),
    "he makes a job's page shorter, or writes into it what is no record": (
        "hetjob/gpu/test_pages.py::test_nobody_can_make_a_page_shorter_below_its_reader",
        "hetjob/gpu/test_pages.py::test_whatever_stands_in_a_page_reading_it_does_no_harm",
    ),
    "he takes the port of a dispatcher that died, and answers there": (
        "mpi_dataworkers/test_taken_port.py::test_a_peer_that_a_stranger_has_turned_away_comes_back_to_the_same_port",
    ),
    "he answers a data worker in a trainer's place": (
        "mpi_dataworkers/test_security.py::test_a_data_worker_sends_nothing_to_an_impostor",
    ),
    "he reports to the site daemon for the job of somebody else": (
        "slurm_plugin/test_daemon.py::test_a_real_cluster_divided_by_an_ordinary_user",
    ),
    "he replays a report, or sends what is none": ("slurm_plugin/test_daemon.py::test_strangers_replays_and_garbage",),
    "he calls his job a companion, a submission or a component of somebody else's": (
        "slurm_plugin/test_client_retry.py::test_another_users_job_is_not_taken_for_the_submission_of_this_one",
        "slurm_plugin/test_advise.py::test_who_says_that_he_serves_the_job_of_somebody_else_does_not_hide_its_advice",
    ),
    # Names and addresses.
    "he puts line breaks into options, names and comments": (
        "hetjob/test_convert.py::test_an_option_is_one_line",
        "slurm_plugin/test_red_team.py::test_what_a_job_is_called_changes_no_reading_but_its_own",
    ),
    "he puts links in the place of address files": (
        "mpi_dataworkers/test_names_of_sockets.py::test_address_files_are_no_links",
    ),
    "he reads the names of abstract sockets in /proc/net/unix, and connects (SO_PEERCRED)": (
        "mpi_dataworkers/test_names_of_sockets.py::test_a_stranger_reads_the_name_of_a_socket_and_gets_no_further",
    ),
    # Keys.
    "he connects to the dispatcher without the job's CURVE key": (
        f"{HERE}::test_another_user_of_the_host_gets_nothing_and_the_job_goes_on",
        "mpi_dataworkers/test_security.py::test_without_the_key_the_dispatcher_does_not_answer",
    ),
    "he delivers batches without the key, with a guessed one, or with a recorded handshake (HMAC, replay)": (
        f"{HERE}::test_another_user_of_the_host_gets_nothing_and_the_job_goes_on",
        "mpi_dataworkers/test_security.py::test_a_handshake_cannot_be_replayed_shortened_or_turned_round",
        "mpi_dataworkers/test_security.py::test_a_stranger_can_neither_deliver_nor_read_batches",
    ),
    "he is on the network between, and changes what passes": (
        "mpi_dataworkers/test_security.py::test_who_is_on_the_path_cannot_change_what_is_made_into_objects",
    ),
    "he looks for keys in /proc, in shared memory and in the job's files": (
        f"{HERE}::test_another_user_of_the_host_gets_nothing_and_the_job_goes_on",
    ),
    # Browsers.
    "he has the browser of a user read the page or the metrics (Host, Origin)": (
        "base/test_web.py::test_one_asks_and_is_answered",
    ),
}


def _names_in(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_attack_of_the_list_has_its_tests() -> None:
    missing = [name for names in ATTACKS.values() for name in names if not _exists(name)]
    assert missing == []


def _exists(name: str) -> bool:
    file, _, function = name.partition("::")
    return (TESTS / file).exists() and function in _names_in(TESTS / file)


class Trainer:
    """A training program of the victim's: it takes a batch, tells its addresses, and goes on when it is told to."""

    def __init__(self, service: str) -> None:
        told, self._go = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(told[0])
                os.close(self._go[1])  # else its own end would keep it waiting
                os.setgroups([])
                os.setgid(VICTIM)
                os.setuid(VICTIM)
                with open(told[1], "w") as tells, open(self._go[0]) as hears:
                    _train(service, tells, hears)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(told[1])
        os.close(self._go[0])
        self._told = os.fdopen(told[0])
        self.known: dict[str, Any] = json.loads(self._told.readline())

    def rest(self) -> list[int]:
        """The samples behind the first batch."""
        os.write(self._go[1], b"go\n")
        found: list[int] = json.loads(self._told.readline())
        return found

    def close(self) -> None:
        os.close(self._go[1])  # if it still waits, it ends
        self._told.close()
        os.waitpid(self.pid, 0)


def _train(service: str, told: Any, go: Any) -> None:
    with DataLoader(datasets.Augmented(80), batch_size=8, service=service) as loader:
        passing = iter(loader)
        next(passing)
        client = loader._connection.client
        assert client is not None
        session = passing._pass._source._sessions[0].session_id  # type: ignore[attr-defined]
        print(json.dumps({"session": session, "receivers": client.receivers}), file=told, flush=True)
        if go.readline():
            print(json.dumps([i for _, batch in passing for i in batch.tolist()]), file=told, flush=True)


@pytest.fixture
def victims(service_in: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A service of the victim's, below /tmp, where its directory is no secret."""
    monkeypatch.setenv("HETSTREAM_TEST_UID", str(VICTIM))
    with tempfile.TemporaryDirectory(prefix="hetstream-test-second-user-") as place:
        os.chown(place, VICTIM, VICTIM)
        Path(place).chmod(0o755)
        running = service_in(Path(place))
        running.start_dispatcher()
        yield running
        running.stop()


@needs_root
def test_another_user_of_the_host_gets_nothing_and_the_job_goes_on(
    victims: Any, wait_until: Callable[..., None]
) -> None:
    """He knows every address, every process and recorded handshakes. He can import hetstream, so he has its code."""

    def is_ready() -> bool:
        assert victims.dispatcher.poll() is None, victims.log("dispatcher")
        return victims.address_file.exists()

    wait_until(is_ready, timeout_s=60, what="the dispatcher")
    worker = victims.start_workers(2)
    fields = json.loads(victims.address_file.read_text())
    service = ServiceAddress(**{name: text for name, text in fields.items() if name != "format"})
    key = bytes.fromhex(service.batch_key)
    with contextlib.closing(Trainer(victims.name)) as trainer:
        pids = [victims.dispatcher.pid, worker.pid, trainer.pid, *children_of(worker.pid)]
        for pid in pids:
            assert Path(f"/proc/{pid}").stat().st_uid == VICTIM
            for what in ("environ", "cmdline"):
                text = Path(f"/proc/{pid}/{what}").read_bytes()
                assert not [one for one in (service.batch_key, service.client_secret_key) if one.encode() in text]
                assert key not in text
        near, far = new_nonce(), new_nonce()
        known = trainer.known | {
            "uid": STRANGER,
            "pids": pids,
            "dispatcher": service.address,
            "address_file": str(victims.address_file),
            "journal": str(victims.directory / "work" / "journal.sqlite"),
            "recorded": {
                address: [
                    encode(Hello("w", address, near)).hex(),
                    encode(Proof(prove(key, "worker", near, far, address))).hex(),
                ]
                for address in trainer.known["receivers"]
            },
        }
        intruder = subprocess.run(
            [sys.executable, str(PROGRAMS / "intruder.py"), json.dumps(known)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert intruder.returncode == 0, intruder.stderr
        assert json.loads(intruder.stdout) == [], intruder.stderr
        assert trainer.rest() == list(range(8, 80))
