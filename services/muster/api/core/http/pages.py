"""`/` and `/api/v1/docs`: how to talk to this server, made from the OpenAPI document. No scripts, nothing fetched."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

router = APIRouter(include_in_schema=False)

_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}"
    "pre{background:#f4f5f7;padding:.8rem;overflow:auto;font-size:.85rem}code{font-size:.9em}"
    "h3{margin-top:2rem}.method{display:inline-block;min-width:4.5rem;font-weight:700}"
    "table{border-collapse:collapse}td{padding:.1rem 1rem .1rem 0;vertical-align:top}"
)
PLACES = {
    "docs": "/docs",
    "reference": "/api/v1/docs",
    "openapi": "/api/v1/openapi.json",
    "api": "/api/v1",
    "health": "/healthz",
    "ready": "/readyz",
    "metrics": "/metrics",
}


@router.get("/")
async def show_places(request: Request) -> Response:
    """Return the addresses that this server answers, for people (HTML) or for programs (JSON)."""
    app = request.app
    if "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({"name": app.title, "version": app.version, "what": app.description, **PLACES})
    if (home := getattr(app.state, "home", None)) is not None:  # there are pages for people
        return RedirectResponse(home, status_code=303)
    links = "".join(f'<tr><td>{name}</td><td><a href="{path}">{path}</a></td></tr>' for name, path in PLACES.items())
    return _page(
        app.title, f"<h1>Muster {_text(app.version)}</h1><p>{_text(app.description)}</p><table>{links}</table>"
    )


@router.get("/api/v1/docs")
async def show_reference(request: Request) -> Response:
    """Return the reference of every operation with its parameters, an example of its body and its responses."""
    document = request.app.openapi()
    parts = [
        f"<h1>Muster {_text(document['info']['version'])}: the REST API</h1>",
        f"<p>{_text(document['info']['description'])}</p>",
        f'<p>For programs: <a href="{PLACES["openapi"]}">{PLACES["openapi"]}</a>. Tokens go into '
        "<code>Authorization: Bearer muster_…</code>.</p>",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += _operation(method, path, operation)
    return _page("Muster: the REST API", "".join(parts))


def _operation(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f'<h3 id="{_text(operation["operationId"])}">{_text(operation["summary"])}</h3>'
    yield f'<p><span class="method">{method.upper()}</span> <code>{_text(path)}</code></p>'
    yield f"<p>{_text(operation.get('description', ''))}</p>"
    if parameters := operation.get("parameters"):
        rows = (
            f"<tr><td><code>{_text(each['name'])}</code></td><td>{each['in']}</td>"
            f"<td>{_text(each.get('description', ''))}</td></tr>"
            for each in parameters
        )
        yield f"<table>{''.join(rows)}</table>"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    if "example" in body:
        yield f"<p>Body</p><pre>{_text(json.dumps(body['example'], indent=2, ensure_ascii=False))}</pre>"
    answers = (
        f"<tr><td>{status}</td><td>{_text(each['description'])}</td></tr>"
        for status, each in operation["responses"].items()
    )
    yield f"<table>{''.join(answers)}</table>"


def _page(title: str, body: str) -> HTMLResponse:
    head = f'<meta charset="utf-8"><title>{_text(title)}</title><style>{_STYLE}</style>'
    return HTMLResponse(
        f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>', headers=_HEADERS
    )


def _text(text: str) -> str:
    return html.escape(text)
