"""``sakiyomi tree``: draft trees of rounds with the accepted path, and the target's predictions for the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sakiyomi.cli.common import JsonOption, load
from sakiyomi.cli.output import progress, stdout, table
from sakiyomi.core.checks import at_least
from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.preflight import check_prompts
from sakiyomi.core.tokens import TokenNames
from sakiyomi.engine.config import LLMConfig

if TYPE_CHECKING:
    from rich.tree import Tree

    from sakiyomi.core.outputs import RoundTrace
    from sakiyomi.evaluation.predictions import Prediction

GAMMA, NODES = 4, 12  # of trees, where none are asked for
WIDE = 1000  # columns: a deep tree is wrapped by the terminal, not cut


@dataclass(frozen=True)
class TreeOptions:
    """What to draw.

    Attributes:
        prompt: text to continue.
        rounds: how many rounds to draw, from the first one with draft tokens on.
        top: most probable tokens to show at each position of the prompt; 0: none.
        plot: draw the predictions, the trees and their attention masks into this .png or .svg (needs matplotlib).
    """

    prompt: str = field(metadata={"argument": "PROMPT"})
    rounds: int = 1
    top: int = 3
    plot: str | None = None


def tree(options: TreeOptions, model: LLMConfig, params: SamplingParams, output: JsonOption) -> None:
    """Draw draft trees.

    What the target expects behind each token of the prompt. Then the tree of a round: each token with p, the target's
    probability, and q, its drafter's; the accepted path, the token that was rejected after it, and the target's own
    token. It drafts even where that is slower: 12 nodes, 4 deep, if no gamma, tree or nodes are given.

    Example: sakiyomi tree "Once upon a time" --gamma 4
    """
    at_least(options, rounds=1)
    if options.top < 0:
        raise InputError(f"top is {options.top}; expected 0 or more")
    if params.n > 1:
        raise InputError(f"n is {params.n}; one text is drawn: leave it out")
    check_prompts([options.prompt])
    if options.plot is not None:
        from sakiyomi.evaluation.bench.plot import check

        check(options.plot)
    from sakiyomi.evaluation.predictions import predictions

    if params.gamma == params.tree == params.nodes == "auto":
        params = replace(params, gamma=GAMMA, nodes=NODES)
    llm = load(model)
    if llm.draft is None and not options.top:
        raise InputError("without a draft there is no tree, and with top 0 no prediction; give a draft or a top")
    tokens = llm.tokenizer(options.prompt)["input_ids"] if options.prompt else []
    traces: Sequence[RoundTrace] = ()
    with progress("generating"):
        if llm.draft is not None:
            traces = llm.generate(options.prompt, params, rounds_trace=True).rounds_trace
        places = predictions(llm.target, tokens, options.top) if options.top else []
    rounds = [traced for traced in traces if traced.tokens][: options.rounds]

    names = TokenNames(llm.tokenizer)

    def text(token: int) -> str:
        return names(token)[0]

    if not output.json:
        _show_places(places, text)
        if llm.draft is not None:
            _show_rounds(rounds, text, len(traces))
    if options.plot is not None:
        from sakiyomi.evaluation.bench.figures.trees import draw, place_lines, tree_lines

        if not places and not rounds:
            raise InputError("no draft tokens were proposed, and with top 0 there is no prediction: nothing to draw")
        draw(options.plot, place_lines(places, text), [tree_lines(traced, text) for traced in rounds])
    output.emit(
        {
            "target": model.target,
            "draft": model.draft,
            "prompt": options.prompt,
            "places": [_place(place, text) for place in places],
            "rounds": [traced.to_dict() | {"texts": [text(token) for token in traced.tokens]} for traced in rounds],
        }
    )


def _place(place: Prediction, text: Any) -> dict[str, Any]:
    top = [{"token_id": token, "text": text(token), "prob": prob} for token, prob in place.top]
    if place.token < 0:
        return {"token_id": None, "text": None, "prob": None, "top": top}
    return {"token_id": place.token, "text": text(place.token), "prob": place.prob, "top": top}


def _show_places(places: Sequence[Prediction], text: Any) -> None:
    if not places:
        return
    rows = []
    for number, place in enumerate(places):
        row: dict[str, Any] = {"position": number, "token": repr(text(place.token)) if place.token >= 0 else "(next)"}
        row["p"] = None if place.prob is None else f"{place.prob:.3f}"
        for rank, (token, prob) in enumerate(place.top, start=1):
            row[f"{rank}."] = f"{text(token)!r} {prob:.3f}"
        rows.append(row)
    table(rows, title="What the target predicted at each position of the prompt")


def _show_rounds(rounds: Sequence[RoundTrace], text: Any, passes: int) -> None:
    console = stdout()
    if not rounds:
        console.print(
            f"no draft tokens were proposed in {passes} rounds: the drafter found nothing to propose; another one "
            "does, for instance --draft self-int4 (the model itself in 4 bits) or --draft model:FOLDER"
        )
    for traced in rounds:
        console.print()
        console.print(_drawn(traced, text), width=WIDE)


def _drawn(traced: RoundTrace, text: Any) -> Tree:
    """One round as a tree for rich, in the colours of ``generate --trace``."""
    from rich.text import Text
    from rich.tree import Tree

    accepted = set(traced.path)
    end = traced.path[-1] if traced.path else -1
    count = f"{len(traced.tokens)} node{'s' if len(traced.tokens) != 1 else ''}"
    root = Tree(Text(f"round {traced.round}: {count}, {len(traced.path)} accepted"))
    branches = {-1: root}
    own = Text(
        f"{text(traced.token)!r} the target's own ({traced.kind})",
        style="red" if traced.kind == "recovered" else "cyan",
    )
    for node, (token, parent) in enumerate(zip(traced.tokens, traced.parents, strict=True)):
        p, q = traced.target_probs[node], traced.draft_probs[node]
        label = f"{text(token)!r} p {p:.3f}" + ("" if q is None else f" q {q:.3f}")
        mark, style = "", "dim"
        if node in accepted:
            mark, style = " accepted", "green"
        elif parent == end and token == traced.refused:
            mark, style = " refused", "red"
        branches[node] = branches[parent].add(Text(label + mark, style=style))
    branches[end].add(own)
    return root
