"""Submissions as REST takes them, and the plan that it answers a dry run with."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from muster.api.core.submission.drafts import SubmissionDraft
from muster.recipe.document import JobSpec
from muster.replies.views import plan_view
from muster.words.base import DocumentProblem
from muster.words.names import API_VERSION, KIND


class DocumentMetadata(BaseModel):
    """Other keys of Kubernetes' ObjectMeta are allowed and ignored."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(
        pattern=r"^[a-z]([-a-z0-9]{0,46}[a-z0-9])?$", description="Unique among the live jobs of a namespace."
    )
    namespace: str | None = Field(default="default", pattern=r"^[a-z]([-a-z0-9]{0,46}[a-z0-9])?$")
    labels: dict[str, str] | None = Field(default={}, max_length=64)


class JobDocument(BaseModel):
    """Body of POST /jobs: the whole TrainingJob, as for `kubectl apply`. Parsed by contract.spec.parse_job."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid")

    api_version: str = Field(default=API_VERSION, pattern=f"^{API_VERSION}$")
    kind: str = Field(default=KIND, pattern=f"^{KIND}$")
    metadata: DocumentMetadata
    spec: JobSpec
    status: Any = Field(default=None, description="Ignored.")


class CloneRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str | None = Field(default=None, description="The new job's name; left out: `<name>-2`, `-3` …")
    spec: dict[str, Any] | None = Field(
        default=None, description="Changes, as a JSON merge patch (RFC 7396) on the spec."
    )


def plan_document(
    draft: SubmissionDraft, refusals: list[dict[str, str]], admission: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the plan without an estimate (planning.py adds it)."""
    view = plan_view(draft.name, draft.namespace, draft.labels, draft.spec)
    view["job"]["project"] = draft.project
    return {
        "accepted": not refusals,
        **view,
        "admission": admission,
        "refusals": refusals,
        "faults": [],
        "warnings": [finding("warning", problem) for problem in draft.warnings],
        "estimate": None,
        "notEstimated": "",
    }


def finding(code: str, problem: DocumentProblem) -> dict[str, str]:
    return {"code": code, "path": problem.path, "message": problem.message}
