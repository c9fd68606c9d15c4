"""`/jobs/{id}/data`: what became of a job's data, and its first samples with what the loss counts of them."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from muster.web import api
from muster.web.api import ApiError, ServicesDependency
from muster.web.job import JobId, show
from muster.web.session import Visitor

router = APIRouter(prefix="/jobs/{job_id}/data", include_in_schema=False)


@router.get("")
async def show_data(request: Request, services: ServicesDependency, visitor: Visitor, job_id: JobId) -> Response:
    """The report that the job's first rank wrote when it had prepared the data."""
    row = await api.find(services, visitor, job_id)
    report, missing, fault = None, False, ""
    try:
        report = await api.data_report(services, visitor, job_id)
    except ApiError as error:
        missing = error.code == "data_report_not_found"
        if not missing and error.code != "storage_unavailable":
            raise
        fault = "" if missing else error.detail
    return await show(request, services, visitor, row, "data", report=report, missing=missing, fault=fault)
