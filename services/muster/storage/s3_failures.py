"""Meaning of S3 failures: retry, slow down, or give up with advice for the user."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FailureKind(Enum):
    AGAIN = "again"
    SLOWER = "slower"  # the store is throttling: everybody waits
    GONE = "gone"  # no such object
    BEYOND = "beyond"  # the object ends before the range
    BROKEN = "broken"  # an upload in parts can't go on; a new one may
    TAKEN = "taken"  # a conditional write found the key in use
    LATER = "later"  # useless to repeat now; another attempt may find fresh credentials, a right clock, free space
    FINAL = "final"  # until a person changes something


class ArrivedDamaged(Exception):
    """The store's answer shows that it got other bytes than were sent."""


@dataclass(frozen=True)
class S3Failure:
    kind: FailureKind
    message: str  # cause and next step
    retry_after_seconds: float | None = None


_THROTTLED = {
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "TooManyRequests",
    "BandwidthLimitExceeded",
}
_PASSING = {
    "InternalError",
    "ServiceUnavailable",
    "RequestTimeout",
    "OperationAborted",
    "ConditionalRequestConflict",
    "BadDigest",
    "XAmzContentChecksumMismatch",  # MinIO's BadDigest
    "MalformedXML",  # ours is not: it was damaged on its way
}
_REGION = "the bucket is in another region; set MUSTER_S3_REGION to it"
_EXPIRED = "the credentials have expired and could not be renewed; give the worker fresh ones"
_LATER = {
    *("ExpiredToken", "ExpiredTokenException", "InvalidToken", "RequestTimeTooSkewed"),
    *("QuotaExceeded", "XMinioStorageFull"),
}
_PERMISSIONS = "s3:ListBucket, GetObject, PutObject, DeleteObject and AbortMultipartUpload"
_ADVICE = {
    "NoSuchBucket": "the bucket does not exist; create it or correct the address",
    "AccessDenied": f"access denied; the worker's role needs {_PERMISSIONS} there",
    "AllAccessDisabled": "the bucket is disabled; ask its owner",
    "InvalidAccessKeyId": "the access key does not exist; give the worker valid credentials",
    "SignatureDoesNotMatch": "the secret key is wrong; give the worker valid credentials",
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "InvalidToken": "the session token is not valid; give the worker valid credentials",
    "RequestTimeTooSkewed": "this machine's clock is wrong; synchronize it (chrony, systemd-timesyncd)",
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "KMS.NotFoundException": "the KMS key does not exist; correct MUSTER_S3_KMS_KEY_ID",
    "KMS.DisabledException": "the KMS key is disabled; enable it or change MUSTER_S3_KMS_KEY_ID",
    "QuotaExceeded": "the bucket's quota is used up; free space or raise it",
    "XMinioStorageFull": "the store is full; free space",
    "EntityTooLarge": "the object is larger than the store allows",
    "403": "access denied; check the worker's credentials and the bucket's policy",
}


def classify(error: Exception) -> S3Failure:
    """Classify an exception of botocore, urllib3 or the socket. An unknown one is not retried now."""
    from botocore.exceptions import (
        ClientError,
        ConnectionError,
        CredentialRetrievalError,
        HTTPClientError,
        IncompleteReadError,
        NoCredentialsError,
        NoRegionError,
    )
    from urllib3.exceptions import HTTPError

    if isinstance(error, ClientError):
        return _classify_response(error)
    if isinstance(error, ArrivedDamaged):
        return S3Failure(FailureKind.AGAIN, f"it was damaged on its way: {error}")
    if isinstance(error, NoCredentialsError):
        return S3Failure(
            # The service that hands out a role's credentials on a node also fails so when too many ask it at once.
            FailureKind.LATER,
            "no AWS credentials were found; give the worker a role, or keys in its environment",
        )
    if isinstance(error, CredentialRetrievalError):
        return S3Failure(FailureKind.AGAIN, f"the credentials could not be fetched: {error}")
    if isinstance(error, NoRegionError):
        return S3Failure(FailureKind.FINAL, "no AWS region is set; set MUSTER_S3_REGION")
    if isinstance(error, ConnectionError | HTTPClientError | IncompleteReadError | HTTPError | OSError | EOFError):
        return S3Failure(FailureKind.AGAIN, f"the store can't be reached or broke off: {_short(error)}")
    return S3Failure(FailureKind.LATER, f"{type(error).__name__}: {_short(error)}")


def error_code(error: Exception) -> str:
    """The code of a store's refusal, `NotImplemented` for every status 501; empty for what is no answer of a store.

    botocore's errors of connections have a `response` too: None.
    """
    response = getattr(error, "response", None) or {}
    if response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 501:
        return "NotImplemented"
    return str(response.get("Error", {}).get("Code", ""))


def _classify_response(error: Exception) -> S3Failure:
    response, code = getattr(error, "response", {}), error_code(error)
    about = response.get("ResponseMetadata", {})
    status = int(about.get("HTTPStatusCode", 0))
    headers = about.get("HTTPHeaders", {})
    retry_after = headers.get("retry-after", "")
    after = float(retry_after) if retry_after.replace(".", "", 1).isdigit() else None
    if code in _THROTTLED or status in (429, 503):
        return S3Failure(FailureKind.SLOWER, f"the store asks to slow down ({code or status})", after)
    if code in ("NoSuchKey", "NoSuchVersion") or (status == 404 and code not in _ADVICE and code != "NoSuchUpload"):
        return S3Failure(FailureKind.GONE, "there is no such object")
    if code in ("NoSuchUpload", "NotImplemented", "InvalidPart"):  # rclone's server takes each part only once
        return S3Failure(FailureKind.BROKEN, f"the store can't go on with the upload ({code})")
    if code == "InvalidRange" or status == 416:
        return S3Failure(FailureKind.BEYOND, "the object ends before the range")
    if code == "PreconditionFailed" or status == 412:
        return S3Failure(FailureKind.TAKEN, "the key is in use")
    if code in _PASSING or (status >= 500 and code not in _ADVICE):
        return S3Failure(FailureKind.AGAIN, f"the store failed ({code or status})", after)
    region = headers.get("x-amz-bucket-region")
    advice = _ADVICE.get(code) or (_ADVICE["PermanentRedirect"] if status in (301, 307) else None)
    advice = f"{advice} ({region})" if advice and region and "MUSTER_S3_REGION" in advice else advice
    message = str(response.get("Error", {}).get("Message", ""))[:200]
    kind = FailureKind.LATER if code in _LATER else FailureKind.FINAL
    return S3Failure(kind, advice or f"refused with {code or status}: {message}")


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
