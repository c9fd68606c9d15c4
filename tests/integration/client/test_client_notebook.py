"""examples/first-job.ipynb runs from its first cell to its last, against a platform as a user has it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from tests.integration.cli.house import House

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_notebook_uploads_trains_plots_exports_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "jupyter"))
    notebook = nbformat.read(EXAMPLES / "first-job.ipynb", as_version=4)
    house = House(tmp_path / "house")
    try:
        house.up("--stop-jobs")
        for name, value in house.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("MUSTER_SERVER", raising=False)  # found as the `muster up` of this state folder
        done = nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    finally:
        house.close()
    said = [_said(cell) for cell in done.cells if cell.cell_type == "code"]
    uploaded, live, curve, table, commits, files, loaded = (said[cell] for cell in (1, 4, 5, 6, 7, 10, 11))
    assert "'ready'>, 400)" in uploaded
    assert "Succeeded" in live
    assert "<progress value='60' max='60'" in live
    assert "<polyline points=" in curve
    assert "steps 1 to 60" in curve
    assert "tokens_per_second" in table
    assert "(60, " in commits
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "first-model").iterdir()
    }
    assert "model.safetensors" in files
    loss = re.search(r"^loss (\d+\.\d+)$", loaded, re.MULTILINE)  # after what the libraries warn of
    assert loss is not None, loaded
    assert float(loss[1]) < math.log(260) - 2, "what was loaded has learnt something: a new model's loss is log(260)"
    assert all(not cell.get("outputs") for cell in nbformat.read(EXAMPLES / "first-job.ipynb", 4).cells), "kept clean"


def _said(cell: Any) -> str:
    """All that the cell shows, also as HTML."""
    shown = [output.get("data", {}) for output in cell.outputs]
    texts = [str(data.get("text/html", data.get("text/plain", ""))) for data in shown]
    return "\n".join([*texts, *(output.get("text", "") for output in cell.outputs)])
