"""The operator of a local world as a process: takes the state folder, adopts what runs, serves until it is asked to
stop. Then it stops deciding and leaves the gangs to train on; the next start adopts them. `kill -9` is the same without
the goodbye.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from http.server import ThreadingHTTPServer

import psutil

from muster.documents.prices import load_prices
from muster.local.metric_pages import CONTENT_TYPE
from muster.operator.local.claim import StateClaim, claim_folder
from muster.operator.local.nodes import VirtualNodes
from muster.operator.local.processes import is_running
from muster.operator.local.world import LocalWorld
from muster.operator.logs import ListenerGroup, LogListener, log
from muster.operator.metrics import OperatorMetrics
from muster.operator.node_reports import NodeReporter
from muster.operator.preview import PreviewHandler
from muster.operator.runner import JobRunner, serve
from muster.operator.server import GetPage, LoopLiveness, Pages, Posts, serve_pages
from muster.operator.settings import OperatorSettings
from muster.operator.sources.alertmanager import PATH as ALERTS
from muster.operator.sources.alertmanager import token_in
from muster.operator.sources.signal_sources import SignalSources
from muster.words.fleet import FleetReport
from muster.words.job import JobSpec
from muster.words.preview import PATH as PREVIEW
from muster.words.state_folder import StateFolder

PARENT_POLL_SECONDS = 0.5


class PortTaken(Exception):
    """Error that the metrics port is taken; the message says what to do."""


def operate(settings: OperatorSettings, spec_type: type[JobSpec]) -> None:
    """Run until SIGTERM, SIGINT or the parent's death, and read specs as `spec_type`.

    Raises FolderTaken, FolderUnusable, PortTaken.
    """
    claim = claim_folder(settings.folder)
    try:
        metrics, liveness = OperatorMetrics(), LoopLiveness()
        settings = _with_token(settings)
        sources = SignalSources(settings, metrics)
        pages, previews = {"/metrics": metrics.page}, PreviewHandler(token_in(settings.webhook_token_file), spec_type)
        server = _serve(settings, liveness, pages, {ALERTS: sources.webhook, PREVIEW: previews})
        port = server.server_address[1]
        try:
            asyncio.run(_operate(settings, spec_type, claim, metrics, liveness, pages, sources, previews, port))
        finally:
            server.server_close()  # its thread ends with the process; waiting for it would cost half a second
    finally:
        claim.release()


async def _operate(
    settings: OperatorSettings,
    spec_type: type[JobSpec],
    claim: StateClaim,
    metrics: OperatorMetrics,
    liveness: LoopLiveness,
    pages: Pages,
    sources: SignalSources,
    previews: PreviewHandler,
    port: int | str,
) -> None:
    prices = load_prices(settings.prices_file)
    world = LocalWorld(
        settings.folder,
        VirtualNodes(settings.nodes, settings.gpus_per_node),
        settings.worker_command,
        spec_type,
        settings.poll_seconds,
        on_error=lambda error: log.warning("poll failed", error=f"{type(error).__name__}: {error}"),
        worker_env=settings.worker_env,
        prices=prices,
        secret_key=settings.secret_key_file,
        worker_paths=settings.worker_paths,
    )
    url = f"http://{settings.host}:{port}"
    claim.tell(url, settings.nodes, settings.gpus_per_node)
    metrics.show_jobs(world.phases, world.job_summaries, prices)
    pages["/metrics/ranks"] = lambda: GetPage(CONTENT_TYPE, world.rank_pages().encode())
    log.info("operator started", state=str(settings.folder), pid=os.getpid(), metrics=f"{url}/metrics")
    async with sources.opened(world, world.current_attempt, world.enqueue) as heard:
        with previews.opened(heard):
            await _serve_until_stopped(
                settings, world, JobRunner(heard, ListenerGroup(LogListener(), metrics)), liveness
            )
    world.close()


async def _serve_until_stopped(
    settings: OperatorSettings, world: LocalWorld, runner: JobRunner, liveness: LoopLiveness
) -> None:
    adopted, strays = await world.adopt()
    for record in adopted:
        runner.queue.prefer(record.job_uid, True)
        log.info("adopted a running worker", uid=record.job_uid, attempt=record.attempt, worker=record.worker)
    for key in strays:
        log.warning("ending a worker of a job that is no more", uid=key.job_uid, attempt=key.attempt, worker=key.worker)
    why = await _first_of(
        asyncio.create_task(serve(runner, settings.passes_at_once), name="serving"),
        asyncio.create_task(_stop_signal(), name="signal"),
        asyncio.create_task(_beat(liveness), name="liveness"),
        asyncio.create_task(_reporter(world).run(), name="nodes"),
        *([asyncio.create_task(_parent_gone(settings.parent_pid), name="parent")] if settings.parent_pid else []),
    )
    log.info("operator stops", why=why, workers="stopped" if settings.stop_workers else "left running")
    if settings.stop_workers:
        stopped = await world.stop_workers(settings.stop_grace_seconds)
        log.info("workers stopped", workers=stopped)


def _reporter(world: LocalWorld) -> NodeReporter:
    async def write(report: FleetReport) -> None:
        await asyncio.to_thread(world.cluster.write_nodes, report)

    return NodeReporter(
        world.node_reports, write, lambda error: log.warning("the API is not told of the nodes", error=f"{error}")
    )


async def _first_of(*tasks: asyncio.Task[str | None]) -> str | None:
    """Return the result of the first task to end and cancel the others. Raises its error if it failed."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _stop_signal() -> str:
    """Returns at the first SIGTERM or SIGINT; the second ends the process as it always does."""
    loop, stopping = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def tell(number: signal.Signals) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)
        if not stopping.done():
            stopping.set_result(number.name)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, tell, number)
    return str(await stopping)


async def _beat(liveness: LoopLiveness) -> None:
    while True:
        liveness.turned()
        await asyncio.sleep(1.0)


async def _parent_gone(pid: int) -> str:
    """Returns when that very process is gone (psutil remembers its start time)."""
    try:
        parent = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return f"its parent (pid {pid}) is gone"
    while True:
        if not is_running(parent):
            return f"its parent (pid {pid}) is gone"
        await asyncio.sleep(PARENT_POLL_SECONDS)


def _with_token(settings: OperatorSettings) -> OperatorSettings:
    """Alertmanager's token is made at the first start, where no file was named. If not, nobody may call."""
    if settings.webhook_token_file is not None:
        return settings
    path = StateFolder(settings.folder).webhook_token
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(f"{secrets.token_urlsafe(32)}\n")
    return settings.model_copy(update={"webhook_token_file": path})


def _serve(settings: OperatorSettings, liveness: LoopLiveness, pages: Pages, posts: Posts) -> ThreadingHTTPServer:
    try:
        return serve_pages(liveness, settings.host, settings.port, pages, posts)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        raise PortTaken(
            f"can't listen on {where}: {error.strerror}; choose another with --port (0: any free one)"
        ) from error
