"""Loading a model writes no line of other libraries; what else they have to say stays."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from processes import own_environment
from sakiyomi.core.foreign_notes import leave_out_foreign_notes


@pytest.mark.thorough
def test_a_model_is_loaded_without_a_line_of_others() -> None:
    """In a process of its own, with the model's classes: a recording would spare them, and torchao with them."""
    code = (
        "import sys\nfrom sakiyomi import LLM\nLLM('tales-draft', 'none', compile=False)\n"
        "print('torchao' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=own_environment(), capture_output=True, encoding="utf-8", check=True
    )
    assert done.stdout.strip() == "True" and done.stderr == ""


def test_only_known_lines_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    leave_out_foreign_notes()
    leave_out_foreign_notes()
    assert len(logging.getLogger("torchao").filters) == 1
    lines = {
        "torchao": ["Failed to load /x/_C.so: no", "int4 needs a newer GPU"],
        "torch.utils._pytree": ["<enum 'A'> is an Enum subclass and is now natively supported by torch", "other"],
    }
    for name, texts in lines.items():
        for text in texts:
            logging.getLogger(name).warning(text)
    assert [record.getMessage() for record in caplog.records] == ["int4 needs a newer GPU", "other"]
