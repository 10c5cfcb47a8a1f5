"""Settings of the whole suite, made before torch is imported."""

from __future__ import annotations

import os

# The tests' models are tiny: a second thread gains nothing, and on a busy machine two of them wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
