"""The API's settings: environment MUSTER_API_*, overridden by the command line of `python -m muster.api`."""

from __future__ import annotations

import ipaddress
import re
from functools import cached_property
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from muster.api.core.cluster_objects import is_system_namespace
from muster.documents.document import BYTES_MAX
from muster.documents.prices import checked_prices
from muster.kube.connection import SERVICE_ACCOUNT
from muster.words.address import StorageAddress, checkpoint_address, parse_address
from muster.words.quantities import quantity
from muster.words.state_folder import StateFolder

Seconds = Annotated[float, Field(gt=0)]


def _bytes_of(given: Any) -> Any:
    """A Kubernetes quantity such as 10Gi as a number, as a chart's values name sizes."""
    return int(quantity(given)) if isinstance(given, str) else given


def own_namespace() -> str:
    """Return the namespace of the pod that this process runs in; empty outside of a cluster."""
    file = SERVICE_ACCOUNT / "namespace"
    return file.read_text().strip() if file.exists() else ""


class ApiSettings(BaseSettings):
    """The settings of the API, from environment variables that begin with MUSTER_API_."""

    model_config = SettingsConfigDict(env_prefix="MUSTER_API_", frozen=True)

    cluster: Literal["local", "kubernetes"] = "local"  # what carries the jobs
    kubeconfig: Path | None = None  # for a cluster, outside a pod; None: $KUBECONFIG
    namespace: str = Field(default_factory=own_namespace)  # the platform's, which is never a job's; empty: it has none
    watch_namespace: str = ""  # the only namespace of the cluster whose jobs are carried; empty: all
    # Whether a job in a cluster may mount folders of its nodes (`hostPath`): no policy refuses the workers then.
    host_paths: bool = False
    state: Path = Field(default_factory=lambda: Path.home() / ".muster")
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8642
    # Where browsers reach the API (`https://muster.example.com`), which a proxy before it knows alone; None: where a
    # request says that it was sent.
    public_url: str | None = None
    # Whether /metrics shows the names of projects and what they spend to whoever reaches it; else to an admin's token.
    metrics_public: bool = False
    auth: bool = True  # False is refused unless the API listens on this machine only
    # The first admin token (`muster_…`); None: one is made and written to `<state>/admin-token`.
    bootstrap_token: SecretStr | None = None
    # The keys of secrets, a line each, of which the first seals: those of one machine, whose operator reads the same
    # variable, and those of webhooks; None: `<state>/secret-key`, made at the first use.
    secret_key_file: Path | None = None
    # The key of AWS KMS by which that file's key is encrypted when it is made; who opens secrets asks KMS, too.
    secret_kms_key_id: str | None = None
    # Sign-in by OpenID Connect: the provider's address as it calls itself, and the public client there that
    # the pages and `muster login` are; None: tokens alone.
    oidc_issuer: str | None = None
    oidc_client_id: str | None = None
    # The client that `muster login` is, where the provider wants one of another kind for it; None: the same.
    oidc_login_client_id: str | None = None
    oidc_audience: str | None = None  # for whom tokens must be; None: the clients
    oidc_scopes: tuple[str, ...] = ("openid", "profile", "email", "offline_access")
    oidc_person_claim: str = "preferred_username"  # of an address the part before the @
    oidc_groups_claim: str = "groups"  # or a path: `realm_access.roles`
    # What groups let people do: {"ml": {"nlp": "member"}, "platform": "admin"}; all others: nothing.
    oidc_roles: dict[str, Literal["admin"] | dict[str, Literal["viewer", "member", "maintainer"]]] = Field(
        default_factory=dict
    )
    # `sqlite:///path` or `postgresql://user:password@host/db`; None: a SQLite file in the state folder.
    database_url: SecretStr | None = None
    database_timeout_seconds: Seconds = (
        5.0  # for a connection, a lock or a statement, before a request is refused with 503
    )
    # Where jobs that name no `checkpoint.uri` commit; None: in a folder under the state folder, or, in a Kubernetes
    # cluster, where its operator puts them.
    checkpoint_uri: str | None = None
    # The operator's own server, which a dry run asks what would happen to the job, and the token that it wants; None:
    # those of the state folder. In a cluster without an address nobody is asked.
    operator_url: str | None = None
    operator_token_file: Path | None = None
    # Where uploaded files are kept: file:///folder or s3://bucket/folder, which the workers read too; None: in the
    # state folder, or, in a Kubernetes cluster, nowhere.
    files_uri: str | None = None
    file_bytes_max: Annotated[int, Field(gt=0, le=10**15)] = 10**12  # of one uploaded file
    # Of all uploads on their way in `<state>/uploads`, where its volume may hold less than the disk below (10Gi);
    # None: as the disk has room.
    uploads_bytes_max: Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(_bytes_of)] = None
    body_bytes_max: Annotated[int, Field(gt=0, le=BYTES_MAX)] = BYTES_MAX
    receive_seconds_max: Seconds = 20.0  # for a request's headers, and again for its body, to arrive
    send_seconds_max: Seconds = 60.0  # for a reader that is behind to take what is ready for it
    # For requests under way when the process is told to end. Locally somebody waits before a terminal.
    shutdown_seconds: Seconds = 5.0
    relay_seconds: Seconds = 1.0  # between looks for rows that another API process left
    mirror_seconds: Seconds = 0.2  # between looks at the cluster's version
    stream_ping_seconds: Seconds = 15.0
    stream_poll_seconds: Seconds = 0.25  # between looks at a log file that a stream follows
    stream_seconds_max: Seconds = 3_600.0  # a stream then ends and its reader resumes: connections do not grow old
    # Of one person, in this process. Half would be few for who follows a gang's workers in many windows; twice as many
    # polls, of ten people, keep the database's connections busy.
    streams_per_person_max: Annotated[int, Field(gt=0)] = 200
    # Of one token, in this process: so many requests at once, and so many a second in the long run.
    requests_burst: Annotated[int, Field(gt=0)] = 1_000
    requests_per_second: Annotated[float, Field(gt=0)] = 200.0
    idempotency_days: Annotated[int, Field(gt=0)] = 30
    # Events, logs and step metrics of jobs that ended so long ago are dropped, and what webhooks were told is after 30
    # days; None: they are kept until the job is deleted.
    history_days: Annotated[int, Field(gt=0)] | None = None
    log_format: Literal["json", "text"] = "json"
    prices_file: Annotated[Path | None, AfterValidator(checked_prices)] = None  # laid over the built-in table of prices
    # Models that answer /v1/chat/completions at a time, each a process that holds it in memory; 0: none does.
    chat_workers: Annotated[int, Field(ge=0, le=64)] = 1
    # Networks beside the internet that webhooks may reach, by http too: ["10.20.0.0/16"]
    webhook_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    # The models that clients of /v1 may name (docs/openai.md); None: there are none.
    base_models_file: Path | None = None

    @model_validator(mode="after")
    def _open_only_at_home(self) -> Self:
        if not self.auth and not is_loopback(self.host):
            raise ValueError(
                f"authentication is off, and {self.host} can be reached from other machines: "
                "listen on 127.0.0.1, or leave authentication on"
            )
        return self

    @field_validator("files_uri")
    @classmethod
    def _files_have_a_folder(cls, uri: str | None) -> str | None:
        if uri is not None:
            checkpoint_address(uri)
        return uri

    @field_validator("public_url")
    @classmethod
    def _public_url_is_an_origin(cls, url: str | None) -> str | None:
        parts = urlsplit(url or "https://none")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ValueError(f"must be an address like https://muster.example.com, without a path, not {url!r}")
        return url.rstrip("/") if url else None

    @model_validator(mode="after")
    def _sign_in_is_whole(self) -> Self:
        if (self.oidc_issuer is None) != (self.oidc_client_id is None):
            raise ValueError("sign-in needs both the issuer and the client: set oidc_issuer and oidc_client_id")
        if self.oidc_login_client_id is not None and self.oidc_client_id is None:
            raise ValueError("oidc_login_client_id is a second client: set oidc_issuer and oidc_client_id, too")
        parts = urlsplit(self.oidc_issuer or "https://none")
        if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname or "")):
            words = f"the issuer must be an https:// address, not {self.oidc_issuer!r}"
            raise ValueError(f"{words}: its keys decide who is who")
        return self

    def is_system_namespace(self, namespace: str) -> bool:
        """Return whether the namespace is the platform's or Kubernetes' own; on one machine none is."""
        return self.cluster != "local" and is_system_namespace(namespace, self.namespace)

    @property
    def layout(self) -> StateFolder:
        return StateFolder(self.state)

    @property
    def database(self) -> str:
        """The SQLAlchemy URL, with the asynchronous driver."""
        url = (
            self.database_url.get_secret_value() if self.database_url else f"sqlite:///{self.layout.database.resolve()}"
        )
        scheme, _, rest = url.partition("://")
        drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
        return f"{drivers.get(scheme, scheme)}://{rest if scheme == 'sqlite' else _each_host_apart(rest)}"

    @property
    def files_place(self) -> StorageAddress | None:
        """Return the address where uploaded files are stored, or None if none are accepted."""
        if self.files_uri is not None:
            return checkpoint_address(self.files_uri)
        if self.cluster == "kubernetes":
            return None
        return parse_address(self.layout.files.resolve().as_uri())

    @cached_property  # each submission asks, and to follow links takes a twelfth of its time
    def default_checkpoint_uri(self) -> str | None:
        """Return the checkpoint address for jobs that do not name one, or None if the operator decides, because workers
        can't see our disk."""
        if self.checkpoint_uri or self.cluster == "kubernetes":
            return self.checkpoint_uri
        return self.layout.checkpoints.resolve().as_uri()


def _each_host_apart(rest: str) -> str:
    """Several servers as libpq spells them (`user@a:5432,b/name`), as SQLAlchemy does (`user@/name?host=a:5432&…`)."""
    authority, slash, place = rest.partition("/")
    who, at, hosts = authority.rpartition("@")
    if "," not in hosts:
        return rest
    name, _, query = place.partition("?")
    named = [host if re.search(r":\d+$", host) else f"{host}:5432" for host in hosts.split(",")]
    return f"{who}{at}{slash or '/'}{name}?{'&'.join([f'host={host}' for host in named] + ([query] if query else []))}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
