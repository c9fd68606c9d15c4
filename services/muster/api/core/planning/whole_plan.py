"""The plan of a submission: what the queue would do with it, what it would need, take and cost, and what would end it
at its start. REST's dry run, `muster submit`, the Python client and the page for submitting all show this one."""

from __future__ import annotations

import asyncio
from typing import Any

from muster.api.core.callers import Principal
from muster.api.core.errors import ApiError
from muster.api.core.estimates.service import estimate
from muster.api.core.services import Services
from muster.api.core.submission.schemas import finding
from muster.api.core.submission.service import SubmissionService
from muster.plan.advice import start_with
from muster.plan.estimate import NO_ESTIMATE, Estimate
from muster.plan.warnings import Warned
from muster.recipe.document import Submission
from muster.words.base import DocumentProblem, dump

# Somebody waits with the text before them, and the rest of the plan is worth showing without an estimate. A model's
# headers that are far away may take longer.
ESTIMATE_SECONDS_MAX = 4.0


async def whole_plan(services: Services, caller: Principal, submission: Submission) -> dict[str, Any]:
    """Return the dry run's reply (replies.Plan). Nothing is written.

    A plan that would be refused is not estimated. Raises ApiError as a submission does.
    """
    plan = await services[SubmissionService].plan(caller, submission)
    if not plan["accepted"]:
        return plan
    admitted = plan["admission"] or {}
    if services.settings.cluster == "local" and (
        start := start_with(admitted["code"], admitted["because"], plan["job"]["spec"])
    ):
        words = f"no room will ever come free for it here. {start}"
        plan = {**plan, "warnings": [*plan["warnings"], finding("warning", DocumentProblem("spec.gang", words))]}
    if submission.spec.program is not None:
        return {**plan, "notEstimated": NO_ESTIMATE}
    try:
        async with asyncio.timeout(ESTIMATE_SECONDS_MAX):
            estimated = await estimate(services, caller, submission)
    except TimeoutError:
        return {**plan, "notEstimated": "storage takes long to answer; `muster estimate` waits longer for it"}
    except ApiError as refused:
        if refused.code == "invalid_job":  # the job is valid: its model can't be trained
            return {**plan, "faults": [finding("would_fail", each) for each in refused.errors]}
        if refused.status >= 500 and refused.code != "model_unreadable":
            raise
        return {**plan, "notEstimated": refused.detail}
    return _with_estimate(plan, estimated)


def _with_estimate(plan: dict[str, Any], estimated: Estimate) -> dict[str, Any]:
    warnings = [*plan["warnings"], *_findings("warning", estimated.warnings)]
    return {
        **plan,
        "estimate": dump(estimated),
        "faults": _findings("would_fail", estimated.faults),
        "warnings": list({(each["path"], each["message"]): each for each in warnings}.values()),
    }


def _findings(code: str, warned: tuple[Warned, ...]) -> list[dict[str, str]]:
    return [finding(code, DocumentProblem(each.path, each.message)) for each in warned]
