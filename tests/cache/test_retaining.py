"""Retaining heads: their formula, what they read, what they learn, and their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.llama.modeling_llama import LlamaAttention

from architectures import ALL, REFUSED, model_of, prompt, refused_model
from sakiyomi.cache.policies.retaining.formats import fingerprint, read_heads, write_heads
from sakiyomi.cache.policies.retaining.heads import RetainingHeads, RetainingShape, default_width
from sakiyomi.cache.policies.retaining.raw import Raw, find_projections
from sakiyomi.core.embedded import embedded
from sakiyomi.core.errors import InputError, LoadError, SakiyomiError, UnsupportedError
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.loading import load_model
from sakiyomi.train import retaining_labels as labels
from sakiyomi.train.retaining import layer_loss
from sakiyomi.train.retaining_labels import attention_observed, kv_heads_of, largest_chances, largest_logits
from toys import tiny_llama, tiny_tokenizer

OWN_ATTENTION = ("falcon", "falcon-multi-query", "falcon-multi-head")
SPLIT = [name for name in ALL if name != "deepseek_v3"]


def heads_for(model: Any, hidden: int = 6, seed: int = 3) -> RetainingHeads:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return RetainingHeads(RetainingShape(Raw(model).widths, kv_heads_of(model), hidden))


# ---------------------------------------------------------------- heads


def test_heads_are_the_papers_formula() -> None:
    heads = RetainingHeads(RetainingShape((7, 9), (2, 3), 5))
    for layer, (width, kv_heads) in enumerate(((7, 2), (9, 3))):
        qkv = torch.randn(4, width)
        first, second = (part[layer].weight.tolist() for part in (heads.first, heads.second))
        for row, scores in zip(qkv.tolist(), heads(layer, qkv).tolist(), strict=True):
            inner = [sum(w * x for w, x in zip(line, row, strict=True)) for line in first]
            inner = [x / (1 + 2.718281828459045**-x) for x in inner]
            expected = [sum(w * x for w, x in zip(line, inner, strict=True)) for line in second]
            assert scores == pytest.approx(expected, abs=1e-5)
        assert heads(layer, qkv).shape == (4, kv_heads)


def test_heads_take_the_models_activation_and_precision() -> None:
    shape = RetainingShape((8,), (2,), 4, "gelu_new")
    heads = RetainingHeads(shape, torch.bfloat16)
    qkv = torch.randn(3, 8)
    assert heads(0, qkv).dtype == torch.bfloat16
    inner = F.gelu(heads.first[0](qkv.bfloat16()), approximate="tanh")
    assert torch.allclose(heads(0, qkv), heads.second[0](inner), atol=0.02)
    with pytest.raises(UnsupportedError, match="no activation 'soft'"):
        RetainingHeads(RetainingShape((8,), (2,), 4, "soft"))


@pytest.mark.parametrize("values", [((), (), 4), ((8, 8), (2,), 4), ((8,), (0,), 4), ((8,), (2,), 0)])
def test_shapes_that_describe_no_heads(values: Any) -> None:
    with pytest.raises(InputError, match="expected"):
        RetainingShape(*values)


def test_the_width_follows_the_model() -> None:
    assert (default_width(4096), default_width(384)) == (1024, 256)


# ---------------------------------------------------------------- what the layers project


def projected(model: Any, ids: Tensor) -> list[list[Tensor]]:
    """Of each layer what its projections gave, noted without `Raw`."""
    found: list[list[Tensor]] = []
    hooks = []
    for names in find_projections(model):
        found.append([])
        for name in names:

            def note(module: nn.Module, inputs: Any, given: Tensor, layer: int = len(found) - 1) -> None:
                found[layer].append(given)

            hooks.append(model.get_submodule(name).register_forward_hook(note))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", SPLIT)
def test_raw_is_what_the_projections_give(name: str) -> None:
    model = model_of(name)
    ids = torch.tensor([prompt(9), prompt(9, 1)])
    expected = projected(model, ids)
    hooks = [len(module._forward_hooks) for module in model.modules()]  # transformers leaves some when it gives states
    raw = Raw(model)
    with raw, torch.no_grad():
        model(input_ids=ids, use_cache=False)
        assert raw.widths == tuple(sum(part.shape[-1] for part in layer) for layer in expected)
        for read, layer in zip(raw.read, expected, strict=True):
            assert read is not None
            assert torch.equal(read, torch.cat(layer, 2).flatten(0, 1))
    assert raw.read == [None] * len(expected)
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gpt2", "gpt_neox", "gemma2", "opt", "falcon"])
def test_raw_of_a_packed_model(name: str) -> None:
    """Hooks go on when layers are packed."""
    model = model_of(name)
    ids = prompt(8)
    expected = [torch.cat(layer, 2)[0] for layer in projected(model, torch.tensor([ids]))]
    names = find_projections(model)
    packed = build_runner(model, compile=False)
    raw = Raw(packed.module, names=names)
    assert raw.widths == tuple(layer.shape[1] for layer in expected)
    raw.listen()
    with packed.cache.lent(8) as slot:
        packed.score([SequenceRows(slot, 0, ids)])
    for read, layer in zip(raw.read, expected, strict=True):
        assert read is not None
        assert torch.allclose(read, layer, atol=1e-4, rtol=1e-4)


def test_raw_tells_before_the_layer_attends() -> None:
    model = model_of("llama")
    order: list[tuple[str, int]] = []
    with (
        Raw(model, then=lambda layer, qkv: order.append(("raw", layer))) as raw,
        attention_observed(model, lambda layer, *_: order.append(("attention", layer))),
        torch.no_grad(),
    ):
        model(input_ids=torch.tensor([prompt(5)]), use_cache=False)
    assert order == [(what, layer) for layer in range(3) for what in ("raw", "attention")]
    assert raw.read == [None] * 3


class Renamed(LlamaAttention):
    """Llama's attention with projections of other names."""

    @property
    def q_proj(self) -> Any:
        return self.to_q

    @property
    def k_proj(self) -> Any:
        return self.to_k

    @property
    def v_proj(self) -> Any:
        return self.to_v


def renamed(model: Any) -> Any:
    for layer in model.model.layers:
        for kind in "qkv":
            module = layer.self_attn._modules.pop(f"{kind}_proj")
            layer.self_attn._modules[f"to_{kind}"] = module
        layer.self_attn.__class__ = Renamed
    return model


def test_projections_of_other_names_are_found_in_a_pass() -> None:
    found = find_projections(renamed(tiny_llama()))
    assert found == [tuple(f"model.layers.{i}.self_attn.to_{kind}" for kind in "qkv") for i in range(2)]


@pytest.mark.parametrize("name", ["rwkv", "mamba", "jamba", "lfm2"])
def test_models_without_such_projections_are_refused(name: str) -> None:
    model = refused_model(name) if name in REFUSED else model_of(name)
    with pytest.raises(UnsupportedError, match=rf"{type(model).__name__}: projections .* of \d layers"):
        Raw(model)


def test_compressed_keys_and_encoders_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"DeepseekV3ForCausalLM: .* 0 of 3 layers"):
        Raw(model_of("deepseek_v3"))
    whisper = hf.WhisperConfig(
        vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, pad_token_id=0,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_source_positions=20, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="has an encoder"):
        Raw(hf.WhisperForConditionalGeneration(whisper))


# ---------------------------------------------------------------- labels


def naive(queries: Tensor, keys: Tensor, first: int, tokens: int, scaling: float, softcap: float) -> list[list[float]]:
    """Largest logit of each token by a loop over KV heads, the rows from `first` on, and their group's heads."""
    group = len(queries) // len(keys)
    found = []
    for head, own in enumerate(keys):
        matrix = torch.stack([queries[head * group + i] @ own.T * scaling for i in range(group)])
        matrix = softcap * torch.tanh(matrix / softcap) if softcap else matrix
        found.append([max(float(row[column]) for some in matrix for row in some[first:]) for column in range(tokens)])
    return found


def heard_by_eager(model: Any, ids: Tensor) -> tuple[list[tuple[Tensor, Tensor, float]], Tensor]:
    """Queries, keys and scaling of every layer under an attention function of the test's own, and the logits."""
    found: list[tuple[Tensor, Tensor, float]] = []
    eager = AttentionInterface()["sdpa"]

    def function(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
        found.append((q[0], k[0], float(kwargs.get("scaling") or q.shape[-1] ** -0.5)))
        return eager(module, q, k, v, mask, **kwargs)

    AttentionInterface.register("test_heard", function)
    AttentionMaskInterface.register("test_heard", AttentionMaskInterface()["sdpa"])
    before = model.config._attn_implementation
    model.set_attn_implementation("test_heard")
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
    finally:
        model.set_attn_implementation(before)
    return found, logits


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gpt2", "gpt_neox", "opt", "mistral", "granite", "gemma3"])
def test_labels_are_the_maxima_of_the_whole_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also over several blocks of rows and of tokens; the model's own output is not changed by listening."""
    monkeypatch.setattr(labels, "ROWS", 3)
    monkeypatch.setattr(labels, "COLUMNS", 5)
    model = model_of(name)
    tokens, answer = 13, 7
    ids = torch.tensor([prompt(tokens + answer)])
    expected, logits = heard_by_eager(model, ids)
    found: dict[int, Tensor] = {}

    def heard(layer: int, queries: Tensor, keys: Tensor, scaling: float, softcap: float, window: int) -> None:
        found[layer] = largest_logits(queries[:, tokens:], keys[:, :tokens], scaling, softcap)

    with attention_observed(model, heard), torch.no_grad():
        again = model(input_ids=ids, use_cache=False).logits
    assert torch.allclose(again, logits, atol=2e-4, rtol=1e-3)
    assert model.config._attn_implementation == "sdpa"
    assert sorted(found) == list(range(3))
    for layer, (queries, keys, scaling) in enumerate(expected):
        whole = naive(queries, keys, tokens, tokens, scaling, 0.0)
        for own, right in zip(found[layer].tolist(), whole, strict=True):
            assert own == pytest.approx(right, abs=2e-4, rel=1e-3)


def test_a_soft_cap_and_windows_by_rows_give_the_models_own_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "ROWS", 4)
    model = model_of("gemma2")  # which transformers runs by plain torch
    ids = torch.tensor([prompt(21)])
    caps: list[float] = []
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        with attention_observed(model, lambda layer, q, k, scaling, softcap, window: caps.append(softcap)):
            found = model(input_ids=ids, use_cache=False).logits
    assert caps == [2.0] * 3
    assert torch.allclose(found, expected, atol=2e-4, rtol=1e-3)
    queries, keys = torch.randn(4, 5, 8), torch.randn(2, 9, 8)
    capped = largest_logits(queries, keys, 0.5, 2.0)
    assert torch.allclose(capped, torch.tensor(naive(queries, keys, 0, 9, 0.5, 2.0)), atol=1e-5)


def test_chances_are_the_maxima_of_the_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "ROWS", 3)
    monkeypatch.setattr(labels, "COLUMNS", 4)
    queries, keys = torch.randn(4, 17, 8), torch.randn(2, 17, 8)
    found = largest_chances(queries[:, 10:], keys, 10, 0.3)
    matrix = 0.3 * torch.einsum("gqd,gkd->gqk", queries, keys.repeat_interleave(2, 0))
    matrix = matrix.masked_fill(torch.ones(17, 17).triu(1).bool(), -torch.inf).log_softmax(2)
    expected = matrix.view(2, 2, 17, 17)[:, :, 10:, :10].amax((1, 2))
    assert torch.allclose(found, expected, atol=1e-5)


def test_tokens_outside_a_layers_window_have_no_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both labels against the whole matrix; windows as a model's layers have them, and nothing is learnt there."""
    monkeypatch.setattr(labels, "ROWS", 3)
    monkeypatch.setattr(labels, "COLUMNS", 4)
    torch.manual_seed(0)
    queries, keys, tokens, window = torch.randn(4, 17, 8), torch.randn(2, 17, 8), 10, 6
    matrix = 0.3 * torch.einsum("gqd,gkd->gqk", queries, keys.repeat_interleave(2, 0))
    rows, columns = torch.arange(17)[:, None], torch.arange(17)
    matrix = matrix.masked_fill((columns > rows) | (columns <= rows - window), -torch.inf)
    own = queries[:, tokens:]
    found = (
        largest_logits(own, keys[:, :tokens], 0.3, window=window),
        largest_chances(own, keys, tokens, 0.3, window=window),
    )
    for each, right in zip(found, (matrix, matrix.log_softmax(2)), strict=True):
        torch.testing.assert_close(each, right.view(2, 2, 17, 17)[:, :, tokens:, :tokens].amax((1, 2)))
        assert each[:, :5].isneginf().all() and each[:, 5:].isfinite().all()
    scores = torch.zeros(tokens, 2, requires_grad=True)
    layer_loss(scores, found[0].T, 1.0, 0.0, 1.0).backward()
    assert scores.grad is not None and not scores.grad[:5].any() and scores.grad[5:].all()
    windows: dict[int, int] = {}
    with (
        attention_observed(model_of("gemma2"), lambda layer, *told: windows.update({layer: told[-1]})),
        torch.no_grad(),
    ):
        model_of("gemma2")(input_ids=torch.tensor([prompt(9)]), use_cache=False)
    assert 0 in windows.values() and max(windows.values()) > 0


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_attention_that_cannot_be_heard_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="FalconForCausalLM keeps its own attention"):
        kv_heads_of(model_of(name))


def test_kv_heads_are_counted() -> None:
    assert kv_heads_of(model_of("llama")) == (2, 2, 2)
    assert kv_heads_of(model_of("llama-multi-query")) == (1, 1, 1)
    assert kv_heads_of(model_of("gpt2")) == (4, 4, 4)


# ---------------------------------------------------------------- files


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    model = tiny_llama()
    heads = heads_for(model).bfloat16()
    recipe = {"query_aware": True, "labels": "logits"}
    digests = fingerprint(model, tiny_tokenizer())
    write_heads(heads, tmp_path / "a", config=model.config, base="some/model", recipe=recipe, fingerprint=digests)
    found = read_heads(tmp_path / "a")
    assert (found.base, found.recipe, found.fingerprint) == ("some/model", recipe, digests)
    assert found.heads.shape == heads.shape
    for one, other in zip(found.heads.parameters(), heads.parameters(), strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, other)
    config = json.loads((tmp_path / "a" / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["hidden_size"], config["num_hidden_layers"]) == ("llama", 32, 2)
    assert (config["width"], config["num_key_value_heads"], config["d_r"]) == (64, 2, 6)
    assert found.check((64, 64), (2, 2), digests) == []
    assert (tmp_path / "a" / "heads.safetensors").stat().st_mode & 0o777 == 0o644


def test_layers_of_several_sizes(tmp_path: Path) -> None:
    heads = RetainingHeads(RetainingShape((8, 12), (2, 1), 4, "gelu"))
    write_heads(heads, tmp_path)
    found = read_heads(str(tmp_path))
    assert found.heads.shape == heads.shape
    assert found.recipe == {}


def test_the_fingerprint_tells_models_apart_and_not_how_they_were_loaded() -> None:
    model = model_of("qwen2")
    tokenizer = tiny_tokenizer()
    own = fingerprint(model, tokenizer)
    packed = build_runner(model, compile=False)
    assert fingerprint(packed.module, tokenizer) == own
    assert fingerprint(model_of("llama"), tokenizer)["weights"] != own["weights"]
    assert fingerprint(model, tiny_tokenizer(300))["tokenizer"] != own["tokenizer"]
    assert "tokenizer" not in fingerprint(model, None)
    found = read_heads_of(model)
    assert found.check((64, 64, 64), (2, 2, 2), own | {"weights": "00"}) == ["weights"]


def read_heads_of(model: Any) -> Any:
    from sakiyomi.cache.policies.retaining.formats import HeadsFile

    return HeadsFile(heads=heads_for(model), name="some-heads", fingerprint=fingerprint(model, None))


def test_heads_of_another_model_are_refused_with_both_numbers(tmp_path: Path) -> None:
    heads = heads_for(tiny_llama())
    write_heads(heads, tmp_path)
    found = read_heads(tmp_path)
    for widths, kv_heads, words in (
        ((64,) * 3, (2,) * 3, "those of 2 layers, and the model has 3"),
        ((64, 96), (2, 2), "read 64 values in layer 1, .* are 96"),
        ((64, 64), (1, 1), "score 2 KV heads in layer 0, and the model has 1"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            found.check(widths, kv_heads)


@pytest.mark.parametrize("name", ["tales", "retriever"])
def test_the_embedded_heads_belong_to_the_embedded_model(name: str) -> None:
    """Their card's overlap is far above chance, and they are no larger than they may be."""
    found = read_heads(f"{name}-retaining")
    model = load_model(name, device="cpu")
    assert (
        found.check(Raw(model.model).widths, kv_heads_of(model.model), fingerprint(model.model, model.tokenizer)) == []
    )
    assert sum(weight.nbytes for weight in found.heads.parameters()) <= 4 << 20
    card = json.loads((embedded(f"{name}-retaining") / "card.json").read_text(encoding="utf-8"))
    assert card["base"] == found.base == name
    assert all(measures["overlap"] > 0.2 for measures in card["held_out"].values())


def official(heads: RetainingHeads) -> dict[str, Tensor]:
    """What Locret's training saves: all of the model's tensors, the heads among them."""
    tensors = {"model.embed_tokens.weight": torch.zeros(3, 2), "model.layers.0.self_attn.q_proj.weight": torch.zeros(2)}
    for layer in range(heads.shape.layers):
        tensors[f"model.layers.{layer}.self_attn.fc1.weight"] = heads.first[layer].weight.detach().clone()
        tensors[f"model.layers.{layer}.self_attn.fc2.weight"] = heads.second[layer].weight.detach().clone()
    return tensors


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "heads.pt"])
@pytest.mark.parametrize("whole", [False, True])
def test_official_checkpoints_are_read(name: str, whole: bool, tmp_path: Path) -> None:
    heads = heads_for(tiny_llama())
    path = tmp_path / name
    if path.suffix == ".safetensors":
        save_file(official(heads), path)
    else:
        torch.save(official(heads), path)
        with pytest.raises(LoadError, match="allow_pickle=True"):
            read_heads(tmp_path if whole else path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_act": "silu"}), encoding="utf-8")
    found = read_heads(tmp_path if whole else path, allow_pickle=True)
    assert found.heads.shape == heads.shape
    assert (found.base, found.recipe, found.fingerprint) == (None, {}, {})
    qkv = torch.randn(5, 64)
    assert torch.equal(found.heads(1, qkv), heads(1, qkv))


def test_names_that_are_no_heads_are_left_alone(tmp_path: Path) -> None:
    """OPT's MLP is called fc1 and fc2 too, but it is in no attention."""
    tensors = {f"model.decoder.layers.0.fc{part}.weight": torch.zeros(2, 2) for part in (1, 2)}
    save_file(tensors | {"model.layers.0.self_attn.fc1.bias": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(LoadError, match="no retaining heads"):
        read_heads(tmp_path / "a.safetensors")


def broken(change: Callable[[dict[str, Tensor]], object]) -> dict[str, Tensor]:
    tensors = official(heads_for(tiny_llama()))
    change(tensors)
    return tensors


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.0.self_attn.fc2.weight"), "fc2 of layer 0 is missing"),
        (lambda t: t.update({"model.layers.1.self_attn.fc1.weight": torch.zeros(5, 64)}), "do not fit together"),
        (lambda t: t.update({"model.layers.1.self_attn.fc1.weight": torch.zeros(6, 64).half()}), "float16"),
        (lambda t: t.update({"model.layers.1.self_attn.fc1.weight": torch.zeros(6)}), "do not fit together"),
    ],
)
def test_damaged_heads(change: Any, words: str, tmp_path: Path) -> None:
    save_file(broken(change), tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=words):
        read_heads(tmp_path)


def test_files_that_are_not_there_or_no_heads(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no folder or file"):
        read_heads(tmp_path / "nowhere")
    with pytest.raises(LoadError, match="no weights in"):
        read_heads(tmp_path)
    (tmp_path / "heads.safetensors").write_bytes(b"12345678901234567890")
    with pytest.raises(SakiyomiError):
        read_heads(tmp_path)
    with pytest.raises(InputError, match="plain"):
        write_heads(heads_for(tiny_llama()), tmp_path, recipe={"a": torch.zeros(1)})
    torch.save([1, 2], tmp_path / "x.bin")
    with pytest.raises(LoadError, match="no tensors by name"):
        read_heads(tmp_path / "x.bin", allow_pickle=True)
