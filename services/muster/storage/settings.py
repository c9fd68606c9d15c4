"""Settings for S3, the same for trainer, operator and API (docs/checkpoints.md, "S3 settings").

The platform sets them and hands them to its workers: a job that could set its own endpoint would commit where the
operator does not look. Credentials come by the AWS libraries' usual chain, in each program of its own.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from muster.words.base import UserError

CONNECT_SECONDS_MAX = 5
READ_SECONDS_MAX = 30.0  # between two packets, not for a whole answer
# Where somebody waits for the answer. The API waits 15 s for all of an estimate, its clients 20 s.
LOOK_RETRY_SECONDS = 10.0
LOOK_READ_SECONDS = 10.0


@dataclass(frozen=True)
class S3Settings:
    """Connection settings of S3. `addressing` is `path` (https://endpoint/bucket/key), `virtual` (https://bucket.endpoint/key)
    or `auto`, as AWS wants it. A rank makes `streams` requests at a time, and bears an outage for `retry_seconds` in
    each; for `read_seconds` it waits for the next packet."""

    endpoint: str | None = None
    region: str | None = None
    addressing: str = "auto"
    kms_key_id: str | None = None
    role_arn: str | None = None
    streams: int = 8
    retry_seconds: float = 60.0
    read_seconds: float = READ_SECONDS_MAX

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> S3Settings:
        """MUSTER_S3_*, else what AWS clients read for the same. Raises UserError for a value that can't be."""

        def first(*names: str) -> str | None:
            return next((value for name in names if (value := environment.get(name))), None)

        endpoint = first("MUSTER_S3_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
        addressing = environment.get("MUSTER_S3_ADDRESSING") or ("path" if endpoint else "auto")
        if addressing not in ("auto", "path", "virtual"):
            raise UserError(f"MUSTER_S3_ADDRESSING must be path or virtual, not {addressing!r}")
        retry_seconds = environment.get("MUSTER_S3_RETRY_SECONDS") or "60"
        if not retry_seconds.replace(".", "", 1).isdigit():
            raise UserError(f"MUSTER_S3_RETRY_SECONDS must be a number of seconds, not {retry_seconds!r}")
        return cls(
            endpoint=endpoint,
            region=first("MUSTER_S3_REGION", "AWS_REGION", "AWS_DEFAULT_REGION"),
            addressing=addressing,
            kms_key_id=environment.get("MUSTER_S3_KMS_KEY_ID") or None,
            role_arn=environment.get("MUSTER_S3_ROLE_ARN") or None,
            streams=min(16, 4 * (os.cpu_count() or 1)),
            retry_seconds=float(retry_seconds),
        )

    @classmethod
    def for_a_look(cls, environment: Mapping[str, str]) -> S3Settings:
        """The same for who lists or looks, and can do without: somebody waits meanwhile."""
        settings = cls.from_environment(environment)
        retry_seconds = min(settings.retry_seconds, LOOK_RETRY_SECONDS)
        return replace(settings, retry_seconds=retry_seconds, read_seconds=LOOK_READ_SECONDS)


_SHARED_BY_ALL = ("ENDPOINT", "REGION", "ADDRESSING", "KMS_KEY_ID", "ROLE_ARN", "RETRY_SECONDS")


def platform_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings in `environment` that the platform's workers get as well."""
    names = (f"MUSTER_S3_{name}" for name in _SHARED_BY_ALL)
    return {name: environment[name] for name in names if environment.get(name)}


_shared: dict[S3Settings, Any] = {}


def share_client(settings: S3Settings) -> None:
    """Make the client that this process, and one that it forks now, will use: half of its memory is what it has read of
    S3, and nobody needs that twice. It has no connection yet, and each process makes its own."""
    _shared[settings] = _make_client(settings)


def s3_client(settings: S3Settings) -> Any:
    """A client of boto3's core that leaves retries and checksums to us: we know the checksum before the body is sent.

    The rest of boto3 would take 3 MB of every upload process, for nothing that we use.
    """
    return _shared.get(settings) or _make_client(settings)


def _make_client(settings: S3Settings) -> Any:
    from botocore.config import Config

    session = _session()
    if settings.role_arn:
        session = _assuming(session, settings.role_arn)
    config = Config(
        connect_timeout=CONNECT_SECONDS_MAX,
        read_timeout=settings.read_seconds,
        max_pool_connections=settings.streams + 2,
        retries={"total_max_attempts": 1},
        # A part is given as a view of shared memory, which the library would refuse, or copy.
        parameter_validation=False,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": settings.addressing, "payload_signing_enabled": False},
        tcp_keepalive=True,
        user_agent_extra="muster",
    )
    return session.create_client("s3", settings.region, endpoint_url=settings.endpoint, config=config)


def _session() -> Any:
    """botocore's, but it keeps little of its data."""
    import botocore.session

    session = botocore.session.get_session()
    loader = session.get_component("data_loader")
    loader.file_loader = _DataFiles(loader.file_loader)
    return session


class _DataFiles:
    """Loads botocore's data files, without the 7 MB that say where each of AWS' hundreds of services is.

    The data of other services is dropped while it is parsed, because holes in the memory of a rank become its upload
    process' own memory.
    """

    def __init__(self, files: Any) -> None:
        self.exists = files.exists

    def load_file(self, path_without_suffix: str) -> Any:
        hook = _without_other_services if path_without_suffix.endswith("endpoints") else None
        for suffix, opened in ((".json", open), (".json.gz", gzip.open)):
            with contextlib.suppress(FileNotFoundError), opened(path_without_suffix + suffix, "rb") as file:
                return json.loads(file.read(), object_pairs_hook=hook)
        return None


def _without_other_services(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {
        key: {name: value.get(name, {}) for name in ("s3", "sts")} if key == "services" else value
        for key, value in pairs
    }


def _assuming(session: Any, role_arn: str) -> Any:
    """A session whose credentials are the role's, renewed before they expire."""
    from botocore.credentials import AssumeRoleCredentialFetcher, DeferredRefreshableCredentials

    fetcher = AssumeRoleCredentialFetcher(
        session.create_client, session.get_credentials(), role_arn, extra_args={"RoleSessionName": "muster-trainer"}
    )
    assumed = _session()
    assumed._credentials = DeferredRefreshableCredentials(method="assume-role", refresh_using=fetcher.fetch_credentials)
    return assumed
