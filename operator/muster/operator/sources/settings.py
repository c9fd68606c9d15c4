"""Where to find the sources. The same in every world."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator
from pydantic_settings import BaseSettings


def _address(text: str) -> str:
    parts = urlsplit(text)
    if text and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ValueError("must look like http://prometheus:9090")
    return text


class SourceSettings(BaseSettings):
    """prometheus_url: empty: it is not asked. prometheus_token_file: for its bearer authentication, if it wants one.
    webhook_token_file: holds the token that Alertmanager must show; without one the webhook is closed. Both files are
    read each time, so that they may be rotated.
    """

    prometheus_url: Annotated[str, AfterValidator(_address)] = ""
    prometheus_token_file: Path | None = None
    webhook_token_file: Path | None = None
