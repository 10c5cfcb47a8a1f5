"""Growing a Llama in depth during training, for shallow steps at the start cost a fraction of deep ones.

Between the trained layers come copies of the nearest one whose output projections are zero. They add nothing at first,
so that the grown model is the same function and the loss does not jump. (Splitting each layer x + f(x) into n layers
f / n was tried first: it cost 0.8 nats a token, which took some 15 steps to win back.)
"""

from __future__ import annotations

import copy
import re

import torch
from transformers import LlamaForCausalLM

_LAYER = re.compile(r"(model\.layers\.)(\d+)(\..+)")
_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def grow(model: LlamaForCausalLM, layers: int) -> tuple[LlamaForCausalLM, dict[str, str]]:
    """A model of `layers` layers, a multiple of the present depth, that computes the same function.

    Returns:
        The new model (own tensors) and a map new parameter name -> old parameter name.
    """
    config = copy.deepcopy(model.config)
    depth = config.num_hidden_layers
    factor, rest = divmod(layers, depth)
    assert not rest, "checked by the configuration"
    config.num_hidden_layers = layers
    deep = LlamaForCausalLM(config)
    old = dict(model.named_parameters())
    source: dict[str, str] = {}
    with torch.no_grad():
        for name, parameter in deep.named_parameters():
            match = _LAYER.fullmatch(name)
            source[name] = name
            if match:
                # The nearest layer, not the one below for all: equal copies side by side would learn the same.
                nearest = min((2 * int(match[2]) + factor) // (2 * factor), depth - 1)
                source[name] = f"{match[1]}{nearest}{match[3]}"
            parameter.copy_(old[source[name]])
            if match and int(match[2]) % factor and name.endswith(_OUTPUTS):
                parameter.zero_()
    return deep, source
