"""Steps of a submission that need the core alone. `app.py` lists all of them, with those of the layers above."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.cluster_objects import namespace_problem, node_volume_problems
from muster.api.core.database.tables import EvaluationRow
from muster.api.core.jobs.repository import folder_of
from muster.api.core.limits import limit_problems, with_defaults
from muster.api.core.submission.drafts import InputCommit, SubmissionDraft
from muster.api.core.submission.facts import CommitOrigin, SubmissionFacts
from muster.local.sandbox import state_problems
from muster.plan.oddities import oddities_of
from muster.recipe.job_inputs import with_input_folder
from muster.words.address import AddressError, parse_address
from muster.words.base import DocumentProblem
from muster.words.environment import steers_processes
from muster.words.model_sources import FromCommit
from muster.words.names import DEFAULT_PROJECT, FILE_ID, Label
from muster.words.program import ARCHIVES


def project_defaults(draft: SubmissionDraft, facts: SubmissionFacts) -> SubmissionDraft:
    return replace(draft, spec=with_defaults(draft.spec, facts.limits))


def platform_defaults(draft: SubmissionDraft, facts: SubmissionFacts) -> SubmissionDraft:
    uri = facts.settings.default_checkpoint_uri
    if draft.spec.checkpoint.uri is not None or uri is None:
        return draft
    return replace(draft, spec=_with(draft.spec, checkpoint=_with(draft.spec.checkpoint, uri=uri)))


def process_settings(draft: SubmissionDraft, facts: SubmissionFacts) -> SubmissionDraft:
    """Refuse settings that have another meaning, or none, or belong to the platform, where workers are processes of
    this machine."""
    if facts.in_containers:
        return draft
    faults = []
    for index, variable in enumerate(draft.spec.runtime.env):
        at = f"spec.runtime.env[{index}]"
        if steers_processes(variable.name):
            words = f"{variable.name} decides what a process of this machine loads, and may only be set where workers"
            faults.append(DocumentProblem(f"{at}.name", f"{words} run in containers; leave it out"))
        if variable.value_from and variable.value_from.config_map_key_ref:
            words = "there are no ConfigMaps on this machine; give a value, or a secretKeyRef"
            faults.append(DocumentProblem(f"{at}.valueFrom.configMapKeyRef", words))
    return draft.with_faults(*faults, *state_problems(draft.spec, facts.settings.layout))


def project_namespace(draft: SubmissionDraft, facts: SubmissionFacts) -> SubmissionDraft:
    """A project with a namespace has no other; `default` has those that an admin lists, and that are nobody else's.

    On one machine a namespace is only a part of a job's name, so `default` has all that are nobody else's, unless an
    admin lists some.
    """
    project, settings, namespace = facts.project, facts.settings, draft.namespace
    if settings.is_system_namespace(namespace):
        words = f"namespace {namespace!r} is the platform's or Kubernetes' own, and never a job's; name another"
        return draft.with_faults(DocumentProblem("metadata.namespace", words))
    if project.namespace is None:
        free = settings.cluster == "local" and facts.limits.namespaces is None and facts.namespace_holder is None
        problem = None if free else namespace_problem(namespace, facts.limits, facts.namespace_holder)
        return draft.with_faults(problem) if problem else draft
    if project.namespace == namespace:
        return draft
    own = f"has the namespace {project.namespace!r} alone"
    words = f"project {project.name!r} {own}; leave it out, or name its project by the label {Label.PROJECT}"
    return draft.with_faults(DocumentProblem("metadata.namespace", words))


def program_source(draft: SubmissionDraft, facts: SubmissionFacts) -> SubmissionDraft:
    """Refuse a program's source that no worker can unpack: most of all a folder, which is the submitter's own."""
    source = draft.spec.program.source if draft.spec.program is not None else None
    if source is None or FILE_ID.fullmatch(source):
        return draft
    address = parse_address(source)
    if address.is_absolute and address.path.endswith(ARCHIVES):
        return draft
    words = f"must be an uploaded file's id or an archive's address (.tar.gz), not {source[:200]!r}"
    problem = DocumentProblem("spec.program.source", f"{words}; `muster submit` uploads a folder by itself")
    return draft.with_faults(problem)


def node_volumes(draft: SubmissionDraft, facts: SubmissionFacts) -> SubmissionDraft:
    """Refuse folders of nodes where a policy of the cluster would refuse the workers that mount them."""
    if not facts.in_containers or facts.settings.host_paths:
        return draft
    return draft.with_faults(*node_volume_problems(draft.spec.runtime))


def project_limits(draft: SubmissionDraft, facts: SubmissionFacts) -> SubmissionDraft:
    return draft.with_faults(*limit_problems(draft.spec, facts.limits, draft.project))


def commit_origins(draft: SubmissionDraft, facts: SubmissionFacts) -> SubmissionDraft:
    """Put the folder of the job in the place of `job`, and the number of the step in the place of `best` or `last`, so
    that the job reads the same commit whenever it starts. Where the platform keeps the commits itself, refuse the
    folder of a job that people of the project do not see."""
    for path, source in draft.spec.input_commits().items():
        if (origin := facts.origins.get(path)) is None:
            continue
        at = f"spec.{path}"
        if origin.hidden:
            words = f"is the folder of no job of project {draft.project!r}; name the job by `job`"
            draft = draft.with_faults(DocumentProblem(f"{at}.uri", words))
        elif origin.foreign:
            words = f"is not the folder of the job {source.job!r} that `job` names; leave one of the two out"
            draft = draft.with_faults(DocumentProblem(f"{at}.uri", words))
        elif origin.newest is None and source.uri is not None:
            continue  # the folder of a job whose record is gone, or of none
        elif origin.folder is None:
            draft = draft.with_faults(_no_commit(draft, path, source, origin))
        else:
            spec = with_input_folder(draft.spec, path, origin.folder, origin.step)
            draft = replace(draft, spec=spec, inputs=(*draft.inputs, InputCommit(at, origin.folder, origin.step)))
    return draft


def _no_commit(draft: SubmissionDraft, path: str, source: FromCommit, origin: CommitOrigin) -> DocumentProblem:
    at, newest = f"spec.{path}", origin.newest
    if newest is None:
        where = f"namespace {draft.namespace!r}"
        where += f" of project {draft.project!r}" if draft.project != DEFAULT_PROJECT else ""
        return DocumentProblem(f"{at}.job", f"there is no job {source.job!r} in {where}")
    offer = origin.older and f"; an older job of that name has it: name that one by its id, {origin.older}"
    if isinstance(source.step, int):
        words = f"has no checkpoint of step {source.step}{offer or '; `muster checkpoints ls` lists them'}"
        return DocumentProblem(f"{at}.step", f"job {source.job!r} ({newest.id}) {words}")
    wait = "; wait for its first checkpoint (event checkpoint.committed)"
    return DocumentProblem(f"{at}.job", f"job {source.job!r} ({newest.id}) has no checkpoint yet{offer or wait}")


def evaluated_job(draft: SubmissionDraft, facts: SubmissionFacts) -> SubmissionDraft:
    """Find the job whose checkpoints the program evaluates, and put its folder beside its name. It need not have a
    checkpoint yet."""
    program = draft.spec.program
    if program is None or program.after is None:
        return draft
    after, at = program.after, "spec.program.after"
    if not facts.evaluated:
        words = f"there is no job {after.job!r} in namespace {draft.namespace!r} of project {draft.project!r}"
        return draft.with_faults(DocumentProblem(f"{at}.job", words))
    target = facts.evaluated[0]
    if after.uri is not None:  # of what an earlier submission became, such as a clone
        asked = parse_address(after.uri)
        match = next((row for row in facts.evaluated if folder_of(row) == asked), None)
        if match is None:
            words = f"is not the folder of the job {after.job!r} that `job` names; leave it out"
            return draft.with_faults(DocumentProblem(f"{at}.uri", words))
        target = match
    if (target.spec.get("program") or {}).get("after"):
        words = f"job {after.job!r} ({target.id}) is an evaluation, which saves no checkpoints"
        return draft.with_faults(DocumentProblem(f"{at}.job", f"{words}; name the job that it evaluates"))
    folder = folder_of(target)
    if folder is None:
        return draft.with_faults(
            DocumentProblem(f"{at}.job", f"job {after.job!r} ({target.id}) does not say where it commits")
        )
    spec = _with(draft.spec, program=_with(program, after=_with(after, uri=str(folder))))
    caller = facts.caller
    granted = str(caller.role_in(draft.project)) if caller.signed_in is not None else None

    async def remember(session: AsyncSession, job_id: str) -> None:
        session.add(EvaluationRow(job_id=job_id, target_id=target.id, granted=granted))
        await session.flush()

    return replace(draft, spec=spec, companions=(*draft.companions, remember))


def warnings(draft: SubmissionDraft, facts: SubmissionFacts) -> SubmissionDraft:
    """Warn of settings that are valid but seldom intended, or that look wrong from this machine."""
    training = draft.spec.training
    if training is None:
        return draft
    odd = tuple(DocumentProblem(f"spec.training.{path}", words) for path, words in oddities_of(training))
    sources = ((f"spec.training.{path}.source", source.source) for path, source in training.sources())
    missing = (warning for path, source in sources if (warning := _source_warning(path, source)))
    return replace(draft, warnings=(*draft.warnings, *odd, *missing))


def _source_warning(path: str, source: str) -> DocumentProblem | None:
    if FILE_ID.fullmatch(source) or ("://" in source and not source.startswith("file:")):
        return None
    address = parse_address(source)
    if address.scheme != "file" or any(letter in address.path for letter in "*?["):
        return None
    if not address.is_absolute:
        return DocumentProblem(
            path, "is a relative path: a worker does not share your working directory; give an absolute one"
        )
    try:
        if not address.local.exists():
            there = f"there is no {address.path[:300]!r} on the API's machine"
            return DocumentProblem(path, f"{there}; the workers need it on theirs")
    except (OSError, AddressError):
        return DocumentProblem(path, "can't be looked up on the API's machine")
    return None


def _with(model: Any, /, **changes: Any) -> Any:
    return model.model_copy(update=changes)
