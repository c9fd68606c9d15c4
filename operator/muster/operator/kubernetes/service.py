"""The operator of a cluster as a process: wait to lead, watch, decide; end when the lead is lost.

Several replicas may run; one leads. `kill -9` costs the lease's fifteen seconds, a SIGTERM hands over at once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from http.server import ThreadingHTTPServer
from typing import Any

import uvloop
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from pydantic import ValidationError
from pydantic_settings import SettingsError

from muster.documents.prices import load_prices
from muster.kube.client import ApiClient
from muster.kube.connection import ApiConnection, connect
from muster.kube.errors import NoCluster
from muster.operator.kubernetes.events import EventWriter
from muster.operator.kubernetes.jobs import with_resources
from muster.operator.kubernetes.leader import LeaderElection, LeadershipLost, LeaseReadiness
from muster.operator.kubernetes.node_reports import write_report
from muster.operator.kubernetes.settings import KubernetesSettings
from muster.operator.kubernetes.world import KubernetesWorld
from muster.operator.logs import ListenerGroup, LogListener, log, set_up_logs
from muster.operator.metrics import OperatorMetrics
from muster.operator.node_reports import NodeReporter
from muster.operator.preview import PreviewHandler
from muster.operator.runner import JobRunner, serve
from muster.operator.server import LoopLiveness, Pages, Posts, serve_pages
from muster.operator.sources.alertmanager import PATH as ALERTS
from muster.operator.sources.alertmanager import token_in
from muster.operator.sources.signal_sources import SignalSources
from muster.words.job import JobSpec
from muster.words.preview import PATH as PREVIEW

GARBAGE = 50_000  # objects made, and not let go of by themselves, before somebody looks for cycles
BAD_USAGE, LOST, NO_CLUSTER, PORT_TAKEN = 2, 1, 4, 5


def main(words: Sequence[str], spec_type: type[JobSpec]) -> int:
    """Run `muster-operator --world kubernetes`, which reads specs as `spec_type`.

    Exit codes: 0 stopped on request, 1 lost the lead, 2 bad usage, 4 no cluster, 5 the metrics port is taken.
    """
    parser = argparse.ArgumentParser(
        prog="muster-operator --world kubernetes",
        description="Gathers gangs of workers in a Kubernetes cluster. Options are also read from MUSTER_OPERATOR_*.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--world", choices=["kubernetes"])
    parser.add_argument("--kubeconfig", help="default: the pod's own account, else $KUBECONFIG")
    parser.add_argument("--namespace", help="where lease and reservations lie (default: our own)")
    parser.add_argument("--image", help="the trainer's image, for jobs that name none")
    parser.add_argument("--checkpoint-uri", help="s3:// folder for jobs that name none")
    parser.add_argument("--host", help="where /metrics, /healthz and /readyz listen")
    parser.add_argument("--port", type=int)
    parser.add_argument("--log-format", choices=["auto", "console", "json"])
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"])
    try:
        settings = KubernetesSettings(**vars(parser.parse_args(words)))
    except (ValidationError, SettingsError) as error:
        print(f"muster-operator: {error}", file=sys.stderr)
        return BAD_USAGE
    set_up_logs(settings.log_format, settings.log_level)
    try:
        connection = connect(settings.kubeconfig)
    except (NoCluster, OSError) as error:
        print(f"muster-operator: {error}", file=sys.stderr)
        return NO_CLUSTER
    gc.freeze()  # what was imported never becomes garbage …
    gc.set_threshold(GARBAGE)  # … and a call or a pass leaves hardly any: looking for it cost a seventh of our time
    try:
        uvloop.run(_operate(settings, spec_type, connection))
    except OSError as error:
        print(f"muster-operator: {error}", file=sys.stderr)
        return PORT_TAKEN
    except LeadershipLost as error:
        log.error("the lead is lost, so this process ends", why=str(error))
        # Not sys.exit: a thread in the middle of a request must not do anything more.
        os._exit(LOST)
    return 0


async def _operate(settings: KubernetesSettings, spec_type: type[JobSpec], connection: ApiConnection) -> None:
    metrics, liveness, readiness = OperatorMetrics(), LoopLiveness(), LeaseReadiness()
    sources = SignalSources(settings, metrics)
    previews = PreviewHandler(
        token_in(settings.webhook_token_file), spec_type, lambda spec: with_resources(spec, settings.resources)
    )
    pages: Pages = {"/metrics": metrics.page}
    posts: Posts = {ALERTS: sources.webhook, PREVIEW: previews}
    server = serve_pages(liveness, settings.host, settings.port, pages, posts, readiness.problem)
    namespace = settings.namespace or connection.namespace
    identity = settings.identity
    try:
        # The lease has a connection of its own: it must not wait behind a thousand pods that are being made.
        async with (
            ApiClient(connection, "muster-operator") as client,
            ApiClient(connection, "muster-operator", at_once=2) as own,
        ):
            metrics.registry.register(_CallCollector(client))
            leader = LeaderElection(
                own,
                namespace,
                identity,
                lambda who: log.info("waiting to lead", leader=who),
                lambda error: log.warning("waiting to lead: the lease can't be read or taken", error=str(error)),
                readiness,
            )
            stop = asyncio.create_task(_stop_signal())
            beat = asyncio.create_task(_beat(liveness))
            if await _until(stop, leader.acquire()):
                await _lead(
                    settings, spec_type, client, namespace, identity, leader, stop, metrics, sources, previews, server
                )
                await leader.release()
            beat.cancel()
            log.info("operator stops", identity=identity)
    finally:
        server.server_close()


async def _lead(
    settings: KubernetesSettings,
    spec_type: type[JobSpec],
    client: ApiClient,
    namespace: str,
    identity: str,
    leader: LeaderElection,
    stop: asyncio.Task[None],
    metrics: OperatorMetrics,
    sources: SignalSources,
    previews: PreviewHandler,
    server: ThreadingHTTPServer,
) -> None:
    """Lead until told to stop. Raises LeadershipLost, and whatever ends the watch."""
    events, prices = EventWriter(client, identity), load_prices(settings.prices_file)
    world = KubernetesWorld(
        client,
        namespace,
        settings.site,
        spec_type,
        settings.namespace_limits,
        lambda what, error: log.warning("trying again", what=what, error=f"{type(error).__name__}: {error}"[:500]),
        settings.silence_seconds,
        settings.report_port,
        events.refused,
        prices,
    )
    metrics.show_jobs(world.phases, world.job_summaries, prices)
    metrics.registry.register(_AgentCollector(world.nodes.agents))
    port = server.server_address[1]
    log.info("operator leads", identity=identity, server=client.connection.server, pid=os.getpid(), port=port)
    async with sources.opened(world, world.current_attempt, world.enqueue) as heard:
        runner = JobRunner(heard, ListenerGroup(LogListener(), metrics, events))
        tasks = [
            asyncio.create_task(serve(runner, settings.passes_at_once), name="serving"),
            asyncio.create_task(leader.hold(), name="lease"),
            asyncio.create_task(events.run(), name="events"),
            asyncio.create_task(_report_nodes(client, namespace, world), name="nodes"),
        ]
        try:
            with previews.opened(heard):
                done, _ = await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await world.close()


async def _report_nodes(client: ApiClient, namespace: str, world: KubernetesWorld) -> None:
    def failed(error: Exception) -> None:
        log.warning("the API is not told of the nodes", error=f"{type(error).__name__}: {error}"[:500])

    await world.jobs()  # once everything is listed
    reporter = NodeReporter(world.node_reports, lambda report: write_report(client, namespace, report), failed)
    await reporter.run()


async def _until(stop: asyncio.Task[None], work: Coroutine[Any, Any, None]) -> bool:
    """Return whether the work ended before the request to stop."""
    task = asyncio.ensure_future(work)
    await asyncio.wait([stop, task], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
        return True
    task.cancel()
    return False


async def _stop_signal() -> None:
    """Returns at the first SIGTERM or SIGINT; the second ends the process as it always does."""
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        if not stopping.done():
            stopping.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, tell)
    await stopping


async def _beat(liveness: LoopLiveness) -> None:
    while True:
        liveness.turned()
        await asyncio.sleep(1.0)


class _AgentCollector(Collector):
    """muster_operator_node_agents{state}: a node whose agent is gone is not watched, and trains on."""

    def __init__(self, agents: Callable[[], dict[str, int]]) -> None:
        self._agents = agents

    def collect(self) -> list[GaugeMetricFamily]:
        family = GaugeMetricFamily("muster_operator_node_agents", "Nodes by what their agent does", labels=["state"])
        for state, count in self._agents().items():
            family.add_metric([state], count)
        return [family]


class _CallCollector(Collector):
    """muster_operator_api_calls_total{verb,resource}."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    def collect(self) -> list[CounterMetricFamily]:
        family = CounterMetricFamily(
            "muster_operator_api_calls", "Calls to the API server", labels=["verb", "resource"]
        )
        for (verb, resource), count in self._client.calls.items():
            family.add_metric([verb, resource], count)
        return [family]
