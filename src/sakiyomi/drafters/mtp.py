"""Drafts with the target's own layer for multi-token prediction (MTP), token by token like an EAGLE head.

DeepSeek-V3: arXiv 2412.19437, section 2.2. For committed tokens the layer reads the hidden state that the target's head
reads, for drafted tokens its own output behind its norm.
"""

from __future__ import annotations

from sakiyomi.core.embedded import folder_of
from sakiyomi.core.errors import InputError
from sakiyomi.drafters.base import DrafterContext
from sakiyomi.drafters.eagle import EagleDrafter
from sakiyomi.drafters.eagle_heads.runner import SharedHead
from sakiyomi.drafters.mtp_layer import make_mtp, read_mtp
from sakiyomi.model_executor.loading.folder import is_of_gguf
from sakiyomi.model_executor.loading.model import Loaded


class MtpDrafter(EagleDrafter):
    """Drafts a tree or a chain with an MTP layer, for all requests at once, one pass a level."""

    name = "mtp"

    @classmethod
    def make(cls, argument: str | None, around: DrafterContext) -> MtpDrafter:
        """The layer in a folder; the target's own where none is named.

        Raises:
            InputError: the target was not read from a folder, and no other one is given.
            LoadError, UnsupportedError: there is no such layer, it cannot be read, or it belongs to another model.
        """
        loaded, target = around.target, around.packed
        folder = folder_of(argument) if argument else loaded.folder
        if folder is None or not folder.is_dir() or is_of_gguf(folder):
            raise InputError(
                f"draft mtp reads a layer in the target's own files, and {loaded.name} is no folder in Hugging Face "
                "format; pass the folder as target, name that of the layer (mtp:<layer>), or choose another draft"
            )
        layers = int(target.config.num_hidden_layers)
        form, tensors = read_mtp(folder, layers)
        target.unfold()
        target.capture([layers - 1])
        module = make_mtp(form, tensors, target.module, str(folder))
        model = around.pack(Loaded(module, None, f"{argument or loaded.name} (mtp)", folder, owned=True))
        return cls(SharedHead(target, model, blank=form.blank), target.vocab_size)
