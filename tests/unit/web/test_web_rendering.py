"""What pages make of text, of times and of long logs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from muster.web import assets
from muster.web.logs import PAGE_BYTES, line_before, search
from muster.web.rendering import HEADERS, clip, environment, query, time_element
from muster.web.session import local_path
from muster.web.sparkline import POINTS, SparklineCache
from muster.words.names import STEP_LOG
from muster.words.state_folder import StateFolder

ROOM = Path(assets.__file__).parent


def test_what_steers_a_terminal_is_not_shown_and_nothing_is_without_end() -> None:
    assert clip("\x1b[31mred\x1b[0m \u202eeno") == "red ·eno"
    assert clip("a" * 1_000_000, 10) == "aaaaaaaaa…"
    assert clip("short") == "short"


def test_commands_are_code_and_causes_are_words() -> None:
    made = environment().from_string("{{ a|code }}|{{ b|sentence }}|{{ c|sentence }}")
    shown = made.render(a="try `muster <b>` or `x`", b="out_of_memory: it's large", c="attempt 2_000 of my_job")
    assert shown == (
        "try <code>muster &lt;b&gt;</code> or <code>x</code>|Out of memory: it&#39;s large|Attempt 2_000 of my_job"
    )
    assert str(environment().from_string("{{ a|code }}").render(a="an odd ` one")) == "an odd ` one"


def test_everything_is_escaped() -> None:
    made = environment().from_string("{{ a }}|{{ b|time }}")
    assert made.render(a="<script>alert(1)</script>", b=None) == "&lt;script&gt;alert(1)&lt;/script&gt;|–"
    assert str(time_element(0.0)) == (
        '<time datetime="1970-01-01T00:00:00Z" data-form="moment" title="1970-01-01 00:00:00 UTC">'
        "1970-01-01 00:00 UTC</time>"
    )


def test_no_template_holds_what_the_policy_forbids() -> None:
    """Inline scripts, handlers and styles would not run; a page that needed them would be broken."""
    policy = HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    for path in (ROOM / "templates").glob("*.html"):
        text = path.read_text()
        assert not re.search(r"\sstyle=|\son\w+=|<style|javascript:|https?://", text), path.name
        assert not re.search(r"<script(?![^>]*(?:\ssrc=|type=\"application/json\"))", text), path.name
        assert "|safe" not in text, path.name


def test_every_file_has_an_address_and_what_is_vendored_its_licence() -> None:
    found = assets.all_assets()
    assert {"muster.css", "muster.js", "icon.svg", "vendor/idiomorph.LICENSE"} <= set(found.files)
    assert assets.address("muster.css") == f"/static/{found.version}/muster.css"
    with pytest.raises(AssertionError, match="is not there"):
        assets.address("none.css")
    assert sum(len(found.files[name].packed) for name in found.files if name.endswith((".js", ".css"))) < 300_000


def test_one_goes_on_to_a_place_here_only() -> None:
    for path in ("https://evil.example", "//evil.example", "/\\evil.example", "jobs", "/a\nb"):
        assert local_path(path) == "/jobs"
    assert local_path("/jobs/1?a=b") == "/jobs/1?a=b"
    assert query({"a": "1", "b": ""}, c=2) == "?a=1&c=2"


def test_a_long_log_is_searched_and_read_by_pages(tmp_path: Path) -> None:
    line = "x" * 99 + "\n"
    file = tmp_path / "log"
    file.write_text(line * 50_000 + "here is the NEEDLE\n" + line * 50_000)
    found = search(file, "needle", 0)
    assert (found.at, found.at_end) == (5_000_000, False)
    assert search(file, "needle", 5_000_019).at_end
    assert search(file, "x\nhere", 0).at == 4_999_900
    assert search(tmp_path / "none", "a", 0).at is None
    begin = line_before(file, 5_000_000)
    assert begin % 100 == 0
    assert 5_000_000 - PAGE_BYTES <= begin < 5_000_000
    assert line_before(file, 100) == 0


def test_a_hit_on_the_border_of_two_chunks_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.web.logs._CHUNK_BYTES", 10)
    file = tmp_path / "log"
    file.write_text("aaaa\nbbbneedlebbb\ncc\n")
    assert search(file, "needle", 0).at == 5
    monkeypatch.setattr("muster.web.logs.SEARCH_BYTES", 10)
    stopped = search(file, "cc", 0)
    assert (stopped.at, stopped.at_end) == (None, False)
    assert search(file, "cc", stopped.until).at == 18


def test_a_sparkline_reads_little_of_a_long_log(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    for number, steps in ((1, range(1, 5_001)), (2, range(4_001, 10_001))):
        file = state.worker("job", number, 0) / STEP_LOG
        file.parent.mkdir(parents=True)
        records = ({"step": step, "loss": 10_000.0 / step, "padding": "x" * 200} for step in steps)
        file.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 10001, "lo')
    sparklines = SparklineCache()
    found = sparklines.of(state, ["job", "none"])
    assert found["none"] == []
    assert 20 <= len(found["job"]) <= POINTS + 2
    assert found["job"][-1] == 1.0
    assert found["job"] == sorted(found["job"], reverse=True)
    assert sparklines.of(state, ["job"])["job"] is found["job"]
