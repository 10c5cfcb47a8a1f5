"""Train a block drafter on a frozen target, whose hidden states are computed on the way.

DFlash, arXiv 2602.06036. After tokens that are drawn anew for every piece of text stand blocks of masks, which learn
the target's distributions there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import rotate_half

from sakiyomi.drafters.block_heads.formats import BlockFile, BlockOptions, usual_layers, write_block
from sakiyomi.drafters.head_model import HEAD_WEIGHT, make_decoder
from sakiyomi.drafters.medusa_heads.ranks import Ranks
from sakiyomi.train.acceptance import Continuations, ranked
from sakiyomi.train.commands import TrainBlock
from sakiyomi.train.draft_vocab import proposing
from sakiyomi.train.head_recipe import LayersRecipe
from sakiyomi.train.hidden import Lesson, TargetStates, begin_as
from sakiyomi.train.loop import Watch
from sakiyomi.train.losses import soft_loss
from sakiyomi.train.parallel import mask_token
from sakiyomi.train.recipe import train


def train_block(config: TrainBlock, command: str = "", watch: Watch | None = None) -> dict[str, Any]:
    """Run `sakiyomi train block`, see `recipe.train`."""
    return train(_Block(config), command, watch)


class _Block(LayersRecipe[TrainBlock]):
    """A few decoder layers learn to predict a block of the target's tokens at once."""

    kind = "block"
    head: BlockHead

    def usual_reads(self, layers: int) -> tuple[int, ...]:
        """See `HeadRecipe`."""
        return usual_layers(layers)

    def check_target(self) -> None:
        """See `Taught`."""
        super().check_target()
        config = self.config
        self.options = BlockOptions(
            layers=self.reads,
            size=config.guesses + (not config.anchored),
            mask=mask_token(config.mask, self.tokenizer, self.vocab),
            anchored=config.anchored,
            causal=config.causal,
            markov="gated" if config.markov else "",
        )
        self.sizes |= {"model_type": "qwen3", "num_hidden_layers": config.layers, "attention_bias": False}
        self.layers, self.positions_ahead = config.layers, config.guesses

    def new_head(self) -> BlockHead:
        """See `HeadRecipe`."""
        return new_block(self.target, self.sizes, self.options, self.config.markov, self.known)

    def losses(self, ids: Tensor, lesson: Lesson, step: int) -> Tensor:
        """See `HeadRecipe`."""
        config, head = self.config, self.working
        # A block needs a token before it, whose states are known, and the target's word after all its guesses.
        order = np.random.default_rng((config.loop.seed, step)).permutation(ids.shape[1] - config.guesses)
        anchors = torch.from_numpy(np.sort(order[: config.anchors])) + 1
        hidden = head(ids, lesson.joined, anchors)
        found = []
        for ahead in range(config.guesses):
            places, read = anchors + ahead, hidden[:, :, ahead].flatten(0, 1)
            wanted, tokens, counts = (
                part[:, places].flatten(0, 1) for part in (lesson.probs, lesson.places, lesson.counts)
            )
            added = head.added(read, ids[:, places].flatten())
            found.append(
                soft_loss(read, head.head.weight, wanted, counts.float(), config.loss, tokens=tokens, added=added)
            )
        return torch.stack(found)

    def ranks(self, texts: Continuations) -> Ranks:
        """See `HeadRecipe`."""
        return rank_blocks(self.head, self.states, self.known, texts)

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> tuple[str, Mapping[str, Tensor]]:
        """See `HeadRecipe`."""
        kept = {}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            if part == "layers":
                number, _, rest = rest.partition(".")
                name = f"layers.{int(number) - 1}.{rest}" if int(number) else "fc.weight"
            if part == "head" and self.known is not None:  # rows of the target's
                kept[HEAD_WEIGHT] = tensor
            elif part not in ("head", "embed"):  # the target's
                kept[name] = tensor
        file = BlockFile(self.sizes | {"dtype": "bfloat16"}, self.options, kept, self.known, "")
        write_block(folder, file, self.config.target, int(self.target.config.get_text_config().num_hidden_layers))
        about = (
            f"A block drafter of {self.config.layers} layers for {self.config.target}, which reads its layers "
            f"{', '.join(map(str, self.reads))}, guesses {self.options.guesses} tokens a pass{proposing(self.known)}"
        )
        return about, kept


# ---------------------------------------------------------------- the drafter while it learns


class MarkovHead(nn.Module):
    """What the token before a guess adds to its logits, gated by the guess's hidden state (DSpark, arXiv 2607.05147).

    Args:
        vocab: tokens that it reads.
        known: tokens that are guessed.
        width: of the hidden states.
        rank: of the table.
    """

    def __init__(self, vocab: int, known: int, width: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, known, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank)
        nn.init.zeros_(self.markov_w2.weight)  # it begins by adding nothing

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """What `markov_w2` reads, (n, rank), from (n, hidden) and the tokens before, (n,)."""
        embedded = self.markov_w1(before)
        gated: Tensor = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded.to(hidden.dtype)], -1))) * embedded
        return gated


class BlockHead(nn.Module):
    """A block drafter's parts in the order in which they work.

    Args:
        module: the drafter as a causal LM, from `make_decoder`.
        options: of it.
        rank: of its Markov head, where it has one.

    Attributes:
        layers: what joins the target's states, and the decoder layers.
        head: over the vocabulary, the target's or some rows of it.
        markov_head: what the token before a guess adds; None: nothing.
    """

    def __init__(self, module: Any, options: BlockOptions, rank: int = 0) -> None:
        super().__init__()
        config, self.options = module.config, options
        width = config.hidden_size
        joining = nn.Linear(len(options.layers) * width, width, bias=False)
        self.layers = nn.ModuleList([joining, *module.model.layers])
        self.hidden_norm = type(module.model.norm)(width, config.rms_norm_eps)
        self.norm, self.head, self.embed = module.model.norm, module.lm_head, module.model.embed_tokens
        self.head.requires_grad_(False)
        sizes = len(self.embed.weight), len(self.head.weight)
        self.markov_head = MarkovHead(*sizes, width, rank) if rank else None
        self._rotary = module.model.rotary_emb
        self._times = config.num_attention_heads // config.num_key_value_heads

    def forward(self, ids: Tensor, states: Tensor, anchors: Tensor) -> Tensor:
        """What the head over the vocabulary reads for every guess, (B, anchors, guesses, hidden).

        Args:
            ids: (B, T) tokens.
            states: (B, T, joined) the target's after each.
            anchors: (n,) places of tokens that blocks begin with; of these the target's states are not known.
        """
        options, size = self.options, self.options.size
        batch, length = ids.shape
        within = torch.arange(size, device=ids.device)
        tokens = ids.new_full((batch, len(anchors), size), options.mask)
        tokens[:, :, 0] = ids[:, anchors]
        hidden = self.embed(tokens.flatten(1)).to(self.norm.weight.dtype)
        text = self.hidden_norm(self.layers[0](states.to(hidden.dtype)))
        places = (anchors[:, None] + within).flatten()
        tail = torch.arange(length, device=ids.device)
        turned = self._rotary(hidden, torch.cat([tail, places])[None])
        block = anchors.repeat_interleave(size)
        own = block == block[:, None]
        if options.causal:
            own &= places <= places[:, None]
        seen = torch.cat([tail < block[:, None], own], 1)
        for layer in self.layers[1:]:
            some: Any = layer
            hidden = hidden + self._attend(some.self_attn, some.input_layernorm(hidden), text, turned, seen)
            hidden = hidden + some.mlp(some.post_attention_layernorm(hidden))
        found: Tensor = self.norm(hidden).view(batch, len(anchors), size, -1)
        return found[:, :, size - options.guesses :]

    def added(self, hidden: Tensor, before: Tensor) -> tuple[Tensor, Tensor] | None:
        """What is multiplied and added to the logits of guesses: see `soft_loss`.

        Args:
            hidden: (n, hidden) of the guesses.
            before: (n,) tokens before them.
        """
        markov = self.markov_head
        return None if markov is None else (markov(hidden, before), markov.markov_w2.weight)

    def logits(self, hidden: Tensor, before: Tensor) -> Tensor:
        """(n, tokens) of guesses, see `added`."""
        found: Tensor = self.head(hidden)
        added = self.added(hidden, before)
        return found if added is None else found + added[0] @ added[1].T

    def _attend(
        self, attention: Any, read: Tensor, text: Tensor, turned: tuple[Tensor, Tensor], seen: Tensor
    ) -> Tensor:
        """Attention of blocks to the text before each, and within each.

        Args:
            attention: its projections and norms.
            read: (B, rows, hidden) of the blocks.
            text: (B, T, hidden).
            turned: cosines and sines of the rotary positions of text and blocks.
            seen: (rows, T + rows) bool.
        """
        both = torch.cat([text, read.to(text.dtype)], 1)
        length = text.shape[1]
        cos, sin = (part[:, None] for part in turned)

        def heads(states: Tensor) -> Tensor:
            split: Tensor = states.unflatten(-1, (-1, attention.head_dim))
            return split.transpose(1, 2)

        q = attention.q_norm(heads(attention.q_proj(read)))
        k = attention.k_norm(heads(attention.k_proj(both)))
        v = heads(attention.v_proj(both)).repeat_interleave(self._times, 1)
        q = q * cos[:, :, length:] + rotate_half(q) * sin[:, :, length:]
        k = (k * cos + rotate_half(k) * sin).repeat_interleave(self._times, 1)
        mixed = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=seen)
        found: Tensor = attention.o_proj(mixed.transpose(1, 2).flatten(2))
        return found


def new_block(
    target: Any, config: dict[str, Any], options: BlockOptions, rank: int = 0, tokens: Tensor | None = None
) -> BlockHead:
    """A block drafter with random weights, the target's embedding and head over the vocabulary, and its last norm.

    Args:
        target: a causal LM.
        config: of the layers.
        options: of the drafter.
        rank: of its Markov head; 0: it has none.
        tokens: that it proposes; None: all.
    """
    embedding = target.get_input_embeddings().weight.detach()
    over = nn.Linear(embedding.shape[1], len(embedding if tokens is None else tokens), bias=False)
    made = begin_as(make_decoder(config, embedding, over), target, tokens)
    return BlockHead(made, options, rank)


def rank_blocks(head: BlockHead, states: TargetStates, tokens: Tensor | None, texts: Continuations) -> Ranks:
    """Where the target's own greedy tokens stand among the drafter's guesses, which are about `tokens` or all."""

    def guess(ids: Tensor, first: int) -> Iterator[Tensor]:
        joined, _ = states(ids)
        hidden = head(ids, joined, torch.arange(first, ids.shape[1] - 1))[0]
        for ahead in range(hidden.shape[1]):
            before = ids[0, first + ahead : -1]
            yield head.logits(hidden[: len(before), ahead], before)

    return ranked(head, texts, head.options.guesses, guess, tokens)
