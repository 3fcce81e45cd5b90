"""What rows wrote, on its way from the replicas that wrote it to the others: candidates may be found there."""

from __future__ import annotations

from array import array
from collections import deque

# Of answers, with one harvest; what a replica has no room for it does without.
MOST_TOKENS = 8192
# Answers that wait for replicas which have not asked since.
MOST_ANSWERS = 1024


class AnswerExchange:
    """Each answer is kept once, and each replica told of those behind the last that it was told of.

    So an answer costs the same however many replicas there are, and a message never has more than ``MOST_TOKENS`` tokens.
    """

    def __init__(self) -> None:
        # (number of the answer, replica that wrote it, tokens)
        self._answers: deque[tuple[int, int, bytes]] = deque(maxlen=MOST_ANSWERS)
        self._told: dict[int, int] = {}
        self._count = 0

    def add(self, replica: int, tokens: tuple[int, ...]) -> None:
        self._answers.append((self._count, replica, packed(tokens[:MOST_TOKENS])))
        self._count += 1

    def take(self, replica: int) -> tuple[bytes, ...]:
        """The newest answers that others wrote since this replica asked last, the oldest of them first."""
        told, self._told[replica] = self._told.get(replica, 0), self._count
        found: list[bytes] = []
        room = MOST_TOKENS
        for number, writer, answer in reversed(self._answers):
            room -= len(answer) // 4
            if number < told or room < 0:
                break
            if writer == replica:
                room += len(answer) // 4
                continue
            found.append(answer)
        return tuple(reversed(found))

    def started(self, replica: int) -> None:
        """A target that begins knows nothing."""
        self._told.pop(replica, None)


def packed(tokens: tuple[int, ...]) -> bytes:
    return array("i", tokens).tobytes()
