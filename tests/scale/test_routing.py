"""A conversation stays where its beginning is cached; load alone moves it, or its replica's end."""

from __future__ import annotations

import pytest

from sakiyomi.scale.routing import affinity_key, ranked

NAMES = ("one", "two", "three", "four")
KEYS = [f"conversation {i}" for i in range(400)]


def test_alike_everywhere_and_spread_over_all() -> None:
    firsts = [ranked(key, dict.fromkeys(NAMES, 0))[0] for key in KEYS]
    assert firsts == [ranked(key, dict.fromkeys(reversed(NAMES), 0))[0] for key in KEYS]
    assert all(firsts.count(name) > 60 for name in NAMES)  # of 400, 100 expected: five deviations


def test_a_replica_that_leaves_moves_its_own_conversations_alone() -> None:
    for key in KEYS:
        before = ranked(key, dict.fromkeys(NAMES, 0))
        assert ranked(key, dict.fromkeys(NAMES[:-1], 0)) == [name for name in before if name != NAMES[-1]]


def test_gives_way_at_four_requests_more_than_the_least_loaded() -> None:
    liked = ranked("a", dict.fromkeys(NAMES, 0))
    loads = dict.fromkeys(NAMES, 1)
    assert ranked("a", {**loads, liked[0]: 4}) == liked
    assert ranked("a", {**loads, liked[0]: 5}) == [*liked[1:], liked[0]]
    assert ranked("a", {**loads, liked[0]: 9, liked[1]: 7}) == [*liked[2:], liked[1], liked[0]]
    assert ranked("a", {}) == []


def chat(*turns: tuple[str, str]) -> dict[str, object]:
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def test_later_turns_have_the_key_of_the_first() -> None:
    first = chat(("system", "Be brief."), ("user", "Hello"))
    later = chat(("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi."), ("user", "How are you?"))
    assert affinity_key(first) == affinity_key(later)
    assert affinity_key(first) != affinity_key(chat(("system", "Be brief."), ("user", "Bye")))
    assert affinity_key(first) != affinity_key(chat(("user", "Hello")))
    assert affinity_key(first, "s1") == affinity_key(chat(("user", "else")), "s1") == "s1"


@pytest.mark.parametrize(
    "body", [{}, {"prompt": None}, {"prompt": [1, 2]}, {"messages": ["?"]}, {"messages": "?"}, {"input": "\ud800"}]
)
def test_any_body_has_a_key(body: dict[str, object]) -> None:
    assert ranked(affinity_key(body), dict.fromkeys(NAMES, 0))


def test_prompts_are_told_by_their_beginning() -> None:
    assert affinity_key({"prompt": "a" * 600}) == affinity_key({"prompt": "a" * 512 + "b"})
    assert affinity_key({"input": "a"}) == affinity_key({"prompt": "a"}) != affinity_key({"prompt": "b"})
