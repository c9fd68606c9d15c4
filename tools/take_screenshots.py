"""Take the pictures of docs/web.md from a platform that runs: every page, light and dark, wide and narrow.

    muster up -d && muster submit examples/pretrain-stdlib.yaml     # and break something, so that there is a story
    python tools/take_screenshots.py --job NAME                     # into docs/images/web/

Needs Chromium, and the `dev` extra.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import BrowserContext, sync_playwright

from muster.client.address import find_server
from muster.client.connection import Connection

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images" / "web"
# Name of the picture, path on the server ({job} is its id), scheme, width in pixels.
PICTURES = (
    ("jobs", "/jobs", "light", 1280),
    ("jobs-dark", "/jobs", "dark", 1280),
    ("jobs-narrow", "/jobs", "light", 360),
    ("job", "/jobs/{job}", "light", 1280),
    ("job-dark", "/jobs/{job}", "dark", 1280),
    ("job-narrow", "/jobs/{job}", "dark", 360),
    ("commits", "/jobs/{job}/checkpoints", "light", 1280),
    ("submit", "/submit?example=pretrain-stdlib", "light", 1280),
    ("submit-dark", "/submit?example=pretrain-stdlib", "dark", 1280),
    ("submit-narrow", "/submit?example=pretrain-stdlib", "dark", 360),
    ("settings", "/settings", "light", 1280),
)
_HEIGHT = 760
_SETTLED_MILLISECONDS = 1_500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", help="the address of the API; left out: the `muster up` of this machine")
    parser.add_argument("--job", required=True, help="name or id of the job to show")
    parser.add_argument("--only", nargs="*", metavar="PICTURE", help="only these: job-dark, submit …")
    given = parser.parse_args()
    server = find_server(given.server)
    with Connection(server) as client:
        job = client.job_id(given.job)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, path, scheme, width in PICTURES:
            if given.only and name not in given.only:
                continue
            context = browser.new_context(
                viewport={"width": width, "height": _HEIGHT},
                color_scheme=scheme,  # type: ignore[arg-type]
                extra_http_headers={"authorization": f"Bearer {server.token}"} if server.token else {},
            )
            _take(context, f"{server.url}{path.format(job=job)}", FOLDER / f"{name}.png")
            context.close()
        browser.close()


def _take(context: BrowserContext, address: str, file: Path) -> None:
    page = context.new_page()
    page.goto(address)
    page.wait_for_timeout(_SETTLED_MILLISECONDS)
    page.screenshot(path=file, full_page=True)
    print(f"{file.name}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
