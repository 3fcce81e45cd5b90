"""The HTTP application: routes, parsing of requests and writing of responses; ``service.py`` acts on them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import aclosing
from threading import Event
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Match, Route

from outrider.runner.job.directory import JOURNAL
from outrider.runner.job.prompts import json_problem, strictly_parsed
from outrider.runner.job.requests import RowError
from outrider.runner.serve import page, single, uploads
from outrider.runner.serve.api_errors import SERVER, ApiError, no_such, unsupported
from outrider.runner.serve.auth import Authentication
from outrider.runner.serve.bodies import pieces
from outrider.runner.serve.metrics import metrics
from outrider.runner.serve.names import Folders
from outrider.runner.serve.ranges import RangedFile
from outrider.runner.serve.request_ids import HEADER, RequestIds
from outrider.runner.serve.service import Service
from outrider.runner.serve.store import Store
from outrider.runner.serve.unwritten_files import lines_of
from outrider.runner.validation_errors import short
from outrider.workers.errors import NoSpaceError, OutriderError

logger = logging.getLogger("outrider.serve")

API = "/v1"
MOST_BODY_BYTES = 1 << 20
STUMBLED = "the server has stumbled; its own output says over what"
USUAL_BATCHES, MOST_BATCHES = 20, 100
USUAL_FILES = MOST_FILES = 10_000


def application(
    service: Service, store: Store, folders: Folders, keys: Sequence[str], names: Sequence[str], most_upload: int
) -> Starlette:
    """The application of a started service."""
    api = _Api(service, store, folders, keys, most_upload)
    return Starlette(
        routes=[
            Route("/v1/files", api.upload, methods=["POST"]),
            Route("/v1/files", api.files, methods=["GET"]),
            Route("/v1/files/{file}", api.file, methods=["GET"]),
            Route("/v1/files/{file}", api.delete_file, methods=["DELETE"]),
            Route("/v1/files/{file}/content", api.content, methods=["GET"]),
            Route("/v1/batches", api.create, methods=["POST"]),
            Route("/v1/batches", api.batches, methods=["GET"]),
            Route("/v1/batches/{batch}", api.batch, methods=["GET"]),
            Route("/v1/batches/{batch}/cancel", api.cancel, methods=["POST"]),
            Route("/v1/models", api.models, methods=["GET"]),
            Route("/v1/models/{model:path}", api.model, methods=["GET"]),
            Route("/v1/completions", api.complete, methods=["POST"]),
            Route("/v1/chat/completions", api.complete, methods=["POST"]),
            Route("/health", _health, methods=["GET"]),
            Route("/metrics", api.metrics, methods=["GET"]),
            Route("/", _page, methods=["GET"]),
            Route("/page/data", api.page_data, methods=["GET"]),
            Route("/page/reports/{batch}", api.report, methods=["GET"]),
        ],
        middleware=[Middleware(RequestIds), Middleware(Authentication, keys=keys, names=names)],
        exception_handlers={
            ApiError: _refusal,
            HTTPException: _unknown,
            OutriderError: _failure,
            ClientDisconnect: _gone,
            Exception: _unexpected,
        },
    )


class _Api:
    """The handlers of routes. Those without ``async`` use SQLite or the disk, and are run in threads by Starlette."""

    def __init__(self, service: Service, store: Store, folders: Folders, keys: Sequence[str], most_upload: int) -> None:
        self._service = service
        self._store = store
        self._folders = folders
        self._keys = keys
        self._most_upload = most_upload

    async def upload(self, request: Request) -> Response:
        _uncompressed(request)
        kind = request.headers.get("content-type", "")
        async with aclosing(pieces(request, self._service.stopping)) as body:
            file = await uploads.receive(kind, body, self._store, self._folders, self._most_upload)
        return JSONResponse(file.shown())

    def files(self, request: Request) -> Response:
        query = _query(request, "after", "limit", "order", "purpose")
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ApiError(400, f'"order" must be asc or desc, got "{short(order)}"', "order")
        limit = _limit(query, USUAL_FILES, MOST_FILES)
        return JSONResponse(self._service.files.list(query.get("purpose"), query.get("after"), limit, order == "desc"))

    def file(self, request: Request) -> Response:
        return JSONResponse(self._service.files.get(request.path_params["file"]).shown())

    def delete_file(self, request: Request) -> Response:
        return JSONResponse(self._service.files.delete(request.path_params["file"]))

    def content(self, request: Request) -> Response:
        file = self._service.files.get(request.path_params["file"])
        path = self._service.files.path_of(file)
        if not path.is_file():
            if file.batch is None or not path.with_name(JOURNAL).is_file():
                raise no_such("File", file.id)
            named = {"Content-Disposition": f'attachment; filename="{file.filename}"', "Content-Length": str(file.bytes)}
            return StreamingResponse(lines_of(path), media_type="application/octet-stream", headers=named)
        return RangedFile(path, media_type="application/octet-stream", filename=file.filename)

    async def create(self, request: Request) -> Response:
        body = await _json(request, MOST_BODY_BYTES, self._service.stopping)
        return JSONResponse(await run_in_threadpool(self._service.create, body))

    def batches(self, request: Request) -> Response:
        query = _query(request, "after", "limit")
        limit = _limit(query, USUAL_BATCHES, MOST_BATCHES)
        return JSONResponse(self._service.list_batches(query.get("after"), limit))

    def batch(self, request: Request) -> Response:
        return JSONResponse(self._service.retrieve(request.path_params["batch"]))

    def cancel(self, request: Request) -> Response:
        return JSONResponse(self._service.cancel(request.path_params["batch"]))

    def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(name) for name in self._service.models]})

    def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in self._service.models:
            raise ApiError(404, f"The model '{short(name)}' does not exist", "model", "model_not_found")
        return JSONResponse(_model(name))

    async def complete(self, request: Request) -> Response:
        body = await _json(request, single.MOST_BODY_BYTES, self._service.stopping)
        return await single.answer(self._service, request, body)

    def metrics(self, request: Request) -> Response:
        return PlainTextResponse(metrics(self._service), media_type="text/plain; version=0.0.4")

    def page_data(self, request: Request) -> Response:
        return JSONResponse(page.data(self._service, self._keys), headers={"Cache-Control": "no-store"})

    def report(self, request: Request) -> Response:
        """A batch's report, with headers that forbid it to run anything: its text comes from rows and models."""
        path = self._service.report_of(request.path_params["batch"])
        if not path.is_file():
            raise no_such("Report", request.path_params["batch"])
        return RangedFile(path, media_type="text/html", headers=page.REPORT_HEADERS)


def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _page(request: Request) -> Response:
    content, headers = page.shell()
    return HTMLResponse(content, headers=headers)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "outrider"}


async def _json(request: Request, most: int, stopping: Event) -> Any:
    _uncompressed(request)
    whole = bytearray()
    async with aclosing(pieces(request, stopping)) as stream:
        async for some in stream:
            whole += some
            if len(whole) > most:
                raise ApiError(413, f"the request is larger than {most:,} bytes", code="request_too_large")
    try:
        return strictly_parsed(whole.decode("utf-8-sig"))
    except (RowError, ValueError, RecursionError) as error:
        said = str(error) if isinstance(error, RowError) else json_problem(error)
        raise ApiError(400, f"the request is not valid JSON: {said}", code="invalid_json") from None


def _uncompressed(request: Request) -> None:
    if (coding := request.headers.get("content-encoding", "identity").strip().lower()) not in ("", "identity"):
        raise ApiError(
            415, f'"Content-Encoding: {short(coding)}" is not supported; send the request as it is', "Content-Encoding"
        )


def _query(request: Request, *known: str) -> dict[str, str]:
    if unknown := sorted(request.query_params.keys() - set(known)):
        raise unsupported(unknown[0])
    for key in request.query_params:
        if len(request.query_params.getlist(key)) > 1:
            raise ApiError(400, f'"{key}" stands twice in the address; leave out one', key)
    return dict(request.query_params)


def _limit(query: dict[str, str], usual: int, most: int) -> int:
    given = query.get("limit", str(usual))
    if not (given.isascii() and given.isdecimal()) or len(given) > 9 or not 1 <= int(given) <= most:
        raise ApiError(400, f'"limit" must be a whole number from 1 to {most}, got "{short(given)}"', "limit")
    return int(given)


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {"Retry-After": "10"} if error.status == 503 else None
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, headers = request.url.path, None
    said = f"Unknown request URL: {request.method} {short(path)}: "
    if error.status_code == 405:
        allowed = ", ".join(_methods(request, path))
        said, headers = f"{said}there is {allowed}", {"Allow": allowed}
    elif _methods(request, API + path):
        said += f"there is {API}{path}; end the client's base URL in {API}"
    else:
        offered = {route.path for route in _routes(request) if route.path.startswith(API) and "{" not in route.path}
        said += f"this server has {', '.join(sorted(offered))}"
    return JSONResponse(ApiError(error.status_code, said, code="unknown_url").body(), error.status_code, headers)


def _routes(request: Request) -> list[Route]:
    return [route for route in request.app.routes if isinstance(route, Route)]


def _methods(request: Request, path: str) -> list[str]:
    """The methods of all routes with this path."""
    scope = {**request.scope, "path": path}
    matching = [route for route in _routes(request) if route.matches(scope)[0] is not Match.NONE]
    return sorted({method for route in matching for method in route.methods or ()})


async def _failure(request: Request, error: Exception) -> Response:
    """Log the error, and answer with a general sentence, since the error names files of the server."""
    logger.error("%s", error)
    full = ApiError(507, "the server's disk is full, or it can open no more files", None, "no_space", SERVER)
    told = full if isinstance(error, NoSpaceError) else ApiError(500, STUMBLED, kind=SERVER)
    return JSONResponse(told.body(), told.status)


async def _gone(request: Request, error: Exception) -> Response:
    """The client has disconnected; nobody reads the response."""
    return Response(status_code=400)


async def _unexpected(request: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(500, STUMBLED, kind=SERVER).body(), 500, {HEADER: request.scope[HEADER]})
