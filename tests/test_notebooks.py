"""The notebooks run from top to bottom, and hold what they say."""

import nbformat
import pytest
from common import NAMES, ROOT
from nbclient import NotebookClient

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, monkeypatch):
    framework = path.stem.split("_")[0]
    if framework not in NAMES:
        pytest.skip(f"needs {framework}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    notebook = nbformat.read(path, as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs")], "notebooks are kept without outputs"
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    for cell in notebook.cells:
        print("".join(output.get("text", "") for output in cell.get("outputs", [])))


def test_there_is_one_for_each_framework():
    assert [path.stem for path in NOTEBOOKS] == ["jax_tour", "torch_tour"]
