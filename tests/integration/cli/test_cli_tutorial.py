"""docs/tutorial.md, typed as it stands: its shell blocks and files make one script, which has to end well. Then what
docs/cookbook.md says can be typed of the same model and data."""

import re
import shutil
import subprocess
import sys

import pytest
from tests.integration.cli.house import House
from tests.tidy.documents import FENCE
from tests.tidy.repository import ROOT

TITLE = re.compile(r'title="([^"]+)"')
# A test can't do this as a reader does: install into .venv, and take the port that every platform takes.
START = "make up ARGS=--detach"
START_HERE = ".venv/bin/muster up --detach --port 0"

# The cookbook's commands that this machine can run, for the tutorial's model: what is typed for each of them.
COOKBOOK = {
    "muster finetune tiny-model chats.jsonl --epochs 2 --dry-run": "",
    "muster data validate job.yaml": "muster data validate first.yaml",
    "muster data inspect train.jsonl --evaluation held-out.jsonl": (
        "muster data inspect chats.jsonl --evaluation held-out.jsonl"
    ),
    "muster estimate job.yaml": "muster estimate first.yaml",
    "muster secrets set wandb < key-file": "",
    "muster secrets set hf-token < token-file": "",
    "muster serve my-assistant": "muster serve first",
}
NOT_HERE = {
    "muster evaluate my-job --data held-out.jsonl": "a job of its own; test_cli_jobs.py scores a checkpoint",
    "muster export my-assistant --to my-model": "the tutorial types it",
    "muster sweep lr.yaml": "eight trainings; tests/integration/local/test_local_sweep.py runs a sweep",
    "muster sweep get lr --follow": "the same",
    "muster up --nodes 1 --gpus-per-node 1": "needs a GPU",
    "muster up --nodes 1 --gpus-per-node 8": "needs eight GPUs",
    "muster run --gpus 8 -- python train.py": "needs eight GPUs",
    "muster doctor --context my-cluster": "needs a cluster; tests/cluster has one",
    "muster --context my-cluster submit job.yaml": "the same",
}


def test_every_command_of_the_cookbook_is_typed_or_it_is_said_why_not() -> None:
    page = (ROOT / "docs" / "cookbook.md").read_text()
    blocks = [block["body"] for block in FENCE.finditer(page) if block["language"] == "sh"]
    commands = {line.partition("#")[0].strip() for block in blocks for line in block.splitlines()} - {""}
    assert commands - COOKBOOK.keys() - NOT_HERE.keys() == set()
    words = " ".join(page.split())
    assert [command for command in (*COOKBOOK, *NOT_HERE) if command not in words] == []


def script(text: str) -> str:
    """Return the page's shell blocks, and between them its files (`yaml title="NAME"`), as one script."""
    lines = ["set -euxo pipefail"]
    for block in FENCE.finditer(text):
        title = TITLE.search(block[0].partition("\n")[0])
        if title is not None:
            lines.append(f"cat > {title[1]} <<'END_OF_FILE'\n{block['body']}END_OF_FILE")
        elif block["language"] == "sh":
            lines.append(block["body"].rstrip())
    return "\n".join(lines) + "\n"


def test_shell_blocks_and_files_make_one_script() -> None:
    page = 'Do:\n\n```sh\na\nb\n```\n\n```yaml title="x.yaml"\nk: 1\n```\n\n```text\nprinted\n```\n\n```sh\nc\n```\n'
    assert script(page) == "set -euxo pipefail\na\nb\ncat > x.yaml <<'END_OF_FILE'\nk: 1\nEND_OF_FILE\nc\n"


def test_the_tutorial_starts_muster_by_make_up() -> None:
    assert script((ROOT / "docs" / "tutorial.md").read_text()).count(START) == 1
    planned = subprocess.run(
        ["make", "--dry-run", *START.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    # Among others: below another make, as in `make test`, it also says which folder it enters and leaves.
    assert ".venv/bin/muster up --detach" in planned.stdout.splitlines()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_tutorial_ends_in_a_model_that_was_talked_to_and_exported(house: House) -> None:
    clone = house.root / "muster"
    shutil.copytree(ROOT / "examples", clone / "examples")
    (clone / ".venv").symlink_to(sys.prefix)
    typed = script((ROOT / "docs" / "tutorial.md").read_text()).replace(START, START_HERE)
    output = house.root / "output"  # no pipe: the platform that stays in the background would hold it open
    with output.open("w") as file:
        code = subprocess.run(
            ["bash", "-c", typed], cwd=clone, env=house.environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        ).returncode
    said = output.read_text()
    assert code == 0, said
    assert "first succeeded: step 182/182" in said
    assert "> What is 6 plus 5?" in said, "a sample of the evaluation"
    exported = {path.name for path in (clone / "first" / "my-model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= exported
    assert "no `muster up` runs on" in house.muster("down", expect=1).stderr, "the last step stopped the platform"
    typed = "\n".join(
        [
            "set -euxo pipefail",
            f"../{START_HERE}",
            "head -n 20 chats.jsonl > held-out.jsonl; echo a-key > key-file; echo a-token > token-file",
            *(f"../.venv/bin/{here or command}" for command, here in COOKBOOK.items()),
            "../.venv/bin/muster down",
        ]
    )
    cooked = house.root / "cooked"
    with cooked.open("w") as file:
        code = subprocess.run(
            ["bash", "-c", typed], cwd=clone / "first", env=house.environ, stdin=subprocess.DEVNULL, stdout=file,
            stderr=file,
        ).returncode  # fmt: skip
    said = cooked.read_text()
    assert code == 0, said
