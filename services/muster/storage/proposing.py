"""A look at a model and at data, for the proposal of a job: for the API, and for a command without one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from muster.plan.proposal import ProposalFacts
from muster.recipe.training import TrainingConfig
from muster.storage.data_shape import examine
from muster.storage.errors import StorageError
from muster.storage.model_source import ModelFacts, model_facts
from muster.words.base import UserError


@dataclass(frozen=True)
class ProposalLook:
    """Result of a look. `model_fault` and `data_fault` say why no job could use them, `gaps` what can't be read from
    here."""

    facts: ProposalFacts
    model_fault: str = ""
    data_fault: str = ""
    gaps: tuple[str, ...] = ()


def look_for_proposal(training: TrainingConfig, same_disk: bool = True) -> ProposalLook:
    """Look at the model and the data of `proposal.preliminary`. `same_disk` is as in `examine`."""
    model, model_fault, gaps = _model(training)
    vocabulary = model.size.vocab_size if model is not None else None
    look, source = examine(training, same_disk, vocabulary), {}
    if look.suggested:
        source = dict(look.suggested)
        (first, *rest) = training.data.train
        first = type(first).model_validate(first.model_dump(exclude_unset=True, by_alias=True) | source)
        data = training.data.model_copy(update={"train": (first, *rest)})
        look = examine(training.model_copy(update={"data": data}), same_disk, vocabulary)
    # The task follows from the format, so that a format that is not for this one is no fault yet.
    faults = look.faults if look.shape is None else ()
    if look.shape is None and not faults:
        gaps += (look.gap,)
    facts = replace(_facts_of(model), data=look.shape, source=source)
    return ProposalLook(facts, model_fault, "; ".join(words for _, words in faults), gaps)


def look_at_model(training: TrainingConfig) -> ProposalLook:
    """Look at the model alone."""
    model, fault, gaps = _model(training)
    return ProposalLook(_facts_of(model), fault, gaps=gaps)


def _facts_of(model: ModelFacts | None) -> ProposalFacts:
    if model is None:
        return ProposalFacts()
    return ProposalFacts(parameters=model.size.parameters, position_limit=model.position_limit)


def _model(training: TrainingConfig) -> tuple[ModelFacts | None, str, tuple[str, ...]]:
    if training.model.from_ is not None and training.model.from_.uri is None:
        return None, "", ("the size of the model: only a server knows where a job's checkpoints are",)
    try:
        return model_facts(training), "", ()
    except UserError as error:
        return None, str(error), ()
    except StorageError as error:
        return None, "", (str(error),)
