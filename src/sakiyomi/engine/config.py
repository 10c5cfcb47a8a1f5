"""What an ``LLM`` is made of, as values that a command line, an environment or a file can say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LLMConfig:
    """The parameters of ``LLM``: which models, and how they run. ``LLM(**dataclasses.asdict(config))`` loads them.

    The flags of the commands and of the server are these fields. Only ``target`` has a default that ``LLM`` has not.

    Attributes:
        target: embedded name (tales), folder in Hugging Face format, GGUF file, or hub id.
        draft: what proposes draft tokens: auto (the result of `sakiyomi tune`, else tales-draft for tales, else a head
            in the folder eagle, block, mtp or medusa of it, else recycle+suffix+prompt-lookup, while that is faster; on
            a GPU without recycle), none, a FOLDER with a model, Medusa heads, an EAGLE head or a block drafter (or
            model:, medusa:, eagle:, block:, mtp: before it, or an embedded name or hub id behind that), mtp (a layer in
            the target's own files), prompt-lookup, suffix or ngram (from the text itself; suffix:FILE remembers earlier
            texts, ngram:FILE is trained), recycle (what the target's passes ranked before; recycle:FILE keeps it),
            self-int4 or self-int8 (the target in 4 or 8 bits), early-exit:LAYERS (its first layers), oracle:RATE (the
            known answer, to measure what a draft could bring). Join several with +.
        cache: eviction policy (h2o), quantization of keys and values (quant-8, quant-4, quant-2; kvquant-4, kvquant-3,
            kvquant-2 at levels fitted to the model), or both (h2o+quant-4). full keeps all keys and values unchanged;
            offload:FOLDER does the same in mapped files.
        kv_budget: how much an eviction policy keeps: KV pairs per head, or bytes (2GiB).
        kv_memory: the same in bytes (2GiB) per request, instead of kv_budget.
        chunk_size: prompt tokens that are prefilled in one pass.
        dtype: auto (as the checkpoint says), float32, bfloat16 or float16.
        device: auto, cpu, cuda or cuda:N.
        quantize: int8 or int4: quantize the target's weights. The command reports what that changes, and keeps a packed
            copy beside the model (or in the cache folder) for the next time.
        offload: where weights lie between passes if they do not fit: disk (in the model's own files), cpu (main
            memory, for a GPU), auto (as much as fits on the device, then in main memory, then on disk), or a folder for
            weights that cannot be used in their stored form.
        compile: auto (passes that come often are recorded on the way, with the same numbers to the last bit) or false
            (all passes run eagerly).
        max_context: most tokens of prompt and output together; by default the model's own limit: its positions, or what
            its stretched rotary embedding reaches (yarn, llama3), and no more than where that changes all positions
            (longrope). A larger number goes beyond it with linear, and more slowly with longrope.
        max_batch: most requests that run at once.
        exact: greedy text, and text sampled by the rule coupled, has the same bits for every draft, gamma and batch.
        strict: a failing drafter ends the request with an error; by default the request continues without it.
        allow_pickle: open pickle weights, which can run any code.
        trust_remote_code: run Python code that comes with the model.
    """

    target: str = "tales"
    draft: str = "auto"
    cache: str = "full"
    kv_budget: int | str | None = None
    kv_memory: int | str | None = None
    chunk_size: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    quantize: str | None = None
    offload: str | None = None
    compile: str | bool = "auto"
    max_context: int | None = None
    max_batch: int = 8
    exact: bool = False
    strict: bool = False
    allow_pickle: bool = False
    trust_remote_code: bool = False
