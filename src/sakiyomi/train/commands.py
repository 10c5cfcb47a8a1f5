"""The commands of `sakiyomi train`: a dataclass each, whose docstring is the help and whose fields are the flags."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from sakiyomi.train.config import (
    AdamOptions,
    AnsweredConfig,
    HeadConfig,
    HeadLayers,
    LlamaSizes,
    LoopOptions,
    MachineOptions,
    RunConfig,
    StepOptions,
    TaughtConfig,
    TextOptions,
    WholeSizes,
)
from sakiyomi.train.settings import Group, Settings, require, setting


@dataclass(frozen=True, kw_only=True)
class TrainTarget(RunConfig):
    """Train a Llama target and its tokenizer from text files.

    Attributes:
        tokenizer: Folder of an existing tokenizer; empty: train one on the training text.
        first_layers: Layers at the start, a divisor of `layers`; more come later; 0: all from the start.
        grow_at: Share of the budget at which `first_layers` become `layers`.
        eval_tokens: Tokens of each held-out file for the losses during the run.

    Example: sakiyomi train target --text stories.jsonl --out my-target --minutes 60
    """

    text: TextOptions = field(default=TextOptions())
    tokenizer: str = setting("")
    sizes: WholeSizes = field(default=WholeSizes())
    first_layers: int = setting(0, least=0)
    grow_at: float = setting(0.45, least=0, most=1)
    eval_tokens: int = setting(16384, least=1, resume=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        layers, most, rows = self.sizes.layers, self.sizes.max_positions, self.loop.row_tokens
        if self.first_layers:
            require(layers % self.first_layers == 0, "first_layers", self.first_layers, f"divides {layers}")
        require(max(rows) <= most, "row_tokens", rows, f"at most {most}")


@dataclass(frozen=True, kw_only=True)
class DraftSizes(LlamaSizes):
    """Sizes of a draft; what is 0 follows from the target's (`train.llama.draft_sizes`).

    Attributes:
        hidden: Width of the hidden states; 0: from the target's.
        layers: Layers; the time of a draft step is mostly overhead per layer. 0: from the target's.
        heads: Attention heads; 0: one for 64 numbers of the hidden state.
        intermediate: Width of the MLP; 0: 8/3 of the hidden state.
    """

    hidden: int = setting(0, least=0)
    layers: int = setting(0, least=0)
    heads: int = setting(0, least=0)
    kv_heads: int = setting(1, least=1)
    intermediate: int = setting(0, least=0)


@dataclass(frozen=True, kw_only=True)
class TrainDraft(TaughtConfig):
    """Distil a small draft from a target, for speculative decoding.

    Attributes:
        row_tokens: Row length in tokens; one only, rows are reused with their labels.
        init: Model to start from (embedded name, folder or hub id), for example the Llama that `train target
            --tokenizer TARGET` makes; the draft then has its sizes.
        top: The target's likeliest tokens kept as labels of a position; one bucket holds the rest.
        label_share: Maximum share of the time that the target may spend on labels; rows without labels learn the text
            itself. With --tokens all rows have labels.
        label_gib: Memory in GiB for labels that later epochs use again.
        parallel: Tokens that the draft guesses in one pass (PARD), with a mask token for each further one; 1: one token
            per pass.
        mask: Token id of the mask; -1: an id that the tokenizer does not use, else its padding token. Texts must not
            contain it.
        gamma: Draft tokens a round in the acceptance measurements.
        cost: Draft step / target step (c) for the expected speed-up: a number, or measured, which times the pair here.

    Example: sakiyomi train draft --target FOLDER --text stories.txt --out my-draft --minutes 10
    """

    loop: LoopOptions = field(
        default=LoopOptions(
            minutes=15.0, decay_share=0.5, row_tokens=(256,), step_tokens=1024, eval_minutes=3.0, compile=False
        )
    )
    init: str = setting("")
    sizes: DraftSizes = field(default=DraftSizes())
    top: int = setting(64, least=1)
    label_share: float = setting(0.2, least=0, most=1, resume=True)
    label_gib: float = setting(2.0, least=0, resume=True)
    parallel: int = setting(1, least=1, most=16)
    mask: int = setting(-1, least=-1)
    gamma: int = setting(4, least=1)
    cost: str = setting("measured", resume=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel > 1:
            length, said = self.loop.row, "its default with --parallel"
            require(length >= self.parallel, "row_tokens", length, f"at least parallel {self.parallel}")
            require(self.cost == "measured", "cost", self.cost, said)  # its speed-up is measured with the engine
            require(self.gamma == type(self).gamma, "gamma", self.gamma, said)
        else:
            require(self.mask == -1, "mask", self.mask, "its default without --parallel")
        if self.cost != "measured":
            require(0 < self.given_cost < math.inf, "cost", self.cost, "measured, or a number above 0")

    @property
    def given_cost(self) -> float:
        """The cost as a number; not a number where it is to be measured, or is no number."""
        try:
            return float(self.cost)
        except ValueError:
            return math.nan


@dataclass(frozen=True, kw_only=True)
class TrainEagle(HeadConfig):
    """Train an EAGLE-3 head on a target, whose hidden states it reads.

    Attributes:
        adam_lr: Peak learning rate of AdamW (norms, and the head over the vocabulary).
        reads: Layers of the target whose outputs are read, counted from 0; none given: the method's own choice, 1, one
            before the middle, and three before the last. Repeatable.
        own_head: Also train the head over the vocabulary, which starts as the target's; otherwise it is not changed.

    Example: sakiyomi train eagle --target FOLDER --text stories.jsonl --out my-head --minutes 40
    """

    sizes: HeadLayers = field(default=HeadLayers())
    steps: StepOptions = field(default=StepOptions())
    own_head: bool = setting(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_length(self.steps.unroll, "unroll ")


@dataclass(frozen=True, kw_only=True)
class TrainMtp(HeadConfig):
    """Train a layer for further tokens (MTP) on a target, its own or a new one.

    Attributes:
        init: Layer to start from: a folder with one, or new for random weights; empty: the target's own layer if its
            files have one, else new.

    Example: sakiyomi train mtp --target FOLDER --text stories.jsonl --out my-layer --minutes 40
    """

    steps: StepOptions = field(default=StepOptions())
    init: str = setting("")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_length(self.steps.unroll, "unroll ")


@dataclass(frozen=True, kw_only=True)
class TrainBlock(HeadConfig):
    """Train a block drafter on a target, which guesses several tokens in one pass.

    Attributes:
        reads: Layers of the target whose outputs are read, counted from 0; none given: the method's own choice, five
            evenly from 1 to three before the last. Repeatable.
        layers: Decoder layers.
        guesses: Tokens that a pass guesses.
        anchors: Random positions of each row at which a block of guesses starts.
        anchored: The last token's own row makes the first guess (DSpark); otherwise the first mask makes it, and the
            block is one row longer (DFlash).
        causal: Each row of a block attends only to the rows before it (JetSpec); otherwise to the whole block.
        markov: Rank of a gated table by which the previous token changes a guess, so that branches of a tree differ
            (DSpark's Markov head); 0: the guesses of a pass are independent.
        mask: Token id of the mask; -1: an id that the tokenizer does not use, else its padding token. Texts must not
            contain it.

    Example: sakiyomi train block --target FOLDER --text stories.jsonl --out my-drafter --minutes 40
    """

    sizes: HeadLayers = field(default=HeadLayers())
    layers: int = setting(2, least=1, most=16)
    guesses: int = setting(7, least=1, most=32)
    anchors: int = setting(32, least=1)
    anchored: bool = setting(False)
    causal: bool = setting(False)
    markov: int = setting(0, least=0)
    mask: int = setting(-1, least=-1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_length(self.guesses, "guesses ")


@dataclass(frozen=True, kw_only=True)
class JointOptions(Group):
    """Training of the target together with its heads.

    Attributes:
        joint: Also train the target (Medusa-2), with low-rank adapters that are merged into a copy of it at the end.
        lora_rank: Rank of the adapters.
        lora_alpha: Scale of the adapters: alpha / rank.
        heads_first: Share of the budget at the start in which only the heads are trained.
        head_lr_times: Learning rate of the heads as a multiple of the target's, while both are trained.
        heads_weight: Weight of the heads' loss while both are trained.
    """

    joint: bool = setting(False)
    lora_rank: int = setting(16, least=1)
    lora_alpha: float = setting(32.0, above=0)
    heads_first: float = setting(0.3, least=0, most=1)
    head_lr_times: float = setting(4.0, above=0)
    heads_weight: float = setting(0.2, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for own in dataclasses.fields(self):
            value = getattr(self, own.name)
            require(self.joint or value == own.default, own.name, value, "its default without --joint")


@dataclass(frozen=True, kw_only=True)
class MedusaMachine(MachineOptions):
    """The same with a further precision.

    Attributes:
        precision: Precision of the passes: bf16, fp16, no (float32, also for the target), or auto: bf16, but no on a
            processor without instructions for bf16, where bf16 is several times slower.
    """

    precision: str = setting("auto", choices=("auto", "bf16", "fp16", "no"), resume=True)


@dataclass(frozen=True, kw_only=True)
class TrainMedusa(RunConfig):
    """Train Medusa heads on a frozen target, or together with it (--joint).

    Attributes:
        valid: Held-out file, NAME=FILE; the target answers its prompts, and heads are measured on that. Repeatable;
            without it some of the training data is held back.
        row_tokens: Row length in tokens; one only, rows come again.
        compile: Compile the layers of a frozen target with torch.compile if a C++ compiler is installed; not with
            --joint.
        target: The target: embedded name (tales), folder in Hugging Face format, or hub id.
        data: Training file FILE@STABLE:DECAY: its share of the rows before and during the decay. Texts, chats, of which
            the assistant's replies are learnt, or what `train distill-data` wrote. Repeat for more files.
        heads: Number of heads: tokens proposed after the target's own.
        layers: Residual blocks of each head.
        own_head: Give each head its own projection to the vocabulary (version 1) instead of the target's (version 2).
        draft_vocab: Tokens that the heads propose, the most frequent ones of what they learn, by the shares of its
            files; 0: all of the target's; -1: 8192 where the target has four times as many, else all. Heads with
            fewer than all are written in vLLM's format.
        head_decay: Factor of the loss weight from one head to the next: the paper has 0.8, the first release 1.0.
        positions: Share of each batch's positions on which the heads are trained, drawn at random.
        lr: Peak learning rate of the heads; with --joint, of the target while both are trained.
        weight_decay: Weight decay.
        cache_gib: Disk space in GiB below OUT for hidden states of rows that are used again; 0: none.
        eval_prompts: Held-out prompts of each file, continued by up to 128 tokens.

    Example: sakiyomi train medusa --target FOLDER --data answers.jsonl --out my-heads --minutes 40
    """

    loop: LoopOptions = field(default=LoopOptions(minutes=20.0, decay_share=0.6, row_tokens=(512,)))
    target: str = setting("", needed="the model that gets the heads")
    data: tuple[str, ...] = setting((), needed="training text or chats, a .jsonl, .json or .txt file (.gz allowed)")
    heads: int = setting(4, least=1, most=16)
    layers: int = setting(1, least=1, most=8)
    own_head: bool = setting(False)
    draft_vocab: int = setting(-1, least=-1)
    head_decay: float = setting(0.8, above=0, most=1)
    positions: float = setting(1.0, above=0, most=1)
    lr: float = setting(0.001, least=0)
    weight_decay: float = setting(0.0, least=0)
    joint: JointOptions = field(default=JointOptions())
    cache_gib: float = setting(0.0, least=0, resume=True)
    machine: MedusaMachine = field(default=MedusaMachine())
    eval_prompts: int = setting(24, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_length(max(self.heads + 1, 7))
        kept = bool(self.cache_gib) and self.joint.joint
        require(not kept, "cache_gib", self.cache_gib, "0 where the target changes")


@dataclass(frozen=True, kw_only=True)
class TrainRetaining(AnsweredConfig):
    """Train retaining heads (Locret) on a target: which keys and values a small cache should keep.

    Attributes:
        clip: Largest absolute value of an entry of the gradient.
        compile: Compile the heads and their loss with torch.compile if a C++ compiler is installed.
        width: Width of the heads' hidden layer; 0: 1024 for targets with hidden states of 2048 or more, else 256.
        labels: What heads predict of the rows' attention to a token: logits, its largest logit (the paper's), or
            chances, the logarithm of its largest probability.
        queries: Rows whose attention counts: answer, those of the answer's tokens (the paper's), or writing, those that
            predict them, one position earlier.
        smooth: Weight of the squared difference of neighbours' scores in each layer.
        huber: Difference above which the loss is linear (beta of the smooth L1 loss).

    Example: sakiyomi train retaining --target FOLDER --data answers.jsonl --out my-retaining-heads
    """

    loop: LoopOptions = field(default=dataclasses.replace(AnsweredConfig.loop, clip=0.5, compile=False))
    width: int = setting(0, least=0)
    labels: str = setting("logits", choices=("logits", "chances"))
    queries: str = setting("answer", choices=("answer", "writing"))
    smooth: float = setting(0.0025, least=0)
    huber: float = setting(1.0, above=0)


@dataclass(frozen=True, kw_only=True)
class TrainLococo(AnsweredConfig):
    """Train convolutions (LoCoCo) that merge the KV pairs which a small cache drops.

    Attributes:
        compile: Compile the loss over the vocabulary with torch.compile if a C++ compiler is installed.
        steps: Training budget in steps; the paper has 200 to 1000.
        scores: Policy that chooses which pairs stay, as --cache takes it, such as h2o or locret:HEADS.
        kv_budget: KV pairs that each head keeps at an eviction boundary, merged ones included.
        merged: Merged pairs among these; the paper uses one in eight.
        chunk_size: Tokens of a prompt between two eviction boundaries.
        kernel: Neighbouring pairs that one weight depends on (kernel size); an odd number.
        again: Merge merged pairs again at the next boundary, as in the paper; otherwise a merged pair stays as long
            as the pair that it was merged into would stay.
        norm: Share of the other pairs in a merged pair before training; the paper has 0.5.
        text_weight: Weight of the loss on prompt tokens after the first eviction boundary, in addition to the loss on
            the answer; use 1 for plain texts.

    Example: sakiyomi train lococo --target FOLDER --data answers.jsonl --out my-convolutions
    """

    loop: LoopOptions = field(
        default=dataclasses.replace(
            AnsweredConfig.loop, decay_share=0.9, row_tokens=(1024,), step_tokens=4096, compile=False
        )
    )
    adam: AdamOptions = field(default=AdamOptions(lr=0.005, weight_decay=0.0))
    steps: int = setting(300, least=1)
    warmup_share: float = setting(0.1, least=0, most=1)
    machine: MachineOptions = field(default=MachineOptions(precision="no"))
    scores: str = setting("h2o")
    kv_budget: int = setting(128, least=2)
    merged: int = setting(16, least=1)
    chunk_size: int = setting(256, least=1)
    kernel: int = setting(21, least=1)
    again: bool = setting(True)
    norm: float = setting(0.5, least=0, most=1)
    text_weight: float = setting(0.0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.kernel % 2 == 1, "kernel", self.kernel, "an odd number")
        require(self.merged < self.kv_budget, "merged", self.merged, f"less than kv_budget {self.kv_budget}")
        least = min(self.loop.row_tokens)
        require(self.chunk_size < least, "chunk_size", self.chunk_size, f"less than the shortest row, {least}")


@dataclass(frozen=True, kw_only=True)
class TrainSpeech(RunConfig):
    """Distil a draft for a speech model (whisper) from sounds; no transcripts are needed.

    Attributes:
        target: The speech model: folder in Hugging Face format, or hub id.
        audio: Sound or video file, or folder of them. Repeat for more. Every eighth part of two minutes is held out.
        layers: Decoder layers of the draft; they start as copies of the target's, evenly chosen. Encoder, embeddings
            and head are the target's.
        top: The target's likeliest tokens kept as labels of a position; their probabilities are scaled to a sum of 1.
        greedy_weight: Weight of -log q(the transcript's token), added to the cross-entropy with the target's labels.
        label_minutes: Maximum minutes for transcribing the sounds before the training; the rest of them is left out.
        cache_gib: Disk space in GiB below OUT for transcripts and encoded sounds, about 3 MB for 30 seconds with a
            large target; sounds that do not fit are left out.
        eval_windows: Held-out windows of 30 seconds in the measurements.
        muon_lr: Peak learning rate of Muon (matrices of the layers); 0: AdamW trains them, too.
        adam_lr: Peak learning rate of AdamW (norms and biases).
        weight_decay: Weight decay of the matrices.
        valid: Held-out sound file, NAME=FILE; the acceptance is reported under the name. Repeatable; without it some of
            the sounds are held back.
        minutes: Training time in minutes of wall clock, without the time for transcribing.
        row_tokens: Maximum tokens of a window's transcript; one only.
        step_tokens: Tokens of one optimizer step, padding included: the windows of a step times ROW_TOKENS.
        eval_minutes: The same between acceptance measurements.

    Example: sakiyomi train speech --target whisper-small --audio recordings/ --out my-draft --minutes 30
    """

    loop: LoopOptions = field(
        default=LoopOptions(
            minutes=30.0, decay_share=0.5, row_tokens=(224,), step_tokens=224 * 8, eval_minutes=3.0, compile=False
        )
    )
    target: str = setting("", needed="the speech model to draft for")
    audio: tuple[str, ...] = setting((), needed="sound files, or folders of them")
    layers: int = setting(1, least=1)
    top: int = setting(64, least=1)
    greedy_weight: float = setting(1.0, least=0)
    label_minutes: float = setting(20.0, above=0)
    cache_gib: float = setting(8.0, above=0)
    eval_windows: int = setting(64, least=1)
    muon_lr: float = setting(0.02, least=0)
    adam_lr: float = setting(0.001, least=0)
    weight_decay: float = setting(0.05, least=0)
    machine: MachineOptions = field(default=MachineOptions())

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_length()
        require(self.loop.workers == 1, "workers", self.loop.workers, "1: this recipe trains in one process")


@dataclass(frozen=True, kw_only=True)
class TrainDistillData(Settings):
    """Have a target write answers, the best training data for its drafts and heads.

    Attributes:
        out: The .jsonl file; the same command continues a stopped run.
        target: The target: embedded name (tales), folder in Hugging Face format, or hub id.
        data: Prompts FILE@SHARE: beginnings of texts, or the users' turns of chats in ShareGPT's form. Repeatable.
        samples: Answers that the target writes.
        minutes: Maximum minutes for writing.
        tokens: Maximum new tokens of an answer.
        batch: Answers written in one batch.
        temperatures: Sampling temperatures; batches cycle through them. 0 is greedy.
        device: Where to run: auto, cpu, cuda or cuda:N.
        seed: Seed of prompts and samples.
        workers: Engines that share the batches, each in a process of its own, on a Ray cluster: N, or MIN:MAX. By
            default one, in this process, without Ray. The file is the same for any number.
        worker_cpus: Processors of each worker; a worker on cuda has a GPU as well.
        address: Address of the cluster: auto, HOST:PORT or ray://HOST:PORT; by default Ray is started here.

    Example: sakiyomi train distill-data --target FOLDER --data prompts.jsonl --out answers.jsonl
    """

    out: str = setting("", needed="a .jsonl file")
    target: str = setting("", needed="the model that writes")
    data: tuple[str, ...] = setting((), needed="files of prompts")
    samples: int = setting(4096, least=1)
    minutes: float = setting(60.0, above=0)
    tokens: int = setting(160, least=1)
    batch: int = setting(128, least=1)
    temperatures: tuple[float, ...] = setting((0.0, 0.0, 1.0), least=0)
    device: str = setting("auto")
    seed: int = setting(1, least=0)
    workers: str = setting("")
    worker_cpus: int = setting(1, least=1)
    address: str = setting("")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.out.endswith(".jsonl"), "out", self.out, "a file that ends in .jsonl")
        require(bool(self.temperatures), "temperatures", self.temperatures, "at least one")


@dataclass(frozen=True, kw_only=True)
class TrainNgram(Settings):
    """Count the n-grams of a text, or of what a target writes, into one file for drafts.

    Attributes:
        out: The file of the tables, .safetensors; `ngram:OUT` drafts from it.
        text: Training file of texts or chats, .jsonl, .json or .txt (.gz allowed). Repeat for more files.
        valid: Held-out file, NAME=FILE; alpha is measured on it. Repeatable; without it some of the text is held back.
        target: The target: embedded name (tales), folder, or hub id. It measures alpha, and can write samples.
        tokenizer: Folder of the tokenizer, if no target is given.
        order: Tokens of the longest n-gram.
        least: Minimum count of an n-gram of three or more tokens.
        keep: Continuations kept for each run of tokens, the most frequent ones.
        samples: Continuations of beginnings of the text that the target writes; they are counted instead of the text.
        sample_tokens: New tokens of each continuation.
        temperature: Temperature of the samples; 0 is greedy.
        positions: Held-out tokens of each file on which alpha is measured.
        seed: Seed of the samples, and of what is held back.

    Example: sakiyomi train ngram --target FOLDER --text notes.txt --out notes.safetensors
    """

    out: str = setting("", needed="a file for the tables")
    text: tuple[str, ...] = setting((), needed="training text or chats")
    valid: tuple[str, ...] = setting(())
    target: str = setting("")
    tokenizer: str = setting("")
    order: int = setting(4, least=1, most=5)
    least: int = setting(2, least=1)
    keep: int = setting(8, least=1, most=64)
    samples: int = setting(0, least=0)
    sample_tokens: int = setting(160, least=1)
    temperature: float = setting(0.0, least=0)
    positions: int = setting(2048, least=1)
    seed: int = setting(1, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.target) != bool(self.tokenizer), "target", self.target, "this or tokenizer, and not both")
        require(bool(self.target) or not self.samples, "samples", self.samples, "0 without a target that writes them")


COMMANDS: dict[str, type[Settings]] = {
    "target": TrainTarget,
    "draft": TrainDraft,
    "medusa": TrainMedusa,
    "eagle": TrainEagle,
    "mtp": TrainMtp,
    "block": TrainBlock,
    "retaining": TrainRetaining,
    "lococo": TrainLococo,
    "speech": TrainSpeech,
    "distill-data": TrainDistillData,
    "ngram": TrainNgram,
}
