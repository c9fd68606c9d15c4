"""Sphinx' settings for the documents' site: `make docs` builds it into build/docs, and a platform shows it at /docs.

The pages are written for GitHub and carry no directives. What a site needs beside them is made here from index.md:
the navigation, in its sections and in its order, and llms.txt, with what it says of each page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
ROW = re.compile(r"^\| (?P<about>[^|]*) \| (?P<pages>.*) \|$", re.MULTILINE)
PAGE = re.compile(r"\]\(([\w-]+)\.md")
# The site has no page for these: files beside docs/, and the folder of the decisions.
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./(?:README\.md|CHANGELOG\.md|examples)|decisions/?)\)")

project = "Muster"
html_title = "Muster"
html_theme = "furo"
html_show_copyright = False
html_static_path = ["../services/muster/web/static/icon.svg"]
html_favicon = "../services/muster/web/static/icon.svg"
html_theme_options = {"navigation_with_keys": True}
extensions = ["myst_parser"]
exclude_patterns = ["images"]
myst_heading_anchors = 4  # `page.md#a-heading`, by the rules of GitHub
suppress_warnings = ["misc.highlighting_failure"]  # an ellipsis in an example is no Python


@dataclass(frozen=True)
class Entry:
    """A page, and what index.md says that one finds there."""

    page: str
    about: str


def sections(index: str) -> dict[str, list[Entry]]:
    """Return the pages of each section of index.md in its order; a page belongs where it is named first."""
    parts = SECTION.split(index)[1:]
    seen: set[str] = set()
    found: dict[str, list[Entry]] = {}
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        entries = found.setdefault(title, [])
        for row in ROW.finditer(text):
            for page in PAGE.findall(row["pages"]):
                if page not in seen:
                    seen.add(page)
                    entries.append(Entry(page, row["about"]))
    return found


def navigation(index: str) -> str:
    """Return the directives that make each section a part of the sidebar, and the decisions the last."""
    trees = [(title, [entry.page for entry in entries]) for title, entries in sections(index).items()]
    trees.append(("Decisions", ["decisions/*"]))
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```\n"
        for title, pages in trees
    )


def llms_text(index: str, titles: dict[str, str]) -> str:
    """Return the site in the form of https://llmstxt.org: a link to each page's Markdown, with what it is about."""
    lines = [
        "# Muster",
        "",
        "> Runs LLM training jobs (pretraining, fine-tuning, preferences, rewards) on one machine or on Kubernetes, "
        "and restarts them by itself from verified checkpoints. One document, the TrainingJob, for REST, the `muster` "
        "command and kubectl.",
    ]
    for title, entries in sections(index).items():
        lines += ["", f"## {title}", ""]
        for entry in entries:
            lines.append(f"- [{titles[entry.page]}](_sources/{entry.page}.md.txt): {plain(entry.about)}")
    return "\n".join(lines) + "\n"


def plain(words: str) -> str:
    """Return Markdown without its links, in one line."""
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", words).strip()


def read_source(_: Sphinx, name: str, source: list[str]) -> None:
    if name == "index":
        source[0] += navigation(source[0])
    source[0] = OUTSIDE.sub(r"\1", source[0])


def write_llms_text(app: Sphinx, failure: Exception | None) -> None:
    if failure is None and app.builder.name == "html":
        titles = {page: title.astext() for page, title in app.env.titles.items()}
        (Path(app.outdir) / "llms.txt").write_text(llms_text((DOCS / "index.md").read_text(), titles))


def setup(app: Sphinx) -> None:
    app.connect("source-read", read_source)
    app.connect("build-finished", write_llms_text)
