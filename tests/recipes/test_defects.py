"""Mistakes in text: the right answer stays one, and differs from what is given."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import numpy as np

from defects import OPENERS, SHORTEST_SLIP, Spoiler, sentences
from scores import edit_distance
from train_toys import stories


def test_sentences_have_plain_marks_and_the_commas_of_openers() -> None:
    found = sentences("One day Tom went out.\n\n“Look!” he said. ‘A  bird…’ Suddenly it flew.")
    assert found == ["One day, Tom went out.", '"Look!" he said.', "'A bird.'", "Suddenly, it flew."]
    assert sentences(" ".join(found)) == found


def test_every_kind_of_mistake_is_made_and_no_slip_is_a_word() -> None:
    texts = [" ".join(sentences(text)) for text in stories(200)]
    words = {word.lower() for text in texts for word in re.findall(r"[A-Za-z']+", text)}
    spoiler, rng = Spoiler(texts), np.random.default_rng(0)
    seen: Counter[str] = Counter()
    for text in texts:
        for make, weight in spoiler._kinds:
            assert weight > 0
            made = make(text, rng)
            if made == text:
                continue
            seen[make.__name__] += 1
            before, after = text.split(), made.split()
            if make.__name__ == "_slip":
                (right,), (slip,) = Counter(before) - Counter(after), Counter(after) - Counter(before)
                assert len(right) >= SHORTEST_SLIP
                assert re.sub("[^a-z']", "", slip.lower()) not in words
                assert edit_distance(right, slip) <= 2
            elif make.__name__ == "_twice":
                assert len(after) == len(before) + 1
                assert any(one == other for one, other in itertools.pairwise(after))
            elif make.__name__ == "_lower":
                assert made.lower() == text.lower()
            elif make.__name__ == "_joined":
                assert made.replace(" ", "") == text.replace(" ", "")
                assert len(after) == len(before) - 1
            else:
                assert len(made) == len(text) - 1
                assert made.count(",") == text.count(",") - 1
    assert set(seen) == {"_slip", "_twice", "_lower", "_joined", "_without_comma"}


def test_commas_are_taken_from_openers_and_before_speech_alone() -> None:
    rng = np.random.default_rng(1)
    make = Spoiler(["x"])._kinds[-1][0]
    for opener in OPENERS:
        assert make(f"{opener}, Tom ran, and fell.", rng) == f"{opener} Tom ran, and fell."
    assert make('Tom said, "Yes, I do."', rng) == 'Tom said "Yes, I do."'
    assert make("Tom ran, and fell.", rng) == "Tom ran, and fell."


def test_the_same_seed_makes_the_same_mistakes() -> None:
    texts = stories(30)
    spoiler = Spoiler(texts)
    first, again, other = (
        [spoiler.spoil(text, np.random.default_rng((seed, i))) for i, text in enumerate(texts)] for seed in (1, 1, 2)
    )
    assert first == again != other
    assert sum(one == text for one, text in zip(first, texts, strict=True)) < 3
