"""What `training_file` and `validation_file` name: an address that the workers can read."""

from __future__ import annotations

from dataclasses import dataclass

from muster.api.auth import Principal
from muster.api.files import repository
from muster.api.openai.requests import refused
from muster.api.services import Services
from muster.contract.address import AddressError, data_address
from muster.contract.names import FILE_ID


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
    if FILE_ID.fullmatch(named):
        async with services.database.read() as session:
            row = await repository.get(session, named)
        if row is None or caller.role_in(row.project) is None:
            raise refused(param, f"there is no file {named}; upload it first")
        return TrainingFile(named, form, (row.checked or {}).get("samples"))
    if "://" not in named:
        words = "must be an uploaded file's id, or an address that the workers can read (s3://bucket/chat.jsonl)"
        raise refused(param, f"{words}, not {named[:200]!r}")
    try:
        data_address(named)
    except AddressError as error:
        raise refused(param, str(error)) from None
    return TrainingFile(named, form)
