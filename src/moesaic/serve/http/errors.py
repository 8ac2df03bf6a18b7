"""Errors in OpenAI's form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moesaic.base.errors import MoesaicError
from moesaic.serve.requests import EngineFull

INVALID_REQUEST = "invalid_request_error"


class ApiError(MoesaicError):
    """An error that a client gets, with its HTTP status."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }
        """Content of the answer."""


def unsupported(param: str, remedy: str) -> ApiError:
    """Return the error for a field that this server does not implement."""
    return ApiError(
        f"{param} is not supported: {remedy}", param=param, code="unsupported_parameter"
    )


def too_long(message: str, param: str) -> ApiError:
    """Return the error for a request beyond the context or the memory."""
    return ApiError(message, param=param, code="context_length_exceeded")


def engine_full(error: EngineFull) -> ApiError:
    """Return the error of a full engine; it says when to try again."""
    return ApiError(
        str(error), status=429, kind="rate_limit_error", code="rate_limit_exceeded",
        headers={"retry-after": str(max(1, math.ceil(error.retry_after_s)))},
    )  # fmt: skip


def engine_failed(error: BaseException | None) -> ApiError:
    """Return the error for a request that the engine gave up."""
    message = str(error) or type(error).__name__ if error else "the engine gave the request up"
    return ApiError(message, status=500, kind="server_error", code="internal_error")


def shutting_down() -> ApiError:
    """Return the error for a request that the end of the server cut off."""
    return ApiError(
        "the server is shutting down: send the request again later",
        status=503, kind="server_error", code="service_unavailable",
    )  # fmt: skip
