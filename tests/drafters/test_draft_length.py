"""Draft sizes: what each policy asks for after what it has seen."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from sakiyomi.core.params import SamplingParams
from sakiyomi.drafters.draft_length import (
    CLEAR,
    LOSS,
    MOST,
    MOST_NODES,
    PATIENCE,
    PROBE,
    PROBE_AGAIN,
    PROBE_EVERY,
    PROBE_LATEST,
    PROBE_ROUNDS,
    AutoSize,
    Costs,
    FixedSize,
    Heuristic,
    Phase,
    Size,
    TokenValue,
    make_policy,
    next_phase,
    shares,
)


def costs(draft: float = 0.1, slope: float = 0.02, overhead: float = 0.0) -> Costs:
    """A target step costs 1, every further row ``slope``."""
    return Costs(lambda rows: 1.0 + slope * (rows - 1), draft, overhead)


def after(accepted: float, rounds: int = 60, gamma: int = 4, seconds: float = 1.0, trees: bool = False) -> AutoSize:
    """Having seen drafts of which every token is accepted, or none, in turn, so that the mean is right."""
    policy, level = AutoSize(trees), 0.0
    for _ in range(rounds):
        policy.phase = Phase.TRYING
        kept = 0
        while kept < gamma:
            level += accepted
            if level < 1.0:
                break
            level -= 1.0
            kept += 1
        policy.observe(gamma, kept, seconds)
    return policy


def policy(**options: object) -> object:
    return make_policy(SamplingParams(**options))  # type: ignore[arg-type]


def test_names() -> None:
    assert policy(gamma=3).next(costs) == Size(3, 3)  # type: ignore[attr-defined]
    assert policy(gamma=3, tree="dynamic", nodes=9).next(costs) == Size(3, 9)  # type: ignore[attr-defined]
    assert policy(gamma=5, nodes=2).next(costs) == Size(2, 2)  # type: ignore[attr-defined]
    assert policy(gamma="heuristic").next(costs) == Size(5, 5)  # type: ignore[attr-defined]
    assert policy(gamma=4, nodes="heuristic").next(costs) == Size(4, 5)  # type: ignore[attr-defined]
    assert isinstance(policy(), AutoSize)
    assert isinstance(policy(tree="chain"), AutoSize)
    asked = policy(gamma=4, tree="best-first").next(costs)  # type: ignore[attr-defined]
    assert (asked.depth, asked.nodes, asked.worth.depth) == (4, MOST_NODES, 4)
    asked = policy(tree="static", nodes=9).next(costs)  # type: ignore[attr-defined]
    assert (asked.depth, asked.nodes) == (MOST, 9)


def test_heuristic_starts_at_five_and_moves_by_two_up_one_down() -> None:
    policy = make_policy(SamplingParams(gamma="heuristic"))
    asked = []
    for accepted in (5, 7, 2, 0, None, 7):
        asked.append(policy.next(costs).depth)
        policy.observe(0 if accepted is None else asked[-1], accepted or 0, 1.0)
    assert asked == [5, 7, 9, 8, 7, 7]
    assert policy.next(costs).depth == 9
    for _ in range(20):
        policy.observe(policy.next(costs).depth, 0, 1.0)
    assert policy.next(costs).depth == 1


def test_a_kept_length_is_the_next_requests_first() -> None:
    """What transformers' assistant does; without being asked for it every request begins at five."""
    kept = {"gamma": Heuristic(), "nodes": Heuristic()}
    first = make_policy(SamplingParams(gamma="heuristic-kept"), kept=kept)
    first.observe(5, 5, 0.1)
    first.observe(7, 3, 0.1)
    assert make_policy(SamplingParams(gamma="heuristic-kept"), kept=kept).next(costs) == Size(6, 6)
    assert make_policy(SamplingParams(gamma="heuristic"), kept=kept).next(costs) == Size(5, 5)
    tree = make_policy(SamplingParams(gamma=4, nodes="heuristic-kept"), kept=kept)
    assert tree.next(costs) == Size(4, 5)


def test_heuristic_nodes_grow_only_with_a_wholly_accepted_deepest_path() -> None:
    policy = make_policy(SamplingParams(gamma=4, nodes="heuristic"))
    assert isinstance(policy, FixedSize)
    sizes = []
    for depth, accepted in ((3, 3), (4, 3), (2, 2), (4, 0), (4, 0)):
        sizes.append(policy.next(costs).nodes)
        policy.observe(depth, accepted, 1.0)
    assert sizes == [5, 7, 6, 8, 7]


def test_acceptance_is_estimated_by_place() -> None:
    """The first token is always kept, the second never: the third is never reached and taken to be as the second."""
    policy = AutoSize()
    for _ in range(200):
        policy.observe(4, 1, 1.0)
    first, second = policy.alphas()
    assert first > 0.95 and second < 0.15


def test_more_is_drafted_where_more_is_accepted() -> None:
    asked = [after(rate).next(costs).depth for rate in (0.3, 0.6, 0.9)]
    assert asked == sorted(asked)
    assert asked[0] < asked[2] <= MOST


def test_less_is_drafted_where_drafting_costs_more() -> None:
    cheap, dear = (after(0.8).next(lambda c=c: costs(draft=c)).depth for c in (0.02, 0.4))
    assert cheap > dear


def test_a_draft_of_one_pass_costs_one_however_deep_it_is() -> None:
    policy, dear = after(0.6), costs(draft=0.5)
    assert policy._depth(dear) <= 1
    assert policy._depth(replace(dear, one_pass=True)) > 2
    crowded = costs(draft=0.2)
    assert crowded.bearable() < replace(crowded, one_pass=True).bearable()


def test_nothing_is_drafted_where_it_does_not_pay_but_now_and_then() -> None:
    """Probes come after 12 rounds, then twice as many, and so on."""
    policy = after(0.2)
    asked: list[int] = []
    for _ in range(12 * PROBE_EVERY):
        asked.append(policy.next(lambda: costs(draft=0.5)).depth)
        policy.observe(asked[-1], 0, 2.0 if asked[-1] else 1.0)
    probes = [i for i, depth in enumerate(asked) if depth and not asked[i - 1]]
    assert [i for i, depth in enumerate(asked) if depth][:PROBE_ROUNDS] == [*range(probes[0], probes[0] + PROBE_ROUNDS)]
    gaps = [after - before - PROBE_ROUNDS for before, after in itertools.pairwise([-PROBE_ROUNDS, *probes])]
    assert gaps == [PROBE_EVERY, 2 * PROBE_EVERY, 4 * PROBE_EVERY]
    assert max(asked) == PROBE


@pytest.mark.parametrize("trees", [False, True])
def test_a_measured_loss_switches_it_off_whatever_was_predicted(trees: bool) -> None:
    """Three of four tokens are accepted and the predicted costs are fine, but rounds take six times a plain one."""
    losing, winning = (after(0.75, seconds=seconds, trees=trees) for seconds in (6.0, 1.5))
    assert losing.next(costs).depth == 0
    assert winning.next(costs).depth > 0
    early = after(0.75, PATIENCE - 1, seconds=6.0, trees=trees)
    assert early.next(costs).depth > 0


def test_a_gain_that_is_next_to_none_is_no_loss() -> None:
    policy = AutoSize()
    for _ in range(50):
        policy.next(lambda: costs(slope=0.0, draft=0.01))
        policy.observe(4, 1, 2.0 / (LOSS + 0.01))
    assert policy._gain.rate == pytest.approx(LOSS + 0.01)
    assert policy.next(lambda: costs(slope=0.0, draft=0.01)).depth > 0


@pytest.mark.parametrize(("gain", "least", "most"), [(1.15, 0.8, 1.0), (0.7, 0.0, 0.1)])
def test_tokens_of_few_rounds_decide_nothing(gain: float, least: float, most: float) -> None:
    """Rounds with drafts commit one to four tokens. What is faster in the mean is drafted, what is slower is not."""
    drafted, rounds = 0, 300
    for seed in range(20):
        chance, policy = random.Random(seed), AutoSize(True)
        for _ in range(rounds):
            depth = min(3, policy.next(lambda: costs(draft=0.05, slope=0.0)).depth)
            kept = next((i for i in range(depth) if chance.random() < 0.5), depth)
            drafted += depth > 0
            policy.observe(depth, kept, 1.875 / gain if depth else 1.0)
    assert least < drafted / (20 * rounds) < most


def test_only_a_clear_loss_of_others_ends_drafting() -> None:
    """The next text may be easier; it decides by its own rounds."""
    assert AutoSize().next(lambda: replace(costs(), rate=CLEAR + 0.02)).depth > 0
    assert AutoSize().next(lambda: replace(costs(), rate=CLEAR - 0.02)).depth == 0


@pytest.mark.parametrize("trees", [False, True])
def test_it_begins_again_when_the_text_becomes_easier(trees: bool) -> None:
    policy = after(0.0, trees=trees, seconds=1.5)
    assert policy.next(lambda: costs(draft=0.3)).depth == 0
    asked = []
    for _ in range(3 * PROBE_EVERY):
        asked.append(policy.next(lambda: costs(draft=0.3)).depth)
        policy.observe(asked[-1], asked[-1], 1.5)
    assert not any(asked[: PROBE_EVERY - 1]) and all(asked[-PROBE_EVERY:])


def test_a_pass_that_grows_with_its_rows_keeps_drafts_short() -> None:
    flat, steep = (after(0.9).next(lambda s=s: costs(slope=s)).depth for s in (0.0, 0.5))
    assert flat > steep


def test_the_measured_overhead_counts() -> None:
    assert after(0.5).next(lambda: costs(overhead=5.0)).depth == 0


@pytest.mark.parametrize("batch", [1, 4])
def test_rows_of_all_requests_are_paid_for(batch: int) -> None:
    asked: list[int] = []

    def score(rows: int) -> float:
        asked.append(rows)
        return 1.0 + 0.1 * rows

    AutoSize().next(lambda: Costs(score, 0.1, 0.0, batch))
    assert all(rows % batch == 0 for rows in asked)
    assert max(asked) == batch * (MOST + 1)


def test_a_token_is_worth_what_else_the_time_would_bring() -> None:
    """At two tokens a second a node has to be worth 0.2 where it costs a tenth of a second."""
    worth = TokenValue(2.0, costs(slope=0.1))
    assert worth.size([0.9, 0.5, 0.21, 0.19, 0.1]) == 3
    assert worth.size([0.15, 0.1]) == 0
    assert worth.pays(0.21, 0.1) and not worth.pays(0.19, 0.1)
    assert worth.price(7) == pytest.approx(0.2)


def test_steps_of_the_pass_are_taken_whole_or_not_at_all() -> None:
    """Four rows cost what two do: nodes that do not pay alone pay together."""
    stairs = Costs(lambda rows: 1.0 if rows == 1 else 1.5 if rows <= 4 else 3.0, 0.1, 0.0)
    assert TokenValue(1.0, stairs).size([0.3, 0.2, 0.1, 0.1]) == 3
    assert TokenValue(1.0, stairs).size([0.3, 0.1, 0.05, 0.05]) == 0


def test_requests_share_the_rows_of_a_pass() -> None:
    """Two of them commit a token a second together, a row takes .4 of one: nodes go where they are worth most."""
    dear = Costs(lambda rows: 1.0 + 0.4 * (rows - 2), 0.1, 0.0, batch=2)
    slow, fast = TokenValue(0.25, dear), TokenValue(0.75, dear)
    assert shares([slow, fast], [[0.9, 0.8, 0.5], [0.45, 0.1]]) == [3, 1]
    assert shares([fast, slow], [[0.9, 0.8, 0.5], [0.3, 0.2]]) == [3, 0]  # alone each would have had .9 and .8
    assert shares([slow], [[0.5, 0.3, 0.45]]) == [3]  # a request that drafts nothing waits, too
    assert shares([slow, fast], [[], []]) == [0, 0]
    stairs = Costs(lambda rows: 1.0 if rows <= 4 else 3.0, 0.1, 0.0, batch=2)
    worths = [TokenValue(0.5, stairs)] * 2
    assert shares(worths, [[0.3, 0.2], [0.1]]) == [2, 0]  # as far as it costs nothing
    assert shares(worths, [[0.3, 0.2], [0.1]], others=1) == [1, 0]
    assert shares([TokenValue(1.0, stairs)], [[0.9, 0.9, 0.4]]) == [2]


def test_what_other_requests_had_is_expected_first() -> None:
    fresh = AutoSize(True)
    assert fresh.next(costs).worth.rate == pytest.approx(1.0)  # type: ignore[union-attr]
    assert fresh.next(lambda: replace(costs(), rate=2.5)).worth.rate == pytest.approx(2.5)  # type: ignore[union-attr]
    for _ in range(100):
        fresh.next(costs)
        fresh.observe(4, 3, 1.0)
    assert 2.5 < fresh.next(lambda: replace(costs(), rate=2.5)).worth.rate < 4.0  # type: ignore[union-attr]


def test_asking_in_vain_takes_time_too() -> None:
    """A drafter that reads and then proposes nothing: rounds cost more than plain ones and bring no more."""
    policy = AutoSize(True)
    asked = []
    for _ in range(PATIENCE + 4):
        asked.append(policy.next(costs).depth)
        policy.observe(0, 0, 1.3 if asked[-1] else 1.0)
    assert all(asked[:PATIENCE]) and not any(asked[PATIENCE:])


def test_who_finds_nothing_and_costs_nothing_may_go_on() -> None:
    policy = AutoSize(True)
    for _ in range(100):
        assert policy.next(costs).depth
        policy.observe(0, 0, 1.0)


def test_a_request_begins_with_what_others_lost() -> None:
    assert AutoSize(True).next(lambda: replace(costs(), rate=0.7)).depth == 0
    assert AutoSize(True).next(lambda: replace(costs(), rate=1.2)).depth > 0


def test_one_bad_round_does_not_end_what_others_gained() -> None:
    """A request that began with nothing accepted rested for 96 rounds, where others gained a little."""
    policy, asked = AutoSize(True), []
    for _ in range(PATIENCE + 1):
        asked.append(policy.next(lambda: replace(costs(), rate=1.05)).depth > 0)
        policy.observe(4, 0, 1.3)
    assert asked == [True] * PATIENCE + [False]
    for _ in range(PROBE_EVERY - 1):
        assert not policy.next(lambda: replace(costs(), rate=1.05)).depth
        policy.observe(0, 0, 1.0)
    assert policy.next(lambda: replace(costs(), rate=1.05)).depth


WEIGHING = (Phase.NEW, Phase.TRYING, Phase.DRAFTING, Phase.PROBING)


@pytest.mark.parametrize(
    ("phases", "left", "measured", "pays", "expected"),
    [
        (WEIGHING, 0, False, True, Phase.TRYING),
        (WEIGHING, 0, True, True, Phase.DRAFTING),
        (WEIGHING, 0, False, False, Phase.RESTING),
        (WEIGHING, 0, True, False, Phase.RESTING),
        *(((Phase.RESTING,), 0, measured, pays, Phase.PROBING) for measured in (0, 1) for pays in (0, 1)),
        *(((Phase.RESTING,), 1, measured, pays, Phase.RESTING) for measured in (0, 1) for pays in (0, 1)),
        *(((Phase.PROBING,), 1, measured, pays, Phase.PROBING) for measured in (0, 1) for pays in (0, 1)),
    ],
)
def test_the_table_of_transitions(
    phases: tuple[Phase, ...], left: int, measured: bool, pays: bool, expected: Phase
) -> None:
    assert {next_phase(phase, left, measured=measured, pays=pays) for phase in phases} == {expected}


def test_the_life_of_a_request_that_loses_is_a_row_of_rests_and_probes() -> None:
    """Tried for six rounds, then rests of 12, 24, ... rounds, each followed by a probe of three."""
    policy = AutoSize(True)
    seen: list[Phase] = []
    for _ in range(2 * PROBE_LATEST + 300):
        policy.next(costs)
        seen.append(policy.phase)
        policy.observe(0, 0, 1.3)
    runs = [(phase, len(list(run))) for phase, run in itertools.groupby(seen)][:-1]
    rests = [PROBE_EVERY << i for i in range(5)] + [PROBE_LATEST]
    assert runs[0] == (Phase.TRYING, PATIENCE)
    assert [count for phase, count in runs if phase is Phase.RESTING] == rests
    assert set(runs[2::2]) == {(Phase.PROBING, PROBE_ROUNDS)}


def test_a_request_that_begins_when_others_lose_rests_longer() -> None:
    policy = AutoSize(True)
    seen = []
    for _ in range(PROBE_AGAIN + PROBE_ROUNDS + 1):
        policy.next(lambda: replace(costs(), rate=0.7))
        seen.append(policy.phase)
        policy.observe(4, 4, 1.0)
    assert seen[:PROBE_AGAIN] == [Phase.RESTING] * PROBE_AGAIN
    assert seen[PROBE_AGAIN:] == [Phase.PROBING] * PROBE_ROUNDS + [Phase.TRYING]


def test_a_loss_that_is_only_predicted_is_looked_at_again_soon() -> None:
    """Costs of a young process are guesses: the first rest is as short as that of a loss that was measured."""
    policy, dear = AutoSize(), costs(draft=5.0)
    seen = []
    for _ in range(PROBE_EVERY + PROBE_ROUNDS + 1):
        policy.next(lambda: dear if len(seen) < 2 else costs(draft=0.02))
        seen.append(policy.phase)
        policy.observe(*((4, 4, 1.0) if policy.phase is not Phase.RESTING else (0, 0, 1.0)))
    rest = [Phase.RESTING] * PROBE_EVERY
    assert seen == [*rest, *[Phase.PROBING] * PROBE_ROUNDS, Phase.TRYING]


def test_fixed_lengths_are_bounded_by_what_others_can_bear() -> None:
    """A row costs 1 here, a draft step .5; rounds of four requests without drafts take 4, and may take 6."""
    policy = make_policy(SamplingParams(gamma=256, nodes=1024, tree="best-first"), bounded=True)
    alone = Costs(lambda rows: 1.0 * rows, 0.5, 0.0, batch=1)
    assert policy.next(lambda: alone).depth == alone.depth < 256  # never beyond what "auto" would consider
    crowded = Costs(lambda rows: 3.0 + 0.25 * rows, 0.5, 0.0, batch=4)
    assert crowded.bearable() == 1  # 5 + .5 are within 6, 6 + 1 are not
    assert (policy.next(lambda: crowded).depth, policy.next(lambda: crowded).nodes) == (1, 1)
    dear = Costs(lambda rows: 1.0 * rows, 0.5, 0.0, batch=4)
    assert policy.next(lambda: dear) == Size(0, 0)
    free = Costs(lambda rows: 4.0, 0.0, 0.0, batch=4)
    assert policy.next(lambda: free).depth == free.depth
    small = make_policy(SamplingParams(gamma=2), bounded=True)
    assert small.next(lambda: free) == Size(2, 2)  # bounds make nothing longer
    unbounded = make_policy(SamplingParams(gamma=40))
    assert unbounded.next(lambda: dear).depth == 40


def test_what_weighs_costs_itself_is_not_bounded() -> None:
    assert isinstance(make_policy(SamplingParams(), bounded=True), AutoSize)
