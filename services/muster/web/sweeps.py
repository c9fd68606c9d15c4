"""`/sweeps`: all sweeps that one may see; and one sweep: its best trial, what its parameters did, its trials."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response

from muster.web import api
from muster.web.api import ApiError, ServicesDependency
from muster.web.notes import PageNote, go_on
from muster.web.rendering import page
from muster.web.session import Posted, Visitor
from muster.web.sweep_view import parallel, short_names, value_text, weights

router = APIRouter(prefix="/sweeps", include_in_schema=False)

_COMPARED = 8  # the best trials, whose curves are compared: as many as /compare shows
SweepId = Annotated[str, Path(min_length=1, max_length=64, pattern=r"^[^\x00:]*$")]


@router.get("")
async def list_sweeps(
    request: Request,
    services: ServicesDependency,
    visitor: Visitor,
    cursor: Annotated[str | None, Query(max_length=200)] = None,
) -> Response:
    listing = await api.sweeps(services, visitor, cursor)
    return page(
        request,
        "sweeps.html",
        visitor,
        current="sweeps",
        sweeps=listing["items"],
        following=listing["nextCursor"],
        first=cursor is None,
        live=any(each["finishedAt"] is None for each in listing["items"]),
    )


@router.get("/{sweep_id}")
async def show_sweep(request: Request, services: ServicesDependency, visitor: Visitor, sweep_id: SweepId) -> Response:
    """Show the sweep of that id, or the newest of that name."""
    sweep = await api.sweep(services, visitor, sweep_id)
    parameters = list(sweep["sweep"]["parameters"])
    higher = sweep["metric"]["better"] == "higher"
    table = sorted(sweep["table"], key=lambda trial: _place(trial, higher))
    return page(
        request,
        "sweep.html",
        visitor,
        current="sweeps",
        sweep=sweep,
        table=table,
        parameters=list(zip(parameters, short_names(parameters), strict=True)),
        value_text=value_text,
        picture=parallel(sweep),
        weights=weights(sweep),
        compared=[trial["jobId"] for trial in table if trial["jobId"] and trial["job"]][:_COMPARED],
        may_act=api.may_act_on_sweep(visitor, sweep),
        live=sweep["finishedAt"] is None,
    )


def _place(trial: dict[str, Any], higher: bool) -> tuple[bool, float, int]:
    """The best value first, and those without one last."""
    value = trial["value"]
    return value is None, (-value if higher else value) if value is not None else 0.0, trial["number"]


@router.post("/{sweep_id}/cancel")
async def cancel_sweep(services: ServicesDependency, form: Posted, sweep_id: SweepId) -> Response:
    try:
        await api.cancel_sweep(services, form.caller, sweep_id)
    except ApiError as error:
        if error.status != 409:
            raise
        return go_on(f"/sweeps/{sweep_id}", [PageNote(False, error.detail)])
    return go_on(
        f"/sweeps/{sweep_id}", [PageNote(True, "No more trials start, and those that run are being cancelled.")]
    )


@router.post("/{sweep_id}/stop")
async def stop_trial(services: ServicesDependency, form: Posted, sweep_id: SweepId) -> Response:
    """Cancel one trial's job; the sweep goes on with the others."""
    sweep = await api.sweep(services, form.caller, sweep_id)
    if not api.may_act_on_sweep(form.caller, sweep):
        detail = f"Sweep {sweep['name']!r} is {sweep['owner']}'s; its owner or a maintainer of the project may do that."
        raise ApiError("forbidden", detail)
    trial = next((each for each in sweep["table"] if str(each["number"]) == form.one("trial")), None)
    if trial is None or trial["jobId"] is None:
        return go_on(
            f"/sweeps/{sweep_id}", [PageNote(False, "There is no such trial with a job; nothing was stopped.")]
        )
    try:
        await api.act(services, form.caller, trial["jobId"], "cancel")
    except ApiError as error:
        if error.status != 409:
            raise
        return go_on(f"/sweeps/{sweep_id}", [PageNote(False, error.detail)])
    words = f"Trial {trial['number']} is being cancelled. It keeps its checkpoints, and the sweep goes on."
    return go_on(f"/sweeps/{sweep_id}", [PageNote(True, words)])
