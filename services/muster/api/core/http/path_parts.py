"""Parts of paths: names and ids of resources, and names that may have an action behind them: `/{name}` and
`/{name}:rotate`."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path
from starlette.convertors import Convertor, register_url_convertor

from muster.words.names import JOB_NAME

NO_NUL = r"^[^\x00]*$"  # PostgreSQL has no such text
JobId = Annotated[str, Path(description="The job's uid.", min_length=1, max_length=64, pattern=NO_NUL)]
ProjectName = Annotated[str, Path(max_length=48, pattern=f"^{JOB_NAME.pattern}$", description="The project's name.")]

_KIND = "without_action"


def without_action(parameter: str) -> str:
    """The part of a path for this parameter, which holds no action: so that GET …/120:pin is a method that the pin does
    not know, and not a step that is called `120:pin`."""
    return f"{{{parameter}:{_KIND}}}"


class _WithoutAction(Convertor[str]):
    regex = "[^/:]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor(_KIND, _WithoutAction())
