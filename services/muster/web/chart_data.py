"""Data of <job-curves>, as a page embeds it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from markupsafe import Markup

from muster.web.api import JobRow


def sources(jobs: Iterable[tuple[JobRow, Any]]) -> Markup:
    """Return the data that <job-curves> draws, for its script tag; None for curves that it fetches itself."""
    listed = [{"name": row.name, "src": f"/jobs/{row.id}/curves", "curves": curves} for row, curves in jobs]
    return Markup(json.dumps(listed, allow_nan=False).replace("<", "\\u003c"))  # noqa: S704
