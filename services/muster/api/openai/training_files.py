"""What `training_file` and `validation_file` name: an address that the workers can read."""

from __future__ import annotations

from dataclasses import dataclass

from muster.api.auth import Principal
from muster.api.openai.requests import refused
from muster.api.services import Services
from muster.contract.address import AddressError, data_address


@dataclass(frozen=True)
class TrainingFile:
    """What a job reads. `examples` is None where nobody has counted them yet."""

    source: str
    format: str
    examples: int | None = None

    def as_source(self) -> dict[str, str]:
        return {"source": self.source, "format": self.format}


async def training_file(services: Services, caller: Principal, named: str, param: str, form: str) -> TrainingFile:
    """Raises ApiError invalid_request that names `param`."""
    if "://" not in named:
        words = "must be an address that the workers can read (s3://bucket/chat.jsonl, file:///data/chat.jsonl)"
        raise refused(param, f"{words}, not {named[:200]!r}")
    try:
        data_address(named)
    except AddressError as error:
        raise refused(param, str(error)) from None
    return TrainingFile(named, form)
