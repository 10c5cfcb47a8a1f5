"""The OpenAPI document is kept to: what it allows is served or refused in words, what it forbids is refused."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from server_toys import running, toy_llm

HOW: dict[str, Any] = {"max_examples": 12, "deadline": None, "derandomize": True, "database": None}
HOW["suppress_health_check"] = [*HealthCheck]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_path_keeps_to_its_document(mode: GenerationMode) -> None:
    tried: dict[str, int] = {}
    with running(toy_llm("none"), max_body=100_000_000) as (_, url):
        document = schemathesis.openapi.from_url(f"{url}/openapi.json")
        for found in document.get_all_operations():
            operation = found.ok()
            if mode is GenerationMode.NEGATIVE and operation.method != "post":
                continue  # they take everything

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(
                max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck]
            )
            def keeps(case: Case) -> None:
                body: Any = case.body
                if isinstance(body, dict) and isinstance(body.get("max_tokens"), int):
                    body["max_tokens"] = min(4, body["max_tokens"])  # the test is not for long texts
                # No document can say that the model must be the server's, or a prompt's tokens few.
                case.call_and_validate(base_url=url, excluded_checks=[positive_data_acceptance])
                tried[case.path] = tried.get(case.path, 0) + 1

            keeps()
    assert tried["/v1/completions"] > 5 and tried["/v1/chat/completions"] > 5
