"""Exports as REST shows and takes them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from muster.api.core.http.reply import Reply

Format = Literal["transformers", "peft"]
Dtype = Literal["keep", "bf16"]


class ExportFile(Reply):
    path: str
    bytes: int


class Export(Reply):
    """`making`: `done` of `total` bytes were read so far. `ready`: `bytes` is the archive's size, and `files` what
    is in it. `sent`: it was written to `to` as well."""

    state: Literal["making", "ready", "sent"]
    step: int
    done: int
    total: int
    bytes: int | None
    files: list[ExportFile]
    to: str | None


class ExportRequest(BaseModel):
    """Body of POST …:export."""

    model_config = ConfigDict(extra="forbid")

    format: Format = Field(default="transformers", description="The whole model, or its adapter alone.")
    dtype: Dtype = Field(default="keep", description="`bf16` halves what is in fp32.")
    ema: bool = Field(default=False, description="The mean of the weights, where the job kept one.")
    to: str | None = Field(default=None, max_length=2_000, description="s3://bucket/folder to write it to.")
