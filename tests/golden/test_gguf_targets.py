"""A GGUF file as target: every drafter, cache and option gives the text that the same file gives without a draft.

What runs packed layers of int8 and int4 runs blocks. A drafter or a policy that is added needs no line here, or is
listed with the reason why it cannot run beside such a file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from architectures import prompt, settled
from block_toys import deepspec_folder, new_block
from drafters import Branching, Scripted, texts_of
from eagle_toys import new_head, speculators_folder
from gguf_toys import model_of
from medusa_toys import new_heads
from sakiyomi import LLM, SamplingParams
from sakiyomi.cache.policies.retaining.formats import write_heads as write_retaining
from sakiyomi.cache.policies.retaining.heads import RetainingHeads, RetainingShape
from sakiyomi.cache.policies.retaining.raw import Raw
from sakiyomi.core.cache_specs import CACHE_FORMS
from sakiyomi.core.draft_specs import FORMS
from sakiyomi.drafters.medusa_heads.formats import write_heads
from sakiyomi.kernels.native import PackedWeights
from sakiyomi.model_executor.gguf.export import write_gguf
from toys import save_model, tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.skipif(PackedWeights.create() is None, reason="the C++ kernels cannot be compiled here")
VOCAB, NEW, CHUNK, BUDGET = 320, 24, 48, 72
PROMPTS = [prompt(150, 1), prompt(5, 2), prompt(100, 3)]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3}


@cache
def model() -> Any:
    """The target before its numbers were rounded: drafts made from it are right now and then."""
    return tiny_llama(VOCAB, layers=3, dim=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of everything; ``target.gguf`` is the file."""
    place = tmp_path_factory.mktemp("gguf")
    write_gguf(place / "target.gguf", model(), tiny_tokenizer(), "Q4_0")
    return place


def draft_file(folder: Path) -> str:
    write_gguf(folder / "draft.gguf", tiny_llama(VOCAB, layers=1, dim=32), tiny_tokenizer(), "Q8_0")
    return f"model:{folder / 'draft.gguf'}"


def medusa(folder: Path) -> str:
    write_heads(new_heads(model(), heads=2), folder / "medusa")
    return f"medusa:{folder / 'medusa'}"


def block(folder: Path) -> str:
    return f"block:{deepspec_folder(folder / 'block', new_block(model(), size=3, anchored=True, layers=(0, 2)))}"


DRAFTS: dict[str, Callable[[Path], str]] = {
    "model": draft_file,
    "medusa": medusa,
    "eagle": lambda folder: f"eagle:{speculators_folder(folder / 'eagle', new_head(model(), layers=(0, 1, 2)))}",
    "block": block,
    "self-int8": lambda folder: "self-int8",
    "self-int4": lambda folder: "self-int4",
    "self-evicted": lambda folder: "self-evicted:64",
    "early-exit": lambda folder: "early-exit:1",
    "oracle": lambda folder: "oracle:0.6",
    "prompt-lookup": lambda folder: "prompt-lookup",
    "suffix": lambda folder: "suffix",
    "recycle": lambda folder: "recycle",
    "ngram": lambda folder: "ngram",
    "model folder": lambda folder: f"model:{save_model(folder / 'same', model(), tiny_tokenizer())}",
    "merged": lambda folder: f"suffix+{draft_file(folder)}",
}
"""A spec of each drafter beside this target, made in a folder."""
WITHOUT = {
    "mtp": "MTP layers are not read from GGUF files",
    "assistant": "assistants are trained for Gemma 4 and read its own layers; the toy target is a Llama",
}


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": NEW, "ignore_eos": True} | values))


def texts(llm: LLM, **values: Any) -> list[list[int]]:
    return [out.token_ids for out in llm.generate(PROMPTS, params(**values))]


_plain: dict[str, list[list[int]]] = {}


def plain(folder: Path, values: dict[str, Any] | None = None, **options: Any) -> list[list[int]]:
    """Nothing drafted: of each prompt alone, or of all with these values (a seed gives each its own) or options."""
    key = repr((folder, values, options))
    if key not in _plain:
        llm = LLM(str(folder / "target.gguf"), "none", **({"compile": False} | options))
        by_itself = values is None and not options
        alone = [llm.generate([tokens], params())[0].token_ids for tokens in PROMPTS] if by_itself else None
        _plain[key] = alone or texts(llm, **(values or {}))
    return _plain[key]


def test_every_drafter_is_here() -> None:
    assert FORMS.keys() <= DRAFTS.keys() | WITHOUT.keys()


@pytest.mark.every
@pytest.mark.parametrize("name", DRAFTS)
def test_drafts(name: str, folder: Path) -> None:
    """Chains, trees and samples with a seed, in a batch of unequal lengths."""
    llm = LLM(str(folder / "target.gguf"), DRAFTS[name](folder), compile=False, strict=True)
    done = llm.generate(PROMPTS, params(gamma=3, tree="chain"))
    assert [out.token_ids for out in done] == plain(folder)
    assert sum(out.stats.drafted for out in done) > 0
    assert texts(llm, gamma=3, nodes=12) == plain(folder)
    assert texts(llm, gamma=3, **SAMPLED) == plain(folder, SAMPLED)


CACHES = [
    *(name for name, form in CACHE_FORMS.items() if form.kind == "policy" and not form.file and name != "infllm"),
    "locret", "quant-8", "quant-4", "quant-2", "kvquant-4", "h2o+quant-4", "minference", "offload",
]  # fmt: skip
"""All policies, quantized caches, one of both. infllm keeps whole blocks, for longer texts than these."""


def cache_options(name: str, folder: Path) -> dict[str, Any]:
    evicts = name.partition("+")[0] in CACHE_FORMS and CACHE_FORMS[name.partition("+")[0]].kind == "policy"
    if name == "locret":
        heads = RetainingHeads(RetainingShape(Raw(model()).widths, (2, 2, 2), 24))
        write_retaining(heads, folder / "locret")
        name = f"locret:{folder / 'locret'}"
    if name.partition("-")[0] in ("quant", "kvquant"):
        name += "[residual=16]"
    return {"cache": name, "chunk_size": CHUNK, **({"kv_budget": BUDGET} if evicts else {})}


@pytest.mark.few(8)
@pytest.mark.parametrize("name", CACHES)
def test_caches(name: str, folder: Path) -> None:
    """What is evicted or rounded does not depend on drafts."""
    options = cache_options(name, folder)
    wanted = plain(folder, **options)
    drafter = Branching(texts_of(PROMPTS, wanted), "sometimes", VOCAB)
    done = LLM(str(folder / "target.gguf"), drafter, compile=False, strict=True, **options).generate(
        PROMPTS, params(gamma=3)
    )
    assert [out.token_ids for out in done] == wanted
    assert sum(out.stats.accepted for out in done) > 10


@pytest.mark.every
@pytest.mark.parametrize(
    "options",
    [{"exact": True}, {"compile": "auto"}, {"max_batch": 2}, {"chunk_size": 16}, {"dtype": "float32"},
     {"exact": True, "compile": "auto"}, {"offload": "disk"}],
    ids=str,
)  # fmt: skip
def test_options(options: dict[str, Any], folder: Path) -> None:
    """By a tree drafter that is right now and then."""
    same = {name: value for name, value in options.items() if name in ("dtype", "chunk_size")}
    wanted = plain(folder, **same)
    drafter = Branching(texts_of(PROMPTS, wanted), "sometimes", VOCAB)
    llm = LLM(str(folder / "target.gguf"), drafter, strict=True, **({"compile": False} | options))
    if options.get("compile"):
        settled(llm)
    done = llm.generate(PROMPTS, params(gamma=4))
    assert [out.token_ids for out in done] == wanted
    assert sum(out.stats.accepted for out in done) > 10


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "gpt_oss", "cohere2", "qwen3_moe", "lfm2", "gpt2"])
def test_kinds_of_layers(kind: str, tmp_path: Path) -> None:
    """Sliding windows, experts with and without biases, states, and layers that lie the other way round."""
    write_gguf(tmp_path / "m.gguf", model_of(kind), tiny_tokenizer(), "Q8_0")
    plain = LLM(str(tmp_path / "m.gguf"), "none", compile=False)
    wanted = [plain.generate([tokens], params())[0].token_ids for tokens in PROMPTS]
    drafter = Scripted(texts_of(PROMPTS, wanted), "sometimes", VOCAB)
    done = LLM(str(tmp_path / "m.gguf"), drafter, strict=True).generate(PROMPTS, params(gamma=3))
    assert [out.token_ids for out in done] == wanted
    assert sum(out.stats.accepted for out in done) > 10


def test_conversations_and_prefixes(folder: Path) -> None:
    """In float32: in 16 bits a prompt's chunks and single rows are summed otherwise on some processors."""
    llm = LLM(str(folder / "target.gguf"), "suffix+prompt-lookup", compile=False, dtype="float32")
    wanted = [llm.generate(PROMPTS[:1], params())[0].token_ids]
    with llm.conversation(llm.prefix(PROMPTS[0][:-1])) as talk:
        assert talk.generate(PROMPTS[0], params()).token_ids == wanted[0]
        longer = [*PROMPTS[0], *wanted[0], *prompt(9, 7)]
        second = talk.generate(longer, params())
        assert second.stats.reused > 100
    assert llm.generate([longer], params())[0].token_ids == second.token_ids


def test_it_says_what_the_weights_are(folder: Path) -> None:
    """For prefixes, which are not those of other blocks, and for readers."""
    llm = LLM(str(folder / "target.gguf"), "none", compile=False)
    assert llm.recipe()["quantize"] == "Q4_0 blocks"
    assert "Q4_0 blocks on cpu" in repr(llm)
