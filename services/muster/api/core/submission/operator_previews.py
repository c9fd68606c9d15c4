"""The API's question to the operator: what would you do with this job, were it submitted?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from aiohttp import ClientError, ClientSession, ClientTimeout
from pydantic import ValidationError

from muster.api.core.settings import ApiSettings
from muster.words.base import dump_json
from muster.words.preview import PATH, Preview, PreviewQuestion

SECONDS_MAX = (
    6.0  # for an answer: a pass over a large fleet takes a second, and the operator answers one after the other
)
PAUSE_SECONDS = 0.1  # before a replica that does not lead is asked again: the Service then finds another
ANSWER_BYTES_MAX = 4 << 20


class NoPreview(Exception):
    """The operator did not say; the message says why, for the caller."""


class OperatorPreviews:
    """Client of the operator's previews. If the settings give no address, it asks the operator that works in the state
    folder."""

    def __init__(self, settings: ApiSettings) -> None:
        self._url: Callable[[], str] = lambda: settings.operator_url or _url_in(settings.layout.operator)
        self._token_file = settings.operator_token_file or settings.layout.webhook_token
        self._must_be_named = settings.cluster != "local"

    async def ask(self, question: PreviewQuestion) -> Preview:
        """Raises NoPreview."""
        url = await asyncio.to_thread(self._url)
        if not url:
            named = "the API was not told the operator's address (operator.webhook in the chart)"
            raise NoPreview(named if self._must_be_named else "no operator runs here")
        try:
            token = (await asyncio.to_thread(self._token_file.read_text)).strip()
        except OSError as error:
            raise NoPreview(f"the operator's token can't be read: {error.strerror}") from None
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        try:
            async with asyncio.timeout(SECONDS_MAX), ClientSession(timeout=ClientTimeout(total=None)) as session:
                return await _answer(session, f"{url.rstrip('/')}{PATH}", headers, dump_json(question))
        except TimeoutError:
            raise NoPreview(f"the operator did not answer within {SECONDS_MAX:g} s") from None
        except ClientError as error:
            raise NoPreview(f"the operator can't be reached: {type(error).__name__}") from None
        except ValidationError:
            raise NoPreview("the operator's answer can't be understood: it is of another version") from None


async def _answer(session: ClientSession, url: str, headers: dict[str, str], body: str) -> Preview:
    while True:
        async with session.post(url, data=body.encode(), headers=headers, allow_redirects=False) as reply:
            text = await reply.content.read(ANSWER_BYTES_MAX)
            if reply.status == 200:
                return Preview.model_validate_json(text)
            if reply.status != 503:
                raise NoPreview(f"the operator answered {reply.status}: {text[:200].decode(errors='replace').strip()}")
        await asyncio.sleep(PAUSE_SECONDS)


def _url_in(path: Path) -> str:
    """The address that the operator wrote down; empty if none did."""
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError):
        return ""
    return str(facts.get("url") or "") if isinstance(facts, dict) else ""
