"""Drafters by the name before the colon of their spec. A new one is a file here whose class has ``make``, a line in
``DRAFTERS``, and its form in ``core.draft_specs``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.core.draft_specs import ModelSpec, read_argument, split_spec
from sakiyomi.core.embedded import DRAFTS, FREE_DRAFT
from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.drafters.adapter import Proposer, as_drafter
from sakiyomi.drafters.base import Context, Drafter, DrafterContext, Rule
from sakiyomi.drafters.merged import MergedDrafter

if TYPE_CHECKING:
    from sakiyomi.model_executor.runner import ModelRunner

__all__ = [
    "DRAFTERS",
    "Context",
    "Drafter",
    "DrafterContext",
    "Proposer",
    "Rule",
    "as_drafter",
    "heads_beside",
    "make_drafter",
    "parse_drafters",
]


def _model(spec: ModelSpec, around: DrafterContext) -> Drafter:
    from sakiyomi.drafters.cross_tokenizer.drafter import CrossDrafter
    from sakiyomi.drafters.learning import HeadLearner
    from sakiyomi.drafters.model import ModelDrafter
    from sakiyomi.model_executor.loading import check_cross_pair, check_pair, has_encoder, same_tokenizer, stop_tokens

    (name, device, learn), target = spec, around.target
    if device is not None and has_encoder(target.model.config):
        raise UnsupportedError(
            f"draft model:{name} is to run on {device}; drafts of encoder-decoder models run where the target runs"
        )
    draft = around.load(name, device)
    if same_tokenizer(target.tokenizer, draft.tokenizer) or has_encoder(target.model.config):
        check_pair(target, draft)
        mask = getattr(draft.model.config, "pard_token", None)
        # What a draft has learnt is no part of its recording.
        packed = _with_encoder(around.pack(replace(draft, record=None) if learn else draft), around.packed)
        if mask is not None and not 0 <= int(mask) < packed.vocab_size:
            raise InputError(
                f"pard_token in config.json of {name} is {mask}, and the model has {packed.vocab_size} tokens; get "
                "it again"
            )
        learner = HeadLearner(packed, "" if learn == "on" else learn) if learn else None
        return ModelDrafter(packed, around.vocab_size, mask=mask, learner=learner)
    if learn:
        raise UnsupportedError(
            f"draft model:{name} is to learn from the target's texts, and the two have different tokenizers; leave "
            "[learn=] out, or choose a draft with the target's tokenizer"
        )
    check_cross_pair(target, draft)
    packed = around.pack(draft)
    inner = ModelDrafter(packed, packed.vocab_size, "cross-model")
    return CrossDrafter(inner, draft.tokenizer, target.tokenizer, stop_tokens(draft.model, draft.tokenizer))


def _self_quantized(kind: str, around: DrafterContext) -> Drafter:
    """The target itself in fewer bits."""
    from sakiyomi.drafters.model import ModelDrafter

    if around.packed.weights.quantization is not None:
        raise InputError(
            f"draft self-{kind}: the target's own weights are quantized, and a quantized copy would not be faster; "
            "leave out quantize, or choose another draft"
        )
    packed = _with_encoder(around.quantized(kind), around.packed)
    return ModelDrafter(packed, around.vocab_size, name=f"self-{kind}")


def _with_encoder(draft: ModelRunner, target: ModelRunner) -> ModelRunner:
    """A draft model that has the target's encoder, if it is the same, run once for both."""
    if draft.weights.encoder is not None and target.weights.encoder is not None:
        draft.weights.encoder.borrow(target.weights.encoder)
    return draft


DRAFTERS: dict[str, str | Callable[[Any, DrafterContext], Drafter]] = {
    "model": _model,
    "medusa": "medusa.MedusaDrafter",
    "eagle": "eagle.EagleDrafter",
    "block": "block.BlockDrafter",
    "mtp": "mtp.MtpDrafter",
    "assistant": "assistant.AssistantDrafter",
    "self-int8": lambda _, around: _self_quantized("int8", around),
    "self-int4": lambda _, around: _self_quantized("int4", around),
    "self-evicted": "self_evicted.SelfEvicted",
    "early-exit": "early_exit.EarlyExit",
    "oracle": "oracle.Oracle",
    "prompt-lookup": "lookup.PromptLookup",
    "suffix": "suffix.SuffixDrafter",
    "ngram": "ngram.NgramDrafter",
    "recycle": "recycle.RecycleDrafter",
}
"""By the name before the colon of a spec: module and class of a drafter, or what makes it from the value behind the
colon (``read_argument``). Modules are imported when such a drafter is wanted.
"""


NGRAMS = "ngram.safetensors"
"""A file in a target's folder that "auto" uses, see `sakiyomi train ngram`."""


def parse_drafters(spec: Any) -> list[str | Drafter]:
    """The specs and drafters in ``draft``, one by one; no model is loaded yet.

    Args:
        spec: a spec, several joined by "+", an object with ``propose``, or a list of these; None: "none".

    Raises:
        InputError: this version has no such drafter, or an object is no drafter.
    """
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        if not spec:
            raise InputError('draft is an empty list; to generate without a draft pass "none"')
        wrong = [entry for entry in spec if not isinstance(entry, str) and not hasattr(entry, "propose")]
        if wrong:
            raise InputError(f"draft={spec!r} holds {wrong[0]!r}; expected specs, or objects with propose")
        return [part for entry in spec for part in parse_drafters(entry)]
    if spec is None:
        return ["none"]
    if isinstance(spec, str):
        return [*split_spec(spec)]
    if not hasattr(spec, "propose"):
        raise InputError(
            f"draft={spec!r}; expected a spec such as 'none' or 'model:<path>', or one object with propose"
        )
    return [as_drafter(spec)]


def heads_beside(folder: Path | None) -> list[str]:
    """Specs of the heads found in the subfolders `eagle`, `block`, `mtp` and `medusa` of a target's folder."""
    places = [] if folder is None else [folder / kind for kind in ("eagle", "block", "mtp", "medusa")]
    specs = [spec for place in places if (place / "config.json").is_file() for spec in split_spec(str(place))]
    return [spec for spec in specs if not spec.startswith("model:")]


def make_drafter(parts: Sequence[str | Drafter], around: DrafterContext, *, strict: bool = False) -> Drafter | None:
    """One drafter from what ``parse_drafters`` returned: several are merged; None for "none".

    "auto" is the draft of an embedded target. For other targets it is the first head in the target's folder (see
    ``heads_beside``), or ``FREE_DRAFT`` if there is none. ``strict``: an error of one of several drafters is raised.

    Raises:
        InputError: its model or file cannot be used beside this target.
    """
    specs = [spec for part in parts for spec in (_known(around) if part == "auto" else [part])]
    made = [made for part in specs if (made := _one(part, around)) is not None]
    if len(made) < 2:
        return made[0] if made else None
    taken: set[str] = set()
    for drafter in made:
        if drafter.name in taken:  # names identify drafters in traces, and their streams of random numbers
            _rename(drafter, taken)
        taken.add(drafter.name)
    # Drafters without a model come first: if their proposals are good, the others are not asked.
    made.sort(key=lambda drafter: drafter.runs_model)
    return MergedDrafter(made, strict=strict)


def _known(around: DrafterContext) -> list[str | Drafter]:
    """What "auto" stands for: the draft of an embedded target, else a head beside the target, else ``FREE_DRAFT``, and
    with it the table ``NGRAMS`` beside the target if there is one.
    """
    known = DRAFTS.get(around.target.name)
    if known is not None:
        return [f"model:{known}"]
    folder = around.target.folder
    if heads := heads_beside(folder):
        return [heads[0]]
    free: list[str | Drafter] = [*split_spec(FREE_DRAFT)]
    if around.packed.device.type != "cpu":
        free.remove("recycle")  # it was never measured there
    if folder is not None and (folder / NGRAMS).is_file():
        free.append(f"ngram:{folder / NGRAMS}")
    return free


def _one(spec: str | Drafter, around: DrafterContext) -> Drafter | None:
    if not isinstance(spec, str):
        return spec
    kind, _, argument = spec.partition(":")
    if kind == "none":
        return None
    make = DRAFTERS[kind]
    if isinstance(make, str):
        module, _, name = make.partition(".")
        make = getattr(import_module(f"sakiyomi.drafters.{module}"), name).make
    return make(read_argument(kind, argument), around)


def _rename(drafter: Drafter, taken: set[str]) -> None:
    number = next(i for i in itertools.count(2) if f"{drafter.name}-{i}" not in taken)
    try:
        drafter.name = f"{drafter.name}-{number}"
    except AttributeError:
        raise InputError(f"two drafters are called {drafter.name!r}; give them different names") from None
