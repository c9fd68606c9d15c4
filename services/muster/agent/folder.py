"""A node's notices as a file: how the workers and the operator of `muster up` hear of them."""

from __future__ import annotations

import os
from pathlib import Path

from muster.words.base import dump_json
from muster.words.notices import NodeNotices


def write(folder: Path, notices: NodeNotices) -> None:
    """Replace `<folder>/<node>.json` whole; remove it where there is nothing to say."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{notices.node}.json"
    if not notices.notices:
        path.unlink(missing_ok=True)
        return
    beside = folder / f".{path.name}.{os.getpid()}"
    beside.write_text(dump_json(notices))
    beside.replace(path)
