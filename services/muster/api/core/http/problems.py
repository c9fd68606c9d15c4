"""Errors as problems: ours, FastAPI's and Starlette's."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from muster.api.core.errors import ACTIONS, COMMIT_ACTIONS, ApiError, job_not_found, problem_response
from muster.words.base import DocumentProblem

log = structlog.get_logger("muster.api")


def answer_errors(app: FastAPI, translate: Callable[[Request, ApiError], ApiError]) -> None:
    """Have every error answered by a problem. `translate` gives the words of the API that was asked."""

    async def refused(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        error = translate(request, error)
        if error.status >= 500:
            log.warning("request refused", code=error.code, cause=str(error.__cause__ or "")[:500])
        return problem_response(request, error)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        faults = tuple(_fault(dict(entry)) for entry in error.errors())
        return await refused(request, ApiError("invalid_parameter", f"{faults[0]}", errors=faults))

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return problem_response(request, _of_http(request, error))

    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def _fault(entry: dict[str, object]) -> DocumentProblem:
    place = ".".join(str(part) for part in entry["loc"])  # type: ignore[attr-defined]
    message = str(entry["msg"])
    return DocumentProblem(place, message[0].lower() + message[1:])


def _of_http(request: Request, error: HTTPException) -> ApiError:
    """Convert an error that Starlette raised by itself."""
    headers = dict(error.headers or {})
    path, method = request.url.path[:200], request.method
    job, colon, action = path.removeprefix("/api/v1/jobs/").partition(":")
    actions = COMMIT_ACTIONS if "/checkpoints/" in job else ACTIONS
    if colon and path.startswith("/api/v1/jobs/") and action not in actions and error.status_code in (404, 405):
        return job_not_found(f"{job}:{action}")
    if error.status_code == 404:
        return ApiError(
            "not_found", f"There is nothing at {path}; /api/v1/openapi.json lists the addresses.", headers=headers
        )
    if error.status_code == 405:
        allowed = headers.get("Allow", headers.get("allow", ""))
        return ApiError("method_not_allowed", f"{path} does not know {method}; it knows {allowed}.", headers=headers)
    if error.status_code == 408:
        return ApiError("body_too_slow", str(error.detail), headers={**headers, "Connection": "close"})
    if error.status_code == 413:
        return ApiError("body_too_large", str(error.detail), headers={**headers, "Connection": "close"})
    return ApiError("invalid_document", f"The request can't be read: {error.detail}", headers=headers)
