"""A server in a thread of the test's own process, on a free port, with a tiny model."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import uvicorn
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from sakiyomi import LLM
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.model_executor.build import build_runner
from sakiyomi.server.app import Server
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.paths import make_app
from sakiyomi.server.run import uvicorn_config
from toys import tiny_llama, tiny_tokenizer

CHATML = (
    "{% if tools %}<|im_start|>system\nYou may call: {% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Write <tool_call>\n{\"name\": ..., \"arguments\": ...}\n</tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip


# Authorities, which nobody here asks, take 27 ms to load, for each client and for each of httpx's own functions.
web = httpx.Client(verify=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0, max_connections=None))
"""``web.get`` and the others are ``httpx.get`` and so on, at once."""
_clients: dict[str, list[openai.OpenAI]] = {}


def toy_llm(draft: Any = "close", *, template: str | None = CHATML, marks: Sequence[str] = (), **options: Any) -> LLM:
    """A tiny Llama in fp32; ``draft`` "close" guesses right now and then: other weights, a little off.

    ``marks`` are special tokens of its tokenizer.
    """
    tokenizer = marked_tokenizer(marks)
    tokenizer.chat_template = template
    if draft == "close":
        near = tiny_llama(max_position_embeddings=4096)
        for parameter in near.parameters():
            parameter.data.mul_(1.02)
        near.lm_head.weight.data += 0.1 * tiny_llama(seed=5).lm_head.weight.data
        draft = ModelDrafter(build_runner(near, compile=False, max_slots=options.get("max_batch", 8)), 320)
    target = tiny_llama(max_position_embeddings=4096)
    return LLM((target, tokenizer), draft, **({"compile": False} | options))


def marked_tokenizer(marks: Sequence[str], special: bool = True) -> Any:
    """The tiny tokenizer, in which these texts are a token each."""
    tokenizer = tiny_tokenizer(320 - len(marks))
    tokenizer.add_tokens(list(marks), special_tokens=special)
    return tokenizer


@contextmanager
def running(llm: LLM, **config: Any) -> Iterator[tuple[Server, str]]:
    """The server, and the address of its root."""
    server = Server(llm, ServerConfig(**({"served_name": "toy"} | config)))
    with listening(make_app(server), server.config) as url:
        yield server, url


@contextmanager
def listening(app: FastAPI, config: ServerConfig) -> Iterator[str]:
    """The address of an application's root."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn_config(app, config))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    url = ""
    try:
        until = time.monotonic() + 20
        while not server.started and time.monotonic() < until:
            time.sleep(0.005)
        yield (url := f"http://127.0.0.1:{listener.getsockname()[1]}")
    finally:
        for used in _clients.pop(url, ()):
            used.close()
        server.should_exit = True
        thread.join(20)
        listener.close()


def client(url: str, **options: Any) -> openai.OpenAI:
    """The real client, which tries once; its connections are closed when the server ends."""
    plain = {"api_key": "none", "max_retries": 0, "timeout": 60, "http_client": httpx.Client(verify=False)}
    made = openai.OpenAI(base_url=f"{url}/v1", **(plain | options))
    _clients.setdefault(url, []).append(made)
    return made


def figures(url: str, **headers: str) -> dict[str, float]:
    """What ``/metrics`` says, by name, or name/label."""
    found = {}
    for family in text_string_to_metric_families(web.get(f"{url}/metrics", headers=headers).text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name not in ("model_name", "le")]
            found["/".join([sample.name, *labels])] = sample.value
    return found


def bombs() -> dict[str, dict[str, Any]]:
    """Schemas whose grammars are large, by kind."""
    deep: dict[str, Any] = {"type": "string", "pattern": "^(a|b|ab|ba){1,200}$"}
    for depth in range(8):
        wide = {"type": "object", "properties": {f"k{depth}_{i}": deep for i in range(2)}}
        deep = {"type": "array", "minItems": 1, "maxItems": 50, "items": {"anyOf": [deep, wide]}}
    return {
        "deep and wide": deep,
        "counted": {"type": "string", "pattern": "^((a{1,900}){1,900}){1,900}$"},
        "many names": {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(3000)}},
        "itself": {"$ref": "#"},
        "alternatives": {"anyOf": [{"type": "string", "pattern": f"^(x|y)*{i}$"} for i in range(400)]},
    }


def small_pdf(words: str) -> bytes:
    """A PDF of one page with these words."""
    drawn = f"BT /F1 12 Tf 20 100 Td ({words}) Tj ET".encode()
    parts = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 200 200] /Contents 4 0 R"
        b" /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(drawn), drawn),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    found, places = b"%PDF-1.4\n", []
    for number, part in enumerate(parts, 1):
        places.append(len(found))
        found += b"%d 0 obj\n%s\nendobj\n" % (number, part)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(parts) + 1, len(found))
    return found + b"xref\n0 %d\n0000000000 65535 f \n%s%s" % (len(parts) + 1, table, end)
