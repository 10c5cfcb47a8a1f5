"""Models of text and images: their text part runs on our cache; encoders of images and sounds stay as they are."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class _Aside(nn.Module):
    """Wraps a part that stays as it is, and hides its modules.

    So the part is not packed, keeps its own attention, and is shared with the user's model.

    Args:
        part: the module.
    """

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "part", part)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "part"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the part."""
        return self.part(*args, **kwargs)


def set_aside(module: Any, original: Any) -> bool:
    """Wrap the parts that do not belong to the text model, see ``_Aside``.

    Args:
        module: our structural copy of a model; changed in place.
        original: the user's model, whose encoders are used.

    Returns:
        Whether there are such parts: the model reads more than text.
    """
    names = names_aside(module)
    for name in names:
        module.set_submodule(name, _Aside(original.get_submodule(name)))
    if names:
        module.set_attn_implementation = module.get_decoder().set_attn_implementation
    return bool(names)


def names_aside(module: Any) -> list[str]:
    """Names of the parts of a model that do not belong to its text model; none if it only reads text."""
    text = module.config.get_text_config(decoder=True)
    if text is module.config:
        return []
    decoder = module.get_decoder()
    if decoder is module or getattr(decoder, "config", None) is not text:
        return []  # a class of text alone, whose configuration has further parts
    inside = {id(part) for part in decoder.modules()}
    names: list[str] = []
    for name, part in module.named_modules():
        apart = id(part) not in inside and all(id(other) not in inside for other in part.modules())
        if apart and hasattr(part, "set_attn_implementation") and not name.startswith(tuple(f"{n}." for n in names)):
            names.append(name)
    return names


def tensors_aside(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of the wrapped parts, by their names in the model's files."""
    parts = {name: part.part for name, part in module.named_modules() if isinstance(part, _Aside)}
    return {f"{name}.{own}": tensor for name, part in parts.items() for own, tensor in part.state_dict().items()}
