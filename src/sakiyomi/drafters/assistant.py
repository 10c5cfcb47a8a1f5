"""Drafts with a Gemma 4 assistant: a few layers with queries only, which attend to the target's keys and values.

Each row reads the target's embedding of a token and the hidden state before it. For the last committed token that is
the target's hidden state, for drafted tokens the assistant's own. All rows of a round have the position of the last
committed token and attend to the text before it. They do not attend to drafted tokens: the hidden state carries those.
The layers are transformers' own, on the target's cache.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.core.draft_specs import ASSISTANTS
from sakiyomi.core.embedded import folder_of
from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.drafters.base import Context, DrafterContext, HiddenStates
from sakiyomi.drafters.draft_tree_state import DraftTreeState, RequestMemory
from sakiyomi.drafters.eagle import FedTree
from sakiyomi.drafters.head_files import check_size, head_config
from sakiyomi.drafters.head_model import read_model
from sakiyomi.drafters.tree_reader import TreeDrafter, TreeReader
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.features import HEAD
from sakiyomi.model_executor.runner import ModelRunner

WHAT = "Gemma assistant"
NAME = "sakiyomi_assistant"
"""Its attention, by transformers' name for it."""


class AssistantModel:
    """Computes rows of an assistant.

    Args:
        module: transformers' assistant.
        target: whose cache it reads.
        layers: of the target, whose keys and values are read, by the kind of attention.

    Attributes:
        seconds: spent on rows so far.
    """

    def __init__(self, module: Any, target: ModelRunner, layers: dict[str, int]) -> None:
        self.seconds = 0.0
        self._module, self._target, self._layers = module, target, layers
        _register()
        module.model.set_attn_implementation(NAME)
        self._no_masks = dict.fromkeys(layers)

    @classmethod
    def load(cls, folder: Path, target: ModelRunner) -> AssistantModel:
        """The assistant in a folder.

        Raises:
            LoadError, UnsupportedError: see ``AssistantDrafter.load``.
        """
        from transformers import AutoModelForCausalLM

        folder, config = head_config(folder, WHAT)
        if config.get("model_type") not in ASSISTANTS:
            raise LoadError(f"{folder} holds no {WHAT}: config.json says {config.get('model_type')!r}")
        if target.cache.dropped is not None or target.weights.own_attention:
            raise UnsupportedError(
                "draft assistant reads keys and values of the whole text from the target's cache, which does not hold "
                "them as they are; use cache='full', or another draft"
            )
        target.unfold()
        what = f"the {WHAT} in {folder}"
        module = read_model(AutoModelForCausalLM, what, folder, dtype=target.dtype, local_files_only=True)
        layers = _fit(module.config, target, folder)
        return cls(module.to(target.device).eval().requires_grad_(False), target, layers)

    @torch.no_grad()
    def __call__(self, slot: int, columns: int, tokens: Sequence[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Compute rows that follow a text.

        Args:
            slot: of the text in the target's cache.
            columns: tokens of it there: all but the last.
            tokens: of the rows: the last of the text, or drafted ones.
            states: before each, (rows, hidden of the target).

        Returns:
            Logits (rows, V), -inf where the assistant proposes nothing, and hidden states for the rows behind these.
        """
        began, module, target = time.perf_counter(), self._module, self._target
        ids = torch.tensor([list(tokens)], device=target.device)
        embedded = target.module.get_input_embeddings()(ids)
        joined = module.pre_projection(torch.cat([embedded, states[None].to(embedded.dtype)], -1).to(target.dtype))
        cache = target.cache
        hidden = module.model(
            inputs_embeds=joined,
            attention_mask=self._no_masks,
            position_ids=torch.full_like(ids, columns),
            shared_kv_states={
                kind: (cache.keys[layer][slot, None, :, :columns], cache.values[layer][slot, None, :, :columns])
                for kind, layer in self._layers.items()
            },
            use_cache=False,
            logits_to_keep=None,  # all rows; 0, its default, would slice masks
        ).last_hidden_state
        logits = self._logits(hidden[0])
        self.seconds += time.perf_counter() - began
        return logits, module.post_projection(hidden)[0]

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits of all tokens, or of the tokens whose centroids fit best; the others get -inf."""
        module, weight = self._module, self._module.lm_head.weight
        some = module.masked_embedding
        if some is None:
            found: Tensor = module.lm_head(hidden)
            return found
        near = some.centroids(hidden).topk(some.centroid_intermediate_top_k).indices
        tokens = some.token_ordering.view(some.num_centroids, -1)[near].flatten(1)
        chosen = (weight[tokens] @ hidden[..., None])[..., 0]
        return hidden.new_full((len(hidden), len(weight)), -torch.inf).scatter_(1, tokens, chosen)


def _fit(config: Any, target: ModelRunner, folder: Path) -> dict[str, int]:
    """The target's layers whose keys and values an assistant reads, by the kind of attention.

    Raises:
        UnsupportedError: it belongs to another target.
    """
    inner, kinds = config.get_text_config(), getattr(target.config, "layer_types", None) or ()
    shapes = target.cache.shapes
    layers = {kind: layer for layer, kind in enumerate(kinds) if shapes[layer].source is None}  # the last of each kind
    sizes = [("hidden states", config.backbone_hidden_size, int(target.config.hidden_size), "values")]
    sizes.append(("a vocabulary", inner.vocab_size, target.vocab_size, "tokens"))
    for number, kind in enumerate(inner.layer_types):
        if kind not in layers:
            has = ", ".join(sorted(set(kinds))) or "one kind alone"
            raise UnsupportedError(
                f"the {WHAT} in {folder} reads keys and values of {kind} layers, and the target has {has}: it belongs "
                "to another model"
            )
        own, shape = inner.per_layer_config[number], shapes[layers[kind]]
        sizes.append((f"keys ({kind})", own.head_dim, shape.key_dim, "values"))
        sizes.append((f"heads of keys ({kind})", own.num_key_value_heads, shape.heads, "heads"))
    for what, own, theirs, unit in sizes:
        check_size(f"the {WHAT} in {folder} reads {what}", own, theirs, unit)
    return {kind: layers[kind] for kind in dict.fromkeys(inner.layer_types)}


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **more: Any
) -> tuple[Tensor, None]:
    """Every row sees the whole text, or the end of it.

    Args:
        module: that attends.
        query: (1, heads, rows, dim).
        key, value: (1, KV heads, columns, dim).
        attention_mask: none.
        more: scaling, and the window.

    Returns:
        (1, rows, heads, dim).
    """
    if window := more.get("sliding_window"):  # that many columns beside the nearest
        key, value = (part[:, :, -(window + 1) :] for part in (key, value))
    _, heads, rows, dim = query.shape
    grouped = query.reshape(key.shape[1], -1, dim) * more["scaling"]
    weights = torch.softmax((grouped @ key[0].transpose(1, 2)).float(), -1).to(value.dtype)
    mixed = (weights @ value[0]).view(heads, rows, -1)
    return mixed.transpose(0, 1)[None], None


class AssistantReader(TreeReader):
    """Grows trees whose rows read hidden states, and attend to the target's cache.

    Args:
        assistant: computes rows.
        target: whose slots the trees belong to.
    """

    state = FedTree

    def __init__(self, assistant: AssistantModel, target: ModelRunner) -> None:
        super().__init__(target, target.vocab_size)
        self._assistant = assistant

    def _score(self, states: Sequence[DraftTreeState], segments: Sequence[SequenceRows]) -> Tensor:
        found = []
        for state, segment in zip(states, segments, strict=True):
            assert isinstance(state, FedTree)
            logits, features = self._assistant(state.slot, state.first - 1, segment.tokens, state.inputs())
            state.keep(features)
            found.append(logits)
        return torch.cat(found)

    def _pass_seconds(self, rows: int) -> float:
        return self.besides  # none of the model's: all that a level takes


class AssistantDrafter(TreeDrafter):
    """Drafts a tree or a chain with an assistant, for one request after the other.

    Args:
        assistant: beside the target.
        target: whose cache it reads.
    """

    name = "assistant"
    hidden_states = HiddenStates((HEAD,))

    def __init__(self, assistant: AssistantModel, target: ModelRunner) -> None:
        super().__init__(AssistantReader(assistant, target))
        self.model = None  # type: ignore[assignment]  # the assistant is no model with passes of its own
        self._assistant, self._vocab_size = assistant, target.vocab_size

    @classmethod
    def make(cls, argument: str, around: DrafterContext) -> AssistantDrafter:
        """The assistant in a folder.

        Raises:
            LoadError, UnsupportedError: it cannot be read, belongs to another model, or the target's cache does not
                hold all keys and values.
        """
        return cls(AssistantModel.load(folder_of(argument), around.packed), around.packed)

    @property
    def forward_seconds(self) -> float:
        """See ``Drafter.forward_seconds``."""
        return self._assistant.seconds

    def _begin(self, context: Context, gamma: int) -> DraftTreeState | None:
        memory = RequestMemory.of(context, self.name, self._vocab_size)
        held = len(context.tokens) - 1  # what the target's slot has
        if not context.states or held < 1:
            return None
        tree = self.reader.begin(context, memory.sampler, self.name, gamma, context.slot, held)
        if tree is not None:
            tree.given = context.states[HEAD][None]
        memory.tree = tree
        return tree
