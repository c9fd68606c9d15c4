"""`/submit`: a job as YAML, written by hand, by a form, from an example or from another job; checked while it is typed.

One form with three buttons: `write` makes the YAML of the fields, `check` says what would become of it, `submit` does
it. Without a script each answers with the whole page; the script asks the same and takes what it needs of the answer.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from muster.documents.examples import ExampleJob, examples, on_this_machine
from muster.documents.yaml_text import write_yaml
from muster.plan.plan_words import describe_eviction, does_not_fit, plan_facts
from muster.web import api
from muster.web.api import ApiError, JobRow, Principal, Scope, Services, ServicesDependency
from muster.web.notes import PageNote, go_on
from muster.web.rendering import page
from muster.web.session import Posted, Visitor
from muster.web.submit_form import FIELDS, METHODS, MODELS, is_filled_in, read_fields, wishes_of, written

router = APIRouter(prefix="/submit", include_in_schema=False)

_Name = Annotated[str, Query(max_length=64, pattern=r"^[^\x00:]*$")]
_KEY_BYTES = 16


@dataclass(frozen=True)
class TypedForm:
    """Content of the form. `key` makes repeated submissions of the same text create one job."""

    text: str
    key: str
    fields: dict[str, str] = field(default_factory=lambda: dict(FIELDS))
    original: JobRow | None = None
    sent: bool = False  # somebody's words, and no text to start from
    by_form: bool = False  # the text is the form's


@router.get("")
async def show_submit(
    request: Request,
    services: ServicesDependency,
    visitor: Visitor,
    example: _Name = "",
    clone: _Name = "",
    model: _Name = "",
    step: Annotated[str, Query(pattern=r"^([0-9]{1,18}|last|best)$")] = "best",
) -> Response:
    """Show the form, empty or with an example's text, with another job's document under a free name, or from a
    checkpoint of the job `model`."""
    key = secrets.token_urlsafe(_KEY_BYTES)
    if clone:
        row = await api.find(services, visitor, clone)
        document = api.editable(visitor, row, await api.free_name(services, row))
        return await _show(request, services, visitor, TypedForm(write_yaml(document), key, original=row))
    if model:
        row = await api.find(services, visitor, model)
        begun = FIELDS | {"model": row.name, "step": step} | await _guessed(services, visitor)
        begun["project"] = row.project
        text = await _text_of(services, visitor, begun)
        return await _show(request, services, visitor, TypedForm(text, key, begun, sent=True, by_form=True))
    if example and example not in examples():
        raise ApiError("not_found", f"There is no example {example!r}; there are {', '.join(examples())}.")
    text = _started(services, examples()[example]) if example else ""
    return await _show(request, services, visitor, TypedForm(text, key))


def _started(services: Services, example: ExampleJob) -> str:
    return on_this_machine(example) if services.settings.cluster == "local" else example.text


@router.post("")
async def submit(request: Request, services: ServicesDependency, form: Posted) -> Response:
    """A refusal shows the page again, with what was typed and each fault at its line."""
    cloned = form.one("cloned")
    typed = TypedForm(
        # A browser sends line ends as CR LF, whatever was typed.
        text=form.one("document").replace("\r\n", "\n"),
        key=form.one("key"),
        fields=read_fields(form.fields),
        original=await api.find(services, form.caller, cloned) if cloned else None,
        sent=True,
    )
    if form.one("verb") == "write":
        text = await _text_of(services, form.caller, typed.fields)
        typed = TypedForm(text, typed.key, typed.fields, sent=True, by_form=True)
    elif form.one("verb") in ("submit", "anyway"):
        checked = await api.drafting.check(services, form.caller, typed.text, typed.original)
        # A plan that would be refused is left to the submission, which answers a repeated one with its job.
        if checked.plan is not None and (
            checked.faults or (form.one("verb") == "submit" and does_not_fit(checked.plan))
        ):
            return await _show(request, services, form.caller, typed, kept_back=True)
        try:
            made = await api.drafting.submit(services, form.caller, typed.text, typed.key, typed.original)
        except ApiError as refused:
            if refused.status >= 500:
                raise
            return await _show(request, services, form.caller, typed, refused)
        words = "This was submitted before, and this is its job." if made.replayed else "Submitted."
        return go_on(f"/jobs/{made.document['id']}", [PageNote(True, words)])
    return await _show(request, services, form.caller, typed)


async def _text_of(services: Services, caller: Principal, fields: dict[str, str]) -> str:
    return written(await api.drafting.propose(services, caller, wishes_of(fields)))


async def _show(
    request: Request,
    services: Services,
    visitor: Principal,
    typed: TypedForm,
    refused: ApiError | None = None,
    kept_back: bool = False,
) -> Response:
    """Show the page with what would become of the text. `kept_back` says that it was to be submitted, and was not: it
    would fail at its start, or does not fit into memory."""
    checked = api.drafting.CheckedText()
    if typed.text.strip() and visitor.may(Scope.WRITE):
        checked = await api.drafting.check(services, visitor, typed.text, typed.original)
    faults = checked.faults or (refused.errors if refused is not None else ())
    plan = checked.plan or {}
    return page(
        request,
        "submit.html",
        visitor,
        refused.status if refused is not None else 200,
        current="submit",
        typed=typed,
        fields=typed.fields | ({} if typed.sent else await _guessed(services, visitor)),
        by_form=typed.by_form,
        unfolded=is_filled_in(typed.fields) or not typed.text,
        faults=faults,
        # Of what is no fault of the text, such as a full queue.
        refusal=refused.detail if refused is not None and not faults else "",
        lines=typed.text.split("\n"),
        plan=checked.plan,
        kept_back=kept_back,
        estimate=plan.get("estimate"),
        unknown=plan.get("notEstimated", ""),
        facts=plan_facts({**plan, "admission": None}) if plan else [],
        evictions=[describe_eviction(each) for each in (plan.get("admission") or {}).get("evictions", [])],
        warnings=[(each["path"], each["message"]) for each in plan.get("warnings", ())],
        cheapest=_cheapest(plan.get("estimate") or {}),
        gaps=(plan.get("estimate") or {}).get("gaps", ()),
        examples=tuple(examples().values()),
        methods=METHODS,
        models=MODELS,
        projects=await api.project_names(services, visitor),
        may_submit=visitor.may(Scope.WRITE),
    )


async def _guessed(services: Services, visitor: Principal) -> dict[str, str]:
    """Return the guessed fields: as many GPUs as the largest node has."""
    nodes = (await api.overview(services, visitor, waiting_max=0)).nodes
    return {"gpus": str(max((node["gpus"] for node in nodes["items"]), default=0)), "project": visitor.home}


def _cheapest(estimate: dict[str, Any]) -> str:
    """Return the cheapest of the gangs that the job fits into, if its price is known."""
    option = estimate.get("cheapest")
    if not option or option.get("price") is None:
        return ""
    return f"{option['nodes']} × {option['instanceType']}, {option['price']:,.2f} {estimate['currency']}"
