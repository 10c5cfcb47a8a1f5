"""The options of a request; their defaults are nowhere else.

Imports no torch, so that a command line may read the defaults quickly.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sakiyomi.core.errors import InputError
from sakiyomi.core.row_processor import RowProcessor

if TYPE_CHECKING:
    from transformers import LogitsProcessor

Acceptance = Literal["auto", "ratio", "coupled", "block", "traversal", "typical"]
ACCEPTANCES = ("auto", "ratio", "coupled", "block", "traversal", "typical")
MOST_CHOICES = 1024  # nodes of a tree that is given as a list
Shape = str | Sequence[int] | Sequence[Sequence[int]]
TREES = ("auto", "chain", "best-first", "ddtree", "dynamic", "static")
QUANTIZATIONS = ("int8", "int4")  # of a target's weights; what they do is in kernels/quantization.py


@dataclass(frozen=True)
class SamplingParams:
    """What to generate and how to choose its tokens; wrong values are refused on construction.

    Attributes:
        max_new_tokens: most tokens to generate.
        temperature: 0 is greedy; 1 the model's own distribution.
        top_k: keep the k most probable tokens; 0: all.
        top_p: keep the fewest most probable tokens that together reach this probability; 1: all.
        min_p: keep tokens of at least this share of the most probable one's probability; 0: all.
        seed: makes sampling reproducible: with acceptance "auto" or "coupled" it gives one text, however it is drafted;
            by the other rules the text depends on the drafts, too, whose size "auto" takes from clocks. None: a new one
            for each request.
        stop: strings that end the text (one string counts as a list of one). The name of a special token, which the
            text leaves out, ends it where the token is written.
        stop_token_ids: tokens that end the text, besides the model's own end tokens.
        gamma: draft tokens, or tree depth, per round: a number, "auto" (by measured costs), "heuristic" (5 at first; +2
            after a wholly accepted draft, else -1) or "heuristic-kept" (the same, and the next request begins where
            the last one was).
        tree: shape of what a draft model proposes: "chain", "best-first" (the nodes most likely to be accepted),
            "ddtree" (the most probable ones by the draft alone), "dynamic" (the best few nodes of every level are
            expanded), "static" (the best shape for the acceptance measured by rank), or "auto": with gamma "auto" the
            tree that is fastest by measured costs, with a number a chain. A list fixes it:
            of counts, ``[1, 7, 6]`` for 7 first tokens and 6 behind each (the 1 stands for the target's own token), or
            of nodes, each the ranks on the way to it, ``[[0], [1], [0, 0]]``: Medusa's ``medusa_choices``.
        nodes: most nodes of the tree: a number, or a word as of gamma.
        repetition_penalty: above 1 makes tokens of prompt and text less probable, below 1 more.
        bad_words: words, or lists of token ids, that must not be generated.
        logit_bias: added to the logits of these tokens.
        logits_processors: transformers' own, called after the options above and before temperature.
        logprobs: how many of the most probable tokens to report at each position; None: none.
        prompt_logprobs: how many of the most probable tokens to report at each place of the prompt, beside the prompt's
            own (`Generation.prompt_logprobs`); 0: its own alone; None: the prompt is not scored.
        ignore_eos: continue after the model's end token.
        n: samples per prompt.
        acceptance: rule by which draft tokens are accepted: "ratio", "coupled", "block" (a chain as a whole) or
            "traversal" (a tree as a whole), all lossless; "auto" chooses. "typical" is lossy: it accepts tokens that
            are probable enough.
        epsilon, delta: thresholds of typical acceptance (arXiv 2401.10774, section 2.3.1), Medusa's posterior_threshold
            and posterior_alpha: a token is accepted if its probability is above the smaller of epsilon and delta x
            exp(-entropy).

    Raises:
        InputError: a value that makes no sense.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    gamma: int | str = "auto"
    tree: Shape = "auto"
    nodes: int | str = "auto"
    repetition_penalty: float = 1.0
    bad_words: Sequence[str | Sequence[int]] = ()
    logit_bias: Mapping[int, float] | None = None
    logits_processors: Sequence[LogitsProcessor | RowProcessor] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    n: int = 1
    acceptance: Acceptance = "auto"
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words", "logits_processors"):
            object.__setattr__(self, name, _several(name, getattr(self, name)))
        if not isinstance(self.tree, str):
            object.__setattr__(self, "tree", _paths(self.tree))
        self.validate()

    @property
    def greedy(self) -> bool:
        """Temperature 0, or so near that float32 logits cannot tell it from 0."""
        return self.temperature < 1e-30

    @property
    def choices(self) -> tuple[tuple[int, ...], ...]:
        """Nodes of a tree that was given as a list, as the ranks on the way to each, level by level; else none."""
        return () if isinstance(self.tree, str) else self.tree  # type: ignore[return-value]

    @property
    def builder(self) -> str:
        """Name of the tree's builder: what "auto" stands for.

        Rules that need the draft's own draws take chains, and trees whose shape is fixed before anything is drawn.
        """
        if not isinstance(self.tree, str):
            return "choices"
        if self.tree != "auto":
            return self.tree
        drawn = not self.greedy and self.acceptance in ("ratio", "block", "traversal")
        if self.nodes != "auto":
            return "static" if drawn else "best-first"
        return "best-first" if self.gamma == "auto" and not drawn else "chain"

    def validate(self) -> None:
        """Refuse values that make no sense; called on construction.

        Raises:
            InputError: with the value and the remedy.
        """
        _integer("max_new_tokens", self.max_new_tokens, 1, "ask for at least one token")
        _integer("top_k", self.top_k, 0, "0 keeps all tokens")
        _integer("n", self.n, 1, "ask for at least one sample")
        _number("temperature", self.temperature, 0.0, math.inf, "0 is greedy, 1 the model's own distribution")
        _number("top_p", self.top_p, 0.0, 1.0, "1 keeps all tokens", open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0, "0 keeps all tokens")
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, "1 is no penalty", open_low=True)
        _number("epsilon", self.epsilon, 0.0, 1.0, "the default is 0.09")
        _number("delta", self.delta, 0.0, math.inf, "the default is 0.3")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), "None takes a new one for each request", 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, "None reports none")
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos is {self.ignore_eos!r}; it is True or False")
        _dial("gamma", self.gamma, "tokens")
        self._validate_tree()
        self._validate_acceptance()
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InputError(f"stop has {text!r} in it; a stop string is a text of at least one character")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, "they are token ids")
        for word in self.bad_words:
            self._validate_bad_word(word)
        for token, bias in (self.logit_bias or {}).items():
            _integer("logit_bias", token, 0, "its keys are token ids")
            if not _is_number(bias) or math.isnan(bias) or bias == math.inf:
                raise InputError(f"logit_bias of token {token} is {bias!r}; give a number, or -inf to ban the token")
        for processor in self.logits_processors:
            if not _is_processor(processor):
                raise InputError(
                    f"logits_processors has {processor!r} in it; give functions of ids and scores, such as "
                    "transformers' LogitsProcessor objects"
                )

    def _validate_tree(self) -> None:
        if isinstance(self.tree, str) and self.tree not in TREES:
            raise InputError(
                f"tree is {self.tree!r}; available are {', '.join(map(repr, TREES))}, or a list: of counts such as "
                "[1, 7, 6], or of nodes such as [[0], [1], [0, 0]]"
            )
        if self.choices and (self.gamma, self.nodes) != ("auto", "auto"):
            raise InputError(
                f"tree is a list, which has its own depth and number of nodes, and gamma is {self.gamma!r} and nodes "
                f"{self.nodes!r}: leave them out"
            )
        _dial("nodes", self.nodes, "nodes")
        if self.tree == "chain" and self.nodes != "auto":
            raise InputError(f"nodes is {self.nodes!r} and tree is 'chain', which has gamma nodes: leave one out")

    def _validate_acceptance(self) -> None:
        if self.acceptance not in ACCEPTANCES:
            known = ", ".join(f'"{name}"' for name in ACCEPTANCES)
            raise InputError(f"acceptance is {self.acceptance!r}; available are {known}")
        if self.acceptance == "typical":
            return
        for name, default in (("epsilon", type(self).epsilon), ("delta", type(self).delta)):
            if getattr(self, name) != default:
                raise InputError(
                    f"{name} is {getattr(self, name)!r} and acceptance is {self.acceptance!r}, which has no such "
                    "threshold: leave it out"
                )

    @staticmethod
    def _validate_bad_word(word: str | Sequence[int]) -> None:
        if not isinstance(word, (str, Sequence)) or not word:
            raise InputError(f"bad_words has {word!r} in it; a bad word is a text or a list of token ids, not empty")
        if not isinstance(word, str):
            for token in word:
                _integer("bad_words", token, 0, "a list in it holds token ids")


def _several(name: str, value: Any) -> tuple[Any, ...]:
    """The values as a tuple. None is an empty one; a single text, number or processor is a tuple of one."""
    if value is None:
        return ()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(value)
    if isinstance(value, (str, int)) or (name == "logits_processors" and _is_processor(value)):
        return (value,)
    raise InputError(f"{name} is {value!r}; expected a list")


def _paths(shape: Any) -> tuple[tuple[int, ...], ...]:
    """The nodes that a list describes, level by level.

    Raises:
        InputError: it describes no tree.
    """
    entries = list(shape) if isinstance(shape, Sequence) else []
    if entries and all(_is_count(entry) for entry in entries):
        if entries[0] != 1 or len(entries) < 2 or min(entries) < 1:
            raise InputError(
                f"tree is {shape!r}; counts begin with 1, for the target's own token, and have one more for each level"
            )
        if sum(itertools.accumulate(entries[1:], operator.mul)) > MOST_CHOICES:
            raise InputError(f"tree is {shape!r}, more than {MOST_CHOICES} nodes; a pass has a row for each")
        levels: list[list[tuple[int, ...]]] = [[()]]
        for count in entries[1:]:
            levels.append([(*path, rank) for path in levels[-1] for rank in range(count)])
        return tuple(path for level in levels[1:] for path in level)
    nodes = [tuple(entry) for entry in entries if isinstance(entry, Sequence) and not isinstance(entry, str)]
    if not nodes or len(nodes) < len(entries) or not all(node and all(map(_is_count, node)) for node in nodes):
        raise InputError(
            f"tree is {shape!r:.80}; expected counts such as [1, 7, 6], or nodes such as [[0], [1], [0, 0]]"
        )
    known = set(nodes)
    for node in nodes:
        for other in (node[:-1], (*node[:-1], node[-1] - 1)):  # what it hangs from, and its sibling before it
            if len(other) and other[-1] >= 0 and other not in known:
                raise InputError(
                    f"tree has the node {list(node)} and not {list(other)}; a node needs the one that it hangs from, "
                    "and siblings have the ranks from 0 on"
                )
    return tuple(sorted(known, key=lambda node: (len(node), node)))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_processor(value: Any) -> bool:
    return callable(value) or isinstance(value, RowProcessor)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _integer(name: str, value: Any, low: int, remedy: str, high: int | None = None) -> None:
    # bool is an int in Python, but top_k=True is a mistake.
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InputError(f"{name} is {value!r}; expected an integer of {bounds}: {remedy}")


def _dial(name: str, value: int | str, what: str) -> None:
    if not isinstance(value, str):
        _integer(name, value, 1, 'to generate without a draft pass draft="none"')
    elif value not in ("auto", "heuristic", "heuristic-kept"):
        raise InputError(f'{name} is {value!r}; it is a number of {what}, "auto", "heuristic" or "heuristic-kept"')


def _number(name: str, value: Any, low: float, high: float, remedy: str, *, open_low: bool = False) -> None:
    if not _is_number(value) or not math.isfinite(value) or value < low or value > high or (open_low and value == low):
        bounds = f"above {low:g}" if open_low else f"of at least {low:g}"
        bounds += "" if high == math.inf else f" and at most {high:g}"
        raise InputError(f"{name} is {value!r}; expected a finite number {bounds}: {remedy}")


def as_params(params: object) -> SamplingParams:
    """The given parameters; the defaults if ``params`` is None.

    Raises:
        InputError: it is of another type.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InputError(f"params is a {type(params).__name__}: {params!r:.80}; expected SamplingParams(...)")
    return params
