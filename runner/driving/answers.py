"""Answers of each replica, passed on to the others, whose suffix finders look for candidates in them."""

from __future__ import annotations

from array import array
from collections import deque

# Tokens that one harvest request carries; older answers beyond that are dropped.
MOST_TOKENS = 8192
TOKEN_BYTES = 4
# Answers that are kept for replicas which have not asked for them yet.
MOST_ANSWERS = 1024


class AnswerExchange:
    """Keeps each answer once, with the number up to which each replica has been sent them.

    So memory does not grow with the number of replicas, and a message has at most ``MOST_TOKENS`` tokens.
    """

    def __init__(self) -> None:
        # (number of the answer, replica that wrote it, tokens)
        self._answers: deque[tuple[int, int, bytes]] = deque(maxlen=MOST_ANSWERS)
        # By replica: the number of the first answer that it has not been sent.
        self._sent: dict[int, int] = {}
        self._count = 0

    def add(self, replica: int, tokens: tuple[int, ...]) -> None:
        self._answers.append((self._count, replica, packed(tokens[:MOST_TOKENS])))
        self._count += 1

    def take(self, replica: int) -> tuple[bytes, ...]:
        """The newest answers that other replicas wrote since this one asked last, oldest first."""
        sent, self._sent[replica] = self._sent.get(replica, 0), self._count
        found: list[bytes] = []
        room = MOST_TOKENS
        for number, writer, answer in reversed(self._answers):
            if number < sent:
                break
            if writer == replica:
                continue
            room -= len(answer) // TOKEN_BYTES
            if room < 0:
                break
            found.append(answer)
        return tuple(reversed(found))

    def started(self, replica: int) -> None:
        """A new target process has none of the answers."""
        self._sent.pop(replica, None)


def packed(tokens: tuple[int, ...]) -> bytes:
    return array("i", tokens).tobytes()
