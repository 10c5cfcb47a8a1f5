"""Train a Llama target and its tokenizer from text files, into a Hugging Face folder with a card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.train.config import TargetConfig
from sakiyomi.train.data import TextSpec, check_shares, parse_text, read_documents
from sakiyomi.train.evaluate import bits_per_character, encode_held_out, parse_valid, read_held_out
from sakiyomi.train.export import save, write_card
from sakiyomi.train.llama import new_llama
from sakiyomi.train.loop import Growth, Loop, compiled_loss
from sakiyomi.train.losses import next_token_loss
from sakiyomi.train.optim import text_optimizers
from sakiyomi.train.preflight import check_run
from sakiyomi.train.rows import load_mixture
from sakiyomi.train.tokenizer import train_tokenizer
from sakiyomi.train.writing import writing

# Held-out tokens of the final measurement: 65,536 give the loss to about 0.01 nats.
FINAL_TOKENS = 65536


def train_target(config: TargetConfig, command: str = "") -> dict[str, Any]:
    """Run `sakiyomi train target`.

    Args:
        config: the settings.
        command: the command line, for the card.

    Returns:
        The summary that `--json` prints; `finished` is False after SIGINT.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    specs = [parse_text(spec) for spec in config.text]
    valid = parse_valid(config.valid)
    check_shares("--text", specs)
    check_run(config, [*(spec.path for spec in specs), *valid.values()])
    texts = {name: read_held_out(path) for name, path in valid.items()}
    tokenizer = load_or_train_tokenizer(config, specs)
    held_out = [encode_held_out(name, some, tokenizer) for name, some in texts.items()]
    mixture = load_mixture(specs, tokenizer, len(tokenizer), config.seed)
    torch.manual_seed(config.seed)
    layers = config.first_layers or config.layers
    model = new_llama(config, tokenizer, layers=layers, vocab=len(tokenizer), max_positions=config.max_positions)
    loss = compiled_loss(next_token_loss, config.compile)
    growth = Growth(config.layers, config.grow_at) if config.first_layers else None

    def batch_loss(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        return loss(hidden, model.lm_head.weight, ids[:, 1:])

    def evaluate(model: LlamaForCausalLM) -> dict[str, dict[str, float]]:
        return {item.name: bits_per_character(model, item, config.eval_tokens) for item in held_out}

    loop = Loop(config, model, batch_loss, mixture, evaluate, optimizers=text_optimizers(config), growth=growth)
    finished = loop.run()
    if not finished:
        return {"finished": False, "out": config.out, "step": loop.progress.step, "tokens": loop.progress.tokens}
    measures = {item.name: bits_per_character(loop.model, item, FINAL_TOKENS) for item in held_out}
    epochs = loop.epochs([spec.path.name for spec in specs])
    save(config, loop.model, tokenizer)
    return write_card(config, loop.model, loop.progress, measures, command, epochs)


def load_or_train_tokenizer(config: TargetConfig, specs: Sequence[TextSpec]) -> PreTrainedTokenizerBase:
    """The tokenizer of the run: the given folder, else the one below OUT (a resumed run), else a new one kept there.

    Raises:
        InputError: the one below OUT has another size than was asked for.
    """
    own = Path(config.out) / "tokenizer"
    if config.tokenizer:
        return load_tokenizer(Path(config.tokenizer))
    if not (own / "tokenizer.json").exists():
        new = train_tokenizer(_texts(specs), config.vocab, config.max_positions)
        with writing(own):
            new.save_pretrained(own)
    tokenizer = load_tokenizer(own)
    if len(tokenizer) != config.vocab:
        raise InputError(
            f"vocab is {config.vocab}, and the tokenizer in {own} has {len(tokenizer)} pieces; give --vocab "
            f"{len(tokenizer)}, or delete that folder to have another one trained"
        )
    return tokenizer


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer folder.

    Raises:
        LoadError: it is missing or holds no tokenizer with an end token.
    """
    if not folder.is_dir():
        raise LoadError(f"tokenizer folder {folder} does not exist; expected a Hugging Face folder")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot load a tokenizer from {folder}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise LoadError(f"the tokenizer in {folder} has no end token; set eos_token in its configuration")
    return tokenizer


def _texts(specs: Sequence[TextSpec]) -> Iterator[str]:
    """Training text for the tokenizer, a file of n times the share per character read about n times."""
    documents = [[text for text in read_documents(spec.path) if isinstance(text, str)] for spec in specs]
    densities = [spec.stable / max(sum(map(len, texts)), 1) for spec, texts in zip(specs, documents, strict=True)]
    smallest = min((density for density in densities if density > 0), default=1.0)
    for density, texts in zip(densities, documents, strict=True):
        for _ in range(round(density / smallest)):
            yield from texts
