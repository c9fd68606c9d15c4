"""A request's body as plain data: JSON or YAML, bounded in depth and size, all of it fit for JSON and databases."""

from __future__ import annotations

import json
import math
from typing import Any

import yaml
from fastapi import Request
from starlette.concurrency import run_in_threadpool

from muster.api.errors import ApiError

DEPTH_MAX = 64
NODES_MAX = 100_000  # after YAML's aliases are followed: ten lines of them can stand for a billion values
YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml")
_THREAD_FROM_BYTES = 20_000  # parsing less than this is quicker than asking a thread for it


async def read_document(request: Request, optional: bool = False) -> Any:
    """The body, decoded by its content type. An empty mapping for an empty body where that is allowed.

    Raises ApiError: unsupported_media_type, invalid_document.
    """
    body = await request.body()
    if optional and not body.strip():
        return {}
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type == "application/json":
        decode = _from_json
    elif media_type in YAML_TYPES:
        decode = _from_yaml
    else:
        shown = f"not {media_type[:100]!r}" if media_type else "but the request names none"
        raise ApiError("unsupported_media_type", f"The body must be application/json or application/yaml, {shown}.")
    if len(body) < _THREAD_FROM_BYTES:
        return decode(body)
    return await run_in_threadpool(decode, body)


def _from_json(body: bytes) -> Any:
    try:
        document = json.loads(body.decode(), parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise _unreadable(f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise _unreadable(f"not UTF-8: byte {error.start}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise _unreadable(f"not JSON: {error}") from None
    return _bounded(document)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _from_yaml(body: bytes) -> Any:
    try:
        text = body.decode()
        _check_depth(text)
        document = yaml.load(text, Loader=_LOADER)  # noqa: S506 - it is one of the two safe ones
    except UnicodeDecodeError as error:
        raise _unreadable(f"not UTF-8: byte {error.start}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise _unreadable(f"not YAML: {error.problem or error.context}{place}") from None
    except (yaml.YAMLError, ValueError, OverflowError, AttributeError) as error:
        # PyYAML's constructors raise plain errors for dates such as 2026-13-45 and for integers such as `0x`.
        raise _unreadable(f"not YAML: {str(error).splitlines()[0][:200]}") from None
    except RecursionError:
        raise _too_deep() from None
    return _bounded(document)


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _check_depth(text: str) -> None:
    """Refuse deep nesting before anything is built: libyaml's composer is recursive C and would end the process."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > DEPTH_MAX:
                raise _too_deep()
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _bounded(document: Any) -> Any:
    """The document, if JSON and every database can hold it."""
    waiting: list[tuple[Any, int]] = [(document, 1)]
    seen = 0
    while waiting:
        value, depth = waiting.pop()
        seen += 1
        if seen > NODES_MAX:
            raise _unreadable(f"more than {NODES_MAX:,} values")
        if depth > DEPTH_MAX:
            raise _too_deep()
        if isinstance(value, dict):
            for key, item in value.items():
                if not isinstance(key, str):
                    raise _unreadable(f"the key {key!r} must be text; put it in quotes")
                _check_text(key)
                waiting.append((item, depth + 1))
        elif isinstance(value, list):
            waiting += [(item, depth + 1) for item in value]
        elif isinstance(value, str):
            _check_text(value)
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise _unreadable(f"{value} is not a number that JSON knows")
        elif isinstance(value, int):
            if abs(value) > 2**63 - 1:
                raise _unreadable("a whole number of more than 64 bits")
        elif value is not None:
            raise _unreadable(f"a {type(value).__name__} ({value}) is not JSON; put it in quotes")
    return document


def _check_text(text: str) -> None:
    if "\x00" in text:
        raise _unreadable("a text with a NUL character")
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise _unreadable("a text with half a surrogate pair")


def _too_deep() -> ApiError:
    return _unreadable(f"nested deeper than {DEPTH_MAX} levels")


def _unreadable(what: str) -> ApiError:
    return ApiError("invalid_document", f"The body can't be read: {what}.")
