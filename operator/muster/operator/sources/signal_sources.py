"""All sources of one operator, opened when it begins to decide and closed with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Protocol
from urllib.parse import urlsplit

from muster.operator.logs import log
from muster.operator.sources.alertmanager import AlertWebhook, token_in
from muster.operator.sources.hub import SignalHub
from muster.operator.sources.prometheus import PrometheusPoller
from muster.operator.sources.settings import SourceSettings
from muster.operator.sources.world import SignalWorld
from muster.operator.world import World


class SourceMetrics(Protocol):
    """The counters that sources report to."""

    def alert(self, outcome: str) -> None:
        """Count an alert that the webhook received, by its `AlertOutcome`."""

    def asked(self, error: Exception | None) -> None:
        """Count a query of Prometheus."""


class SignalSources:
    """All sources of signals. `webhook` is served at alertmanager.PATH, and takes alerts while they are opened."""

    def __init__(self, settings: SourceSettings, metrics: SourceMetrics) -> None:
        self._settings, self._metrics = settings, metrics
        self.webhook = AlertWebhook(token_in(settings.webhook_token_file), metrics.alert)
        self._prometheus_down = False

    @contextlib.asynccontextmanager
    async def opened(
        self, world: World, current: Callable[[str], int | None], enqueue: Callable[[str], None]
    ) -> AsyncIterator[World]:
        """The world together with what these sources say.

        `current` and `enqueue` are as the Hub wants them, but `enqueue` is only called in the event loop.
        """
        loop = asyncio.get_running_loop()
        hub = SignalHub(current, lambda uid: _enqueue_from_thread(loop, enqueue, uid))
        asking = [asyncio.create_task(self._prometheus(hub).run(), name="prometheus")] if self._url else []
        self.webhook.hub = hub
        try:
            yield SignalWorld(world, hub)
        finally:
            self.webhook.hub = None
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    @property
    def _url(self) -> str:
        return self._settings.prometheus_url

    def _prometheus(self, hub: SignalHub) -> PrometheusPoller:
        log.info("asking Prometheus", url=_without_password(self._url))
        return PrometheusPoller(
            self._url, hub, self._on_prometheus_answer, token_in(self._settings.prometheus_token_file)
        )

    def _on_prometheus_answer(self, error: Exception | None) -> None:
        self._metrics.asked(error)
        if (error is not None) == self._prometheus_down:
            return
        self._prometheus_down = error is not None
        if error is None:
            log.info("Prometheus answers again", url=_without_password(self._url))
        else:
            why = f"{type(error).__name__}: {error}"[:300].replace(self._url, _without_password(self._url))
            log.warning(
                "Prometheus does not answer; heartbeats are enough", url=_without_password(self._url), error=why
            )


def _enqueue_from_thread(loop: asyncio.AbstractEventLoop, enqueue: Callable[[str], None], uid: str) -> None:
    """An alert may come in at the very end of a loop."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(enqueue, uid)


def _without_password(url: str) -> str:
    """Return the address without the password that may be in it."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
