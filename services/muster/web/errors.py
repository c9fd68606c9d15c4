"""Error pages: the API's refusals, for people."""

from __future__ import annotations

from urllib.parse import quote, urlsplit

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ExceptionHandler

from muster.web.api import ApiError
from muster.web.rendering import page
from muster.web.session import local_path
from muster.web.sign_in import sign_in_page

_TITLES = {
    401: "Sign in first",
    403: "You may not do that",
    404: "There is nothing here",
    409: "That can't be done now",
    503: "Something does not answer",
}


def answer_with_pages(app: FastAPI) -> None:
    """Refuse a request for a page by a page; programs are answered as before."""
    for kind in (ApiError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _with_page(app.exception_handlers[kind]))


def _with_page(otherwise: ExceptionHandler) -> ExceptionHandler:
    async def answer(request: Request, error: Exception) -> Response:
        if not wants_page(request):
            answered: Response = await otherwise(request, error)  # type: ignore[arg-type, misc]
            return answered
        return _page(request, error)

    return answer


def wants_page(request: Request) -> bool:
    """A browser that opens an address; not its scripts, and nothing under /api."""
    return "text/html" in request.headers.get("accept", "") and not request.url.path.startswith("/api/")


def _page(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        status, words, headers = error.status, error.detail, dict(error.headers)
        if status == 401:
            return _to_sign_in(request)
    elif isinstance(error, HTTPException):
        status, headers = error.status_code, dict(error.headers or {})
        words = "The address leads nowhere." if status == 404 else str(error.detail)
    else:
        status, words, headers = 422, "The address holds a value that can't be.", {}
    title = _TITLES.get(status, "That did not work")
    request_id = str(request.scope.get("request_id", ""))
    return page(request, "error.html", None, status, headers, title=title, words=words, request_id=request_id)


def _to_sign_in(request: Request) -> Response:
    if request.method != "GET":
        words = "Your session has ended, so nothing was done. Sign in, and repeat it."
        return sign_in_page(request, _page_of_the_form(request), 401, words)
    here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(f"/sign-in?next={quote(here)}", status_code=303)


def _page_of_the_form(request: Request) -> str:
    """Return the address of the submitted form, which may still hold its input; else that of all jobs."""
    came = urlsplit(request.headers.get("referer", ""))
    if came.netloc != request.url.netloc:
        return "/jobs"
    return local_path(came.path + (f"?{came.query}" if came.query else ""))
