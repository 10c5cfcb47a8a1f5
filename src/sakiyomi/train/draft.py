"""Distil a small Llama draft from any causal LM, on text and on the target's own continuations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from sakiyomi.errors import InputError, LoadError
from sakiyomi.train.acceptance import Continuations, acceptance, continuations, distinct_ngrams
from sakiyomi.train.config import DraftConfig
from sakiyomi.train.data import TextSpec, encode_documents, parse_text, read_documents
from sakiyomi.train.evaluate import parse_named
from sakiyomi.train.export import export
from sakiyomi.train.labels import SoftLabels, vocabulary
from sakiyomi.train.llama import new_llama
from sakiyomi.train.loop import Loop, compile_layers, compiled_loss
from sakiyomi.train.losses import distillation_loss
from sakiyomi.train.report import Reporter
from sakiyomi.train.rows import FixedRows, Mixture
from sakiyomi.train.samples import extend_samples
from sakiyomi.train.target import load_tokenizer


def train_draft(config: DraftConfig, command: str = "") -> dict[str, Any]:
    """Run `sakiyomi train draft`.

    Args:
        config: the settings.
        command: the command line, for the card.

    Returns:
        The summary that `--json` prints; `finished` is False after SIGINT.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    specs = [parse_text(spec) for spec in config.text]
    target, tokenizer = load_target(Path(config.target))
    reporter = Reporter(config.log_seconds)
    samples = Path(config.out) / "samples.jsonl"
    count = 0
    if config.samples:
        prompts = [parse_text(spec) for spec in config.prompts or config.text]
        count = extend_samples(config, target, tokenizer, prompts, samples, reporter)
    held_out = _held_out(config, target, tokenizer)
    mixture = _mixture(config, specs, samples if count else None, tokenizer)
    torch.manual_seed(config.seed)
    draft = _new_draft(config, target, tokenizer)
    if isinstance(target, LlamaForCausalLM):
        compile_layers(target, config.compile)
    labels = SoftLabels(target, config.top, int(config.label_gib * 2**30))
    loss = compiled_loss(distillation_loss, config.compile)

    def batch_loss(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
        # One row in, one row of labels out: the last column has no label of its own to be compared with.
        inputs = ids[:, :-1]
        with torch.autocast(inputs.device.type, enabled=False):
            top_ids, top_probs = labels(inputs)
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
        return loss(hidden, model.lm_head.weight, top_ids, top_probs, config.greedy_weight)

    def evaluate(model: LlamaForCausalLM) -> dict[str, dict[str, float]]:
        model.eval()
        measures = {name: acceptance(model, target, texts, config.gamma) for name, texts in held_out.items()}
        model.train()
        return measures

    loop = Loop(config, draft, batch_loss, mixture, evaluate)
    if not loop.run():
        return {"finished": False, "out": config.out, "step": loop.progress.step, "tokens": loop.progress.tokens}
    measures: dict[str, Any] = evaluate(loop.model)
    for name, texts in held_out.items():
        measures[name]["target_distinct_4grams"] = distinct_ngrams(texts.greedy)
        measures[name] |= _expected(measures[name], config)
    names = [*(spec.path.name for spec in specs), *(["samples.jsonl"] if count else [])]
    return export(config, loop.model, tokenizer, loop.progress, measures, command, loop.epochs(names))


def load_target(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A frozen causal LM in bf16 and its tokenizer.

    Raises:
        LoadError: the folder is missing or holds no causal LM.
    """
    if not folder.is_dir():
        raise LoadError(f"target {folder} is no folder; expected a causal LM in Hugging Face format")
    tokenizer = load_tokenizer(folder)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot load a causal LM from {folder}: {error}") from error
    return model.eval().requires_grad_(False), tokenizer


def _new_draft(config: DraftConfig, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """A draft with random weights, or the one to start from.

    Raises:
        LoadError: the folder to start from holds no Llama of the target's vocabulary.
    """
    vocab = vocabulary(target)
    if not config.init:
        positions = int(target.config.get_text_config().max_position_embeddings)
        return new_llama(config, tokenizer, layers=config.layers, vocab=vocab, max_positions=positions)
    start, start_tokenizer = load_target(Path(config.init))
    if not isinstance(start, LlamaForCausalLM):
        raise LoadError(f"init {config.init} is a {type(start).__name__}, expected a LlamaForCausalLM")
    if vocabulary(start) != vocab or start_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise LoadError(f"init {config.init} has another vocabulary than the target; train it with --tokenizer TARGET")
    model: LlamaForCausalLM = start.float().requires_grad_(True)
    return model


def _mixture(
    config: DraftConfig, specs: Sequence[TextSpec], samples: Path | None, tokenizer: PreTrainedTokenizerBase
) -> Mixture:
    sources = [(spec.path, spec.stable, spec.decay) for spec in specs]
    if samples is not None:
        totals = [sum(spec.stable for spec in specs), sum(spec.decay for spec in specs)]
        if min(totals) <= 0:
            raise InputError(f"the shares of the training text sum to {min(totals)}; give one file a share above 0")
        shares = (config.sample_share, config.sample_share_decay)
        sources = [
            (path, stable / totals[0] * (1 - shares[0]), decay / totals[1] * (1 - shares[1]))
            for path, stable, decay in sources
        ]
        sources.append((samples, *shares))
    streams = [
        FixedRows(
            encode_documents(list(read_documents(path)), tokenizer), config.row_tokens[0], seed=config.seed, key=key
        )
        for key, (path, _, _) in enumerate(sources)
    ]
    return Mixture(streams, [stable for _, stable, _ in sources], [decay for _, _, decay in sources], config.seed)


def _held_out(
    config: DraftConfig, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Continuations]:
    return {
        name: continuations(
            target, tokenizer, encode_documents(list(read_documents(path)), tokenizer), count=config.eval_prompts
        )
        for name, path in map(parse_named, config.valid)
    }


def _expected(measured: dict[str, float], config: DraftConfig) -> dict[str, float]:
    """What theory makes of the measured rates: alpha for sampled text, the greedy agreement in its place for greedy."""
    from sakiyomi import theory

    found: dict[str, float] = {}
    for rate, kind in (("alpha", "sampled"), ("greedy_agreement", "greedy")):
        alpha = min(measured[rate], 1 - 1e-9)
        found[f"expected_tokens_{kind}"] = theory.expected_tokens(alpha, config.gamma)
        found[f"expected_speedup_{kind}"] = theory.speedup(alpha, config.gamma, config.cost)
        found[f"optimal_gamma_{kind}"] = theory.optimal_gamma(alpha, config.cost)
    return found
