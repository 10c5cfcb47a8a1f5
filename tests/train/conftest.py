"""Training runs of tests end with measurements that are as short as they may be, and without pictures."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Continuations of 128 tokens and two runs each are for figures that somebody reads."""
    monkeypatch.setattr("sakiyomi.train.taught.NEW_TOKENS", 24)
    monkeypatch.setattr("sakiyomi.train.medusa.NEW_TOKENS", 24)
    monkeypatch.setattr("sakiyomi.train.acceptance.RUNS", 1)
    monkeypatch.setattr("sakiyomi.train.draft.MEASURED_TOKENS", 16)


@pytest.fixture(autouse=True)
def few_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without matplotlib, unless a test asks for ``pictures``: drawing takes longer than training."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("sakiyomi.train.plot._panels", lambda *widths: (None, []))


@pytest.fixture
def pictures() -> None:
    """The test's runs draw them."""
