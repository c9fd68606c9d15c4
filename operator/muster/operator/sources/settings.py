"""Where to find what lies outside of the worlds: other sources, and prices. The same in every world."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator
from pydantic_settings import BaseSettings

from muster.documents.prices import checked_prices


def _address(text: str) -> str:
    parts = urlsplit(text)
    if text and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ValueError("must look like http://prometheus:9090")
    return text


class SourceSettings(BaseSettings):
    """prometheus_url: empty: it is not asked. prometheus_token_file: for its bearer authentication, if it wants one.
    webhook_token_file: holds the token that Alertmanager must show; without one the webhook is closed. Both files are
    read each time, so that they may be rotated. prices_file: a table (JSON) that is laid over the built-in one.
    """

    prometheus_url: Annotated[str, AfterValidator(_address)] = ""
    prometheus_token_file: Path | None = None
    webhook_token_file: Path | None = None
    prices_file: Annotated[Path | None, AfterValidator(checked_prices)] = None
