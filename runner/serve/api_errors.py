"""Errors in the form that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

from outrider.runner.validation_errors import short

INVALID, SERVER = "invalid_request_error", "server_error"


class ApiError(Exception):
    """A request that is refused: its HTTP status, a sentence, and what the sentence is about."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, kind: str = INVALID
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def no_such(what: str, name: str) -> ApiError:
    return ApiError(404, f"No such {what} object: {short(name)}", "id", "not_found")


def unsupported(name: str) -> ApiError:
    return ApiError(400, f'"{short(name)}" is not supported; leave it out', short(name), "unsupported_parameter")


def not_a_key() -> ApiError:
    message = "Incorrect API key provided: give one of the server's keys as Authorization: Bearer KEY"
    return ApiError(401, message, code="invalid_api_key")
