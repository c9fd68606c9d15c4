"""How the golden folders are made: python -m tests.integration.checkpoint.golden.make v1

Only for a new version of the format, into a new folder; an existing one must stay readable as it is.
"""

import json
import sys
from pathlib import Path

from tests.integration.checkpoint.gang import run_gang

HERE = Path(__file__).parent


def main(name: str) -> None:
    folder = HERE / name
    if folder.exists():
        raise SystemExit(f"{folder} is there; a golden folder is never changed")
    said = run_gang(2, "fsdp", "train", folder.as_uri(), steps=1)
    (folder / "digests.json").write_text(json.dumps(said[0]["digests"]["1"], indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
