"""What recordings of speech models have beside those of other models: the encoder, and the names of two parts.

See ``recorder.py``, which writes them.
"""

from __future__ import annotations

import itertools
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sakiyomi.cache.cross_attention import Source
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.model_executor.encoder_decoder.decoder import Encoder
from sakiyomi.model_executor.encoder_decoder.families import family_of
from sakiyomi.model_executor.encoder_decoder.judged import noise_source
from sakiyomi.model_executor.trace import trace
from sakiyomi.model_executor.widened import widened
from sakiyomi.sampling.suppressed import forbidding, lighter

if TYPE_CHECKING:
    from sakiyomi.model_executor.runner import ModelRunner


def whole(runner: ModelRunner) -> Any:
    """The transformers model; without its encoder, if it has one."""
    return runner.module if runner.weights.encoder is None else runner.module.inner


def given_name(runner: ModelRunner, name: str) -> str:
    """The name in the transformers model of a part of the module that runs."""
    return name if runner.weights.encoder is None else str(runner.module.given_name(name))


def parts_of(runner: ModelRunner) -> tuple[dict[str, nn.Module], dict[str, nn.Parameter]]:
    """Modules and parameters by their names in the transformers model."""
    module, encoder = runner.module, runner.weights.encoder
    modules = {given_name(runner, name): part for name, part in module.named_modules()}
    parameters = {given_name(runner, name): part for name, part in module.named_parameters()}
    if encoder is not None:
        modules |= {f"{encoder.path}.{name}": part for name, part in encoder.module.named_modules()}
        parameters |= {f"{encoder.path}.{name}": part for name, part in encoder.module.named_parameters()}
    return modules, parameters


def check_encoder(runner: ModelRunner, quantize: str | None) -> None:
    """Refuse models with an encoder whose recording would not be whole.

    Raises:
        UnsupportedError: it reads tokens, is quantized, or its settings make more processors than `forbidding`.
    """
    if runner.weights.encoder is None:
        return
    if quantize is not None:
        raise UnsupportedError("it has an encoder and no packed copy, so that it is quantized in every start")
    model = whole(runner)
    if not family_of(model.config).takes_audio:
        raise UnsupportedError("its encoder takes sources of any length")
    settings = deepcopy(model.generation_config)
    settings._eos_token_tensor = None if settings.eos_token_id is None else torch.tensor(settings.eos_token_id)
    settings.do_sample = False
    for begin in (1, 4):
        made = [vars(lighter(each)) for each in model._get_logits_processor(settings, begin, None)]
        if str(made) != str([vars(each) for each in forbidding(settings, begin)]):
            raise UnsupportedError("its generation settings do more than forbid tokens")


def traced_encoder(runner: ModelRunner) -> tuple[Any, dict[str, Any]]:
    """The graph of the encoder, and its metadata without the names of the weights that it reads."""
    encoder, family = runner.weights.encoder, family_of(whole(runner).config)
    assert encoder is not None, "the model has one"
    (features,) = _noise(runner).inputs.values()
    runner.begin(BatchPlan([]), 0)
    with widened(runner.device):
        graph = trace(lambda given: encoder.module(given).last_hidden_state, features).graph.copy()
    paths = {id(module): name for name, module in parts_of(runner)[0].items()}
    crosses = {paths[id(each)]: {family.heads: each.heads, "scaling": each.scaling} for each in encoder.crosses}
    return graph, {"path": encoder.path, "fingerprint": encoder.fingerprint, "crosses": crosses}


def prove_encoder(runner: ModelRunner, recorded: Encoder) -> Source:
    """Compare what a recorded encoder makes of noise with what the model's makes; returns the noise.

    Raises:
        UnsupportedError: the two differ.
    """
    source, own = _noise(runner), runner.weights.encoder
    assert own is not None, "the model has one"
    runner.begin(BatchPlan([]), 0)
    hidden = [each.read(source) for each in (own, recorded)]
    pairs = [itertools.chain(*each.pairs(hidden[0])) for each in (own, recorded)]
    if not torch.equal(*hidden) or not all(itertools.starmap(torch.equal, zip(*pairs, strict=True))):
        raise UnsupportedError("its recorded encoder gives other numbers")
    return source


def _noise(runner: ModelRunner) -> Source:
    config = whole(runner).config
    return noise_source(config, family_of(config), (), runner.dtype)
