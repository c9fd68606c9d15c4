"""Errors of the API: problem+json (RFC 9457) with a stable code, which can also be read as OpenAI's `error`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse

from muster.words.base import DocumentProblem

MEDIA_TYPE = "application/problem+json"


@dataclass(frozen=True)
class ErrorKind:
    """One stable code: its HTTP status, its title and what to do about it (served at `/api/v1/problems/<code>`)."""

    status: int
    title: str
    advice: str


KINDS: dict[str, ErrorKind] = {
    "invalid_document": ErrorKind(
        400, "The body can't be read", "Send one JSON or YAML document; the detail names the place."
    ),
    "invalid_request": ErrorKind(
        400, "The request is not valid", "`error.param` names the first fault, and `errors` names every one."
    ),
    "unauthorized": ErrorKind(
        401, "A token is needed", "Send `Authorization: Bearer muster_…` with a token that is not revoked."
    ),
    "forbidden": ErrorKind(403, "This token may not do that", "Use a token with the scope that the detail names."),
    "not_found": ErrorKind(
        404, "There is nothing at this address", "The addresses are listed at /api/v1/openapi.json."
    ),
    "job_not_found": ErrorKind(404, "There is no such job", "`muster ls` lists the jobs that you may see."),
    "model_not_found": ErrorKind(
        404, "There is no such model", "List the models with `client.models.list()`; an administrator maps base models."
    ),
    "checkpoint_not_found": ErrorKind(
        404, "There is no such checkpoint", "`muster checkpoints ls JOB` lists a job's checkpoints."
    ),
    "data_report_not_found": ErrorKind(
        404, "There is no report of the data", "The first rank writes it when it has prepared the data."
    ),
    "profile_not_found": ErrorKind(
        404, "There is no such file of a profile", "`muster profile JOB --list` lists the job's profiles."
    ),
    "log_not_found": ErrorKind(404, "There is no such log", "`muster get JOB` lists the attempts and their workers."),
    "project_not_found": ErrorKind(
        404, "There is no such project", "`muster projects ls` lists the projects that you may see."
    ),
    "person_not_found": ErrorKind(404, "There is no such person", "An admin lists people with `muster people ls`."),
    "member_not_found": ErrorKind(404, "There is no such member", "`muster projects get PROJECT` lists the members."),
    "token_not_found": ErrorKind(404, "There is no such token", "`muster tokens ls` lists the tokens."),
    "secret_not_found": ErrorKind(404, "There is no such secret", "`muster secrets ls` lists the project's secrets."),
    "webhook_not_found": ErrorKind(
        404, "There is no such webhook", "`muster webhooks ls` lists the project's webhooks."
    ),
    "delivery_not_found": ErrorKind(
        404, "There is no such message", "`muster webhooks deliveries NAME` lists the messages."
    ),
    "sweep_not_found": ErrorKind(404, "There is no such sweep", "`muster sweep ls` lists the sweeps."),
    "file_not_found": ErrorKind(404, "There is no such file", "`muster files ls` lists the files."),
    "export_file_not_found": ErrorKind(
        404, "The model has no such file", "Accept application/json to see which it has."
    ),
    "method_not_allowed": ErrorKind(
        405, "This address does not know that method", "The Allow header names those that it knows."
    ),
    "name_taken": ErrorKind(
        409, "A live job has this name", "Wait for it, cancel it, or choose another name; jobId tells which."
    ),
    "queue_full": ErrorKind(
        409, "The queue is full", "Submit again when a queued job has begun, or ask an admin for a higher quota."
    ),
    "sweep_name_taken": ErrorKind(
        409, "A live sweep has this name", "Wait for it, cancel it, or choose another name; sweepId tells which."
    ),
    "sweep_finished": ErrorKind(
        409, "The sweep has ended", "Its trials are kept; create a new sweep with `muster sweep FILE`."
    ),
    "project_exists": ErrorKind(
        409, "The project exists", "`muster projects set` changes it; a new project needs another name."
    ),
    "webhook_exists": ErrorKind(
        409, "The webhook exists", "`muster webhooks set` changes it; a new webhook needs another name."
    ),
    "namespace_taken": ErrorKind(
        409, "The namespace has jobs of another project", "Choose another namespace, or wait until they have ended."
    ),
    "project_in_use": ErrorKind(409, "The project has jobs", "Delete its jobs first, or keep the project."),
    "job_live": ErrorKind(409, "The job has not ended", "Cancel it, and delete it when it has ended."),
    "job_needed": ErrorKind(
        409, "Somebody needs the job's checkpoints", "The detail says who; the record alone may go."
    ),
    "job_finished": ErrorKind(
        409, "The job has ended", "A finished job does not change; `muster clone JOB` runs it again."
    ),
    "job_not_running": ErrorKind(
        409,
        "The job does not train now",
        "Try again when its phase is Running; `muster why JOB` says what it waits for.",
    ),
    "profile_under_way": ErrorKind(
        409, "A profile is being made", "`muster profile JOB --list` shows it; try again when it is complete."
    ),
    "job_cancelling": ErrorKind(
        409, "The job is being cancelled", "A cancelled job can't be resumed; `muster clone JOB` runs it again."
    ),
    "checkpoint_unusable": ErrorKind(
        409,
        "The checkpoint can't be read or marked",
        "The detail says why; `muster checkpoints ls JOB` lists the usable ones.",
    ),
    "file_in_use": ErrorKind(409, "A live job reads the file", "Wait until the job has ended, or cancel it."),
    "file_unfit": ErrorKind(409, "The file is not ready", "`muster files get FILE-ID` says why."),
    "upload_conflict": ErrorKind(
        409, "The upload is not where the request begins", "HEAD tells the offset; send the rest from there."
    ),
    "upload_protocol": ErrorKind(412, "This version of tus is not spoken", "Send `Tus-Resumable: 1.0.0`."),
    "upload_busy": ErrorKind(
        423, "Another request is sending this upload", "Repeat it after `Retry-After` seconds; nothing was lost."
    ),
    "checksum_mismatch": ErrorKind(
        460, "The bytes are not those of the checksum", "What this request brought was dropped: send it again."
    ),
    "body_too_slow": ErrorKind(
        408, "The body came too slowly", "Send the whole body at once; nothing was done, so repeat the request."
    ),
    "body_too_large": ErrorKind(
        413, "The body is too large", "A job document is small; data belongs into files that it names."
    ),
    "file_too_large": ErrorKind(
        413, "The file is larger than may be", "The detail says which limit; delete files, or ask for a higher one."
    ),
    "unsupported_media_type": ErrorKind(
        415, "This content type is not read", "Send application/json or application/yaml."
    ),
    "range_unsatisfiable": ErrorKind(416, "There are no such bytes", "Content-Range says how many there are."),
    "invalid_job": ErrorKind(422, "The job is not valid", "`errors` names every fault with its path."),
    "invalid_sweep": ErrorKind(422, "The sweep is not valid", "`errors` names every fault with its path and trial."),
    "invalid_project": ErrorKind(422, "The project is not valid", "`errors` names every fault with its path."),
    "invalid_person": ErrorKind(422, "The person is not valid", "`errors` names every fault with its path."),
    "invalid_token": ErrorKind(422, "The token is not valid", "`errors` names every fault with its path."),
    "invalid_annotations": ErrorKind(
        422, "The tags or the note are not valid", "`errors` names every fault with its path."
    ),
    "invalid_webhook": ErrorKind(422, "The webhook is not valid", "`errors` names every fault with its path."),
    "invalid_secret": ErrorKind(422, "The secret is not valid", "`errors` names every fault with its path."),
    "invalid_parameter": ErrorKind(422, "A parameter is not valid", "`errors` names every fault with its path."),
    "invalid_cursor": ErrorKind(
        422, "The cursor is not one of ours", "Use `nextCursor` of the page before, unchanged, or none."
    ),
    "idempotency_key_reused": ErrorKind(
        422, "This Idempotency-Key belongs to another request", "Use a new key for a new request."
    ),
    "model_unreadable": ErrorKind(
        424, "The model can't be read", "The detail names the place; the API reads with credentials of its own."
    ),
    "rate_limited": ErrorKind(429, "This token asks too often", "Wait for `Retry-After` seconds; nothing was done."),
    "too_many_streams": ErrorKind(
        429, "Too many streams are open", "Close some, or use a webhook; the detail says how many there may be."
    ),
    "model_busy": ErrorKind(429, "The model is busy", "Nothing was done. Ask again after `Retry-After` seconds."),
    "model_unavailable": ErrorKind(
        503, "The model can't be asked", "The detail says why; `muster serve JOB` prints how to serve it elsewhere."
    ),
    "internal": ErrorKind(
        500, "Something is wrong in the API", "Retry; if it stays, show the requestId to whoever runs Muster."
    ),
    "job_leaving": ErrorKind(409, "The cluster still has the job", "Repeat it after `Retry-After` seconds."),
    "secrets_unavailable": ErrorKind(
        503, "Secrets can't be kept", "The detail says why and what to do; nothing was changed."
    ),
    "sign_in_unavailable": ErrorKind(
        503, "The sign-in's provider does not answer", "Retry after `Retry-After` seconds, or use a token."
    ),
    "storage_unavailable": ErrorKind(
        503, "The checkpoint folder can't be used", "The detail names the place and the next step; nothing was changed."
    ),
    "no_space": ErrorKind(507, "The disk of the files is full", "Free some space; what has arrived is kept."),
    "export_unavailable": ErrorKind(424, "Models can't be made here", "The detail says why, and where they can."),
    "inspection_unavailable": ErrorKind(
        424, "The data can't be inspected here", "The detail says why, and where they can."
    ),
    "files_unavailable": ErrorKind(
        503, "Files can't be kept", "The detail says why and what to do; nothing was changed."
    ),
    "database_unavailable": ErrorKind(
        503,
        "The database does not answer",
        "The detail says if anything was changed. Retry with the same Idempotency-Key after `Retry-After` seconds.",
    ),
}


@dataclass
class ApiError(Exception):
    """A request that ends without its result. `detail` says cause, place and next step in a sentence or two."""

    code: str
    detail: str
    errors: Sequence[DocumentProblem] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.code in KINDS, f"{self.code} is not in errors.KINDS"

    @property
    def status(self) -> int:
        return KINDS[self.code].status

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


ACTIONS = ("cancel", "suspend", "resume", "clone")  # of a job: POST /jobs/{id}:cancel
COMMIT_ACTIONS = ("pin", "unpin", "export")  # of a commit: POST /jobs/{id}/checkpoints/{step}:pin


def job_not_found(job: str) -> ApiError:
    if ":" in job:  # no id has one
        action = job.partition(":")[2][:64]
        noun, actions = ("checkpoint", COMMIT_ACTIONS) if "/checkpoints/" in job else ("job", ACTIONS)
        detail = f"A {noun} knows no action {action!r}; there are POST …:{', :'.join(actions)}."
        return ApiError("not_found", detail)
    return ApiError(
        "job_not_found", f"There is no job with the id {job!r}; `muster ls` lists the jobs that you may see."
    )


def invalid_parameter(path: str, message: str, did_you_mean: str | None = None) -> ApiError:
    problem = DocumentProblem(path, message, did_you_mean)
    return ApiError("invalid_parameter", str(problem), errors=(problem,))


def disk_full() -> ApiError:
    detail = "The disk of the database is full, so nothing was changed. Free some space on it; nothing else is needed."
    return ApiError("database_unavailable", detail, headers={"Retry-After": "30"})


def database_unavailable(
    detail: str = "The database is locked or can't be reached, so nothing was changed. Retry in a moment.",
) -> ApiError:
    return ApiError("database_unavailable", detail, headers={"Retry-After": "2"})


def database_busy(seconds: float, what: str = "connection to the database") -> ApiError:
    """Return the error for a request that waited in vain for what other requests of this process hold."""
    detail = (
        f"The API is busy: no {what} came free within {seconds:g} s, so nothing was changed. Retry in a moment; fewer "
        "requests and streams at a time get through sooner, and GET /readyz says whether the database answers."
    )
    return database_unavailable(detail)


def commit_unanswered() -> ApiError:
    return database_unavailable(
        "The database went away before it said whether it keeps the change. Repeat the request with the same "
        "Idempotency-Key in a moment; without one, look first whether the change is there."
    )


# What OpenAI's API says by status; all other refusals are invalid_request_error.
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_PLACE = re.compile(r"^(query|path|header|body)\.")


def problem_body(error: ApiError, instance: str, request_id: str) -> dict[str, Any]:
    kind = KINDS[error.code]
    faults = [
        {
            "path": fault.path,
            "message": fault.message,
            **({"didYouMean": fault.did_you_mean} if fault.did_you_mean else {}),
            **({"line": fault.line, "column": fault.column} if fault.line else {}),
        }
        for fault in error.errors
    ]
    return {
        "type": f"/api/v1/problems/{error.code}",
        "title": kind.title,
        "status": kind.status,
        "detail": error.detail,
        "code": error.code,
        "instance": instance,
        "requestId": request_id,
        "errors": faults,
        "error": {
            "message": error.detail,
            "type": _OPENAI_TYPES.get(kind.status, "server_error" if kind.status >= 500 else "invalid_request_error"),
            "param": _PLACE.sub("", error.errors[0].path) if faults else None,
            "code": error.code,
        },
        **error.extra,
    }


def problem_headers(error: ApiError) -> dict[str, str]:
    # OpenAI's clients retry 409 by themselves unless told otherwise; no refusal of ours is cured by repeating it.
    retry = {"x-should-retry": "false"} if error.status < 500 else {}
    return {**retry, **error.headers}


def problem_response(request: Request, error: ApiError) -> JSONResponse:
    body = problem_body(error, request.url.path, str(request.scope.get("request_id", "")))
    return JSONResponse(body, status_code=error.status, headers=problem_headers(error), media_type=MEDIA_TYPE)
