"""Checks that generated text is the target's own: against transformers, and drafted against plain generation.

Under greedy search our tokens have to be those of transformers' ``generate``. Under the coupled rule sampled text
depends on the seed alone, so that drafted and plain text have to be equal too. Where they are not, rounding explains
the difference (see ``reference``), or it is a defect. With ``exact=True`` our own texts have to be equal to the last
token, near-ties included. Under the ratio rule and its kin the text depends on the draft, and only its distribution is
the target's: that is tested in ``distribution``. transformers has no model with our quantized weights: there the
reference is the text that the same engine writes without a draft, judged by the engine's own passes. This module prints
nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from sakiyomi.core.chats import Chat
from sakiyomi.core.dtypes import dtype_name
from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tokens import TokenNames
from sakiyomi.drafters import Drafter
from sakiyomi.engine.chat_template import prompt_ids
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.audit.config import AuditConfig, Shape, shape_name
from sakiyomi.evaluation.audit.distribution import SampledTests
from sakiyomi.evaluation.audit.reference import EngineReference, HFReference, coupled_scores, greedy_scores
from sakiyomi.evaluation.audit.report import AuditReport, Check, SampledCheck, Texts
from sakiyomi.evaluation.bench.peers import Transformers, stop_tokens
from sakiyomi.model_executor.loading import load_model
from sakiyomi.model_executor.weights import quantizes
from sakiyomi.sampling.verifiers import VERIFIERS

Key = tuple[str, int] | None
"""Rule and seed of a sampled text; None of a greedy one."""


Part = tuple[str, tuple[Any, ...]]
"""Work of one engine: the name of a method of ``Auditor``, and its arguments."""


@dataclass(frozen=True)
class Measured:
    """What the checks of some texts need.

    Attributes:
        prompts, expected: token ids of prompts, and the reference's greedy texts after them.
        noise: of the reference, as it is known until now.
        about: other attributes of the report.
    """

    prompts: Texts
    expected: Texts
    noise: float
    about: dict[str, Any]


def audit(
    target: Any,
    draft: Any = "auto",
    *,
    prompts: Sequence[str | Chat],
    drafts: Sequence[Any] = (),
    config: AuditConfig | None = None,
    options: Mapping[str, Any] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> AuditReport:
    """Compare our texts with those of transformers, and drafted texts with plain ones.

    Args:
        target, draft: as ``LLM`` takes them.
        prompts: texts to continue, and chats to reply to.
        drafts: others to check beside the same target, each as ``LLM`` takes it.
        config: how much is checked.
        options: other arguments of ``LLM``: dtype, exact, quantize and so on.
        note: receives progress messages.

    Raises:
        SakiyomiError: what ``LLM`` raises.
    """
    config = config or AuditConfig()
    auditor = Auditor(target, draft, drafts, config, options or {}, note)
    return put_together(lambda parts: map(auditor.do, parts), [prompts], config)


def put_together(
    do: Callable[[Sequence[Part]], Iterable[Any]], prompts: Sequence[Sequence[str | Chat]], config: AuditConfig
) -> AuditReport:
    """Run the parts of an audit and combine their results; each rule whose distribution is tested is a part.

    Differences are judged by the noise of all texts, whichever part measured it.

    Args:
        do: results of parts, in their order.
        prompts: of each part that compares texts.
        config: how much is checked.
    """
    measured: list[Measured] = list(do([("measure", (texts,)) for texts in prompts]))
    noise = max(part.noise for part in measured)
    firsts = itertools.accumulate((len(part.prompts) for part in measured), initial=0)
    comparing: list[Part] = [("compare", (part, first, noise)) for part, first in zip(measured, firsts, strict=False)]
    every: Texts = [ids for part in measured for ids in part.prompts]
    report = AuditReport(noise, prompts=every, **measured[0].about)
    rules = _rules(config)[1] if config.sampled or config.verifiers else []
    testing: list[Part] = [("test", (every, [rule])) for rule in rules]
    done = list(do(comparing + testing))
    report.checks = [Check.joined(same) for same in zip(*done[: len(comparing)], strict=True)]
    report.sampled = [check for part in done[len(comparing) :] for check in part]
    report.untested = [rule for rule in rules if all(check.rule != rule for check in report.sampled)]
    differences = [found for check in report.checks for found in check.divergences]
    if differences:
        tokens = sorted({token for found in differences for token in (found.expected, found.got)})
        (report.words,) = do([("words", (tokens,))])
    return report


def _rules(config: AuditConfig) -> tuple[list[str], list[str]]:
    """Rules whose text depends on the seed alone and is compared; rules whose distribution is tested."""
    names = config.verifiers or [name for name, rule in VERIFIERS.items() if rule.lossless]
    coupled = [name for name in names if VERIFIERS[name].rule == "coupled"]
    return coupled, [name for name in names if VERIFIERS[name].rule != "coupled" and name != "greedy"]


class Auditor:
    """An engine beside its reference, which does parts of an audit; see ``audit``."""

    def __init__(
        self,
        target: Any,
        draft: Any,
        drafts: Sequence[Any],
        config: AuditConfig,
        options: Mapping[str, Any],
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._config, self._options, self._note = config, dict(options), note
        note("loading the engine")
        self.engine = LLM(target, draft=draft, **self._options)
        self._drafters = [one for one in (self.engine.draft, *map(self.engine.drafter, drafts)) if one is not None]
        self._target = target
        self._tests: SampledTests | None = None

    def do(self, part: Part) -> Any:
        """Do a part."""
        return getattr(self, part[0])(*part[1])

    def measure(self, texts: Sequence[str | Chat]) -> Measured:
        """The reference's texts after some prompts, and the noise of passes of other shapes.

        Raises:
            InputError: the context has no room for a text.
        """
        engine, config = self.engine, self._config
        ids = [prompt_ids(engine.tokenizer, text, config.prompt_tokens) for text in texts]
        longest = max(map(len, ids))
        if longest + config.max_new_tokens > engine.max_context:
            raise InputError(
                f"max_new_tokens is {config.max_new_tokens}; after prompts of up to {longest} tokens the context of "
                f"{engine.max_context} has room for {max(engine.max_context - longest, 0)}: ask for fewer"
            )
        name, reference, write = self._judge
        self._note("writing plainly" if name == "own plain" else f"writing with {name}")
        expected = [write(prompt) for prompt in ids]
        self._note("measuring the noise of other pass shapes")
        for prompt, text in zip(ids, expected, strict=True):
            reference.measure(prompt, text)
        about = {
            "dtype": dtype_name(engine.target.dtype),
            "exact": bool(self._options.get("exact")),
            "drafter": ", ".join(drafter.name for drafter in self._drafters) or None,
            "reference": name,
            "quantization": engine.target.weights.quantization,
        }
        return Measured(ids, expected, reference.noise, about)

    def compare(self, measured: Measured, first: int, noise: float) -> list[Check]:
        """Compare texts.

        Args:
            measured: of the prompts.
            first: place of the first prompt among all.
            noise: by which differences are judged.
        """
        config, (name, reference, _) = self._config, self._judge
        reference.noise = noise
        self._note("checking plain text")
        compared = partial(self._compared, measured, first)
        write = partial(_write, measured.prompts, self._view())
        plain: dict[Key, Texts] = {None: write(config.greedy())}
        together = write(config.greedy(), batched=True)
        checks = [compared("plain", name, measured.expected, plain[None])]
        checks.append(compared("plain", "plain", plain[None], together, batch=len(together)))
        for rule, seed in itertools.product(_rules(config)[0], config.seeds):
            plain[rule, seed] = write(config.seeded(seed, rule=rule))
            checks.append(compared("plain", "logits", None, plain[rule, seed], key=(rule, seed)))
        for drafter in self._drafters:
            for shape in config.shapes():
                self._note(f"checking {drafter.name}, {shape_name(shape)}")
                checks += self._drafted(compared, drafter, shape, plain, measured)
        return checks

    def _drafted(
        self,
        compared: Callable[..., Check],
        drafter: Drafter,
        shape: Shape,
        plain: Mapping[Key, Texts],
        measured: Measured,
    ) -> Iterator[Check]:
        """Check text that was written with a draft."""
        config, write = self._config, partial(_write, measured.prompts, self._view(drafter))
        compared = partial(compared, "drafted", gamma=shape.get("gamma"), drafter=drafter.name, tree="tree" in shape)
        texts = write(config.greedy(shape))
        yield compared(against=self._judge[0], expected=measured.expected, got=texts)
        if measured.about["exact"]:
            yield compared(against="plain", expected=plain[None], got=texts)
        together = write(config.greedy(shape), batched=True)
        yield compared(against="plain", expected=plain[None], got=together, batch=len(together))
        for key in plain:
            if key is None:
                continue
            params = config.seeded(key[1], shape, key[0])
            if drafter.kind_for(params) in VERIFIERS[key[0]].takes:
                yield compared(against="plain", expected=plain[key], got=write(params), key=key)

    def _compared(
        self,
        measured: Measured,
        first: int,
        what: str,
        against: str,
        expected: Texts | None,
        got: Texts,
        *,
        key: Key = None,
        batch: int = 1,
        **where: Any,
    ) -> Check:
        """Compare texts with the expected ones, or judge each token by itself; see ``Check`` for the rest."""
        reference, (rule, seed) = self._judge[1], key or ("greedy", None)
        # Each sampled text was a list of one: its key is (seed, 0).
        scores = greedy_scores if seed is None else coupled_scores(self._config.seeded(seed), 0)
        limit = reference.limit(0.0 if seed is None else self._config.temperature)
        exact = measured.about["exact"] and against == "plain"
        found = []
        for i, (prompt, text) in enumerate(zip(measured.prompts, got, strict=True)):
            follow = partial(reference.follow, first + i, prompt, text, scores=scores, limit=limit)
            if expected is None:
                divergence = follow()
            else:
                allowed = 0.0 if exact else limit
                divergence = reference.compare(first + i, prompt, expected[i], text, scores=scores, limit=allowed)
                if divergence is not None and exact:
                    divergence = replace(divergence, defect=True)
                elif divergence is not None and not divergence.defect:
                    # The texts part at a near-tie; what follows is judged token by token.
                    divergence = follow() or divergence
            if divergence is not None:
                found.append(divergence)
        where |= {"texts": len(got), "equal": len(got) - len(found), "tokens": sum(map(len, got))}
        return Check(rule, what, against, seed, batch, divergences=tuple(found), **where)

    def test(self, prompts: Texts, rules: Sequence[str]) -> list[SampledCheck]:
        """Test the distribution of sampled text under some rules."""
        if self._tests is None:
            every = _rules(self._config)[1]
            judge = self._judge[1]
            self._tests = SampledTests(self._view, self._drafters, every, prompts, judge, self._config, self._note)
        return self._tests.run(rules)

    def words(self, tokens: Sequence[int]) -> dict[int, str]:
        """Tokens as text."""
        names = TokenNames(self.engine.tokenizer)
        return {token: names(token)[0] for token in tokens if token >= 0}

    def _view(self, drafter: Drafter | None = None) -> EngineView:
        return EngineView(self.engine, drafter, strict=bool(self._options.get("strict")))

    @cached_property
    def _judge(self) -> tuple[str, HFReference, Callable[[list[int]], list[int]]]:
        """The reference: its name, the judge by its logits, and a function that writes its greedy text."""
        own, options, greedy = self.engine.target, self._options, self._config.greedy()
        # torchao, on a GPU, reports nothing
        if quantizes(own.weights) or options.get("quantize") or options.get("cache", "full") != "full":
            plain = self._view()
            return "own plain", EngineReference(own), lambda ids: list(plain.generate([ids], greedy)[0].token_ids)
        self._note("loading the model with transformers")
        known = ("dtype", "device", "trust_remote_code", "allow_pickle")
        loaded = load_model(self._target, **{name: options[name] for name in known if name in options})
        writer = Transformers(loaded.model, stop=stop_tokens(loaded.model, loaded.tokenizer))
        return "transformers", HFReference(loaded.model), lambda ids: writer.generate(ids, greedy)


def _write(prompts: Texts, llm: EngineView, params: SamplingParams, *, batched: bool = False) -> Texts:
    """Texts after all prompts, one after the other or all at once."""
    batches = [prompts] if batched else [[prompt] for prompt in prompts]
    return [list(done.token_ids) for batch in batches for done in llm.generate(batch, params)]
