"""Settings that several training commands share, and the only home of their defaults; `commands` has the commands."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sakiyomi.kernels.variants import multiplies_bf16
from sakiyomi.train.settings import Group, Settings, require, setting


@dataclass(frozen=True, kw_only=True)
class LoopOptions(Group):
    """Settings of every training run: budget, schedule, checkpoints.

    Attributes:
        out: Folder of the finished model; checkpoints and logs are written below it.
        name: Name of the model on its card; empty: the last part of OUT.
        valid: Held-out file, NAME=FILE; losses are reported under the name. Repeatable.
        minutes: Training time in minutes of wall clock; the learning rate is 0 at its end.
        tokens: Training budget in tokens; above 0 it replaces `minutes` (reproducible on any machine).
        decay_share: Last share of the budget in which the learning rate falls linearly to 0.
        warmup_steps: Steps of linear warm-up.
        finish_minutes: Length of the decay when SIGUSR1 or the file OUT/finish asks for an early finish.
        row_tokens: Row lengths in tokens; step s uses the (s mod n)-th.
        step_tokens: Tokens of one optimizer step; a multiple of every row length.
        clip: Largest norm of the gradient.
        note: Line for the card, such as a data set with its licence. Repeatable.
        seed: Seed for the initial weights and the order of the data.
        save_minutes: Minutes of training between checkpoints; the last two are kept.
        eval_minutes: Minutes of training between held-out losses, more if they would take over a 20th of the time.
        log_seconds: Seconds between log lines if stderr is no terminal.
        compile: Compile the layers with torch.compile if a C++ compiler is installed.
        threads: CPU threads of each process; 0: all.
        workers: Processes on this machine that share the rows of each step; the result is the same as with one
            process. Under torchrun, torchrun's processes are used.
        resume: Continue from the newest checkpoint below OUT, with the settings of its first part.
    """

    out: str = setting("", needed="a folder for the model", resume=True)
    name: str = setting("", resume=True)
    valid: tuple[str, ...] = setting(())
    minutes: float = setting(75.0, least=0)
    tokens: int = setting(0, least=0)
    decay_share: float = setting(0.4, above=0, most=1)
    warmup_steps: int = setting(30, least=0)
    finish_minutes: float = setting(15.0, above=0, resume=True)
    row_tokens: tuple[int, ...] = setting((256, 256, 512, 1024), least=1)
    step_tokens: int = setting(8192, least=1)
    clip: float = setting(1.0, above=0)
    note: tuple[str, ...] = setting((), resume=True)
    seed: int = setting(1, least=0)
    save_minutes: float = setting(3.0, least=0, resume=True)
    eval_minutes: float = setting(5.0, least=0, resume=True)
    log_seconds: float = setting(20.0, least=0, resume=True)
    compile: bool = setting(True, resume=True)
    threads: int = setting(0, least=0, resume=True)
    workers: int = setting(1, least=1, resume=True)
    resume: bool = setting(False, resume=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.row_tokens), "row_tokens", self.row_tokens, "at least one length")
        for length in self.row_tokens:
            require(self.step_tokens % length == 0, "step_tokens", self.step_tokens, f"a multiple of {length}")

    @property
    def row(self) -> int:
        """The row length of a run that has one."""
        return self.row_tokens[0]


@dataclass(frozen=True, kw_only=True)
class TextOptions(Group):
    """Training text and optimizer of a model that is trained on text.

    Attributes:
        text: Training file FILE@STABLE:DECAY of texts or chats: its share of the rows before and during the decay.
            Repeat for more files.
        muon_lr: Peak learning rate of Muon (2-D matrices of the layers); 0: AdamW trains them, too.
        adam_lr: Peak learning rate of AdamW (embeddings and norms).
        weight_decay: Weight decay of the 2-D matrices of the layers.
        precision: Precision of the passes and of Muon's iterations: bf16, no (float32; several workers then agree with
            one to the sixth digit), or auto: bf16 if the processor has instructions for it, else no.
    """

    text: tuple[str, ...] = setting((), needed="training text or chats, a .jsonl, .json or .txt file (.gz allowed)")
    muon_lr: float = setting(0.02, least=0)
    adam_lr: float = setting(0.004, least=0)
    weight_decay: float = setting(0.05, least=0)
    precision: str = setting("auto", choices=("auto", "bf16", "no"))

    @property
    def passes(self) -> str:
        """Precision of the passes on this machine: bf16 or no."""
        return passes_on("cpu", self.precision)


def passes_on(device: str, precision: str) -> str:
    """Precision of a run's passes: "auto" becomes bf16 or no, whichever the device computes faster.

    Args:
        device: its type, as torch names it. Every device but some processors has instructions for bf16.
        precision: the setting.
    """
    if precision != "auto":
        return precision
    return "bf16" if device != "cpu" or multiplies_bf16() else "no"


@dataclass(frozen=True, kw_only=True)
class MachineOptions(Group):
    """Device and precision of a run that can use a GPU.

    Attributes:
        device: Where to train: auto, cpu, cuda or cuda:N.
        precision: Precision of the passes: bf16, no (float32, also for the target), or auto: bf16, but no on a
            processor without instructions for bf16, where bf16 is several times slower.
    """

    device: str = setting("auto", resume=True)
    precision: str = setting("auto", choices=("auto", "bf16", "no"), resume=True)


@dataclass(frozen=True, kw_only=True)
class LlamaSizes(Group):
    """Sizes of a Llama.

    Attributes:
        hidden: Width of the hidden states.
        layers: Layers of the finished model.
        heads: Attention heads.
        kv_heads: Key/value heads.
        intermediate: Width of the MLP.
        rope_theta: Base of the rotary embedding.
    """

    hidden: int = setting(384, least=1)
    layers: int = setting(12, least=1)
    heads: int = setting(6, least=1)
    kv_heads: int = setting(2, least=1)
    intermediate: int = setting(1024, least=1)
    rope_theta: float = setting(10000.0, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden and self.heads:  # a draft's may be 0
            check_sizes(self.hidden, self.heads, self.kv_heads)


def check_sizes(hidden: int, heads: int, kv_heads: int) -> None:
    """Raise InputError unless the widths divide as Llama needs them."""
    require(hidden % heads == 0, "heads", heads, f"a divisor of hidden {hidden}")
    # The rotary embedding rotates the two halves of a head against each other.
    require(hidden // heads % 2 == 0, "heads", heads, f"heads of an even width, not {hidden // heads}")
    require(heads % kv_heads == 0, "kv_heads", kv_heads, f"a divisor of heads {heads}")


@dataclass(frozen=True, kw_only=True)
class WholeSizes(LlamaSizes):
    """Sizes of a model with a vocabulary of its own.

    Attributes:
        vocab: Pieces of the tokenizer to train, special tokens included.
        max_positions: Longest context in tokens.
    """

    vocab: int = setting(4096, least=1)
    max_positions: int = setting(1024, least=1)


@dataclass(frozen=True, kw_only=True)
class SampleOptions(Group):
    """Continuations that the target writes as training text for its draft.

    Attributes:
        samples: Continuations that the target writes as training text; 0: the given text alone.
        sample_minutes: Maximum minutes for writing them.
        sample_tokens: New tokens of each continuation.
        sample_batch: Continuations written in one batch.
        temperatures: Sampling temperatures; batches cycle through them. 0 is greedy.
        prompts: Files of the prompts, FILE@SHARE, texts or chats; empty: the training text.
        sample_share: Share of the rows that are samples before the decay.
        sample_share_decay: Share of the rows that are samples during the decay.
    """

    samples: int = setting(4096, least=0)
    sample_minutes: float = setting(10.0, least=0)
    sample_tokens: int = setting(160, least=1)
    sample_batch: int = setting(32, least=1)
    temperatures: tuple[float, ...] = setting((0.0, 0.0, 1.0), least=0)
    prompts: tuple[str, ...] = setting(())
    sample_share: float = setting(0.5, least=0, most=1)
    sample_share_decay: float = setting(0.85, least=0, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.temperatures), "temperatures", self.temperatures, "at least one")
        require(bool(self.samples) or not self.prompts, "prompts", self.prompts, "none with --samples 0")


@dataclass(frozen=True, kw_only=True)
class AdamOptions(Group):
    """AdamW.

    Attributes:
        lr: Peak learning rate.
        beta1: AdamW's first beta.
        beta2: AdamW's second beta.
        weight_decay: Weight decay.
    """

    lr: float = setting(0.0005, least=0)
    beta1: float = setting(0.9, least=0, most=0.9999)
    beta2: float = setting(0.95, least=0, most=0.99999)
    weight_decay: float = setting(0.01, least=0)


@dataclass(frozen=True, kw_only=True)
class HeadLayers(Group):
    """Layers of a head's own kind, which read the outputs of some of the target's layers.

    Attributes:
        reads: Layers of the target whose outputs are read, counted from 0; by default the method's own choice.
            Repeatable.
        kv_heads: Key/value heads of a layer; 0: as many as the target has.
        intermediate: Width of a layer's MLP; 0: the target's width.
        draft_vocab: Tokens that are proposed, the most frequent ones of what is learnt, by the shares of its files; 0:
            all of the target's; -1: 8192 where the target has four times as many, else all.
    """

    reads: tuple[int, ...] = setting((), least=0)
    kv_heads: int = setting(0, least=0)
    intermediate: int = setting(0, least=0)
    draft_vocab: int = setting(-1, least=-1)


@dataclass(frozen=True, kw_only=True)
class StepOptions(Group):
    """Training of a head that drafts token by token.

    Attributes:
        unroll: Draft steps of a training position; from the second step on the head reads its own features. Steps
            after the second are learnt on half of the rows.
    """

    unroll: int = setting(5, least=1, most=16)


# ---------------------------------------------------------------- runs, from the general to the special


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """All settings of a training run."""

    loop: LoopOptions = LoopOptions()

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.loop.tokens) or self.loop.minutes > 0, "minutes", self.loop.minutes, "more than 0")

    def check_one_length(self, longer_than: int = 0, what: str = "") -> None:
        """Raise InputError unless all rows have one length, more than `longer_than` tokens; `what` goes before that."""
        rows = self.loop.row_tokens
        require(len(rows) == 1, "row_tokens", rows, "one length")
        require(rows[0] > longer_than, "row_tokens", rows, f"more than {what}{longer_than}")


@dataclass(frozen=True, kw_only=True)
class TaughtConfig(RunConfig):
    """A run that learns from a target, on text and on what the target writes.

    Attributes:
        target: The target: embedded name (tales), folder in Hugging Face format, or hub id; any causal LM.
        greedy_weight: Weight of -log q(the target's likeliest token), added to the KL divergence.
        eval_prompts: Held-out prompts of each file, of 64 tokens or of a chat, continued by 128.
        valid: Held-out file, NAME=FILE; the acceptance is reported under the name. Repeatable; without it some of the
            training text is held back.
        minutes: Training time in minutes of wall clock, without the time for samples.
        row_tokens: Row length in tokens; one only.
        eval_minutes: The same between acceptance measurements.
    """

    text: TextOptions = TextOptions()
    target: str = setting("", needed="the model to draft for")
    greedy_weight: float = setting(0.5, least=0)
    sampling: SampleOptions = SampleOptions()
    eval_prompts: int = setting(32, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_length()


@dataclass(frozen=True, kw_only=True)
class HeadConfig(TaughtConfig):
    """A head of decoder layers beside a frozen target, whose hidden states it reads.

    Attributes:
        step_decay: Factor of the loss weight from one draft position to the next.
        loss: Loss of a position: ce, the cross-entropy with the target's distribution; tv, the total variation
            distance, which is the rejection rate; or lk, -log of the acceptance rate.
        muon_lr: Peak learning rate of Muon (matrices of the layers, and the projection of hidden states); 0: AdamW
            trains them, too.
        adam_lr: Peak learning rate of AdamW (norms, and all other trained weights).
        speed: Measure tau of trees and the speed-up with the engine when the head is finished.
        top: The target's likeliest tokens kept as labels of a position; their probabilities are scaled to a sum of 1.
        cache_gib: Disk space in GiB below OUT for what the target gives for rows, which come again in later epochs;
            0: none.
    """

    loop: LoopOptions = LoopOptions(minutes=40.0, decay_share=0.6, row_tokens=(256,), step_tokens=4096, compile=False)
    text: TextOptions = TextOptions(muon_lr=0.05, adam_lr=0.005, weight_decay=0.0)
    step_decay: float = setting(0.8, above=0, most=1)
    loss: str = setting("ce", choices=("ce", "tv", "lk"))
    speed: bool = setting(True, resume=True)
    top: int = setting(64, least=1)
    cache_gib: float = setting(2.0, least=0, resume=True)


@dataclass(frozen=True, kw_only=True)
class AnsweredConfig(RunConfig):
    """A run that trains a module of a small cache on prompts with answers; the target is frozen.

    Attributes:
        target: The target: embedded name (tales), folder in Hugging Face format, or hub id.
        data: Training file FILE@STABLE:DECAY of prompts with answers: instruction and output (LongAlpaca), prompt and
            answer, chats, of which the last reply is the answer, what `train distill-data` wrote, or plain texts, whose
            last part is the answer; its share of the rows before and during the decay. Repeat for more files.
        tasks: Synthetic questions about long texts, made during the run, by name and share: passkey,number@0.5,kv@2.
        filler: File of texts (.jsonl or .txt, .gz allowed) whose sentences hide the facts of the tasks; empty: a few
            built-in sentences, repeated.
        steps: Training budget in steps.
        warmup_share: Share of the budget at the start in which the learning rate rises linearly from 0.
        answer_tokens: Maximum tokens of an answer.
        query_aware: Put the question in front of the prompt as well (Locret-Q).
        query_tokens: Last tokens of a prompt that count as its question, where the data names none.
        eval_rows: Held-out rows of each file or task.
        valid: Held-out file, NAME=FILE; its prompts are measured on. Repeatable; without it some of the training data
            is held back.
        minutes: Training time in minutes of wall clock; above 0 it replaces `steps`.
        tokens: Training budget in tokens, padding included (a step has STEP_TOKENS); above 0 it replaces `steps`.
        warmup_steps: Further steps of linear warm-up.
        row_tokens: Most tokens of a prompt with its answer; of longer prompts the middle is left out. Step s uses the
            (s mod n)-th; those beyond the target's positions mean its positions.
        step_tokens: Rows of one step times their longest length; a multiple of every row length.
    """

    loop: LoopOptions = LoopOptions(
        minutes=0.0, warmup_steps=0, decay_share=1 / 3, row_tokens=(10240,), step_tokens=10240
    )
    target: str = setting("", needed="the model whose keys and values are kept or dropped")
    data: tuple[str, ...] = setting(())
    tasks: str = setting("")
    filler: str = setting("")
    steps: int = setting(3000, least=1)
    warmup_share: float = setting(2 / 3, least=0, most=1)
    answer_tokens: int = setting(512, least=1)
    query_aware: bool = setting(False)
    query_tokens: int = setting(100, least=1)
    adam: AdamOptions = AdamOptions()
    machine: MachineOptions = MachineOptions()
    eval_rows: int = setting(16, least=1)

    def __post_init__(self) -> None:
        if not self.loop.minutes and not self.loop.tokens:
            tokens = self.steps * self.loop.step_tokens
            object.__setattr__(self, "loop", dataclasses.replace(self.loop, tokens=tokens))
        super().__post_init__()
        require(bool(self.data or self.tasks), "data", self.data, "a file of prompts with answers, or --tasks")
        require(bool(self.tasks) or not self.filler, "filler", self.filler, "its default without --tasks")
        require(min(self.loop.row_tokens) >= 32, "row_tokens", self.loop.row_tokens, "32 or more")
        own = self.query_tokens == type(self).query_tokens
        require(self.query_aware or own, "query_tokens", self.query_tokens, "its default without --query-aware")
