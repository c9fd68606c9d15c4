"""Settings of the operator in a cluster: from the command line, else MUSTER_OPERATOR_*, else the defaults here."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from muster.kube.connection import SERVICE_ACCOUNT
from muster.kube.watch import SILENCE_SECONDS
from muster.operator.kubernetes.render import REPORT_PORT, DiskLimits, SiteSettings
from muster.operator.sources.settings import SourceSettings
from muster.storage.settings import platform_variables
from muster.words.gang import Resources
from muster.words.pods import Toleration

# Taints of accelerator nodes that are there to keep others out.
TOLERATIONS = tuple(
    Toleration(key=key, operator="Exists", effect="NoSchedule") for key in ("nvidia.com/gpu", "vpc.amazonaws.com/efa")
)


def _identity() -> str:
    """A pod's name is its own, and a container that was restarted may take back the lease that it held before."""
    name = socket.gethostname()
    return name if SERVICE_ACCOUNT.exists() else f"{name}-{uuid.uuid4().hex[:8]}"


class KubernetesSettings(SourceSettings):
    """Settings of the operator from its environment (MUSTER_OPERATOR_*); most go into Site, which explains them.

    The lease and the reservations lie in `namespace`; None means the operator's own. No two operators may have the same
    `identity`. `namespace_limits` is how many accelerators the jobs of a namespace may hold together, as JSON.
    `report_from` must let this operator reach its workers, too.
    """

    model_config = SettingsConfigDict(env_prefix="MUSTER_OPERATOR_", frozen=True, extra="forbid")

    world: Literal["kubernetes"] = "kubernetes"
    kubeconfig: Path | None = None
    namespace: str | None = None
    identity: str = Field(default_factory=_identity)
    image: str = ""
    checkpoint_uri: str = ""
    api_server: str = "https://kubernetes.default.svc"
    tolerations: tuple[Toleration, ...] = TOLERATIONS
    image_pull_secrets: tuple[str, ...] = ()
    service_account: str = "default"
    namespace_limits: dict[str, int] = Field(default_factory=dict)
    preflight: bool | None = None
    preflight_answers: str = ""
    report_port: int = REPORT_PORT
    report_from: tuple[dict[str, Any], ...] = ()
    fence_audience: str = ""
    watch_namespace: str = ""
    env_from: tuple[dict[str, Any], ...] = ()
    resources: Resources = Resources()
    read_only_root: bool = True
    disk: DiskLimits = DiskLimits()
    agent_port: Annotated[int, Field(ge=0, le=65535)] = 0
    silence_seconds: Annotated[float, Field(gt=0)] = SILENCE_SECONDS
    passes_at_once: Annotated[int, Field(ge=1)] = 48  # they mostly wait for the API server
    host: str = "0.0.0.0"  # noqa: S104 - a pod's metrics are scraped from elsewhere
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    log_format: Literal["auto", "console", "json"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def site(self) -> SiteSettings:
        return SiteSettings(
            image=self.image,
            api_server=self.api_server,
            checkpoint_uri=self.checkpoint_uri,
            tolerations=self.tolerations,
            service_account=self.service_account,
            image_pull_secrets=self.image_pull_secrets,
            preflight=self.preflight,
            preflight_answers=self.preflight_answers,
            agent_port=self.agent_port,
            report_from=self.report_from,
            fence_audience=self.fence_audience,
            watch_namespace=self.watch_namespace,
            s3=platform_variables(os.environ),
            env_from=self.env_from,
            resources=self.resources,
            read_only_root=self.read_only_root,
            disk=self.disk,
        )
