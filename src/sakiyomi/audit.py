"""Checks that generated text is the target's own: against transformers, and of drafted against plain generation.

Under greedy search our tokens have to be those of transformers' ``generate``. Under the coupled rule sampled text
depends on the seed alone, so that drafted and plain text have to be equal too. Where they are not, the difference is
explained (see ``referee``) or it is a defect. With ``exact=True`` our own texts have to be equal to the last token,
near-ties included. Weights that were rounded are in no transformers model: there the reference is the text that the
same engine writes plainly, and its own passes are the judge. This module prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sakiyomi.audit_report import AuditConfig, AuditReport, Check, Texts
from sakiyomi.bench.peers import Transformers, stop_tokens
from sakiyomi.bench.undrafted import Undrafted
from sakiyomi.errors import InputError
from sakiyomi.own_referee import OwnReferee
from sakiyomi.params import SamplingParams
from sakiyomi.referee import Divergence, Referee, Scores, coupled_scores, greedy_scores

__all__ = ["AuditConfig", "AuditReport", "Check", "audit"]


def audit(
    target: Any,
    draft: Any = "auto",
    *,
    prompts: Sequence[str],
    config: AuditConfig | None = None,
    options: Mapping[str, Any] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> AuditReport:
    """Compare our texts with those of transformers, and drafted texts with plain ones.

    Args:
        target, draft: as ``LLM`` takes them.
        prompts: texts to continue.
        config: how much is checked.
        options: other arguments of ``LLM``: dtype, exact, quantize and so on.
        note: is told what is going on.

    Raises:
        SakiyomiError: what ``LLM`` raises.
    """
    from sakiyomi.llm import LLM
    from sakiyomi.loading import load_model

    config, options = config or AuditConfig(), dict(options or {})
    note("loading the engine")
    engine = LLM(target, draft=draft, **options)
    ids = [engine.tokenizer(text).input_ids[: config.prompt_tokens] for text in prompts]
    longest = max(map(len, ids))
    if longest + config.max_new_tokens > engine.max_context:
        raise InputError(
            f"max_new_tokens is {config.max_new_tokens}; behind prompts of up to {longest} tokens the context of "
            f"{engine.max_context} has room for {max(engine.max_context - longest, 0)}: ask for fewer"
        )
    referee: Referee
    # torchao, on a GPU, reports nothing
    rounded = engine.target.rounding is not None or options.get("quantize")
    if rounded or options.get("cache", "full") != "full":
        reference, referee = "own plain", OwnReferee(engine.target)
        note("writing plainly")
        plainly = Undrafted(engine)
        expected = [list(plainly.generate([prompt], config.greedy())[0].token_ids) for prompt in ids]
    else:
        note("loading the model with transformers")
        known = ("dtype", "device", "trust_remote_code", "allow_pickle")
        loaded = load_model(target, **{name: options[name] for name in known if name in options})
        reference, referee = "transformers", Referee(loaded.model)
        writer = Transformers(loaded.model, stop=stop_tokens(loaded.model, loaded.tokenizer))
        note("writing with transformers")
        expected = [writer.generate(prompt, config.greedy()) for prompt in ids]
    note("measuring the noise of other pass shapes")
    for prompt, text in zip(ids, expected, strict=True):
        referee.measure(prompt, text)

    report = AuditReport(
        referee.noise,
        str(engine.target.dtype).removeprefix("torch."),
        bool(options.get("exact")),
        None,
        ids,
        reference=reference,
        rounding=engine.target.rounding,
        tokenizer=engine.tokenizer,
    )
    auditor = _Auditor(report, referee, config, note)
    note("checking plain text")
    plain = auditor.plain(Undrafted(engine), expected)
    report.drafter = getattr(engine.draft, "name", None)
    if engine.draft is not None:
        auditor.drafted(engine, expected, plain)
    return report


class _Auditor:
    """Makes the checks of one report."""

    def __init__(self, report: AuditReport, referee: Referee, config: AuditConfig, note: Callable[[str], None]) -> None:
        self.report, self.referee, self.config, self.note = report, referee, config, note

    def plain(self, llm: Any, expected: Texts) -> dict[int | None, Texts]:
        """Check plain text; it comes back by seed, None for the greedy one."""
        found: dict[int | None, Texts] = {None: self._write(llm, self.config.greedy())}
        self._compare("plain", self.report.reference, expected, found[None])
        together = self._write(llm, self.config.greedy(), batched=True)
        self._compare("plain", "plain", found[None], together, batch=len(together))
        for seed in self.config.seeds:
            found[seed] = self._write(llm, self.config.sampled(seed))
            self._follow(found[seed], seed)
        return found

    def drafted(self, llm: Any, expected: Texts, plain: Mapping[int | None, Texts]) -> None:
        """Check text that was written with a draft."""
        for gamma in self.config.gammas:
            self.note(f"checking gamma {gamma}")
            texts = self._write(llm, self.config.greedy(gamma))
            self._compare("drafted", self.report.reference, expected, texts, gamma)
            if self.report.exact:
                self._compare("drafted", "plain", plain[None], texts, gamma)
            together = self._write(llm, self.config.greedy(gamma), batched=True)
            self._compare("drafted", "plain", plain[None], together, gamma, batch=len(together))
            for seed in self.config.seeds:
                texts = self._write(llm, self.config.sampled(seed, gamma))
                self._compare("drafted", "plain", plain[seed], texts, gamma, seed)

    def _write(self, llm: Any, params: SamplingParams, *, batched: bool = False) -> Texts:
        prompts = self.report.prompts
        if batched:
            return [list(done.token_ids) for done in llm.generate(prompts, params)]
        return [list(llm.generate([prompt], params)[0].token_ids) for prompt in prompts]

    def _scores(self, seed: int | None) -> tuple[Scores, float]:
        if seed is None:
            return greedy_scores, self.referee.limit()
        # Each text was a list of one: its key is (seed, 0).
        return coupled_scores(self.config.sampled(seed), 0), self.referee.limit(self.config.temperature)

    def _compare(
        self,
        what: str,
        against: str,
        expected: Texts,
        got: Texts,
        gamma: int | None = None,
        seed: int | None = None,
        *,
        batch: int = 1,
    ) -> None:
        scores, limit = self._scores(seed)
        if self.report.exact and against == "plain":
            limit = 0.0
        found = []
        for i, (prompt, right, text) in enumerate(zip(self.report.prompts, expected, got, strict=True)):
            divergence = self.referee.compare(i, prompt, right, text, scores=scores, limit=limit)
            if divergence is None:
                continue
            if limit == 0.0:
                divergence = replace(divergence, defect=True)
            elif not divergence.defect:
                # The texts part at a near-tie; what follows is judged token by token.
                divergence = self.referee.follow(i, prompt, text, scores=scores, limit=limit) or divergence
            found.append(divergence)
        self._add(what, against, got, found, gamma, seed, batch)

    def _follow(self, texts: Texts, seed: int) -> None:
        scores, limit = self._scores(seed)
        judged = (
            self.referee.follow(i, prompt, text, scores=scores, limit=limit)
            for i, (prompt, text) in enumerate(zip(self.report.prompts, texts, strict=True))
        )
        self._add("plain", "logits", texts, [found for found in judged if found is not None], None, seed, 1)

    def _add(
        self,
        what: str,
        against: str,
        texts: Texts,
        found: list[Divergence],
        gamma: int | None,
        seed: int | None,
        batch: int,
    ) -> None:
        rule = "greedy" if seed is None else "coupled"
        tokens = sum(map(len, texts))
        self.report.checks.append(
            Check(rule, what, against, gamma, seed, batch, len(texts), len(texts) - len(found), tokens, tuple(found))
        )
