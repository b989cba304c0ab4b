"""The job's side of the site daemon: addresses, messages, and a link that never holds the job up."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetstream.base.errors import ConfigError
from hetstream.hetjob.errors import SiteError
from hetstream.hetjob.ports import JobDemand, MarkedJob, Measured, RemainingWork, SiteReading, SpeedPoint
from hetstream.hetjob.site import client as link_module
from hetstream.hetjob.site.client import (
    HOLD_S,
    SiteLink,
    SiteSettings,
    TcpAddress,
    UnixAddress,
    ask,
    linked,
    parse_address,
    read_settings,
)
from hetstream.hetjob.site.messages import (
    LENGTH,
    MAX_ANSWER_BYTES,
    Answer,
    AskReading,
    AskStatus,
    CompanionSeen,
    GrantLimit,
    JobStatus,
    RefuseReading,
    RefuseReport,
    ReportDemand,
    ShowReading,
    ShowStatus,
    SiteRequest,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
    new_request,
)

REPORT = (1, 2, 8, 4, 0.25)
DEMAND = ReportDemand(8123, *REPORT)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/hetstream/daemon.sock", UnixAddress(Path("/run/hetstream/daemon.sock"))),
        ("tcp://slurm@controller:9420", TcpAddress("slurm", "controller", 9420)),
        ("tcp://1234@[fd00::1]:9420", TcpAddress("1234", "fd00::1", 9420)),
    ],
)
def test_addresses(text: str, address: UnixAddress | TcpAddress) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "controller:9420",
        "tcp://controller:9420",
        "unix:daemon.sock",
        "tcp://a@b:99999",
        "unix:/" + "x" * 200,
        "http://a",
    ],
)
def test_a_wrong_address_names_the_forms(text: str) -> None:
    with pytest.raises(ConfigError, match="must be unix:/PATH"):
        parse_address(text)


def test_the_environment_wins_over_the_sites_file(tmp_path: Path) -> None:
    file = tmp_path / "daemon.env"
    assert read_settings({}, file) == SiteSettings(None, None)
    file.write_text('#HETSTREAM_DAEMON=unix:/no\nHETSTREAM_DAEMON="unix:/a"\nOTHER=x\nHETSTREAM_MUNGE_SOCKET=/b\n')
    assert read_settings({}, file) == SiteSettings(UnixAddress(Path("/a")), Path("/b"))
    assert read_settings({"HETSTREAM_DAEMON": "unix:/c"}, file).address == UnixAddress(Path("/c"))
    assert read_settings({"HETSTREAM_DAEMON": ""}, file).address is None
    with pytest.raises(ConfigError):
        read_settings({"HETSTREAM_DAEMON": "here"}, file)


def test_the_daemons_user_must_be_known() -> None:
    assert TcpAddress("root", "here", 1).reader_uid() == 0
    assert TcpAddress("77", "here", 1).reader_uid() == 77
    with pytest.raises(ConfigError, match="no user nobody-at-all on this host"):
        TcpAddress("nobody-at-all", "here", 1).reader_uid()


ANSWERS: list[Answer] = [
    GrantLimit(None, "why", 10.0),
    GrantLimit(3, "why", 1.0),
    RefuseReport("no"),
    ShowStatus(
        "observe", 1.0, 2, 3, None, "", ("cpu",), 64, (JobStatus("1", "a", 0, 0, 1, 1, 1.0, None, 1, "r", 0.0),)
    ),
    ShowReading(b"packed"),
    RefuseReading("hidden"),
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_messages_round_trip(answer: Answer) -> None:
    for question in (DEMAND, AskStatus(), AskReading()):
        request = new_request(question, 17)
        assert decode_request(encode_request(request)) == request
    data = encode_answer(answer, request.reply_key)
    assert decode_answer(data, request.reply_key) == answer
    for changed in (data[:-1], data[:40] + b" " + data[41:], b"", new_request(DEMAND, 1).reply_key.encode()):
        with pytest.raises(SiteError, match="does not come from the daemon that was asked"):
            decode_answer(changed, request.reply_key)


GOLDEN = (
    b'{"version":1,"sent_ns":17,"reply_key":"' + b"ab" * 32 + b'","question":{"type":"report_demand","job_id":8123,'
    b'"minimum":1,"current":2,"wanted":8,"cpus":4,"wait_share":0.25}}'
)


def test_version_1_is_these_bytes() -> None:
    assert encode_request(SiteRequest(1, 17, "ab" * 32, DEMAND)) == GOLDEN
    assert decode_request(GOLDEN).question == DEMAND


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"wanted":8', b'"wanted":0'),
        (b'"wanted":8', b'"wanted":-8'),
        (b'"cpus":4', b'"cpus":0'),
        (b'"wait_share":0.25', b'"wait_share":7'),
        (b'"wait_share":0.25', b'"wait_share":null,"more":1'),
        (b"report_demand", b"ask_for_more"),
        (b"ab" * 32, b"ab"),
        (b'"job_id":8123', b'"job_id":"8123"'),
    ],
)
def test_what_breaks_a_rule_is_no_message(old: bytes, new: bytes) -> None:
    assert old in GOLDEN
    with pytest.raises(SiteError, match="not a message of versions 1 to 3"):
        decode_request(GOLDEN.replace(old, new))


@given(st.binary(max_size=400) | st.integers(0, len(GOLDEN)).map(lambda cut: GOLDEN[:cut]))
def test_garbage_is_no_message(data: bytes) -> None:
    with contextlib.suppress(SiteError):
        assert decode_request(data).version == 1
    with pytest.raises(SiteError):
        decode_request(b"[" * 100_000)


class Answers:
    """A daemon in a thread that answers each connection with the next of its answers; None is silence, then the end."""

    def __init__(self, directory: Path) -> None:
        self.settings = SiteSettings(UnixAddress(directory / "s"), None)
        self.asked: list[ReportDemand] = []
        self.next: Callable[[SiteRequest], bytes] = lambda request: b""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(directory / "s"))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def answer(self, answer: Answer) -> None:
        def reply(request: SiteRequest) -> bytes:
            data = encode_answer(answer, request.reply_key)
            return LENGTH.pack(len(data)) + data

        self.next = reply

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection:
                head = connection.recv(LENGTH.size)
                if not head:
                    return
                data = connection.recv(LENGTH.unpack(head)[0])
                request = decode_request(data)
                if isinstance(request.question, ReportDemand):
                    self.asked.append(request.question)
                connection.sendall(self.next(request))

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(self._socket.getsockname())
        self._thread.join()
        self._socket.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Answers]:
    daemon = Answers(tmp_path)
    yield daemon
    daemon.close()


def test_an_answer_that_is_none_is_an_error(daemon: Answers, tmp_path: Path) -> None:
    assert (
        ask_again(daemon, lambda _: b"")
        == "the site daemon closed the connection: it does not know who asks, could not "
        "read the question, or is of another release of hetstream; its log says which"
    )
    assert "is announced" in ask_again(daemon, lambda _: LENGTH.pack(MAX_ANSWER_BYTES + 1))
    forged = encode_answer(GrantLimit(99, "", 1.0), "00" * 32)
    assert "does not come from the daemon" in ask_again(daemon, lambda _: LENGTH.pack(len(forged)) + forged)

    def not_json(request: SiteRequest) -> bytes:
        data = encode_answer(GrantLimit(99, "", 1.0), request.reply_key)
        wrong = encode_answer(msgspec.Raw(b"{"), request.reply_key)  # type: ignore[arg-type]
        assert len(wrong) < len(data)
        return LENGTH.pack(len(wrong)) + wrong

    assert "not a message of versions 1 to 3" in ask_again(daemon, not_json)
    with pytest.raises(SiteError, match=r"unix:/\S+/nobody does not answer: No such file"):
        ask(SiteSettings(UnixAddress(tmp_path / "nobody"), None), DEMAND)
    with pytest.raises(SiteError, match="no address"):
        ask(SiteSettings(None, None), DEMAND)


def ask_again(daemon: Answers, reply: Callable[[SiteRequest], bytes]) -> str:
    daemon.next = reply
    with pytest.raises(SiteError) as caught:
        ask(daemon.settings, DEMAND)
    return str(caught.value)


def test_a_silent_daemon_costs_no_more_than_the_limit(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        with pytest.raises(SiteError, match=r"unix:\S+ does not answer: timed out|took too long"):
            ask(SiteSettings(UnixAddress(tmp_path / "s"), None), DEMAND, 0.2)


def test_without_munge_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SiteSettings(TcpAddress("0", "localhost", 1), tmp_path / "no-socket")
    with pytest.raises(SiteError, match=r"munge(: No such file| exited with \d+: .*no-socket)"):
        ask(settings, DEMAND)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SiteError, match="munge: No such file or directory"):
        ask(settings, DEMAND)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.shows("the site daemon divides data workers, survives its death, and believes what Slurm confirms")
def test_a_link_keeps_the_newest_limit_and_forgets_it_when_nobody_answers(
    daemon: Answers, wait_until: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    daemon.answer(GrantLimit(4, "its share", 300.0))
    clock = Clock()
    link = SiteLink(daemon.settings, 8123, clock)
    assert link.data_workers() is None
    link.report(JobDemand(*REPORT))
    wait_until(lambda: link.data_workers() == 4)
    assert "job=8123 site limit=4: its share" in caplog.text
    # What has changed is said at once; what has not, when the daemon wants to hear it.
    clock.now += 2.0
    more = ReportDemand(8123, 1, 4, 16, 4, 0.5)
    daemon.answer(GrantLimit(5, "its share", 300.0))
    link.report(JobDemand(1, 4, 16, 4, 0.5))
    wait_until(lambda: link.data_workers() == 5)
    assert daemon.asked == [DEMAND, more]
    daemon.answer(RefuseReport("not yours"))
    clock.now += 2.0
    link.report(JobDemand(*REPORT))
    wait_until(lambda: "refuses the report of job=8123" in caplog.text)
    assert link.data_workers() == 5
    clock.now += HOLD_S
    assert link.data_workers() is None
    link.close()


def test_a_link_gives_the_companions_of_one_start_and_when_they_were_read(
    daemon: Answers, wait_until: Callable[..., None]
) -> None:
    seen = (
        CompanionSeen("10", "hets:start=8123.1", "PENDING", 4),
        CompanionSeen("9", "hets:start=8123.0", "RUNNING", 4),
    )
    daemon.answer(GrantLimit(None, "it only observes", 300.0, seen, 7.5))
    clock = Clock()
    clock.now = 100.0
    link = SiteLink(daemon.settings, 8123, clock)
    assert link.marked("hets:start=8123.1") is None
    link.report(JobDemand(*REPORT))
    wait_until(lambda: link.marked("hets:start=8123.1"))
    assert link.marked("hets:start=8123.1") == SiteReading(92.5, [MarkedJob("10", "PENDING", 4)])
    link.close()


@pytest.mark.shows("the site daemon divides data workers, survives its death, and believes what Slurm confirms")
def test_a_link_finds_a_daemon_that_comes_later(
    tmp_path: Path, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link_module, "_FIRST_RETRY_S", 0.05)
    link = SiteLink(SiteSettings(UnixAddress(tmp_path / "s"), None), 8123)
    link.report(JobDemand(*REPORT))
    wait_until(lambda: "the site daemon was not asked" in caplog.text)
    daemon = Answers(tmp_path)
    daemon.answer(GrantLimit(None, "it only observes", 10.0))
    wait_until(lambda: daemon.asked)
    assert link.data_workers() is None
    assert len([record for record in caplog.records if "was not asked" in record.message]) == 1
    link.close()
    daemon.close()


MEASURED = Measured(
    8.0, 10.0, (SpeedPoint(4, 0, 2.0), SpeedPoint(4, 2, 8.0)), 1e6, 4, 8000,
    RemainingWork(5000.0, 0.1, "loader", 9000.0),
)  # fmt: skip


@pytest.mark.shows("a report to the daemon carries measured speeds, a grant a number, nodes and the reason")
def test_version_2_round_trips_and_version_1_carries_nothing_of_it() -> None:
    report = ReportDemand(8123, *REPORT, MEASURED)
    data = encode_request(new_request(report, 17))
    assert b'"version":2' in data
    assert decode_request(data).question == report
    with pytest.raises(SiteError, match="a question of version 1 has what only a later version has"):
        decode_request(data.replace(b'"version":2', b'"version":1'))
    assert b'"version":1' in encode_request(new_request(DEMAND, 17))
    assert b"measured" not in encode_request(new_request(DEMAND, 17))
    for wrong in (
        msgspec.structs.replace(MEASURED, ideal_steps_per_s=0.0),
        msgspec.structs.replace(MEASURED, points=MEASURED.points * 9),
        msgspec.structs.replace(MEASURED, remaining=RemainingWork(-1.0, 0.0, "loader")),
    ):
        bad = msgspec.structs.replace(report, measured=wrong)
        with pytest.raises(SiteError, match="not a message of versions 1 to 3"):
            decode_request(encode_request(new_request(bad, 17)))
    # What a grant of version 2 adds is not there unless there is something to say: a job of version 1 reads it.
    assert b"nodes" not in encode_answer(GrantLimit(3, "why", 1.0), "ab" * 32)
    told = GrantLimit(3, "why", 1.0, nodes=("cpu1",))
    assert decode_answer(encode_answer(told, "ab" * 32), "ab" * 32) == told


@pytest.mark.shows("a daemon of protocol 1 works with jobs of 2, and the other way round")
def test_a_job_of_version_2_tells_a_daemon_of_version_1_what_it_understands_and_says_so_once(
    daemon: Answers, wait_until: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    is_old, refused = True, list[int]()

    def answer(request: SiteRequest) -> bytes:
        if is_old and request.version > 1:
            refused.append(request.version)
            return b""
        data = encode_answer(GrantLimit(5 if is_old else 6, "its share", 1.0), request.reply_key)
        return LENGTH.pack(len(data)) + data

    daemon.next = answer
    clock = Clock()
    link = SiteLink(daemon.settings, 8123, clock)
    link.report(JobDemand(*REPORT, MEASURED))
    wait_until(lambda: link.data_workers() == 5)
    clock.now += 2.0
    link.report(JobDemand(1, 3, 9, 4, 0.25, MEASURED))
    wait_until(lambda: daemon.asked[-1].wanted == 9)
    wait_until(lambda: link.data_workers() == 5)
    assert refused == [2]
    assert [one.measured for one in daemon.asked[1:]] == [None] * (len(daemon.asked) - 1)
    assert caplog.text.count("the site daemon speaks version 1: it is not told what job=8123 has measured") == 1
    # A newer daemon takes its place: it is found some time later.
    is_old = False
    clock.now += 700.0
    link.report(JobDemand(1, 3, 10, 4, 0.25, MEASURED))
    wait_until(lambda: link.data_workers() == 6)
    assert daemon.asked[-1].measured == MEASURED
    link.close()


def test_a_job_without_an_address_has_no_link(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with linked({"HETSTREAM_DAEMON": ""}, 8123) as link:
        assert link is None
    with linked({"HETSTREAM_DAEMON": "somewhere"}, 8123) as link:
        assert link is None
    assert "no link to the site daemon: address of the site daemon 'somewhere'" in caplog.text
    with linked({"HETSTREAM_DAEMON": f"unix:{tmp_path}/s"}, 8123) as link:
        assert link is not None
        assert link.data_workers() is None
