"""Optimizers: Muon for the matrices of the layers, AdamW for embeddings and norms."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from sakiyomi.train.config import TextRunConfig
from sakiyomi.train.muon import Muon

LAYER = re.compile(r"(^|\.)(layers|block)\.\d+$")
"""Ends the name of a layer: Llama and Whisper have ``layers``, T5 has ``block``."""


def text_optimizers(settings: TextRunConfig, model: nn.Module) -> list[Optimizer]:
    """Muon and AdamW over all parameters of a whole model."""
    config = settings.text
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    layers = [layer for name, layer in model.named_modules() if LAYER.search(name)]
    # Tables of embeddings (T5 keeps one in a layer) are looked up, not multiplied with.
    linear = {id(part.weight) for layer in layers for part in layer.modules() if isinstance(part, nn.Linear)}
    for parameter in model.parameters():
        if parameter.requires_grad:
            (matrices if id(parameter) in linear and config.muon_lr else others).append(parameter)
    optimizers: list[Optimizer] = []
    if matrices:
        optimizers.append(
            Muon(matrices, config.muon_lr, config.weight_decay, torch.bfloat16 if config.passes == "bf16" else None)
        )
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=config.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True))
    return with_peaks(optimizers)


def with_peaks(optimizers: list[Optimizer]) -> list[Optimizer]:
    """Each group's learning rate kept as its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def set_scale(optimizers: list[Optimizer], scale: float) -> None:
    """Set every learning rate to its peak times `scale`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * scale


def copy_state(
    old: list[Optimizer], old_model: nn.Module, new: list[Optimizer], new_model: nn.Module, source: Mapping[str, str]
) -> None:
    """Give each parameter of `new_model` a copy of the moments of its source parameter in `old_model`."""
    old_parameters = dict(old_model.named_parameters())
    states = {parameter: state for optimizer in old for parameter, state in optimizer.state.items()}
    new_names = {parameter: name for name, parameter in new_model.named_parameters()}
    for optimizer in new:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = states.get(old_parameters[source[new_names[parameter]]], {})
                optimizer.state[parameter] = {key: value.clone() for key, value in state.items()}
