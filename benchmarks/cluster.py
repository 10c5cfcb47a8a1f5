"""How many replicas a load needs, simulated with what this machine's rounds cost.

python benchmarks/cluster.py --target tales --rate 20 --first-token 0.3 --tokens-per-second 50
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster_simulation import POLICIES, Costs, Load, fewest, run, simulate
from sakiyomi.cli.common import JsonOption, load
from sakiyomi.cli.output import progress, say, table
from sakiyomi.core.checks import at_least
from sakiyomi.core.errors import InputError
from sakiyomi.engine.config import LLMConfig
from sakiyomi.scale.cluster import MAX_BATCH
from scripts import command
from scripts import run as run_command

if TYPE_CHECKING:
    from sakiyomi.engine.llm import LLM

BEST = "hash with slack"
COLUMNS = {
    "tokens/s": "tokens_per_second",
    "first token p50, s": "first_p50",
    "p95": "first_p95",
    "whole p95, s": "whole_p95",
    "prompts cached": "cached",
    "busy": "busy",
    "busiest": "busiest",
}
"""Of the tables: the figure of an ``Outcome`` in each."""


@dataclass(frozen=True)
class ClusterOptions:
    """The targets of the plan.

    Attributes:
        first_token: seconds to the first token, for 95 % of the requests.
        tokens_per_second: speed of 95 % of the replies after that.
        replicas: simulate so many replicas; 0: the fewest that meet the targets.
        check: seconds of processor time for which one real engine, and then two, answer the same load, to compare with
            the simulation; 0: no check.
    """

    first_token: float = 0.5
    tokens_per_second: float = 20.0
    replicas: int = 0
    check: float = 0.0

    def __post_init__(self) -> None:
        at_least(self, replicas=0, check=0)
        for name in ("first_token", "tokens_per_second"):
            if not 0 < getattr(self, name) < 1e6:
                raise InputError(f"{name} is {getattr(self, name):g}; expected a number above 0")


def _command(what: Load, options: ClusterOptions, model: LLMConfig, output: JsonOption) -> None:
    """Simulate how many replicas a load needs, and how to route its requests.

    The costs of rounds and prompts are measured on one core of this machine, and printed with the result. The rest is a
    simulation by discrete events: continuous batching, prefill in chunks, cached conversations, routing.

    Example: python benchmarks/cluster.py --target tales --rate 20 --first-token 0.3
    """
    with progress("measuring rounds on one core"):
        from cluster_costs import measure, one_core

        one_core()
        llm = load(model)
        plain = llm if llm.draft is None else load(dataclasses.replace(model, draft="none"))
        costs = measure(llm, plain, what)
    found = _simulated(what, options, costs)
    found["checked"] = _checked(what, options, found["replicas"], model, llm, costs) if options.check else []
    _show(found)
    output.emit(found)


def _simulated(what: Load, options: ClusterOptions, costs: Costs) -> dict[str, Any]:
    with progress("simulating"):
        needed = None
        if not options.replicas:
            needed = fewest(costs, what, BEST, options.first_token, 1 / options.tokens_per_second)
            if needed is None:
                raise InputError(
                    "no number of replicas is enough: one request alone takes longer than is wanted; raise "
                    "--first-token, or lower --tokens-per-second"
                )
        count = options.replicas or (needed.replicas if needed is not None else 1)
        outcomes = {name: simulate(count, costs, what, name) for name in POLICIES}
        lost = simulate(count, costs, what, BEST, loss=what.seconds / 2) if count > 1 else None
    return {
        "simulated": True,
        "costs": dataclasses.asdict(costs),
        "load": dataclasses.asdict(what),
        "replicas": count,
        "policies": {name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()},
        "loss": None if lost is None else dataclasses.asdict(lost),
        "speculation": _speculation(costs),
    }


def _speculation(costs: Costs) -> list[dict[str, Any]]:
    """Tokens per second by number of requests, without and with drafts, and the ratio."""
    found = []
    for i, batch in enumerate(costs.batches):
        plain = batch / costs.plain[i]
        drafted = batch * costs.tokens[i] / costs.drafted[i] if costs.drafted else None
        found.append({"requests": batch, "plain": plain, "drafted": drafted, "gain": drafted and drafted / plain})
    return found


def _checked(
    what: Load, options: ClusterOptions, replicas: int, model: LLMConfig, llm: LLM, costs: Costs
) -> list[dict[str, Any]]:
    """Real engines compared with simulated ones, under the same load."""
    from cluster_costs import EngineReplica, Texts

    llms, found = [llm], []
    for count in (1, 2):
        while len(llms) < count:
            llms.append(load(model))
        part = dataclasses.replace(what, rate=what.rate * count / replicas, seconds=options.check)
        with progress(f"{count} real"):
            texts = Texts(llm, part)
            engines = [EngineReplica(one, texts) for one in llms]
            real = run(engines, part, BEST)
            for engine in engines:
                engine.close()
        simulated = simulate(count, costs, part, BEST)
        found.append({"replicas": count, "real": dataclasses.asdict(real), "simulated": dataclasses.asdict(simulated)})
    return found


def _show(found: dict[str, Any]) -> None:
    costs = found["costs"]
    say("measured on one core of this machine, in processor time:")
    table(
        [
            {
                "requests": line["requests"],
                "round, ms": 1000 * costs["plain"][i],
                "tokens/s": line["plain"],
                "drafted round, ms": 1000 * costs["drafted"][i] if costs["drafted"] else None,
                "tokens a round": costs["tokens"][i] if costs["tokens"] else None,
                "drafted tokens/s": line["drafted"],
                "gain": line["gain"],
            }
            for i, line in enumerate(found["speculation"])
        ],
        title="rounds of so many requests at once",
    )
    passes = zip(costs["prompts"], costs["prompt"], strict=True)
    shown = ", ".join(f"{tokens} tokens {1000 * seconds:.1f}" for tokens, seconds in passes)
    draft = f"the draft reads a token in {1e6 * costs['catching_up']:.0f} us"
    say(f"prompts, ms: {shown}; {draft}; {costs['slots']} slots")
    lost = [line["requests"] for line in found["speculation"] if line["gain"] is not None and line["gain"] < 1]
    if costs["drafted"]:
        say(
            f"drafts are slower with {', '.join(map(str, lost))} requests at once"
            if lost
            else "drafts are always faster"
        )
    say("", f"simulated: {found['replicas']} replicas")
    table([_line({"routing": name}, outcome) for name, outcome in found["policies"].items()], title="by routing")
    if (loss := found["loss"]) is not None:
        say(
            f"a replica lost in the middle (hash with slack): {loss['moved']} requests continue elsewhere, silent for "
            f"{loss['gap_p50']:.2f} s (median), {loss['gap_max']:.2f} s at most; first token p95 "
            f"{loss['first_p95']:.2f} s"
        )
    for pair in found["checked"]:
        lines = [_line({"": which}, pair[which]) for which in ("real", "simulated")]
        table(lines, title=f"checked: {pair['replicas']} replicas of one core, each on its own processor time")


def _line(first: dict[str, Any], outcome: dict[str, Any]) -> dict[str, Any]:
    return first | {name: outcome[key] for name, key in COLUMNS.items()}


app = command(_command, defaults={"max_batch": MAX_BATCH})

if __name__ == "__main__":
    run_command(app)
