"""Settings of what lies outside of the worlds: other sources, and prices. They are the same in every world."""

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
    """Sources of signals besides the world. Token files are read at each use: they may be rotated."""

    prometheus_url: Annotated[str, AfterValidator(_address)] = ""  # an empty one is not asked
    prometheus_token_file: Path | None = None  # the bearer token for Prometheus
    webhook_token_file: Path | None = None  # the token that Alertmanager must show; without one the webhook is closed
    prices_file: Annotated[Path | None, AfterValidator(checked_prices)] = None  # JSON, laid over the built-in table
