"""Answers on their way between replicas: each replica hears of the others' once, and never of too much."""

from __future__ import annotations

from array import array

from outrider.runner.driving.answers import MOST_ANSWERS, MOST_TOKENS, AnswerExchange


def told(exchange: AnswerExchange, replica: int) -> list[list[int]]:
    return [array("i", each).tolist() for each in exchange.take(replica)]


def test_each_replica_hears_of_the_others_answers_once_in_their_order() -> None:
    exchange = AnswerExchange()
    for writer, tokens in [(0, (1, 2)), (1, (3,)), (2, (4, 5)), (0, (6,))]:
        exchange.add(writer, tokens)
    assert told(exchange, 1) == [[1, 2], [4, 5], [6]]
    assert told(exchange, 1) == []
    exchange.add(2, (7,))
    assert told(exchange, 1) == [[7]]
    assert told(exchange, 0) == [[3], [4, 5], [7]]
    exchange.started(1)
    assert told(exchange, 1) == [[1, 2], [4, 5], [6], [7]], "its next target knows nothing"


def test_a_message_and_what_waits_are_bounded_and_the_newest_comes() -> None:
    exchange = AnswerExchange()
    for number in range(10):
        exchange.add(0, (number,) * (MOST_TOKENS // 4))
    assert [each[0] for each in told(exchange, 1)] == [6, 7, 8, 9]
    exchange.add(0, (1,) * (2 * MOST_TOKENS))
    assert [len(each) for each in told(exchange, 1)] == [MOST_TOKENS]
    for number in range(2 * MOST_ANSWERS):
        exchange.add(0, (number,))
    assert [each[0] for each in told(exchange, 1)] == list(range(MOST_ANSWERS, 2 * MOST_ANSWERS))


def test_its_own_answers_take_no_room_in_a_message_to_a_replica() -> None:
    exchange = AnswerExchange()
    exchange.add(0, (7,))
    exchange.add(1, (1,) * MOST_TOKENS)
    exchange.add(0, (8,))
    assert told(exchange, 1) == [[7], [8]]
