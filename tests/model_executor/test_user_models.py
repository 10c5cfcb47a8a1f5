"""A pair that the user loaded himself, whatever he did to it, works as target unchanged, or is refused clearly.

Quantized, offloaded, adapted and sharded models are ordinary objects with unusual layers: the engine must run those
layers, not their weights. The oracle is the same object's own ``generate`` or forward.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from architectures import ALL, VOCAB, greedy, logits_after, make, model_of, prompt
from drafters import Branching, Scripted, texts_of
from sakiyomi import LLM, SakiyomiError, SamplingParams
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.model_executor.probe import probe
from toys import character_tokenizer, save_model, tiny_llama
from warm import warm

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
PROMPTS = [prompt(11, 1), prompt(3, 2)]
NEW = 16


def check(model: Any, *, exactly: bool = True) -> None:
    """Greedy text through the engine, plain and drafted, against the model's own; the model is as it was afterwards."""
    before = [greedy(model, tokens, NEW) for tokens in PROMPTS]
    texts = texts_of(PROMPTS, before)
    for draft in ("none", Scripted(texts, "always", VOCAB), Branching(texts, "sometimes", VOCAB)):
        llm = LLM((model, TOKENIZER), draft, compile=False)
        done = llm.generate(PROMPTS, SamplingParams(max_new_tokens=NEW, ignore_eos=True, gamma=3))
        for out, expected in zip(done, before, strict=True):
            same = [a == b for a, b in zip(out.token_ids, expected, strict=True)]
            assert all(same) if exactly else sum(same) >= NEW // 2, same
    assert [greedy(model, tokens, NEW) for tokens in PROMPTS] == before, "the user's model has changed"


def test_a_plain_pair() -> None:
    check(make(ALL["llama"]()))


def test_a_model_in_bfloat16_with_parts_in_float32() -> None:
    """Norms or heads kept in fp32 are usual; the parts' own casts stay."""
    model = copy.deepcopy(model_of("gpt2"))
    model.transformer.ln_f.float()
    check(model)


class Int8Linear(nn.Linear):
    """How quantizing libraries look from outside: a linear layer whose weight is not what it multiplies with."""

    def __init__(self, old: nn.Linear) -> None:
        super().__init__(old.in_features, old.out_features, bias=old.bias is not None)
        scale = old.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("codes", (old.weight.detach() / scale).round().to(torch.int8))
        self.bias = old.bias
        self.weight = nn.Parameter(torch.zeros_like(old.weight), requires_grad=False)  # nothing of use

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.codes.to(x.dtype) * self.scale, self.bias)


class LowRank(nn.Module):
    """An adapter around a layer."""

    def __init__(self, old: nn.Module, width: int = 4) -> None:
        super().__init__()
        self.old = old
        generator = torch.Generator().manual_seed(0)
        self.down = nn.Parameter(torch.randn(width, old.in_features, generator=generator))  # type: ignore[attr-defined]
        self.up = nn.Parameter(0.3 * torch.randn(old.out_features, width, generator=generator))  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return self.old(x) + x @ self.down.T @ self.up.T  # type: ignore[no-any-return]


@pytest.mark.few(1)
@pytest.mark.parametrize("change", [Int8Linear, LowRank])
def test_layers_that_are_not_plain(change: Callable[[nn.Linear], nn.Module]) -> None:
    model = make(ALL["llama"]())
    for layer in model.model.layers:
        layer.self_attn.q_proj = change(layer.self_attn.q_proj)
        layer.mlp.down_proj = change(layer.mlp.down_proj)
    plain, changed = (logits_after(m, PROMPTS[0]) for m in (model_of("llama"), model))
    assert not torch.equal(plain, changed)
    check(model)


def test_shared_layers() -> None:
    """One module in two places, as in models that share layers across depth."""
    model = make(ALL["llama"]())
    model.model.layers[2].mlp = model.model.layers[1].mlp
    check(model)


def test_weights_that_cannot_be_written() -> None:
    """Memory-mapped weights are often read only, inference mode forbids gradients: nothing may write to either."""
    model = make(ALL["llama"]()).requires_grad_(False)
    with torch.inference_mode():
        frozen = make(ALL["llama"]())
    for given in (model, frozen):
        llm = LLM((given, TOKENIZER), "none", compile=False)
        done = llm.generate(PROMPTS, SamplingParams(max_new_tokens=NEW, ignore_eos=True))
        assert [out.token_ids for out in done] == [greedy(model_of("llama"), tokens, NEW) for tokens in PROMPTS]


def test_a_model_whose_cache_is_switched_off() -> None:
    """Settings for training stay the user's, and do not concern the engine."""
    model = make(ALL["llama"]())
    model.config.use_cache = False
    model.activation_checkpointing_enable()
    model.train()
    llm = LLM((model, TOKENIZER), "none", compile=False)
    done = llm.generate(PROMPTS, SamplingParams(max_new_tokens=NEW, ignore_eos=True))
    assert [out.token_ids for out in done] == [greedy(model_of("llama"), tokens, NEW) for tokens in PROMPTS]
    assert model.training
    assert model.is_activation_checkpointing
    assert not model.config.use_cache


def test_a_forward_that_refuses_what_it_is_given() -> None:
    """Its own error is the cause, and not taken for that of a class whose attention cannot be switched."""

    class Refusing(nn.Module):
        def set_attn_implementation(self, name: str) -> None: ...

        def forward(self, **_: Any) -> None:
            raise ValueError("it wants a bounding box")

    with pytest.raises(UnsupportedError, match="asks for more than keys, values and positions") as caught:
        probe(Refusing(), 8, 1, torch.device("cpu"))
    assert str(caught.value.__cause__) == "it wants a bounding box"


def test_training_goes_on_beside_the_engine() -> None:
    """Gradients of the user's model after generating are what they were without it."""
    model = make(ALL["llama"]())
    ids = torch.tensor([PROMPTS[0]])
    model(input_ids=ids, labels=ids).loss.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    llm = LLM((model, TOKENIZER), "none", compile=False)
    llm.generate(PROMPTS, SamplingParams(max_new_tokens=4))
    model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, wanted[name]), name


# ---------------------------------------------------------------- offloaded


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["cpu hooks", "disk"])
def test_offloaded_by_accelerate(where: str, tmp_path: Path) -> None:
    """Weights that come and go by hooks: run through those hooks, or refused; never silently empty."""
    accelerate = pytest.importorskip("accelerate")
    model = make(ALL["llama"]())
    expected = [greedy(model, tokens, NEW) for tokens in PROMPTS]
    if where == "disk":
        accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    else:
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    try:
        llm = LLM((model, TOKENIZER), "none", compile=False)
        done = llm.generate(PROMPTS, SamplingParams(max_new_tokens=NEW, ignore_eos=True))
    except SakiyomiError as error:
        assert "offload" in str(error) or "device" in str(error)
    else:
        assert [out.token_ids for out in done] == expected
    assert [greedy(model, tokens, NEW) for tokens in PROMPTS] == expected


def test_a_device_map_that_names_the_disk(tmp_path: Path) -> None:
    """As ``from_pretrained`` makes it: some layers here, some in files."""
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path / "model", model_of("llama"), TOKENIZER)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu", "model.rotary_emb": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i else "cpu" for i in range(3)}
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=str(tmp_path / "files"))
    try:
        llm = LLM((model, TOKENIZER), "none", compile=False)
        done = llm.generate(PROMPTS, SamplingParams(max_new_tokens=NEW, ignore_eos=True))
    except SakiyomiError as error:
        assert "offload" in str(error) or "device" in str(error)
    else:
        assert [out.token_ids for out in done] == [greedy(model_of("llama"), tokens, NEW) for tokens in PROMPTS]


# ---------------------------------------------------------------- quantized


@pytest.mark.filterwarnings("default")
def test_torchao_weights() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = tiny_llama(vocab=VOCAB, dim=64, layers=2)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    check(model)


@pytest.mark.filterwarnings("default")
def test_bitsandbytes_weights(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = tiny_llama(vocab=VOCAB, dim=64, layers=2)
    for layer in model.model.layers:
        old = layer.mlp.up_proj
        fresh = bitsandbytes.nn.Linear4bit(
            old.in_features, old.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
        )
        fresh.load_state_dict({"weight": old.weight.detach().clone()})
        layer.mlp.up_proj = fresh.to("cpu")
    check(model)


# ---------------------------------------------------------------- several processes

SHARDED = """
import json, sys
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from sakiyomi import LLM, SakiyomiError, SamplingParams
from toys import character_tokenizer

folder, count, prompts, rank = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
tokenizer = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + count - 2))))
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
weight = model.model.layers[0].self_attn.q_proj.weight
shape = list(getattr(weight, "to_local", lambda: weight)().shape)
try:
    llm = LLM((model, tokenizer), "none", compile=False)
    done = llm.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True))
    found = {"tokens": [out.token_ids for out in done]}
except SakiyomiError as error:
    found = {"error": type(error).__name__, "message": str(error)}
found["shape"] = shape
if dist.get_rank() == 0:
    print("FOUND" + json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""


def test_tensor_parallel_in_two_processes(tmp_path: Path) -> None:
    """``tp_plan="auto"`` on gloo: the same text as in one process, on every rank, or one clear error; never a hang."""
    model = tiny_llama(vocab=VOCAB, dim=32, layers=2)
    folder = save_model(tmp_path / "model", model, TOKENIZER)
    script = tmp_path / "sharded.py"
    script.write_text(textwrap.dedent(SHARDED), encoding="utf-8")
    settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # What torch's launcher would set; it is one more process that loads torch.
    settings |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = [*warm(), str(script), str(folder), str(VOCAB), json.dumps(PROMPTS)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            env=os.environ | settings | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (_, errors) in zip(ranks, said, strict=True):
        assert process.returncode == 0, errors[-2000:]
    (line,) = [line for line in said[0][0].splitlines() if line.startswith("FOUND")]
    found = json.loads(line.removeprefix("FOUND"))
    print(found)
    if "error" in found:
        assert "tensor" in found["message"] or "distributed" in found["message"], found
    else:
        assert found["tokens"] == [greedy(model, tokens, 8) for tokens in PROMPTS]
