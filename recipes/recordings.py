"""The recordings that come with the embedded models: with them the first start imports no model class either.

python recipes/recordings.py            # after a change of the models, or of what a recording holds
"""

from __future__ import annotations

import itertools
import logging
import sys
from pathlib import Path

from sakiyomi.core.embedded import EMBEDDED, embedded
from sakiyomi.kernels.build import native
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.loading import load_model
from sakiyomi.model_executor.loading.recorder import save_recording
from sakiyomi.model_executor.loading.recording import SHIPPED

DTYPES = ("bfloat16", "float32")
"""As embedded models are stored, and as `sakiyomi demo` runs them."""


def record(name: str, dtype: str, place: Path) -> bool:
    """Write the recording of an embedded model, made from the model itself, and say whether that worked."""
    native()  # waits for the kernels
    loaded = load_model(name, dtype=dtype)
    runner = build_runner(loaded.model, owned=True)
    runner.record()
    return save_recording(embedded(name), None, None, None, loaded.tokenizer, runner, place)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    for name, dtype in itertools.product(EMBEDDED, DTYPES):
        if not record(name, dtype, embedded(name) / SHIPPED.format(dtype)):
            sys.exit(f"{name} cannot be recorded")
