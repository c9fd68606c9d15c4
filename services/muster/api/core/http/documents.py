"""`/docs`: the site of documents that `make docs` built, where this server runs in a checkout.

The files are public text, so nobody has to sign in. Their pages run Sphinx' own scripts, for the search and the dark
mode; the policy of each page admits them by their hashes, and nothing from another origin.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response

from muster.api.core.errors import ApiError

router = APIRouter(include_in_schema=False)

# `make docs` writes it; looked for at each request, so that a running server shows what was built meanwhile.
SITE = Path(__file__).resolve().parents[5] / "build" / "docs"
_INLINE = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_POLICY = (
    "default-src 'none'; script-src 'self'{scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_NOT_BUILT = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Muster: documents</title></head><body>'
    "<h1>The documents are not built here</h1><p>In a checkout of Muster, <code>make docs</code> builds them, and this "
    "address shows them from then on. They are the Markdown files of its folder <code>docs</code>.</p>"
    '<p><a href="/api/v1/docs">The REST API</a> is described by this server itself.</p></body></html>'
)


@router.get("/docs")
def show_index() -> Response:
    """Redirect to the site's first page, or say how the site is built."""
    if (SITE / "index.html").is_file():
        return RedirectResponse("/docs/index.html", status_code=307)
    return HTMLResponse(_NOT_BUILT, headers={"Content-Security-Policy": _POLICY.format(scripts="")})


@router.get("/llms.txt")
def show_overview() -> Response:
    """Redirect to the overview for language models (llmstxt.org), whose links are relative to the site."""
    return RedirectResponse("/docs/llms.txt", status_code=307)


@router.get("/docs/{path:path}")
def show_document(path: str) -> Response:
    """Return a file of the site. Raises ApiError (404) for one that is not there or lies outside of it."""
    file = _file(path or "index.html")
    if file is None:
        raise ApiError("not_found", f"There is no document {path[:100]!r}; /docs leads to all of them.")
    headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    if file.suffix != ".html":
        return FileResponse(file, headers=headers)
    text = file.read_text()
    scripts = "".join(f" 'sha256-{_digest(script)}'" for script in sorted(set(_INLINE.findall(text))))
    return HTMLResponse(text, headers={**headers, "Content-Security-Policy": _POLICY.format(scripts=scripts)})


def _file(path: str) -> Path | None:
    if "\0" in path:  # no file system has such a name, and Python refuses to ask it
        return None
    site = SITE.resolve()
    file = (site / path).resolve()
    return file if file.is_relative_to(site) and file.is_file() else None


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
