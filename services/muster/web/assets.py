"""`/static`: scripts, styles and pictures, from inside the package, under an address that changes with their content.

So a browser keeps them for good, and asks for others after an upgrade; and a module finds its neighbour by `./name`.
"""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

from muster.charts import assets as charts
from muster.web.api import ApiError
from muster.web.job_keys import job_keys

router = APIRouter(include_in_schema=False)

FOLDERS = (Path(__file__).parent / "static", charts.FOLDER)
_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".woff2": "font/woff2"}
_FOR_GOOD = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class PageAsset:
    """A file as it is sent, plain and compressed."""

    kind: str
    body: bytes
    packed: bytes


@dataclass(frozen=True)
class AssetSet:
    """All files by name, and what names this very set of them."""

    files: dict[str, PageAsset]
    version: str


@cache
def all_assets() -> AssetSet:
    """Read once: a process serves what it started with."""
    files: dict[str, PageAsset] = {}
    digest = hashlib.sha256()
    for folder in FOLDERS:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name, body = path.relative_to(folder).as_posix(), path.read_bytes()
            digest.update(f"{name}\0{len(body)}\0".encode() + body)
            kind = _KINDS.get(path.suffix) or mimetypes.guess_type(name)[0] or "text/plain"
            files[name] = PageAsset(kind, body, gzip.compress(body, 9, mtime=0))
    keys = job_keys()
    digest.update(keys)
    files["job-keys.json"] = PageAsset("application/json", keys, gzip.compress(keys, 9, mtime=0))
    return AssetSet(files, digest.hexdigest()[:16])


def address(name: str) -> str:
    """Return the file's address for pages. Raises KeyError for a missing file, so that no page links to one."""
    assets = all_assets()
    assert name in assets.files, f"static/{name} is not there"
    return f"/static/{assets.version}/{name}"


@router.get("/static/{version}/{name:path}")
async def read_asset(request: Request, version: str, name: str) -> Response:
    """A file of the set. One of another release is not kept by the browser: a new page asks for it anew."""
    assets = all_assets()
    if (asset := assets.files.get(name)) is None:
        raise ApiError("not_found", f"There is no file {name[:100]!r} for pages.")
    headers = {
        "Cache-Control": _FOR_GOOD if version == assets.version else "no-cache",
        "Vary": "Accept-Encoding",
        "X-Content-Type-Options": "nosniff",
    }
    packs = "gzip" in request.headers.get("accept-encoding", "") and len(asset.packed) < len(asset.body)
    if packs:
        headers["Content-Encoding"] = "gzip"
    return Response(asset.packed if packs else asset.body, media_type=asset.kind, headers=headers)


@router.get("/favicon.ico")
async def read_favicon() -> Response:
    """Serve the icon at the address that browsers ask before they have read a page."""
    asset = all_assets().files["icon.svg"]
    return Response(asset.body, media_type=asset.kind, headers={"Cache-Control": "public, max-age=86400"})
