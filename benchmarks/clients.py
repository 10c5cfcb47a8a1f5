"""Whether clients work unchanged: each against a live ``sakiyomi serve`` of the embedded pair.

    pip install litellm llm openai-agents guidellm lm-eval[api] transformers  # in an environment of their own
    python benchmarks/clients.py --python OTHER/bin/python                    # those that are there

litellm and llm say the same greedy text as the server's own paths give, whole and streamed; the agent of openai-agents
calls its tool, is given the result, and replies; guidellm's streams all succeed; lm-evaluation-harness finds the
likeliest answers and writes the text. One line a client; 1 is the status if one fails, or none is there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sakiyomi import embedded

PROMPT, TOKENS = "The fox said", 16

LITELLM = """
import json, sys
from importlib.metadata import version
import litellm
url, prompt, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
how = dict(api_base=url + "/v1", api_key="none", temperature=0, max_tokens=tokens)
said = [{"role": "user", "content": prompt}]
chat = litellm.completion("openai/tales", said, **how).choices[0].message.content
parts = litellm.completion("openai/tales", said, stream=True, **how)
streamed = "".join(part.choices[0].delta.content or "" for part in parts)
plain = litellm.text_completion(model="text-completion-openai/tales", prompt=prompt, **how).choices[0].text
vector = litellm.embedding("openai/tales", [prompt], api_base=how["api_base"], api_key="none").data[0]["embedding"]
print(json.dumps({"version": version("litellm"), "chat": chat, "streamed": streamed, "plain": plain,
                  "width": len(vector)}))
"""

LLM = """
import json, sys
from importlib.metadata import version
import llm
prompt, tokens = sys.argv[2], int(sys.argv[3])
model = llm.get_model("tales-here")
chat = model.prompt(prompt, stream=False, temperature=0, max_tokens=tokens).text()
streamed = "".join(model.prompt(prompt, stream=True, temperature=0, max_tokens=tokens))
print(json.dumps({"version": version("llm"), "chat": chat, "streamed": streamed}))
"""

AGENTS = """
import json, sys
from importlib.metadata import version
from typing import Literal
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)
cities = []
@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    "The weather of a city."
    cities.append(city)
    return "It is sunny."
model = OpenAIChatCompletionsModel("tales", AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="none"))
how = ModelSettings(temperature=0, tool_choice="required", max_tokens=200)
agent = Agent("guide", instructions="Help.", model=model, tools=[weather], model_settings=how)
reply = Runner.run_sync(agent, sys.argv[2], max_turns=3).final_output
print(json.dumps({"version": version("openai-agents"), "calls": len(cities), "replied": bool(reply)}))
"""
GUIDELLM = """
import json, subprocess, sys
from importlib.metadata import version
data = "kind=synthetic_text,prompt_tokens=32,output_tokens=" + sys.argv[3]
command = [sys.executable, "-m", "guidellm", "run", "--backend", "kind=openai_http,target=" + sys.argv[1],
           "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=8", "--data", data,
           "--tokenizer", "kind=hf_auto,model=" + sys.argv[4], "--output", "kind=json,path=report.json",
           "--disable-console"]
subprocess.run(command, check=True)
with open("report.json") as file:
    metrics = json.load(file)["benchmarks"][0]["metrics"]
written = metrics["output_token_count"]["successful"]["mean"]
print(json.dumps({"version": version("guidellm"), "streams": metrics["request_totals"]["successful"],
                  "written": written}))
"""

LM_EVAL = """
import json, sys
from importlib.metadata import version
import lm_eval
url, prompt, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
with open("items.jsonl", "w") as file:
    for text, answers in ("The little girl was very", [" happy", " parliament"]), (prompt, [" hello", "!!?"]):
        print(json.dumps({"prompt": text, "answers": answers, "text": ""}), file=file)
task = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "items.jsonl"}}, "test_split": "test",
        "doc_to_text": "{{prompt}}", "target_delimiter": ""}
chosen = {**task, "task": "chosen", "output_type": "multiple_choice", "doc_to_choice": "{{answers}}",
          "doc_to_target": 0}
written = {**task, "task": "written", "output_type": "generate_until", "doc_to_target": "{{text}}",
           "generation_kwargs": {"until": [], "max_gen_toks": tokens, "do_sample": False}}
how = {"model": "tales", "base_url": url + "/v1/completions", "tokenizer": sys.argv[4]}
found = lm_eval.simple_evaluate("local-completions", model_args=how, tasks=[chosen, written], log_samples=True)
print(json.dumps({"version": version("lm_eval"), "likeliest": found["results"]["chosen"]["acc,none"],
                  "unmarked": found["samples"]["written"][1]["resps"][0][0]}))
"""
CLIENTS = {"litellm": LITELLM, "llm": LLM, "agents": AGENTS, "guidellm": GUIDELLM, "lm_eval": LM_EVAL}
PACKAGES = {"agents": "openai-agents", "lm_eval": "lm-eval[api] transformers"}

# The embedded models have none.
TEMPLATE = """{% if tools %}{{ tools | tojson }}
Write <tool_call>
{"name": ..., "arguments": ...}
</tool_call>
{% endif %}{% for message in messages %}{{ message.content or "" }}{% for call in message.tool_calls %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}
{% endfor %}"""


@contextmanager
def served(folder: str) -> Iterator[str]:
    """A server of the embedded pair on a free port; its address."""
    template = Path(folder, "template.jinja")
    template.write_text(TEMPLATE, encoding="utf-8")
    command = [sys.executable, "-m", "sakiyomi", "serve", "--port", "0", "--chat-template", str(template)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"at (http://\S+)", line):
                yield found[1]
                return
        raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.wait()


def ask(url: str, path: str, body: dict[str, object]) -> dict[str, object]:
    """The reply of one of the server's own paths."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return dict(json.load(reply))


def wanted(url: str) -> dict[str, object]:
    """What clients have to say, by the server's own paths."""
    how = {"temperature": 0, "max_tokens": TOKENS}
    chat = ask(url, "/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], **how})
    plain = ask(url, "/v1/completions", {"prompt": PROMPT, **how})
    vectors = ask(url, "/v1/embeddings", {"input": PROMPT})
    text = chat["choices"][0]["message"]["content"]  # type: ignore[index]
    width = len(vectors["data"][0]["embedding"])  # type: ignore[index]
    plainly = plain["choices"][0]["text"]  # type: ignore[index]
    unmarked = ask(url, "/tokenize", {"prompt": PROMPT, "add_special_tokens": False})["tokens"]  # as lm-eval sends it
    written = ask(url, "/v1/completions", {"prompt": unmarked, **how})
    return {
        "chat": text,
        "streamed": text,
        "plain": plainly,
        "unmarked": written["choices"][0]["text"],  # type: ignore[index]
        "width": width,
        "calls": 1,
        "replied": True,
        "streams": 8,
        "written": TOKENS,
        "likeliest": 1.0,
    }


def run(python: str, name: str, url: str, folder: str, expected: dict[str, object]) -> bool | None:
    """Whether a client says what is expected; None: it is not installed."""
    if subprocess.run([python, "-c", f"import {name}"], capture_output=True, check=False).returncode:
        print(f"{name}: not installed; pip install {PACKAGES.get(name, name)}")
        return None
    settings = {
        **os.environ,
        "LLM_USER_PATH": folder,
        "OPENAI_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, "-c", CLIENTS[name], url, PROMPT, str(TOKENS), str(embedded("tales"))]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, encoding="utf-8", env=settings, check=False, timeout=300
    )
    if done.returncode:
        print(f"{name}: failed\n{done.stderr[-2000:]}")
        return False
    found = json.loads(done.stdout.splitlines()[-1])
    version = found.pop("version")
    wrong = [
        f"{key} is {value!r}, expected {expected[key]!r}" for key, value in found.items() if value != expected[key]
    ]
    print(f"{name} {version}: " + ("; ".join(wrong) or f"as it is, {', '.join(found)} equal"))
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the clients")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, served(folder) as url:
        lines = f'- model_id: tales-here\n  model_name: tales\n  api_base: "{url}/v1"\n'
        Path(folder, "extra-openai-models.yaml").write_text(lines, encoding="utf-8")  # llm's
        expected = wanted(url)
        results = [run(options.python, name, url, folder, expected) for name in CLIENTS]
    return 0 if True in results and False not in results else 1


if __name__ == "__main__":
    sys.exit(main())
