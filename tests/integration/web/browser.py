"""A real Chromium, watched: whatever it asks of another host, prints as an error or refuses by a policy is a fault."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import sync_playwright
from tests.polling import WAIT_SECONDS_MAX

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@dataclass
class Watched:
    """A page of a browser, with what went wrong in it. Policy violations are console errors too."""

    page: Any
    faults: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def refuse(self, dialog: Any) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()


@contextlib.contextmanager
def chromium(**context: Any) -> Iterator[Watched]:
    """A fresh browser with one page; `context` is playwright's: viewport, color_scheme, java_script_enabled …"""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            opened = browser.new_context(**context)
            opened.set_default_timeout(WAIT_SECONDS_MAX * 1_000)
            page = opened.new_page()
            watched = Watched(page)
            page.on("request", lambda request: watched.asked.append(request.url))
            page.on("pageerror", lambda error: watched.faults.append(f"error: {error}"))
            page.on(
                "console",
                lambda message: watched.faults.append(message.text) if message.type in ("error", "warning") else None,
            )
            page.on("dialog", lambda dialog: watched.refuse(dialog))
            yield watched
        finally:
            browser.close()
