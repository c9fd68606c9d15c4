"""Parts of paths that hold a name, where others have an action behind it: `/{name}` and `/{name}:rotate`."""

from __future__ import annotations

from starlette.convertors import Convertor, register_url_convertor

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
