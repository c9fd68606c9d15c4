"""The site of the documents: Sphinx builds it without a warning, and nothing in it is fetched from elsewhere."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
FETCHED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"?((?:https?:)?//[^\"> ]+)")


@pytest.fixture(scope="module")
def settings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_conf", ROOT / "docs" / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_conf"] = module
    spec.loader.exec_module(module)
    return module


INDEX = """# Documents

## Start

| I want to … | read |
|---|---|
| begin | [tutorial.md](tutorial.md) |
| ask [a friend](faq.md#one) | [faq.md](faq.md), [tutorial.md](tutorial.md) |

## More

| I want to … | read |
|---|---|
| see all | `make docs` |
| know a key | [job.md](job.md#keys), `muster explain` |
"""


def test_the_sections_of_the_index_are_those_of_the_site(settings: ModuleType) -> None:
    entry = settings.Entry
    assert settings.sections(INDEX) == {
        "Start": [entry("tutorial", "begin"), entry("faq", "ask [a friend](faq.md#one)")],
        "More": [entry("job", "know a key")],
    }
    assert ":caption: More\n\njob\n```" in settings.navigation(INDEX)


def test_language_models_get_each_page_with_what_it_is_about(settings: ModuleType) -> None:
    titles = {"tutorial": "Tutorial", "faq": "Questions", "job": "The job"}
    text = settings.llms_text(INDEX, titles)
    assert text.startswith("# Muster\n\n> ")
    assert text.endswith("\n## More\n\n- [The job](_sources/job.md.txt): know a key\n")
    assert "- [Questions](_sources/faq.md.txt): ask a friend\n" in text


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` builds it, in a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    planned = subprocess.run(["make", "--dry-run", "docs"], cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = (line for line in planned.stdout.splitlines() if line.startswith(".venv/bin/sphinx-build "))
    command = line.replace(".venv/bin/sphinx-build", f"{sys.executable} -m sphinx").replace("build/", f"{folder}/")
    built = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder / "docs"


@pytest.mark.long
def test_every_document_is_a_page_and_is_found_by_the_search(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages - {path.stem for path in site.glob("*.html")} == set()
    index = (site / "searchindex.js").read_text()
    assert [page for page in pages if f'"{page}"' not in index] == []
    overview = (site / "llms.txt").read_text()
    links = re.findall(r"\]\((_sources/[^)]+)\)", overview)
    assert len(links) >= len(pages) - 1, "all but the index"
    assert [link for link in links if not (site / link).is_file()] == []


@pytest.mark.long
def test_nothing_of_the_site_comes_from_elsewhere(site: Path) -> None:
    fetched = {address for page in site.rglob("*.html") for address in FETCHED.findall(page.read_text())}
    assert fetched == set()
