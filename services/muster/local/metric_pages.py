"""Pages of metrics in Prometheus' text format, from several programs put together as one, each with labels of its own.

Launchers put the pages of their ranks together, and the operator of one machine those of all jobs: so one known address
is scraped instead of many random ones. https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# A rank that is stopped accepts a connection and never answers; Prometheus gives all of us 10 s.
PAGE_SECONDS, PAGES_AT_ONCE, PAGE_BYTES_MAX = 1.5, 16, 4_000_000

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*\})?([ \t].*)")
_SUFFIXES = ("", "_bucket", "_sum", "_count")
_LABEL = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)=")


def gathered(places: Sequence[tuple[Mapping[str, str], int]]) -> str:
    """Return the merged metric pages of this machine's programs, given as (labels, port). A program that does not
    answer is left out."""
    with ThreadPoolExecutor(PAGES_AT_ONCE, "metrics") as pool:
        pages = list(pool.map(lambda place: _page(place[1]), places))
    return merged((labels, page) for (labels, _), page in zip(places, pages, strict=True))


def _page(port: int) -> str:
    try:
        with _DIRECT.open(f"http://127.0.0.1:{port}/metrics", timeout=PAGE_SECONDS) as reply:
            text: bytes = reply.read(PAGE_BYTES_MAX)
    except (OSError, ValueError):
        return ""
    return text.decode(errors="replace")


def merged(pages: Iterable[tuple[Mapping[str, str], str]]) -> str:
    """Merge the metric pages, given as (labels, page), into one in which each metric stands once, with the samples of
    all. A label that a sample has already is kept, and an invalid line is left out."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for labels, page in pages:
        own = [(name, f'{name}="{_escaped(value)}"') for name, value in labels.items()]
        family = ""
        for line in page.split("\n"):
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if all(line.split(" ", 2)[1] != other.split(" ", 2)[1] for other in head):
                    head.append(line)
            elif match := _SAMPLE.fullmatch(line):
                name = match[1]
                mine = family if name.removeprefix(family) in _SUFFIXES else name
                samples.setdefault(mine, []).append(_labelled(name, match[2] or "", match[3], own))
    families = dict.fromkeys([*heads, *samples])
    lines = [line for family in families for line in (*heads.get(family, ()), *samples.get(family, ()))]
    return "".join(f"{line}\n" for line in lines)


def _labelled(name: str, braces: str, rest: str, own: list[tuple[str, str]]) -> str:
    inner = braces[1:-1].rstrip(",")
    has = set(_LABEL.findall(inner))
    new = ",".join(text for label, text in own if label not in has)
    both = f"{new},{inner}" if new and inner else new or inner
    return f"{name}{{{both}}}{rest}" if both else f"{name}{rest}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
