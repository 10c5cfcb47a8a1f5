"""A target of which each of two processes has a part of every layer (transformers' tp_plan): drafts go over it, too."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from toys import tiny_llama, tiny_tokenizer

RUN = """
import os, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig
from sakiyomi import LLM, InputError, SamplingParams

torch.set_num_threads(1)
target, draft = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(
    target, dtype=torch.float32, distributed_config=DistributedConfig(tp_size=2)
)
assert {type(weight).__name__ for weight in model.parameters()} == {"DTensor", "Parameter"}
pair = model, AutoTokenizer.from_pretrained(target)
prompts = [[5, 6, 7], [9, 8], [3, 1, 4, 1, 5]]
texts = {}
plain, drafted = LLM(pair, "none"), LLM(pair, f"model:{draft}")
for params in (
    SamplingParams(max_new_tokens=16, ignore_eos=True),
    SamplingParams(max_new_tokens=16, ignore_eos=True, temperature=1.0, seed=3),
    SamplingParams(max_new_tokens=16, ignore_eos=True, tree="best-first"),
):
    found = [[one.token_ids for one in llm.generate(prompts, params)] for llm in (plain, drafted)]
    alone = [drafted.generate([prompt], params)[0] for prompt in prompts]
    assert found[0] == found[1] and alone[0].token_ids == found[0][0], (params, found)
    assert all(one.stats.drafted for one in alone)
    texts[params] = found[0]
try:
    drafted.generate(prompts, SamplingParams(temperature=1.0))
except InputError as error:
    assert "give a seed" in str(error)
else:
    raise AssertionError("processes would have gone apart")
with open("texts" + os.environ["RANK"], "w") as file:  # what both print may become one line
    file.write(repr(texts))
torch.distributed.destroy_process_group()  # else torch may abort at the end
"""


@pytest.mark.thorough
@pytest.mark.timeout(330)
def test_drafts_over_a_target_in_two_processes(tmp_path: Path) -> None:
    """Greedy and sampled, together and alone: both processes write the text of plain decoding. No clock decides."""
    for name, seed in (("target", 0), ("draft", 1)):
        tiny_llama(seed=seed).save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    (tmp_path / "run.py").write_text(RUN, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "run.py"]
    both = subprocess.Popen(
        [*command, str(tmp_path / "target"), str(tmp_path / "draft")],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    )
    try:
        _, errors = both.communicate(timeout=280)
    finally:  # where processes part, each waits for the other
        with contextlib.suppress(ProcessLookupError):
            os.killpg(both.pid, signal.SIGKILL)
    assert both.returncode == 0, errors[-3000:]
    said = [(tmp_path / f"texts{rank}").read_text(encoding="utf-8") for rank in range(2)]
    assert said[0] == said[1] and len(said[0]) > 100
