"""Models that were changed after they were loaded: by adapters of peft, or by a forward put in another's place.

What runs gives the text of the changed model, as transformers' own ``generate`` does; what cannot is refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import sakiyomi
import seq2seq_toys
from architectures import ALL, VOCAB, _gpt2, greedy, make, model_of, prompt
from multimodal_toys import seeing_model
from sakiyomi import LLM, SamplingParams, UnsupportedError
from sakiyomi.core.hf_names import CACHE
from sakiyomi.model_executor.loading import stop_tokens
from toys import character_tokenizer

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
TEXT = prompt(11, 1)
NEW = 12
PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


def by_llm(model: Any, **options: Any) -> list[int]:
    return LLM((model, TOKENIZER), "none", compile=False, **options).generate([TEXT], PARAMS)[0].token_ids


def by_transformers(model: Any, **options: Any) -> list[int]:
    """What ``generate`` of the model itself writes; peft's takes named arguments alone."""
    ids = torch.tensor([TEXT])
    values = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | options
    done = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **values)
    return done[0, len(TEXT) :].tolist()  # type: ignore[no-any-return]


# ---------------------------------------------------------------- peft

LAYERS = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", LAYERS),
    "dora": ("LoraConfig", LAYERS | {"use_dora": True}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
}


def adapted(kind: str, name: str = "llama") -> Any:
    peft = pytest.importorskip("peft")
    config, values = ADAPTERS[kind]
    values = values if name == "llama" or "target_modules" not in values else values | {"target_modules": ["c_proj"]}
    model = make(ALL[name]())
    plain = by_transformers(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tuned = peft.get_peft_model(model, getattr(peft, config)(task_type="CAUSAL_LM", **values)).eval()
    for parameter in tuned.parameters():
        if parameter.requires_grad:  # those of the adapter
            parameter.data.mul_(3.0)
    # What peft 0.21 calls past_key_values is left out by transformers 5.24.
    assert by_transformers(tuned) != plain or (kind, CACHE) == ("prefix tuning", "cache"), "the adapter changes nothing"
    return tuned


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_of_layers(kind: str, name: str) -> None:
    """DoRA computes with the weights of the layers that it adapts: these stay torch's own."""
    model = adapted(kind, name)
    expected = by_transformers(model)
    assert by_llm(model) == expected
    assert by_transformers(model, custom_generate=sakiyomi.custom_generate) == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["prompt tuning", "prefix tuning", "p-tuning"])
def test_adapters_of_prompts_are_refused(kind: str) -> None:
    """Their tokens are no layers, and would be left out in silence; without them the model is itself."""
    model = adapted(kind)
    with pytest.raises(UnsupportedError, match="learns prompts"):
        by_llm(model)
    with pytest.raises(UnsupportedError, match="learns prompts"):
        by_transformers(model, custom_generate=sakiyomi.custom_generate)
    with model.disable_adapter():
        assert by_llm(model) == greedy(model.get_base_model(), TEXT, NEW)


# ---------------------------------------------------------------- forwards in the place of others

PATCHED = ("model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.k_proj")


def patch(model: Any, name: str) -> None:
    layer = model.get_submodule(name)
    own = layer.forward
    layer.forward = lambda x: 1.7 * own(x) + 0.1


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PATCHED)
def test_a_patched_layer_is_not_packed(name: str) -> None:
    model = make(ALL["llama"]())
    plain = by_transformers(model)
    patch(model, name)
    expected = by_transformers(model)
    assert expected != plain
    assert by_llm(model) == expected
    assert by_transformers(model, custom_generate=sakiyomi.custom_generate) == expected


# ---------------------------------------------------------------- changes while the model is in use


def switched(model: Any) -> None:
    """Another adapter, of those that the model has."""
    model.set_adapter("other")


def two_adapters() -> Any:
    peft = pytest.importorskip("peft")
    model = adapted("lora")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", **LAYERS))
    for name, parameter in model.named_parameters():
        if ".other." in name:
            parameter.data.mul_(3.0)
    return model.eval()


def replaced(model: Any) -> None:
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(-layer.weight.detach())


def hooked(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, out: 2 * out)


def other_weights() -> dict[str, Tensor]:
    return make(ALL["llama"](), seed=1).state_dict()  # type: ignore[no-any-return]


def norm_of(model: Any) -> Tensor:
    return model.model.layers[0].input_layernorm.weight.data  # type: ignore[no-any-return]


CHANGES: dict[str, tuple[Any, Any]] = {
    "adapter switched": (two_adapters, switched),
    "adapters off": (two_adapters, lambda model: model.base_model.disable_adapter_layers()),
    "weights replaced": (lambda: make(ALL["llama"]()), replaced),
    "weights in place": (lambda: make(ALL["llama"]()), lambda model: norm_of(model).mul_(-1.5)),
    "weights loaded": (lambda: make(ALL["llama"]()), lambda model: model.load_state_dict(other_weights())),
    "hook": (lambda: make(ALL["llama"]()), hooked),
    "layer patched": (lambda: make(ALL["llama"]()), lambda model: patch(model, PATCHED[1])),
    "module patched": (lambda: make(ALL["llama"]()), lambda model: patch(model, "model.layers.1.mlp")),
}  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", CHANGES)
def test_a_model_that_is_changed_while_it_is_in_use(kind: str) -> None:
    """An LLM that packed it refuses, with one sentence; the drop-in packs it again, as a new LLM does."""
    made, change = CHANGES[kind]
    model = made()
    llm, plain = LLM((model, TOKENIZER), "none", compile=False), by_transformers(model)
    assert llm.generate([TEXT], PARAMS)[0].token_ids == plain
    assert by_transformers(model, custom_generate=sakiyomi.custom_generate) == plain
    change(model)
    expected = by_transformers(model)
    assert expected != plain
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"changed since it was packed.*make a new LLM"):
            llm.generate([TEXT], PARAMS)
    assert not llm.engine.busy
    assert by_llm(model) == expected
    assert by_transformers(model, custom_generate=sakiyomi.custom_generate) == expected


def test_what_was_set_is_named() -> None:
    model = make(ALL["llama"]())
    llm = LLM((model, TOKENIZER), "none", compile=False)
    llm.generate([TEXT], PARAMS)
    model.model.layers[1].self_attn.scaling = 0.5
    with pytest.raises(UnsupportedError, match=r"set to \(scaling of model\.layers\.1\.self_attn\) changed"):
        llm.generate([TEXT], PARAMS)
    handle = (model := make(ALL["llama"]())).lm_head.register_forward_hook(lambda *_: None)
    llm = LLM((model, TOKENIZER), "none", compile=False)
    handle.remove()
    with pytest.raises(UnsupportedError, match=r"its hooks of lm_head"):
        llm.generate([TEXT], PARAMS)


def test_looking_at_hidden_states_changes_nothing() -> None:
    """transformers leaves hooks behind that do nothing in other calls."""
    model = make(ALL["llama"]())
    llm, plain = LLM((model, TOKENIZER), "none", compile=False), by_transformers(model)
    with torch.no_grad():
        seen = model(input_ids=torch.tensor([[5, 6, 7]]), output_hidden_states=True, output_attentions=True)
    assert len(seen.hidden_states) > 1 and any(part._forward_hooks for part in model.modules())
    assert llm.generate([TEXT], PARAMS)[0].token_ids == plain
    assert by_llm(model) == plain


@pytest.mark.parametrize("name", ["recurrent_gemma", "dynamic", "longrope", "qwen3_5"])
def test_a_model_that_transformers_runs_meanwhile(name: str) -> None:
    """Some keep states of the text that came last, or frequencies for its length: nothing of the model changes."""
    model = meanwhile(name)
    llm, ids = LLM((model, TOKENIZER), "none", compile=False), torch.tensor([prompt(70, 2)])
    before = llm.generate([TEXT], PARAMS)[0].token_ids
    model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    assert llm.generate([TEXT], PARAMS)[0].token_ids == before


def meanwhile(name: str) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": VOCAB, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": None}
    if name == "dynamic":
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        return make(hf.LlamaConfig(**sizes, max_position_embeddings=32, rope_parameters=rope))
    if name == "longrope":
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        rope["original_max_position_embeddings"] = 32
        return make(hf.Phi3Config(**sizes, max_position_embeddings=256, rope_parameters=rope))
    return seeing_model(name) if name == "qwen3_5" else model_of(name)


# ---------------------------------------------------------------- small models at borders of self-tests


def test_exact_with_fewer_positions_than_the_self_test_has_tokens() -> None:
    assert by_llm(make(_gpt2(n_positions=40)), exact=True) == greedy(make(_gpt2(n_positions=40)), TEXT, NEW)
    model, source = seq2seq_toys.build("whisper", max_target_positions=30), seq2seq_toys.sources("whisper")[0]
    llm = LLM((model, seq2seq_toys.TOKENIZER), "none", compile=False, exact=True)
    assert llm.generate([source], PARAMS)[0].token_ids == seq2seq_toys.reference(model, source, NEW)


def test_an_early_exit_of_a_model_with_as_many_layers_as_parts_of_a_layer() -> None:
    """A T5 block has a list of three parts."""
    model, sources = seq2seq_toys.build("t5", layers=3), seq2seq_toys.sources("t5")
    llm = LLM((model, seq2seq_toys.TOKENIZER), "early-exit:2", compile=False)
    done = llm.generate(sources, PARAMS)
    assert [out.token_ids for out in done] == [seq2seq_toys.reference(model, source, NEW) for source in sources]
    assert sum(out.stats.accepted for out in done) > 0


def test_exact_with_experts_that_only_a_part_of_the_config_names() -> None:
    parts = {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}}
    parts |= {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 2, "moe_top_k": 1}}
    sizes = {"vocab_size": VOCAB, "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 256}
    model = make(hf.DbrxConfig(**sizes, **parts, bos_token_id=None, eos_token_id=None))
    assert by_llm(model) == greedy(model, TEXT, NEW)
    with pytest.raises(UnsupportedError, match="gathers rows by expert"):
        by_llm(model, exact=True)


def test_end_tokens_are_those_of_the_generation_settings() -> None:
    """xglm's configuration names one that its settings do not: transformers does not end there."""
    model = make(ALL["llama"]())
    model.config.eos_token_id = 7
    assert stop_tokens(model, TOKENIZER) == ()
    model.generation_config.eos_token_id = [5, 7]
    assert stop_tokens(model, TOKENIZER) == (5, 7)


def test_a_weight_that_a_parent_reads_by_itself() -> None:
    """Its layer is called too, and stays torch's own; the others are packed."""

    class Reading(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            weight = self.inner.down_proj.weight.to(x.dtype)
            return self.inner(x) + 0.1 * (x @ weight @ weight.T)  # type: ignore[no-any-return]

    model = make(ALL["llama"]())
    model.model.layers[1].mlp = Reading(model.model.layers[1].mlp)
    expected = by_transformers(model)
    llm = LLM((model, TOKENIZER), "none", compile=False)
    assert llm.generate([TEXT], PARAMS)[0].token_ids == expected
    runs = dict(llm.engine.target.module.named_modules())
    assert type(runs["model.layers.1.mlp.inner.down_proj"]) is torch.nn.Linear
    assert type(runs["model.layers.1.mlp.inner.up_proj"]) is not torch.nn.Linear
