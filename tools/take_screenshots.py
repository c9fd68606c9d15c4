"""Take the pictures of docs/web.md from a platform that runs: every page, light and dark, wide and narrow.

    muster up -d && muster submit examples/pretrain-stdlib.yaml     # and break something, so that there is a story
    muster submit examples/sft-chat.yaml                            # once that one has ended
    muster sweep examples/sweep-stdlib.yaml
    python tools/take_screenshots.py --job NAME --other NAME --sweep NAME       # into docs/images/web/

Needs Chromium, and the `dev` extra.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from playwright.sync_api import BrowserContext, sync_playwright

from muster.client.address import find_server
from muster.client.connection import Connection

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images" / "web"
# Name of the page, its path on the server ({job}, {other} and {sweep} are their ids). Each is taken wide and light, and
# narrow and dark; those of IN_THE_DARK wide and dark too.
PAGES = (
    ("jobs", "/jobs"),
    ("job", "/jobs/{job}"),
    ("logs", "/jobs/{job}/logs"),
    ("events", "/jobs/{job}/events"),
    ("commits", "/jobs/{job}/checkpoints"),
    ("commit", "/jobs/{job}/checkpoints/last"),
    ("data", "/jobs/{other}/data"),
    ("samples", "/jobs/{job}/samples"),
    ("chat", "/jobs/{other}/chat"),
    ("config", "/jobs/{job}/config?against={other}"),
    ("compare", "/compare?jobs={job},{other}"),
    ("sweeps", "/sweeps"),
    ("sweep", "/sweeps/{sweep}"),
    ("fleet", "/fleet"),
    ("submit", "/submit?example=pretrain-stdlib"),
    ("settings", "/settings"),
    ("webhooks", "/settings/projects/default/webhooks"),
)
IN_THE_DARK = ("jobs", "job", "compare", "sweep", "fleet", "submit")
WIDE, NARROW = 1280, 360  # pixels
_HEIGHT = 760
_SETTLED_MILLISECONDS = 1_500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", help="the address of the API; left out: the `muster up` of this machine")
    parser.add_argument("--job", required=True, help="name or id of the job to show")
    parser.add_argument("--other", required=True, help="the job to compare it with, whose data are shown")
    parser.add_argument("--sweep", required=True, help="name or id of the sweep to show")
    parser.add_argument("--only", nargs="*", metavar="PAGE", help="only these: job, submit …")
    given = parser.parse_args()
    server = find_server(given.server)
    with Connection(server) as client:
        jobs = {"job": client.job_id(given.job), "other": client.job_id(given.other), "sweep": given.sweep}
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, path, scheme, width in _pictures(given.only):
            context = browser.new_context(
                viewport={"width": width, "height": _HEIGHT},
                color_scheme=scheme,
                extra_http_headers={"authorization": f"Bearer {server.token}"} if server.token else {},
            )
            _take(context, f"{server.url}{path.format(**jobs)}", FOLDER / f"{name}.png")
            context.close()
        browser.close()


def _pictures(only: list[str] | None) -> Iterator[tuple[str, str, Literal["light", "dark"], int]]:
    """Name, path, scheme and width of each."""
    for name, path in PAGES:
        if only and name not in only:
            continue
        yield name, path, "light", WIDE
        yield f"{name}-narrow", path, "dark", NARROW
        if name in IN_THE_DARK:
            yield f"{name}-dark", path, "dark", WIDE


def _take(context: BrowserContext, address: str, file: Path) -> None:
    page = context.new_page()
    page.goto(address)
    page.wait_for_timeout(_SETTLED_MILLISECONDS)
    page.screenshot(path=file, full_page=True)
    print(f"{file.name}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
