"""Single requests over HTTP: a row like those of batches, answered whole or streamed as server-sent events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from outrider.runner.serve.api_errors import INVALID, SERVER, ApiError
from outrider.runner.serve.running import Answer
from outrider.runner.serve.service import Service
from outrider.runner.validation_errors import short, shown

MOST_BODY_BYTES = 64 << 20
LOOK_SECONDS = 1.0
# Parameters that are not supported with "stream".
NOT_STREAMED = ("logprobs", "echo")
STREAM_OPTIONS = {"include_usage", "include_obfuscation"}
CHAT = "/v1/chat/completions"


async def answer(service: Service, request: Request, body: object) -> Response:
    if not isinstance(body, dict):
        raise ApiError(400, "send an object (application/json)")
    asked = dict(body)
    streamed, options = asked.pop("stream", None) or False, asked.pop("stream_options", None)
    model = _model(service, asked)
    usage = _checked_stream(streamed, options, asked)
    # The row's seed derives from this id, so that a model's process that is restarted generates the same text.
    name = f"single-{secrets.token_hex(12)}"
    entry = {"custom_id": name, "method": "POST", "url": request.url.path, "body": asked}
    answers: asyncio.Queue[Answer] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def on_answer(answer: Answer) -> None:
        # The runner's thread may outlive the event loop.
        if not loop.is_closed():
            loop.call_soon_threadsafe(answers.put_nowait, answer)

    take_back = service.runner.ask(model, entry, streamed, on_answer)
    try:
        first = await _next(answers, request)
        while not streamed and not first.last:
            first = await _next(answers, request)
    except BaseException:
        take_back()
        raise
    if first.error is not None:
        raise _refusal(first)
    if streamed:
        chat = request.url.path == CHAT
        stream = _events(first, answers, model, chat, usage, take_back)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    assert first.record is not None
    return JSONResponse(_whole(first.record, model))


async def _next(answers: asyncio.Queue[Answer], request: Request) -> Answer:
    """The next part of the answer; an error once the client has disconnected."""
    while True:
        try:
            return await asyncio.wait_for(answers.get(), LOOK_SECONDS)
        except TimeoutError:
            if await request.is_disconnected():
                raise ApiError(499, "the client has gone") from None


def _model(service: Service, asked: Mapping[str, Any]) -> str:
    model = asked.get("model")
    if model is None and len(service.models) == 1:
        return service.models[0]
    if model is None:
        raise ApiError(400, "you must provide a model parameter", "model", "missing_required_parameter")
    if not isinstance(model, str):
        raise ApiError(400, f'"model" must be a text, got {shown(model)}', "model", "invalid_type")
    if model not in service.models:
        raise ApiError(404, f"The model '{short(model)}' does not exist", "model", "model_not_found")
    return model


def _checked_stream(streamed: object, options: object, asked: Mapping[str, Any]) -> bool:
    """Check the options of streaming; whether the stream is to end with "usage"."""
    if not isinstance(streamed, bool):
        raise ApiError(400, '"stream" must be true or false', "stream", "invalid_type")
    if options is not None and (not isinstance(options, dict) or options.keys() - STREAM_OPTIONS or not streamed):
        said = '"stream_options" may have "include_usage" and "include_obfuscation", where "stream" is true'
        raise ApiError(400, said, "stream_options", "unsupported_parameter")
    usage = None if options is None else options.get("include_usage")
    if usage is not None and not isinstance(usage, bool):
        said = '"stream_options": "include_usage" must be true or false'
        raise ApiError(400, said, "stream_options", "invalid_type")
    if (padded := None if options is None else options.get("include_obfuscation")) is not None and padded is not False:
        said = '"stream_options": "include_obfuscation" must be false: events are not padded'
        raise ApiError(400, said, "stream_options", "unsupported_parameter")
    for key in NOT_STREAMED:
        # "logprobs": 0 is a request for log-probabilities too.
        if streamed and asked.get(key) is not None and asked[key] is not False:
            raise ApiError(400, f'"{key}" is not supported where "stream" is true', key, "unsupported_parameter")
    return bool(usage)


def _refusal(answer: Answer) -> ApiError:
    assert answer.error is not None
    status, sentence, code = answer.error
    return ApiError(status, sentence, code=code, kind=INVALID if status < 500 else SERVER)


def _whole(record: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The response to a single request: the record with the time and the model's name. (Records of jobs hold no time.)"""
    return {**record, "created": int(time.time()), "model": model}


async def _events(
    first: Answer,
    answers: asyncio.Queue[Answer],
    model: str,
    chat: bool,
    usage: bool,
    take_back: Callable[[], None],
) -> AsyncIterator[str]:
    """Server-sent events in OpenAI's form. If the client disconnects, the row is withdrawn."""
    created, answer, ended = int(time.time()), first, False
    head = {"object": "chat.completion.chunk" if chat else "text_completion", "created": created, "model": model}
    begun: set[int] = set()
    name = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
    try:
        while True:
            for piece in answer.pieces:
                for choice in _choices(piece, chat, begun):
                    yield _event({"id": name, **head, "choices": [choice]})
            if answer.last:
                break
            answer = await answers.get()
        ended = True
        if answer.error is not None:
            yield _event(_refusal(answer).body())
        elif usage and answer.record is not None:
            yield _event({"id": name, **head, "choices": [], "usage": answer.record["usage"]})
        yield "data: [DONE]\n\n"
    finally:
        if not ended:
            take_back()


def _choices(piece: Mapping[str, Any], chat: bool, begun: set[int]) -> Iterator[dict[str, Any]]:
    """A piece has ``index``, ``text``, perhaps ``reasoning`` and ``tool_calls``, and as the last a ``finish_reason``.

    As OpenAI does, tool calls come in a chunk before the one with the ``finish_reason``; here each call is whole.
    """
    index, reason, calls = piece["index"], piece.get("finish_reason"), piece.get("tool_calls")
    if not chat:
        yield {"index": index, "text": piece["text"], "logprobs": None, "finish_reason": reason}
        return
    delta: dict[str, Any] = {} if index in begun else {"role": "assistant"}
    begun.add(index)
    if piece.get("reasoning"):
        delta["reasoning_content"] = piece["reasoning"]
    if piece["text"] or reason is None:
        delta["content"] = piece["text"]
    if calls:
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
        yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        delta = {}
    yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
