"""Tiny models and tokenizers, made on the fly: no file, no download, the same ones in every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sakiyomi.cache.eviction import EvictingCache
from sakiyomi.core.errors import SakiyomiError

CORPUS = (
    "Once upon a time there was a little fox who lived in a wood. Every day the fox went down to the river.",
    'One day she said: "I want to see the sea!" and so she went, and went, and went, until the sea was there.',
    "むかしむかし、あるところに、おじいさんとおばあさんが住んでいました。おじいさんは山へ芝刈りに行きました。",
    "A smile 😀, a family 👨‍👩‍👧, a flag 🇯🇵, and the number 12345.\n\nThe end.",
)


def places_of(eviction: EvictingCache, slot: int) -> Sequence[Sequence[Tensor]]:
    """Of each layer and head, the places in the text of the pairs that stayed at the last boundary."""
    record = eviction._slots[slot]
    if eviction.policy is None:
        return [[torch.arange(record.boundary)] * shape.heads for shape in eviction.cache.shapes]
    return record.places


def refused(
    load: Callable[..., object], kind: type[SakiyomiError], *words: str, target: object, **options: object
) -> str:
    """Loading the target raises this kind of error with these words, on one line, which comes back."""
    with pytest.raises(kind) as caught:
        load(target, **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


@lru_cache
def _trained(vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def tiny_tokenizer(vocab: int = 320) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most ``vocab`` tokens (257 are the bytes and the end token, id 0)."""
    copy = Tokenizer.from_str(_trained(vocab).to_str())
    return PreTrainedTokenizerFast(tokenizer_object=copy, eos_token="<|end|>", pad_token="<|end|>")


def tiny_llama(vocab: int = 320, layers: int = 2, dim: int = 32, seed: int = 0, **config: object) -> LlamaForCausalLM:
    """A Llama with random weights, fp32, in evaluation mode. Other config values may be given by name."""
    values: dict[str, object] = {
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": 2 * dim,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
        # Wide enough that the argmax is clear: near-ties would make greedy comparisons flaky.
        "initializer_range": 0.2,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**(values | config))).eval()


def save_model(folder: Path, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast | None) -> Path:
    """Write both in Hugging Face format; the folder comes back."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def byte_fallback_tokenizer(
    pieces: Sequence[str] = ("▁", "a", "b", "e", "▁a", "▁the", "あ", "、"),
) -> PreTrainedTokenizerFast:
    """Like Llama 2's: pieces with ▁ for the space, every other character as ``<0x..>`` bytes, first space dropped."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in [f"<0x{value:02X}>" for value in range(256)] + list(pieces):
        vocab[token] = len(vocab)
    model = models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def character_tokenizer(characters: str = "abc xyz.!?あい😀") -> PreTrainedTokenizerFast:
    """One token a character."""
    vocab = {"<unk>": 0, "</s>": 1} | {c: i for i, c in enumerate(characters, start=2)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def word_piece_tokenizer() -> PreTrainedTokenizerFast:
    """Pieces that join by ``##``, and decoding that removes spaces before punctuation, as BERT's does."""
    pieces = ["[UNK]", "[SEP]", "do", "you", "##ing", "##s", "n't", "'", "s", "'s", "ve", ".", ",", "!", "?", "know"]
    tokenizer = Tokenizer(models.WordPiece(vocab={p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[SEP]", clean_up_tokenization_spaces=True
    )


def unigram_tokenizer(
    words: Sequence[str] = ("▁the", "▁fox", "the", "ing", "おじいさん", "ました", "、", "。", "\n"),
) -> PreTrainedTokenizerFast:
    """Like T5's or ALBERT's: the likeliest of whole pieces, ▁ for the space and before the text, bytes for the rest."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((f"<0x{value:02X}>", -20.0) for value in range(256)), ("▁", -3.0)]
    pieces += [(character, -4.0) for character in "abcdefghijklmnopqrstuvwxyzOnceいさんまた山"]
    vocab = list(dict(pieces + [(word, -5.0) for word in words]).items())
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def succession_llama(tokens: Sequence[int], vocab: int) -> LlamaForCausalLM:
    """A Llama that writes each of these tokens, all of which differ, behind the one before it; the first after all."""
    model = tiny_llama(vocab, layers=1, dim=-(-vocab // 32) * 32, max_position_embeddings=256)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight.copy_(torch.eye(vocab, model.config.hidden_size))
        follows = torch.zeros(vocab, dtype=torch.int64).index_copy_(
            0, torch.tensor(tokens), torch.tensor([*tokens[1:], tokens[0]])
        )
        model.lm_head.weight[follows, torch.arange(vocab)] = 9
    return model
