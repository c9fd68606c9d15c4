"""What <job-curves> is given to draw, as it stands in a page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from markupsafe import Markup

from muster.web.api import JobRow


def sources(jobs: Iterable[tuple[JobRow, Any]]) -> Markup:
    """What <job-curves> draws, as it stands in its script's tag; None for curves that it is to ask for itself."""
    listed = [{"name": row.name, "src": f"/jobs/{row.id}/curves", "curves": curves} for row, curves in jobs]
    return Markup(json.dumps(listed, allow_nan=False).replace("<", "\\u003c"))  # noqa: S704
