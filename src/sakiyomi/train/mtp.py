"""Train a layer for predicting further tokens (MTP) on a frozen target, its own or a new one.

The layer learns the target's distribution after every token: with the target's hidden states, and then step by step
with what it gave itself in their place, as it will draft. DeepSeek-V3, arXiv 2412.19437. One layer is run again for
each further token, as in FastMTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from sakiyomi.core.embedded import folder_of
from sakiyomi.core.errors import LoadError
from sakiyomi.drafters.mtp_layer import MtpForm, make_mtp, new_mtp, read_mtp, write_mtp
from sakiyomi.model_executor.structural_copy import layer_list
from sakiyomi.train.commands import TrainMtp
from sakiyomi.train.head_recipe import STEPS, Unrolled, UnrolledRecipe, attend_in_steps, behind, own_attention
from sakiyomi.train.loop import Watch
from sakiyomi.train.recipe import train

NEW = "new"


def train_mtp(config: TrainMtp, command: str = "", watch: Watch | None = None) -> dict[str, Any]:
    """Run `sakiyomi train mtp`, see `recipe.train`."""
    return train(_Mtp(config), command, watch)


class _Mtp(UnrolledRecipe[TrainMtp]):
    """One decoder layer of the target's kind learns to predict the target from what its head reads."""

    kind = "mtp"
    head: MtpHead

    def check_target(self) -> None:
        """See `Taught`: the layer is looked for before the target writes anything."""
        super().check_target()
        self.count = int(self.target.config.get_text_config().num_hidden_layers)
        self.begun = self._begin()

    def _begin(self) -> tuple[MtpForm, dict[str, Tensor], str] | None:
        """The layer that training continues; None: a new one."""
        config = self.config
        if config.init == NEW:
            return None
        folder = folder_of(config.init or config.target)
        if not folder.is_dir():
            if config.init:
                raise LoadError(f"init is {config.init!r}, and no such folder is there; check it, or write --init new")
            return None  # a GGUF file, whose layer is not read
        try:
            return (*read_mtp(folder, self.count), str(folder))
        except LoadError:
            if config.init:
                raise
            return None

    def new_head(self) -> MtpHead:
        """See `HeadRecipe`."""
        if self.begun is None:
            self.form, module = new_mtp(self.target)
        else:
            self.form, tensors, name = self.begun
            module = make_mtp(self.form, tensors, self.target, name)
        self.begun = None
        self.module = module
        return MtpHead(self.form, module, self.target.get_output_embeddings().weight.detach())

    def shared(self) -> Sequence[Tensor]:
        """See `HeadRecipe`."""
        return [self.head.weight()]

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> tuple[str, Mapping[str, Tensor]]:
        """See `HeadRecipe`."""
        form, layer, fused = self.form, "layers.1.", "model.embed_tokens."
        named = {
            "layers.0.weight": form.project,
            f"{fused}embedding_norm.weight": form.embedding,
            f"{fused}hidden_norm.weight": form.hidden,
            "model.norm.weight": form.norm,
        }
        written = {f"{named[name]}.weight": tensor for name, tensor in tensors.items() if name in named}
        inner = dict(self.head.layers[1].state_dict(prefix="model.layers.0."))  # what is no parameter, too
        inner |= {f"model.layers.0.{n.removeprefix(layer)}": t for n, t in tensors.items() if n.startswith(layer)}
        for name, tensor in revert_weight_conversion(self.module, inner).items():
            written[form.layer + name.removeprefix("model.layers.0.")] = tensor
        write_mtp(folder, form, written, self.count, self.config.target)
        return f"A layer for predicting further tokens (MTP) for {self.config.target}", written


# ---------------------------------------------------------------- the layer while it learns


class MtpHead(Unrolled):
    """The layer's parts in the order in which they work.

    Args:
        form: of the layer.
        module: from `make_mtp` or `new_mtp`.
        out: weights of the target's head over the vocabulary, (V, hidden), which stay as they are.

    Attributes:
        layers: what joins a token and a hidden state, and the decoder layer.
        model: that they belong to.

    Raises:
        UnsupportedError: the target's class keeps its own attention.
    """

    def __init__(self, form: MtpForm, module: Any, out: Tensor) -> None:
        super().__init__()
        fused = module.model.embed_tokens
        embedding = fused.embed
        module.float().requires_grad_(True)
        fused.embed = nn.Embedding.from_pretrained(embedding.weight.detach())  # as the target has it
        attend_in_steps(module)
        self.layers = nn.ModuleList([fused.project, module.get_submodule(layer_list(module, 1, "training heads"))[0]])
        self.model = module.model
        self._form, self._out = form, [out]  # no parameter of this module
        self._attending = [part for part in self.layers[1].modules() if hasattr(part, "layer_idx")]

    def weight(self) -> Tensor:
        """See `Unrolled`."""
        return self._out[0]

    def forward(self, ids: Tensor, states: Tensor, steps: int) -> Iterator[Tensor]:
        """See `Unrolled`."""
        fused: Any = self.model.embed_tokens
        found: tuple[list[Tensor], list[Tensor]] = [], []
        embedded = fused.embed(ids).to(fused.project.weight.dtype)
        if self._form.blank:
            embedded = torch.cat([torch.zeros_like(embedded[:, :1]), embedded[:, 1:]], 1)
        embedded = fused.embedding_norm(embedded)
        features = states.to(embedded.dtype)
        for step in range(1, steps + 1):
            for part in self._attending:
                setattr(part, STEPS, found)
            parts = [embedded, fused.hidden_norm(features)]
            joined = fused.project(torch.cat(parts[::-1] if self._form.hidden_first else parts, -1))
            hidden = self.model(inputs_embeds=joined.to(embedded.dtype), use_cache=False).last_hidden_state
            if len(found[0]) != step:
                raise own_attention(self.model)
            yield hidden
            features = behind(hidden, 1)
