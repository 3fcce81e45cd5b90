"""Renders chat templates in a fork of this process.

A template is a program of the model's author: it may loop for ever, or take any memory. So the fork has limits of memory
and time. A conversation that exceeds one fails, and later ones are rendered in another fork.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import select
import signal
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from outrider.workers.errors import ModelError, first_line
from outrider.workers.models.chat import LeftOutError

# CPU time of the fork for one conversation; a usual one takes less than a millisecond.
MOST_SECONDS = 1.0
# Wall-clock time for one conversation, on a busy machine.
MOST_WAITING = 20.0
MOST_BYTES = 1 << 30
MOST_CHARACTERS = 10_000_000
# After this many failed forks in a row the template is refused rather than a conversation.
MOST_IN_A_ROW = 3
POLL_SECONDS = 0.25

Render = Callable[[Any], str]
RenderedChat = tuple[str, str]  # the text, or "" and why there is none


def render_all(render: Render, conversations: Sequence[Any], name: str) -> list[RenderedChat]:
    """Each conversation's text. ``name`` is that of the model, for sentences."""
    rendered: list[RenderedChat] = []
    stopped = 0
    while len(rendered) < len(conversations):
        for each in _rendered(render, conversations[len(rendered) :], name):
            rendered.append(each)
            stopped = 0
        if len(rendered) < len(conversations):
            stopped += 1
            if stopped >= MOST_IN_A_ROW:
                raise ModelError(
                    f"the chat template of {name} ran for more than {MOST_SECONDS:g} s, or died, on {stopped} "
                    "conversations one after the other: it cannot be used"
                )
            rendered.append(("", f"ran for more than {MOST_SECONDS:g} s, or died, on these messages"))
    return rendered


def _rendered(render: Render, conversations: Sequence[Any], name: str) -> Iterator[RenderedChat]:
    """The results of one fork, until it ends or exceeds a limit."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _render_here(render, conversations, writing)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb", buffering=0) as rendered:
            while (size := _read(rendered.fileno(), 8, child)) is not None:
                body = _read(rendered.fileno(), struct.unpack("<Q", size)[0], child)
                if body is None:
                    return
                yield pickle.loads(body)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _read(descriptor: int, size: int, child: int) -> bytes | None:
    """Read this many bytes; None where the child ends, or exceeds its time."""
    parts: list[bytes] = []
    used, deadline = _seconds_of(child), time.monotonic() + MOST_WAITING
    while size:
        if not select.select([descriptor], [], [], POLL_SECONDS)[0]:
            if time.monotonic() > deadline or _seconds_of(child) - used > MOST_SECONDS:
                return None
            continue
        part = os.read(descriptor, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _seconds_of(process: int) -> float:
    """The CPU time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _render_here(render: Render, conversations: Sequence[Any], writing: int) -> None:
    """Runs in the fork. Ends it with _exit, so that none of the parent's exit handlers run."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        gc.freeze()  # a collection would touch, and so copy, all objects of the parent: a second for a big job
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MOST_BYTES, held + MOST_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for conversation in conversations:
            body = pickle.dumps(_render_one(render, conversation))
            view = memoryview(struct.pack("<Q", len(body)) + body)
            while view:
                view = view[os.write(writing, view) :]
    finally:
        os._exit(0)


def _render_one(render: Render, conversation: Any) -> RenderedChat:
    try:
        text = render(conversation)
        if len(text) > MOST_CHARACTERS:
            return "", f"makes {len(text):,} characters of these messages; at most {MOST_CHARACTERS:,} are taken"
        text.encode()
    except LeftOutError as error:
        return "", str(error)
    except MemoryError:
        return "", f"asks for more than {MOST_BYTES >> 30} GB of memory for these messages"
    except BaseException as error:  # a template may fail in any way
        return "", f"refuses the messages: {first_line(error)[:1000]}"
    return text, ""
