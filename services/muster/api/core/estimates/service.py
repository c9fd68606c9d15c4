"""Estimates of jobs: from their documents, what storage shows of their models and data, and what other jobs did."""

from __future__ import annotations

import functools
import os

from muster.api.core.callers import Principal
from muster.api.core.errors import ApiError
from muster.api.core.estimates.records import measured
from muster.api.core.services import Services
from muster.api.core.submission.drafts import invalid_job
from muster.api.core.submission.service import SubmissionService
from muster.plan.estimate import NO_ESTIMATE, Estimate
from muster.recipe.document import Submission
from muster.recipe.job_inputs import with_addresses
from muster.recipe.training import TrainingConfig
from muster.storage.errors import StorageError
from muster.storage.estimating import estimate_with_storage
from muster.words.address import parse_address
from muster.words.base import DocumentProblem, UserError

# A model's headers are some requests to its storage. A client waits 20 seconds for an answer.
SECONDS_MAX = 15.0


async def estimate(services: Services, caller: Principal, submission: Submission) -> Estimate:
    """Raises ApiError invalid_job and model_unreadable, and what `draft` raises."""
    drafted = await services[SubmissionService].draft(caller, submission)
    if drafted.faults:
        raise invalid_job(drafted.faults)
    if drafted.spec.training is None:
        raise invalid_job((DocumentProblem("spec.program", NO_ESTIMATE),))
    source = drafted.spec.training.model.source
    if source and services.settings.cluster == "kubernetes" and parse_address(source).scheme == "file":
        raise ApiError("model_unreadable", f"{source} lies on the workers' disks, which the API does not see.")
    records = await measured(services.database, caller)
    machine = _machine_bytes() if services.settings.cluster == "local" else None
    spec = with_addresses(drafted.spec, drafted.files)
    folder = parse_address(source or spec.training_config.data.train[0].source)
    work = functools.partial(estimate_with_storage, spec, services.prices, records, machine)
    try:
        return await services.folders.run(folder, work, seconds=SECONDS_MAX)
    except UserError as error:
        raise invalid_job((DocumentProblem(_place(drafted.spec.training), str(error)),)) from None
    except StorageError as error:
        raise ApiError("model_unreadable", f"{error}") from None


def _place(training: TrainingConfig) -> str:
    return "spec.training.adapter" if training.adapter and training.model.shape else "spec.training.model"


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
