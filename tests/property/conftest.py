"""Deterministic examples, so that a run that passes passes again; no deadline, for machines that are busy.

``--hypothesis-profile=search`` looks for new counterexamples.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile("fixed")
