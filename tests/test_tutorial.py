"""The tutorial is true: its cells run in their order, without jupyter, and what they assert holds."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from processes import own_environment
from warm import warm

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "tutorial.ipynb"


def test_its_cells_run() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    code = "\n\n".join("".join(cell["source"]) for cell in cells)
    environment = own_environment(HF_HUB_OFFLINE="1")
    done = subprocess.run([*warm(), "-c", code], env=environment, capture_output=True, encoding="utf-8", timeout=250)
    assert done.returncode == 0, done.stderr
    assert "locret:retriever-retaining  4 of 4 right" in done.stdout
