"""A program that calls transformers' generate, with one argument more: streamed, sampled, and checked.

Run it:  python examples/transformers_generate.py
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import sakiyomi

if __name__ == "__main__":
    loop = sakiyomi.custom_generate.using(compile=False) if "--quick" in sys.argv else sakiyomi.custom_generate
    model = AutoModelForCausalLM.from_pretrained(sakiyomi.embedded("tales"), dtype=torch.float32)
    draft = AutoModelForCausalLM.from_pretrained(sakiyomi.embedded("tales-draft"), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(sakiyomi.embedded("tales"))
    inputs = tokenizer("Once upon a time", return_tensors="pt")

    torch.manual_seed(1)
    model.generate(
        **inputs,
        do_sample=True,
        top_p=0.9,
        max_new_tokens=48,
        streamer=TextStreamer(tokenizer, skip_prompt=True),
        custom_generate=loop,
        assistant_model=draft,
    )
    ours = model.generate(**inputs, max_new_tokens=48, custom_generate=loop, assistant_model=draft)
    theirs = model.generate(**inputs, max_new_tokens=48)
    print(f"greedy, the same tokens as transformers alone: {torch.equal(ours, theirs)}")
