"""Write the chart's CustomResourceDefinition from the models, or with --check say whether it is what they say today."""

import sys
from pathlib import Path

import yaml

from muster.recipe.schema import definition

PLACE = Path(__file__).resolve().parent.parent / "helm" / "muster" / "files" / "trainingjobs.yaml"
HEADER = "# Made by tools/generate_crd.py from services/muster/{words,recipe}; change the models instead.\n"


def main() -> int:
    wanted = HEADER + yaml.safe_dump(definition(), sort_keys=False, width=120, allow_unicode=True)
    if "--check" not in sys.argv[1:]:
        PLACE.parent.mkdir(parents=True, exist_ok=True)
        PLACE.write_text(wanted)
        return 0
    if PLACE.exists() and PLACE.read_text() == wanted:
        return 0
    print(f"{PLACE.name} is not what the models say: run `python tools/generate_crd.py`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
