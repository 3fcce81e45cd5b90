"""The line over shared memory: its messages, its waits, its ends. Ray's channels are queues here, the sockets are real."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from queue import Empty, Full, Queue
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from fakes import END, FakeEngine, decode, plain
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayChannelTimeoutError

from outrider.workers.draft import shared_memory_transport as shared_line
from outrider.workers.draft.call_transport import CallTransport
from outrider.workers.draft.drafter import Drafter
from outrider.workers.draft.shared_memory_transport import (
    LAST,
    MORE,
    PipeEnd,
    SharedMemoryTransport,
    TransportBroken,
    answer_requests,
    greet,
)
from outrider.workers.draft.transport import DraftFailed, DraftLost
from outrider.workers.engines.costs import CostCurve
from outrider.workers.messages import DraftReply, DraftRequest, Row, RowResult, Sampling
from outrider.workers.ray_compat import Buffers
from outrider.workers.target.draft_link import DraftLink
from outrider.workers.target.text_and_stop_strings import TextWriter
from outrider.workers.target.verifier import Verifier


class Channel:
    """Holds this many pieces, as Ray's do; whoever would wait for longer than the timeout is told."""

    def __init__(self, places: int = shared_line.ANSWERS) -> None:
        self.chunks: Queue[bytes] = Queue(places)

    def write(self, chunk: bytes, timeout: float) -> None:
        try:
            self.chunks.put(chunk, timeout=timeout)
        except Full:
            raise RayChannelTimeoutError("nobody reads") from None

    def read(self, timeout: float) -> bytes:
        try:
            return self.chunks.get(timeout=timeout)
        except Empty:
            raise RayChannelTimeoutError("nothing was written") from None


class Ends:
    """Both ends of a line, and what lies between them."""

    def __init__(self) -> None:
        self.asks, self.answers = Channel(), Channel()
        self.bells = socket.socketpair()
        self.target = PipeEnd(self.bells[0], self.asks, self.answers)
        self.draft = PipeEnd(self.bells[1], self.answers, self.asks)

    def close(self) -> None:
        for doorbell in self.bells:
            doorbell.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def transport(ends: Ends) -> tuple[SharedMemoryTransport, list[str]]:
    """The target's end, and what became of the draft's process."""
    ended: list[str] = []
    return SharedMemoryTransport(ends.target, CallTransport(None), lambda: ended.append("hung up")), ended


@given(st.lists(st.binary(max_size=200), max_size=8), st.integers(20, 64))
def test_messages_arrive_whole_and_in_order_however_many_pieces_they_have(messages: list[bytes], chunk: int) -> None:
    made = Ends()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_line, "CHUNK_BYTES", chunk)
        sender = threading.Thread(target=lambda: [made.target.send(message) for message in messages])
        sender.start()
        assert [made.draft.receive(10.0) for _ in messages] == messages
        sender.join()
    made.close()


def test_who_does_not_want_to_wait_is_told_that_nothing_came(ends: Ends) -> None:
    assert ends.target.receive(0.0) is None
    ends.draft.send("there")
    assert ends.target.receive(0.0) == "there"


def test_half_a_message_is_kept_until_the_rest_is_here(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Channel(100)
    monkeypatch.setattr(shared_line, "CHUNK_BYTES", 30)
    left, right = socket.socketpair()
    PipeEnd(left, sent, None).send(list(range(60)))
    marks, chunks = right.recv(100), [sent.read(0.0) for _ in range(sent.chunks.qsize())]
    assert marks == MORE * (len(chunks) - 1) + LAST
    assert len(chunks) > 2
    for index, chunk in enumerate(chunks):
        assert ends.target.receive(0.0) is None
        ends.answers.write(chunk, 0.0)
        ends.bells[1].sendall(marks[index : index + 1])
    assert ends.target.receive(0.0) == list(range(60))
    left.close()
    right.close()


def test_a_process_that_is_gone_is_noticed_at_once(ends: Ends) -> None:
    ends.bells[1].close()
    with pytest.raises(TransportBroken, match="gone"):
        ends.target.receive(60.0)
    with pytest.raises(TransportBroken):
        ends.target.send("anyone?")


def test_an_announced_piece_that_is_not_there_breaks_the_line(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_line, "PATIENCE_SECONDS", 0.01)
    ends.bells[1].sendall(LAST)
    with pytest.raises(TransportBroken, match="nothing was written"):
        ends.target.receive(1.0)


def test_who_is_never_read_stops_sending(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_line, "PATIENCE_SECONDS", 0.01)
    for number in range(shared_line.ANSWERS):
        ends.target.send(number)
    with pytest.raises(TransportBroken, match="nobody reads"):
        ends.target.send("one too many")


def test_what_cannot_be_read_breaks_the_line(ends: Ends) -> None:
    ends.answers.write(b"no pickle", 0.0)
    ends.bells[1].sendall(LAST)
    with pytest.raises(TransportBroken):
        ends.target.receive(1.0)


def test_an_answer_that_nobody_asked_for_breaks_the_line(ends: Ends) -> None:
    made, ended = transport(ends)
    reply = made.ask(DraftRequest(1, ()))
    for number in (1, 2):
        ends.draft.send(DraftReply(number, {}))
    assert reply.ready(0.0)
    with pytest.raises(DraftLost, match="nobody asked"):
        made.receive(0.0)
    assert ended == ["hung up"], "so that the driver starts another"


def test_requests_are_answered_in_their_order_and_a_late_answer_is_still_its_own(ends: Ends) -> None:
    made, _ = transport(ends)
    first, second = made.ask(DraftRequest(1, ())), made.ask(DraftRequest(2, ()))
    assert not first.ready(0.0)
    for number in (1, 2):
        ends.draft.send(DraftReply(number, {}))
    assert second.ready(0.0)
    assert (second.take().round, first.take().round) == (2, 1)


def test_an_error_of_the_draft_is_told_and_the_next_request_is_answered(ends: Ends) -> None:
    def propose(ask: DraftRequest) -> DraftReply:
        if ask.round == 1:
            raise IndexError("nine\nof many lines")
        return DraftReply(ask.round, {})

    made, _ = transport(ends)
    worker = threading.Thread(target=answer_requests, args=(ends.draft, propose))
    worker.start()
    failed = made.ask(DraftRequest(1, ()))
    assert failed.ready(10.0)
    with pytest.raises(DraftFailed, match=r"IndexError: nine$"):
        failed.take()
    answered = made.ask(DraftRequest(2, ()))
    assert answered.ready(10.0)
    assert answered.take() == DraftReply(2, {})
    ends.bells[0].shutdown(socket.SHUT_RDWR)
    worker.join(10.0)
    assert not worker.is_alive(), "a draft without a target has nothing to wait for"


def test_a_draft_that_dies_between_request_and_answer_is_lost(ends: Ends) -> None:
    made, ended = transport(ends)
    reply = made.ask(DraftRequest(1, ()))
    ends.bells[1].close()
    with pytest.raises(DraftLost):
        reply.ready(60.0)
    assert ended == ["hung up"]


def test_all_requests_of_a_line_that_is_lost_are_lost_at_once(ends: Ends) -> None:
    """Whatever other file has the number of the closed socket by then."""
    made, ended = transport(ends)
    first, second = made.ask(DraftRequest(1, ())), made.ask(DraftRequest(2, ()))
    ends.bells[1].close()
    with pytest.raises(DraftLost):
        first.ready(60.0)
    number_taken_again = socket.socketpair()
    with pytest.raises(DraftLost, match="closed"):
        second.ready(60.0)
    for taken in number_taken_again:
        taken.close()
    assert ended == ["hung up"] * 2


def test_a_wait_of_any_length_can_be_asked_for(ends: Ends) -> None:
    ends.draft.send("there")
    assert ends.target.receive(1e12) == "there"


def test_a_line_is_greeted_through_before_it_is_used(ends: Ends) -> None:
    worker = threading.Thread(target=answer_requests, args=(ends.draft, lambda ask: DraftReply(ask.round, {})))
    worker.start()
    greet(ends.target)
    ends.target.send(DraftRequest(1, ()))
    assert ends.target.receive(10.0) == DraftReply(1, {})
    ends.target.close()
    worker.join(10.0)


def test_a_draft_that_does_not_greet_back_is_not_used(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_line, "OPENING_SECONDS", 0.01)
    with pytest.raises(TransportBroken, match="greet"):
        greet(ends.target)


class Core:
    """Of Ray's core what a channel needs: places that are written and read by reference."""

    def __init__(self) -> None:
        self.places: dict[str, list[bytes]] = {}

    def experimental_channel_put_serialized(self, packed: bytes, place: str, readers: int, timeout: int) -> None:
        assert (readers, timeout) == (1, 5000)
        assert not self.places.get(place), "it has not been read yet"
        self.places[place] = [packed]

    def get_objects(self, places: list[str], timeout: int) -> list[tuple[Any, bytes, None]]:
        [place] = places
        return [(SimpleNamespace(to_pybytes=self.places[place].pop), b"RAW", None)]


def test_the_places_of_a_channel_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core()
    monkeypatch.setattr("ray._private.serialization.RawSerializedObject", bytes)
    monkeypatch.setattr(ray._private.worker.global_worker, "core_worker", core, raising=False)
    places = [SimpleNamespace(_writer_ref=name, _local_reader_ref=name) for name in ("one", "two", "three")]
    writing, reading = (Buffers(SimpleNamespace(_buffers=places)) for _ in range(2))
    for number in range(4):
        chunks = [bytes([number, which]) for which in range(2)]
        for chunk in chunks:
            writing.write(chunk, 5.0)
        assert [reading.read(5.0) for _ in chunks] == chunks
    assert sorted(core.places) == ["one", "three", "two"]


def test_rows_are_the_same_whether_the_draft_lives_or_dies_in_between() -> None:
    def attached(link: DraftLink) -> Ends:
        made = Ends()
        drafter: Any = Drafter(FakeEngine(), {END})
        threading.Thread(target=answer_requests, args=(made.draft, drafter.propose), daemon=True).start()
        link.attach(transport(made)[0])
        return made

    link = DraftLink(deadline=10.0)
    target = Verifier(
        engine=FakeEngine(),
        new_writer=lambda row: TextWriter(decode, row.stop, (END,)),
        proposer=link,
        batch=4,
        draft_tokens=3,
        verify_seconds=CostCurve({1: 1.0}),
        end_tokens=(END,),
    )
    rows = [Row(key, (key % END, key % 7, 3), 30, Sampling(temperature=key % 2, seed=key)) for key in range(100)]
    target.add(rows)
    ended: dict[int, RowResult] = {}
    now = attached(link)
    rounds = deaths = 0
    while not target.idle:
        for one in target.round():
            assert isinstance(one, RowResult)
            ended[one.key] = one
        rounds += 1
        if rounds % 40 == 20:
            now.bells[1].shutdown(socket.SHUT_RDWR)
            deaths += 1
        elif rounds % 40 == 25:
            assert not link.ready
            now.close()
            now = attached(link)
    assert {key: one.tokens for key, one in ended.items()} == {row.key: plain(row, 96).tokens for row in rows}
    assert deaths > 1
    assert target.counters.accepted > 100
    now.close()
