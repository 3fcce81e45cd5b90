"""A transport between two processes of one host: messages in Ray's object store, and a socket to wake the reader.

Ray's calls go through several threads and sockets of both processes, which on busy cores takes two milliseconds a round. A
mutable object of its store is written and read in place, in tens of microseconds. But a process that waits for such an
object spins, on the core that the other process needs; so a byte on a Unix socket announces each piece. The end of the
socket also tells at once that the other process has died.
"""

from __future__ import annotations

import logging
import math
import pickle
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from outrider.workers.draft.call_transport import CallTransport
from outrider.workers.draft.transport import DraftFailed, DraftLost, Reply
from outrider.workers.errors import first_line
from outrider.workers.machine import semaphores
from outrider.workers.machine.private_folder import held_folder, sweep
from outrider.workers.messages import DraftReply, DraftRequest
from outrider.workers.ray_compat import Buffers, channels

logger = logging.getLogger(__name__)
# A message is sent in pieces of this many bytes; nearly all have one piece. The buffer also holds Ray's own header.
CHUNK_BYTES = 1 << 17
BUFFER_BYTES = CHUNK_BYTES + 4096
# This many pieces of requests and of answers may be unread before the sender waits (and spins). A round takes one each way;
# the others are for rows that are sent whole (300,000 tokens) and for late answers.
REQUESTS, ANSWERS = 8, 3
# To write a piece while earlier ones are unread, or to read one that was announced.
PATIENCE_SECONDS = 5.0
# The longest that the draft may take to open its end.
OPENING_SECONDS = 10.0
# A day: poll takes no timeout above 2^31 milliseconds.
LONGEST_WAIT = 86400.0
# The test message that goes each way before a transport is used.
GREETING = "hello"
MORE, LAST = b"+", b"."
# The socket's name in its folder.
DOORBELL = "doorbell"
_opening = threading.Lock()
_half_opened: list[ExitStack] = []


class TransportBroken(Exception):
    """The other end is gone, or a piece that it announced is missing."""


class PipeEnd:
    """One end of the two-way pipe between target and draft. Each end is used by one thread at a time."""

    def __init__(self, doorbell: socket.socket, outgoing: Any, incoming: Any) -> None:
        self._doorbell = doorbell
        # Python's timeouts on a socket would cost further system calls for each message.
        doorbell.setblocking(True)
        self._heard = select.poll()
        self._heard.register(doorbell, select.POLLIN)
        self._outgoing = outgoing
        self._incoming = incoming
        self._chunks: list[bytes] = []

    def send(self, message: Any) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            for start in range(0, len(data), CHUNK_BYTES):
                self._outgoing.write(data[start : start + CHUNK_BYTES], timeout=PATIENCE_SECONDS)
                self._doorbell.sendall(LAST if start + CHUNK_BYTES >= len(data) else MORE)
        except (OSError, RayError) as error:
            raise TransportBroken(first_line(error)) from error

    def receive(self, timeout: float | None) -> Any:
        """The next message; None where no complete one has arrived within this many seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            mark = self._mark(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if mark is None:
                return None
            # A piece that was announced and is missing breaks the pipe: a later piece would be taken for it.
            try:
                self._chunks.append(self._incoming.read(timeout=PATIENCE_SECONDS))
                if mark == LAST:
                    data, self._chunks = b"".join(self._chunks), []
                    return pickle.loads(data)
            except Exception as error:  # Ray's and whatever unpickling finds wrong
                raise TransportBroken(first_line(error)) from error

    def _mark(self, timeout: float | None) -> bytes | None:
        if self._doorbell.fileno() < 0:
            # The descriptor's number may belong to another file by now.
            raise TransportBroken("it was closed")
        try:
            if timeout is not None and not self._heard.poll(math.ceil(1000.0 * min(timeout, LONGEST_WAIT))):
                return None
            mark = self._doorbell.recv(1)
        except OSError as error:
            raise TransportBroken(first_line(error)) from error
        if not mark:
            raise TransportBroken("its process is gone")
        return mark

    def close(self) -> None:
        """The other end notices it at once."""
        self._doorbell.close()


class SharedMemoryTransport:
    """The target's end. ``end_draft`` ends the process of a draft that cannot be reached, so that another is started."""

    name = "shared memory"

    def __init__(self, pipe_end: PipeEnd, calls: CallTransport, end_draft: Callable[[], None]) -> None:
        self._pipe_end = pipe_end
        self._calls = calls
        self._end_draft = end_draft
        self._unanswered: deque[_PendingReply] = deque()

    def ask(self, request: DraftRequest) -> Reply:
        try:
            self._pipe_end.send(request)
        except TransportBroken as error:
            raise self._lost(error) from error
        answer = _PendingReply(self)
        self._unanswered.append(answer)
        return answer

    def reconfigure(self, cores: Sequence[int], draft_ahead: bool, timeout: float) -> None:
        self._calls.reconfigure(cores, draft_ahead, timeout)

    def receive(self, timeout: float) -> bool:
        """Receive a message; it answers the oldest request without an answer."""
        try:
            message = self._pipe_end.receive(timeout)
            if message is None:
                return False
            if not self._unanswered:
                raise TransportBroken("it answered what nobody asked")
        except TransportBroken as error:
            raise self._lost(error) from error
        self._unanswered.popleft().message = message
        return True

    def _lost(self, error: TransportBroken) -> DraftLost:
        self._unanswered.clear()
        self._pipe_end.close()
        self._end_draft()
        return DraftLost(str(error))


class _PendingReply:
    def __init__(self, transport: SharedMemoryTransport) -> None:
        self._transport = transport
        self.message: DraftReply | str | None = None

    def ready(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while self.message is None:
            if not self._transport.receive(max(0.0, deadline - time.monotonic())):
                return False
        return True

    def take(self) -> DraftReply:
        assert self.message is not None
        if isinstance(self.message, str):
            raise DraftFailed(self.message)
        return self.message


def open_transport(draft: Any) -> SharedMemoryTransport:
    """Called in the target's actor. Raises TransportBroken where the two cannot share memory."""
    # Alpha in Ray: where it is missing or different, the caller falls back to calls, and says so.
    parts = channels()
    node = ray.get(draft.node.remote(), timeout=OPENING_SECONDS)
    if node != ray.get_runtime_context().get_node_id():
        raise TransportBroken("the draft is on another node")
    # One at a time: ``remove_names`` would unlink the semaphores of another transport that is only half open.
    with _opening, ExitStack() as stack:
        sweep()
        # Only this user's processes can enter the folder, so nobody else's answer.
        folder = stack.enter_context(held_folder(len(DOORBELL)))
        semaphores.note_opening(folder)
        try:
            transport = _open_transport(draft, node, parts.open, str(folder / DOORBELL))
        except Exception:
            # A slow draft may still open it. The folder is kept, so that a later ``sweep`` finds the semaphores by its
            # note.
            _half_opened.append(stack.pop_all())
            raise
        semaphores.remove_names()
    return transport


def _open_transport(draft: Any, node: str, channel: Any, path: str) -> SharedMemoryTransport:
    context = ray.get_runtime_context()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen(1)
        door.settimeout(OPENING_SECONDS)
        asks = channel(context.current_actor, [(draft, node)], REQUESTS, BUFFER_BYTES)
        answers = ray.get(draft.connect.remote(context.current_actor, asks, path), timeout=OPENING_SECONDS)
        doorbell, _ = door.accept()
    # Registered at once: objects of the draft end with it, and Ray ends a process that registers for one that is gone.
    answers.ensure_registered_as_reader()
    asks.ensure_registered_as_writer()
    pipe_end = PipeEnd(doorbell, Buffers(asks), Buffers(answers))
    try:
        greet(pipe_end)
    except Exception:
        pipe_end.close()
        raise
    return SharedMemoryTransport(pipe_end, CallTransport(draft), partial(ray.kill, draft))


def greet(pipe_end: PipeEnd) -> None:
    """Exchange the test message; raises where the pipe does not work."""
    pipe_end.send(GREETING)
    if pipe_end.receive(OPENING_SECONDS) != GREETING:
        raise TransportBroken("the draft did not greet back")


def join_transport(target: Any, asks: Any, path: str) -> tuple[PipeEnd, Any]:
    """Called in the draft's actor: its end of the pipe, and the channel for its answers."""
    context = ray.get_runtime_context()
    readers = [(target, context.get_node_id())]
    try:
        answers = channels().open(context.current_actor, readers, ANSWERS, BUFFER_BYTES)
        asks.ensure_registered_as_reader()
        answers.ensure_registered_as_writer()
        doorbell = socket.socket(socket.AF_UNIX)
        doorbell.connect(path)
        return PipeEnd(doorbell, Buffers(answers), Buffers(asks)), answers
    except Exception:
        # The target does not wait for this end any more, so it does not unlink these semaphores.
        semaphores.remove_names()
        raise


def answer_requests(pipe_end: PipeEnd, propose: Callable[[DraftRequest], DraftReply]) -> None:
    """Answer requests until the target is gone."""
    try:
        while True:
            request = pipe_end.receive(None)
            try:
                answer: DraftReply | str = request if request == GREETING else propose(request)
            except Exception as error:  # the target gets the sentence, and goes on without candidates
                answer = f"{type(error).__name__}: {first_line(error)}"
            pipe_end.send(answer)
    except TransportBroken as error:
        logger.info("no more requests: %s", error)
    finally:
        pipe_end.close()
