"""llama.cpp by xllamacpp: its own server in this process, with a draft model of its own. Runs in its environment."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def served(task: dict[str, Any]) -> Any:
    """The server of a GGUF file, with another one as its draft; see ``worker``. `port`: on which it listens."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = task["model"]
    params.port = task.get("port", params.port)
    params.n_parallel = task["requests"]
    # Each slot has its own share of the context, with room for draft tokens after the last one.
    params.n_ctx = task["requests"] * (task["context"] + task["gamma"] + 1)
    params.kv_unified = False
    params.cache_prompt, params.cache_ram_mib = False, 0
    params.verbosity = -1
    threads = [params.cpuparams, params.cpuparams_batch]
    wide = task["kind"] == "float32"
    if wide:
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    elif task.get("cache") == "8":
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_Q8_0
    if task["draft"] is not None:
        draft = params.speculative.draft
        draft.mparams.path = task["draft"]
        draft.n_max, draft.n_min, draft.p_min = task["gamma"], 0, 0.0
        if wide:
            draft.cache_type_k = draft.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        threads += [draft.cpuparams, draft.cpuparams_batch]
    for each in threads:
        each.n_threads = task["threads"]
    return xllamacpp.Server(params)


def start(task: dict[str, Any]) -> tuple[Callable[[list[list[int]], int], list[list[int]]], dict[str, Any]]:
    """Open a GGUF file, with another one as its draft; see ``worker``."""
    import xllamacpp

    server = served(task)
    pool = ThreadPoolExecutor(task["requests"])

    def one(prompt: list[int], tokens: int) -> list[int]:
        # Its Python methods give text alone; the server's own path gives token ids.
        asked = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0, "samplers": ["temperature"]}
        asked |= {"ignore_eos": True, "return_tokens": True, "cache_prompt": False}
        body = json.dumps(asked).encode()
        header = {"Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{server.listening_address}/completion", body, header)
        ) as reply:
            found: list[int] = json.load(reply)["tokens"]
        return found

    def write(batch: list[list[int]], tokens: int) -> list[list[int]]:
        return list(pool.map(lambda prompt: one(prompt, tokens), batch))

    found = [part.strip() for part in xllamacpp.get_system_info().split("|") if "= 1" in part and "AVX" in part]
    return write, {
        "version": f"xllamacpp {xllamacpp.__version__}",
        "threads": task["threads"],
        "KV": "f32" if task["kind"] == "float32" else "q8_0" if task.get("cache") == "8" else "f16",
        "built with": " ".join(part.split(":")[-1].split("=")[0].strip() for part in found),
    }
