"""The base of what OpenAI's clients send, and the faults of it as they understand them."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from muster.api.core.errors import ApiError
from muster.words.base import DocumentProblem


class OpenAIRequest(BaseModel):
    """snake_case keys, no unknown ones, no silent conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


def invalid_request(faults: Sequence[DocumentProblem]) -> ApiError:
    """The refusal of a request; `error.param` names the first of its faults."""
    more = f" ({len(faults) - 1} more in `errors`)" if len(faults) > 1 else ""
    return ApiError("invalid_request", f"The request is not valid: {faults[0]}{more}", errors=tuple(faults))


def refused(param: str, words: str) -> ApiError:
    return invalid_request((DocumentProblem(param, words),))
