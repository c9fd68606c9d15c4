"""A page: its template, what every page has, and the headers that keep it from running anything but our own scripts."""

from __future__ import annotations

import gzip
import re
import time
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from muster.plan.plan_words import results_words
from muster.web import assets
from muster.web.api import Principal
from muster.web.notes import NOTE_COOKIE, read_notes
from muster.web.session import form_token
from muster.words import text
from muster.words.times import epoch_seconds

# Name of the page (for `aria-current`), its address, its words.
NAVIGATION = (
    ("jobs", "/jobs", "Jobs"),
    ("sweeps", "/sweeps", "Sweeps"),
    ("submit", "/submit", "Submit"),
    ("compare", "/compare", "Compare"),
    ("fleet", "/fleet", "Fleet"),
)

_OWN_SITES = ("same-origin", "none")  # of Sec-Fetch-Site; older browsers send none, and get the page as it is
_COMPRESSED_MIN = 1_400  # bytes: what fits into one packet takes as long in any size
_COMPRESSION = 4  # a list of 150 kB in 2 ms; level 9 takes three times as long for a tenth less

HEADERS = {
    # Own scripts and styles from this server, and nothing inline: text that slips into a page can't run.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with no-referrer a browser would not say the origin of a form either
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",  # what one person may see is kept for nobody
}


def page(
    request: Request,
    template: str,
    visitor: Principal | None,
    status: int = 200,
    headers: dict[str, str] | None = None,
    **values: Any,
) -> Response:
    """The template with these values. `visitor` is None on pages that need no sign-in."""
    context = {
        "visitor": visitor,
        "here": request.url.path + (f"?{request.url.query}" if request.url.query else ""),
        "form_token": form_token(request),
        "navigation": NAVIGATION,
        "signs_in": request.app.state.services.settings.auth,
        "notes": read_notes(request),
        "current": "",
        "now": round(time.time(), 1),
        **values,
    }
    response = HTMLResponse(render(template, **context), status_code=status, headers={**HEADERS, **(headers or {})})
    if context["notes"]:
        response.delete_cookie(NOTE_COOKIE)
    return compress(request, response)


def compress(request: Request, response: Response) -> Response:
    """Return the response, its body compressed (a list in a fifth of its bytes) where the browser takes that, and where
    our own pages or the address bar ask for it.

    The length of a compressed page tells something of its content to whoever can have text of his own put into it and
    sees the traffic (BREACH, https://breachattack.com): enough to guess the token of its forms. He makes the browser of
    somebody else load the page from another site, and browsers say so.
    """
    response.headers["Vary"] = "Accept-Encoding, Sec-Fetch-Site"
    takes = "gzip" in request.headers.get("accept-encoding", "")
    if takes and request.headers.get("sec-fetch-site") in _OWN_SITES and len(response.body) >= _COMPRESSED_MIN:
        response.body = gzip.compress(bytes(response.body), _COMPRESSION, mtime=0)
        response.headers["Content-Encoding"] = "gzip"
        response.headers["Content-Length"] = str(len(response.body))
    return response


def render(template: str, **values: Any) -> Markup:
    """A template, or a part of a page, with nothing but these values."""
    return Markup(environment().get_template(template).render(values))  # noqa: S704 - it escapes what it shows


@cache
def environment() -> Environment:
    """Return the template environment. It escapes everything, and a name that a page was not given is an error rather
    than an empty text."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["asset"] = assets.address
    made.globals["query"] = query
    made.filters |= {
        "amount": text.amount,
        "clip": clip,
        "duration": text.duration,
        "loss": text.loss,
        "results": results_words,
        "metric": metric_words,
        "plural": text.plural,
        "code": code,
        "sentence": sentence,
        "share": text.share,
        "size": text.size,
        "time": time_element,
        "path": lambda value: quote(str(value), safe=""),
    }
    return made


def clip(value: object, characters: int = 300) -> str:
    """Return at most so many characters of the value, with an ellipsis at the end: a page is not for a megabyte of
    text."""
    whole = str(value)
    clean = text.readable(whole[: characters * 4])  # what is taken out may leave less
    return clean if len(whole) <= characters else clean[: characters - 1] + "…"


def sentence(words: str) -> str:
    """Return the words with a capital at their beginning; a cause in its spelling for programs (`user_error:`) is said
    as people say it."""
    first, space, rest = words.partition(" ")
    first = first.replace("_", " ") if re.fullmatch("[a-z]+(_[a-z]+)+:?", first) else first
    return first[:1].upper() + first[1:] + space + rest


def code(words: str) -> Markup:
    """Return the words with what stands between backticks as code; an odd backtick stays as it is."""
    parts = words.split("`")
    if len(parts) % 2 == 0:
        return escape(words)
    spelled = (Markup("<code>{}</code>").format(part) if n % 2 else escape(part) for n, part in enumerate(parts))
    return Markup("").join(spelled)


def metric_words(name: str) -> str:
    """`evaluation_bits_per_byte` as people write it; names with other signs are left as they are."""
    return name.replace("_", " ").capitalize() if re.fullmatch("[a-z][a-z0-9_]*", name) else name


def time_element(at: str | float | None, form: str = "moment") -> Markup | str:
    """A time as `<time>`, in UTC until the browser says it in its own zone. `form`: moment, brief (no date for
    today), clock or ago."""
    if at is None:
        return text.NOTHING
    seconds = epoch_seconds(at)
    iso = f"{_utc(seconds, '%Y-%m-%dT%H:%M:%S')}Z"
    words = _utc(seconds, "%H:%M:%S UTC" if form == "clock" else "%Y-%m-%d %H:%M UTC")
    return Markup('<time datetime="{}" data-form="{}" title="{}">{}</time>').format(
        iso, form, _utc(seconds, "%Y-%m-%d %H:%M:%S UTC"), words
    )


def _utc(seconds: float, form: str) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime(form)


def query(values: dict[str, Any], **changes: Any) -> str:
    """`?a=1&b=2` of the values with the changes; empty ones are left out."""
    merged = {key: value for key, value in {**values, **changes}.items() if value not in (None, "", [], ())}
    return f"?{urlencode(merged, doseq=True)}" if merged else "?"
