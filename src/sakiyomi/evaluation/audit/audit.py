"""Checks that generated text is the target's own: against transformers, and drafted against plain generation.

Under greedy search our tokens have to be those of transformers' ``generate``. Under the coupled rule sampled text
depends on the seed alone, so that drafted and plain text have to be equal too. Where they are not, rounding explains
the difference (see ``hf_reference``), or it is a defect. With ``exact=True`` our own texts have to be equal to the last
token, near-ties included. Under the ratio rule and its kin the text depends on the draft, and only its distribution is
the target's: that is tested in ``distribution``. transformers has no model with our quantized weights: there the
reference is the text that the same engine writes without a draft, judged by the engine's own passes. This module prints
nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sakiyomi.core.dtypes import dtype_name
from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.drafters import Drafter
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.audit.config import AuditConfig, shape_name
from sakiyomi.evaluation.audit.distribution import SampledTests
from sakiyomi.evaluation.audit.engine_reference import EngineReference
from sakiyomi.evaluation.audit.hf_reference import Divergence, HFReference, Scores, coupled_scores, greedy_scores
from sakiyomi.evaluation.audit.report import AuditReport, Check, SampledCheck, Texts
from sakiyomi.evaluation.bench.peers import Transformers, stop_tokens
from sakiyomi.model_executor.loading import load_model
from sakiyomi.sampling.verifiers import VERIFIERS

__all__ = ["AuditConfig", "AuditReport", "Check", "SampledCheck", "audit"]

Key = tuple[str, int] | None
"""Rule and seed of a sampled text; None of a greedy one."""


def audit(
    target: Any,
    draft: Any = "auto",
    *,
    prompts: Sequence[str],
    drafts: Sequence[Any] = (),
    config: AuditConfig | None = None,
    options: Mapping[str, Any] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> AuditReport:
    """Compare our texts with those of transformers, and drafted texts with plain ones.

    Args:
        target, draft: as ``LLM`` takes them.
        prompts: texts to continue.
        drafts: others to check beside the same target, each as ``LLM`` takes it.
        config: how much is checked.
        options: other arguments of ``LLM``: dtype, exact, quantize and so on.
        note: is told what is going on.

    Raises:
        SakiyomiError: what ``LLM`` raises.
    """
    config, options = config or AuditConfig(), dict(options or {})
    note("loading the engine")
    engine = LLM(target, draft=draft, **options)
    drafters = [drafter for drafter in (engine.draft, *map(engine.drafter, drafts)) if drafter is not None]
    ids = [engine.tokenizer(text).input_ids[: config.prompt_tokens] for text in prompts]
    longest = max(map(len, ids))
    if longest + config.max_new_tokens > engine.max_context:
        raise InputError(
            f"max_new_tokens is {config.max_new_tokens}; behind prompts of up to {longest} tokens the context of "
            f"{engine.max_context} has room for {max(engine.max_context - longest, 0)}: ask for fewer"
        )
    strict = bool(options.get("strict"))

    def view(drafter: Drafter | None = None) -> EngineView:
        return EngineView(engine, drafter, strict=strict)

    name, reference, expected = _reference(target, view(), ids, config, options, note)
    note("measuring the noise of other pass shapes")
    for prompt, text in zip(ids, expected, strict=True):
        reference.measure(prompt, text)
    report = AuditReport(
        reference.noise,
        dtype_name(engine.target.dtype),
        bool(options.get("exact")),
        ", ".join(drafter.name for drafter in drafters) or None,
        ids,
        reference=name,
        quantization=engine.target.weights.quantization,
        tokenizer=engine.tokenizer,
    )
    auditor = _Auditor(report, reference, config, note)
    note("checking plain text")
    plain = auditor.plain(view(), expected)
    for drafter in drafters:
        auditor.drafted(view(drafter), drafter, expected, plain)
    if config.sampled or config.verifiers:
        tests = SampledTests(view, drafters, auditor.tested, ids, reference, config, note)
        report.untested = tests.untested
        report.sampled += tests.run()
    return report


def _reference(
    target: Any,
    plain: EngineView,
    prompts: Texts,
    config: AuditConfig,
    options: dict[str, Any],
    note: Callable[[str], None],
) -> tuple[str, HFReference, Texts]:
    """Whose texts and logits are right: its name, what judges by its logits, and its greedy texts."""
    own = plain.engine.target
    # torchao, on a GPU, reports nothing
    if own.weights.quantization is not None or options.get("quantize") or options.get("cache", "full") != "full":
        note("writing plainly")
        texts = [list(plain.generate([prompt], config.greedy())[0].token_ids) for prompt in prompts]
        return "own plain", EngineReference(own), texts
    note("loading the model with transformers")
    known = ("dtype", "device", "trust_remote_code", "allow_pickle")
    loaded = load_model(target, **{name: options[name] for name in known if name in options})
    writer = Transformers(loaded.model, stop=stop_tokens(loaded.model, loaded.tokenizer))
    note("writing with transformers")
    return "transformers", HFReference(loaded.model), [writer.generate(prompt, config.greedy()) for prompt in prompts]


class _Auditor:
    """Makes the checks of one report."""

    def __init__(
        self, report: AuditReport, reference: HFReference, config: AuditConfig, note: Callable[[str], None]
    ) -> None:
        self.report, self.reference, self.config, self.note = report, reference, config, note
        names = config.verifiers or [name for name, rule in VERIFIERS.items() if rule.lossless]
        # Whether a rule's text depends on the seed alone: then it is compared, else its distribution is tested.
        self.coupled = [name for name in names if VERIFIERS[name].rule == "coupled"]
        self.tested = [name for name in names if VERIFIERS[name].rule != "coupled" and name != "greedy"]

    def plain(self, llm: Any, expected: Texts) -> dict[Key, Texts]:
        """Check plain text; it comes back by rule and seed, None for the greedy one."""
        found: dict[Key, Texts] = {None: self._write(llm, self.config.greedy())}
        self._compare("plain", self.report.reference, expected, found[None])
        together = self._write(llm, self.config.greedy(), batched=True)
        self._compare("plain", "plain", found[None], together, batch=len(together))
        for key in itertools.product(self.coupled, self.config.seeds):
            found[key] = self._write(llm, self.config.seeded(key[1], rule=key[0]))
            self._follow(found[key], key)
        return found

    def drafted(self, llm: Any, drafter: Drafter, expected: Texts, plain: Mapping[Key, Texts]) -> None:
        """Check text that was written with a draft."""
        for shape in self.config.shapes():
            self.note(f"checking {drafter.name}, {shape_name(shape)}")
            where: dict[str, Any] = {"gamma": shape.get("gamma"), "drafter": drafter.name, "tree": "tree" in shape}
            texts = self._write(llm, self.config.greedy(shape))
            self._compare("drafted", self.report.reference, expected, texts, **where)
            if self.report.exact:
                self._compare("drafted", "plain", plain[None], texts, **where)
            together = self._write(llm, self.config.greedy(shape), batched=True)
            self._compare("drafted", "plain", plain[None], together, **where, batch=len(together))
            for key in itertools.product(self.coupled, self.config.seeds):
                params = self.config.seeded(key[1], shape, key[0])
                if drafter.kind_for(params) in VERIFIERS[key[0]].takes:
                    self._compare("drafted", "plain", plain[key], self._write(llm, params), key=key, **where)

    def _write(self, llm: Any, params: SamplingParams, *, batched: bool = False) -> Texts:
        prompts = self.report.prompts
        if batched:
            return [list(done.token_ids) for done in llm.generate(prompts, params)]
        return [list(llm.generate([prompt], params)[0].token_ids) for prompt in prompts]

    def _scores(self, key: Key) -> tuple[Scores, float]:
        if key is None:
            return greedy_scores, self.reference.limit()
        # Each text was a list of one: its key is (seed, 0).
        return coupled_scores(self.config.seeded(key[1]), 0), self.reference.limit(self.config.temperature)

    def _compare(
        self, what: str, against: str, expected: Texts, got: Texts, *, key: Key = None, batch: int = 1, **where: Any
    ) -> None:
        scores, limit = self._scores(key)
        if self.report.exact and against == "plain":
            limit = 0.0
        found = []
        for i, (prompt, right, text) in enumerate(zip(self.report.prompts, expected, got, strict=True)):
            divergence = self.reference.compare(i, prompt, right, text, scores=scores, limit=limit)
            if divergence is None:
                continue
            if limit == 0.0:
                divergence = replace(divergence, defect=True)
            elif not divergence.defect:
                # The texts part at a near-tie; what follows is judged token by token.
                divergence = self.reference.follow(i, prompt, text, scores=scores, limit=limit) or divergence
            found.append(divergence)
        self._add(what, against, got, found, key, batch, **where)

    def _follow(self, texts: Texts, key: Key) -> None:
        scores, limit = self._scores(key)
        judged = (
            self.reference.follow(i, prompt, text, scores=scores, limit=limit)
            for i, (prompt, text) in enumerate(zip(self.report.prompts, texts, strict=True))
        )
        self._add("plain", "logits", texts, [found for found in judged if found is not None], key, 1)

    def _add(
        self, what: str, against: str, texts: Texts, found: list[Divergence], key: Key, batch: int, **where: Any
    ) -> None:
        rule, seed = key or ("greedy", None)
        where |= {"texts": len(texts), "equal": len(texts) - len(found), "tokens": sum(map(len, texts))}
        self.report.checks.append(Check(rule, what, against, seed, batch, divergences=tuple(found), **where))
