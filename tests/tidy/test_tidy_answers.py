"""Questions of new users: the index leads to the page that answers each, by a row in words like theirs."""

import re

import pytest
from tests.tidy.repository import ROOT

DOCS = ROOT / "docs"
# The question, words of the index's row, the page, and what it says in answer.
QUESTIONS = [
    ("Which keys may the YAML have, with defaults?", "every key of a job", "job.md", "default `"),
    ("How do I use the 8 GPUs of this machine?", "use my GPUs", "gpu.md", "--gpus-per-node 8"),
    ("My CSV has other column names", "CSV with other columns", "data.md", "columns: {"),
    (
        "Train a finished job for more epochs",
        "for more epochs",
        "cookbook.md",
        "model: {from: {job: first, step: best}}",
    ),
    ("Score a finished model without training", "score a finished model", "evaluation.md", "muster evaluate"),
    ("W&B", "W&B", "tracking.md", "wandb:"),
    ("Out of memory: what now?", "out of memory", "troubleshooting.md", "activationCheckpointing"),
    ("HF_TOKEN for gated models", "gated", "models.md", "HF_TOKEN"),
    ("My own training loop", "a program of my own", "running-programs.md", "muster run"),
    ("Chat", "chat with a checkpoint", "generation.md", "muster chat"),
    ("Serve", "serve a model", "cookbook.md", "muster serve"),
]


@pytest.mark.parametrize(("words", "page", "answer"), [each[1:] for each in QUESTIONS], ids=[q[0] for q in QUESTIONS])
def test_the_index_leads_to_the_page_that_answers(words: str, page: str, answer: str) -> None:
    rows = [line for line in (DOCS / "index.md").read_text().splitlines() if line.startswith("|") and words in line]
    assert any(re.search(rf"\]\({re.escape(page)}[#)]", row) for row in rows), f"no row of {words!r} leads to {page}"
    assert answer in (DOCS / page).read_text()
