"""A model whose tokenizer drops the first space of a text, as those of Llama 2, Mistral and Phi 3 do."""

from __future__ import annotations

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from toys import succession_llama, unigram_tokenizer

WHOLE = " fox ran😀 home\n"
"""What it writes behind "the"; a special token, ``<|im_end|>``, stands before the newline."""
_MARKS = ["<|user|>", "<|reply|>", "<|im_end|>"]
_SAID = ("▁the", "▁fox", "▁ran", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁home", "<|im_end|>", "\n", "</s>")


def spaced_toy() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """It writes the same text behind "the" and at the beginning of a reply."""
    tokenizer = unigram_tokenizer(["▁the", "▁fox", "▁ran", "▁home", "\n"])
    tokenizer.add_tokens(_MARKS, special_tokens=True)
    tokenizer.chat_template = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|reply|>"
    first, *rest = tokenizer.convert_tokens_to_ids(list(_SAID))
    model = succession_llama([first, *rest], len(tokenizer))
    reply = tokenizer.convert_tokens_to_ids("<|reply|>")
    model.lm_head.weight.data[:, reply] = model.lm_head.weight.data[:, first]
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer
