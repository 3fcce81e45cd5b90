"""Authentication: a request needs a key, and a Host header that names this server (against DNS rebinding)."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import parse_qs

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.runner.job.results import atomically
from outrider.runner.serve.api_errors import ApiError, not_a_key
from outrider.runner.small_file import read_small
from outrider.workers.errors import UsageError

KEY_FILE = "api-key"
# Paths without a key: the health check, and the page's shell, which shows nothing without a token.
OPEN = frozenset({"/", "/health"})
PAGE, REPORTS = "/page/", "/page/reports/"


def keys_of(path: Path | None, data: Path) -> tuple[Path, list[str]]:
    """The key file and its keys, one per line; without ``--api-key-file`` a key is made in the data directory.

    A file that other users can read is refused.
    """
    found = data / KEY_FILE if path is None else path
    option = "--data" if path is None else "--api-key-file"
    if path is None and _is_empty(found):
        with atomically(found, UsageError) as stream:
            os.fchmod(stream.fileno(), 0o600)
            stream.write(f"sk-outrider-{secrets.token_urlsafe(32)}\n".encode())
    try:
        about = found.stat()
        keys = [line.strip() for line in read_small(found).decode("utf-8-sig").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"{option}: {found} cannot be read: {why}") from None
    if about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(f"{option}: other users can read or write {found}: chmod 600 {found}")
    if not keys:
        raise UsageError(f"{option}: {found} holds no key; write one a line")
    return found, keys


def _is_empty(path: Path) -> bool:
    """Whether the file is missing or empty (as a full disk may leave it); False if that cannot be seen."""
    try:
        return not path.stat().st_size
    except OSError as error:
        return isinstance(error, FileNotFoundError)


def page_token(keys: Sequence[str]) -> str:
    """A token that gives access to the page's data only, so that no key gets into a browser."""
    return _signed(keys[0], "page")


def report_signature(keys: Sequence[str], batch: str) -> str:
    """A signature for the URL of one batch's report, since a link cannot carry a header with a token."""
    return _signed(keys[0], f"report {batch}")


def _signed(key: str, what: str) -> str:
    return hmac.new(key.encode(), f"outrider {what}".encode(), hashlib.sha256).hexdigest()[:32]


class Authentication:
    """ASGI middleware that checks key and Host header before anything else of the application runs."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], names: Sequence[str] = ()) -> None:
        self._app = app
        self._keys = list(keys)
        self._names = frozenset({"localhost", *map(_plain, names)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if b"transfer-encoding" in headers and b"content-length" in headers:
            # A proxy in front of us might use the other header: request smuggling.
            said = "the request has both Content-Length and Transfer-Encoding; leave out one"
            await _refused(ApiError(400, said, "Content-Length"), {"Connection": "close"})(scope, receive, send)
            return
        # A health check may lack a Host header; a browser always sends one.
        nameless = b"host" not in headers and scope["path"] in OPEN
        if not nameless and not self._is_own_name(headers.get(b"host", b"").decode("latin-1")):
            refusal = ApiError(421, "this server does not have that host name; see --hostname", "Host", "unknown_host")
            await _refused(refusal)(scope, receive, send)
        elif scope["path"] in OPEN or self._has_key(scope, headers):
            await self._app(scope, receive, send)
        else:
            await _refused(not_a_key())(scope, receive, send)

    def _is_own_name(self, host: str) -> bool:
        """Whether the Host header is an address or one of our names. A foreign page can only use a foreign name for us."""
        name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return _plain(name) in self._names
        return True

    def _has_key(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        path: str = scope["path"]
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        known = list(self._keys)
        if path.startswith(REPORTS):
            given_here = parse_qs(scope["query_string"].decode("latin-1")).get("sign", [""])[0]
            if hmac.compare_digest(given_here.encode(), report_signature(self._keys, path[len(REPORTS) :]).encode()):
                return scope["method"] in ("GET", "HEAD")
        elif path.startswith(PAGE):
            known.append(page_token(self._keys))
        # All keys are compared, so that the time does not depend on which one matches.
        same = [hmac.compare_digest(given.strip(), key.encode()) for key in known]
        return scheme.lower() == b"bearer" and any(same)


def _plain(name: str) -> str:
    """A host name in lower case, without the final dot of a fully qualified name."""
    return name.lower().removesuffix(".")


def _refused(error: ApiError, headers: dict[str, str] | None = None) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else headers
    return JSONResponse(error.body(), status_code=error.status, headers=headers)
