"""Compressed pages: for the reader's own browser, and never for a page that another site leads to."""

import gzip

import pytest
from fastapi import Request, Response

from muster.web.rendering import compress

PAGE = b"<p>a line of a table</p>" * 200


def answered(body: bytes = PAGE, **headers: str) -> Response:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return compress(Request({"type": "http", "headers": pairs}), Response(body, media_type="text/html"))


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_ones_own_browser_gets_a_page_in_fewer_bytes(site: str) -> None:
    response = answered(accept_encoding="gzip, br", sec_fetch_site=site)
    assert response.headers["content-encoding"] == "gzip"
    assert int(response.headers["content-length"]) == len(response.body) < len(PAGE) / 5
    assert gzip.decompress(response.body) == PAGE


@pytest.mark.parametrize(
    "headers",
    [
        {"accept_encoding": "gzip", "sec_fetch_site": "cross-site"},
        {"accept_encoding": "gzip", "sec_fetch_site": "same-site"},
        {"accept_encoding": "gzip"},
        {"sec_fetch_site": "none"},
    ],
)
def test_the_length_of_a_page_tells_no_other_site_of_its_content(headers: dict[str, str]) -> None:
    response = answered(**headers)
    assert (response.body, response.headers.get("content-encoding")) == (PAGE, None)
    assert response.headers["vary"] == "Accept-Encoding, Sec-Fetch-Site"


def test_little_is_sent_as_it_is() -> None:
    assert answered(b"[]", accept_encoding="gzip", sec_fetch_site="same-origin").body == b"[]"
