"""The simulation of replicas: what can be said without it, it says, too; and it is that of the engine's rounds."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import pytest
from typer.testing import CliRunner

from cluster import app
from cluster_costs import EngineReplica, Texts
from cluster_simulation import POLICIES, Costs, Load, SimulatedReplica, fewest, run, simulate
from sakiyomi import InputError
from server_toys import toy_llm

COSTS = Costs(
    batches=(1, 8, 32),
    plain=(0.006, 0.008, 0.016),
    drafted=(0.009, 0.016, 0.05),
    tokens=(3.0, 2.5, 2.0),
    prompts=(2, 512),
    prompt=(0.003, 0.258),
    catching_up=0.0001,
    slots=32,
)
LOAD = Load(rate=4.0, seconds=40.0, turns=4, groups=4, system=200, user=40, new=64, think=2.0, seed=1)


def test_a_request_alone_takes_what_its_rounds_take() -> None:
    alone = dataclasses.replace(LOAD, rate=0.05, seconds=200.0, turns=1, groups=1)
    found = simulate(1, dataclasses.replace(COSTS, drafted=(), tokens=()), alone, "in turn")
    # The first prompt is read whole; later ones have their system prompt in the cache.
    assert found.first_p50 == pytest.approx(0.002 + 40 * 0.0005, rel=0.01)
    assert found.whole_p95 == pytest.approx(0.002 + 240 * 0.0005 + 63 * 0.006, rel=0.01)
    assert found.cached > 0.5


@pytest.mark.thorough
def test_hashing_keeps_conversations_where_their_caches_are() -> None:
    """At half of what eight replicas can do; where they can do no more, the hash gives way and nothing is gained."""
    load = dataclasses.replace(LOAD, rate=6.0, seconds=100.0)
    found = {name: simulate(8, COSTS, load, name) for name in POLICIES}
    assert found["hash with slack"].cached > 0.85 > 0.6 > found["in turn"].cached
    assert found["hash with slack"].first_p95 < 0.5 * found["in turn"].first_p95
    tokens = [outcome.tokens_per_second for outcome in found.values()]
    assert max(tokens) < 1.1 * min(tokens)  # none is at its limit


def test_what_several_begin_with_is_read_once() -> None:
    """As in the engine: who begins with what another one is reading waits for it, and has it from there."""
    together = Load(rate=1e4, seconds=60.0, turns=1, groups=1, system=1000, user=10, new=2, think=0.0, seed=1)
    crowd = list(itertools.islice(together.first(), 8))
    replica = SimulatedReplica(COSTS, together.system, random.Random(0))
    for request in crowd:
        replica.add(request)
    while replica.requests:
        replica.round()
    assert sum(request.prompt - request.reused for request in crowd) == 1000 + 8 * 10


@pytest.mark.thorough
def test_more_load_takes_more_replicas() -> None:
    some = fewest(COSTS, LOAD, "hash with slack", 0.3, 0.02)
    more = fewest(COSTS, dataclasses.replace(LOAD, rate=16.0), "hash with slack", 0.3, 0.02)
    assert some is not None
    assert more is not None
    assert 1 <= some.replicas < more.replicas <= 8 * some.replicas
    assert fewest(COSTS, dataclasses.replace(LOAD, seconds=4.0), "in turn", 1e-4, 1e-4) is None


def test_a_lost_replica_is_a_pause_and_no_loss() -> None:
    found = simulate(4, COSTS, LOAD, "hash with slack", loss=20.0)
    assert found.moved > 0
    assert 0 < found.gap_p50 <= found.gap_max < 2.0
    whole = simulate(4, COSTS, LOAD, "hash with slack")
    assert found.tokens_per_second > 0.9 * whole.tokens_per_second


@pytest.mark.thorough
def test_simulated_rounds_are_those_of_the_engine() -> None:
    """Two real engines and two simulated ones under one load, with rounds that take no time at all: the same requests
    end, and prompts are found in the cache as often."""
    load = Load(rate=2.0, seconds=20.0, turns=3, groups=2, system=24, user=8, new=4, think=0.5, seed=2)
    llms = [toy_llm(max_batch=4, max_context=128), toy_llm(max_batch=4, max_context=128)]
    texts = Texts(llms[0], load)
    replicas = [EngineReplica(llm, texts) for llm in llms]
    real = run([Timeless(replica) for replica in replicas], load, "hash with slack")
    costs = Costs((1,), (1e-9,), (), (), (1,), (1e-9,), 0.0, slots=4)
    simulated = simulate(2, costs, load, "hash with slack")
    assert real.tokens_per_second == pytest.approx(simulated.tokens_per_second, rel=0.02)
    assert real.cached == pytest.approx(simulated.cached, abs=0.05)
    for replica in replicas:
        replica.close()


class Timeless:
    """A real replica whose rounds take no time on its clock."""

    def __init__(self, replica: EngineReplica) -> None:
        self._replica = replica
        self.requests, self.add = replica.requests, replica.add

    def round(self) -> tuple[float, list[object]]:
        _, ended = self._replica.round()
        return 1e-9, ended  # type: ignore[return-value]


@pytest.mark.thorough
def test_the_command_prints_what_was_measured_and_what_was_simulated() -> None:
    flags = "--rate 3 --turns 2 --system 20 --user 8 --new 6 --think 0.2 --seconds 5 --check 1 --max-batch 2"
    wanted = "--first-token 5 --tokens-per-second 1 --draft none --json"
    done = CliRunner().invoke(app, ["--target", "tales", *flags.split(), *wanted.split()])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["simulated"] is True
    assert found["costs"]["batches"] == [1, 2]
    assert found["replicas"] == 1
    assert found["policies"].keys() == POLICIES.keys()
    assert [pair["replicas"] for pair in found["checked"]] == [1, 2]


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"rate": float("nan")}, {"turns": 0}, {"think": -1.0}, {"new": 1}])
def test_values_that_cannot_be_meant_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        Load(**wrong)  # type: ignore[arg-type]
