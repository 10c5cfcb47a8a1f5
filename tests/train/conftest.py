"""Training runs of tests end with measurements that are as short as they may be, and without pictures."""

from __future__ import annotations

import pytest

from train_toys import draw_nothing


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Continuations of 128 tokens and two runs each are for figures that somebody reads."""
    monkeypatch.setattr("sakiyomi.train.taught.NEW_TOKENS", 24)
    monkeypatch.setattr("sakiyomi.train.medusa.NEW_TOKENS", 24)
    monkeypatch.setattr("sakiyomi.train.acceptance.RUNS", 1)
    monkeypatch.setattr("sakiyomi.train.draft.MEASURED_TOKENS", 16)


@pytest.fixture(autouse=True)
def few_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """None, unless a test asks for ``pictures``."""
    if "pictures" not in request.fixturenames:
        draw_nothing(monkeypatch)


@pytest.fixture
def pictures() -> None:
    """The test's runs draw them."""
