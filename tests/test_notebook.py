"""The notebook among the examples."""

import re
import shutil
from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_notebook_trains_shows_a_tree_and_draws_a_curve(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    shutil.copytree(EXAMPLES / "demo_policy", tmp_path / "demo_policy")
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "40 steps in" in text and re.search(r"S1  before token \d+ of \d+: H = \d", text)
    assert any("image/png" in output.get("data", {}) for output in outputs)
