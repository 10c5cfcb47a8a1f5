"""A small Japanese target, a draft of its tokenizer, and a draft of another one, trained from children's books.

    python benchmarks/japanese.py --data ../shared/data --out runs/japanese --bench

Makes in OUT: `target/model` (5.5M parameters, byte-level BPE of 4096 pieces), `draft/model` (0.6M, distilled from the
target, its tokenizer), `other/model` (0.6M, SentencePiece-like unigram tokenizer of 2048 pieces with bytes behind it,
trained on the books and on the text that the target writes). About half an hour of one core; a run that was
stopped goes on where it was, and what is finished is not done again. With --bench the target is then inflated, and both
drafts are measured on it: on held-out works, and on two files of questions.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sakiyomi.train.data import read_documents

NOTE = "728 works by Ogawa, Niimi, Miyazawa and Kusuyama from Aozora Bunko, public domain in Japan"
SPACE, END = "▁", "</s>"
FOURTH = 4  # of the documents one in four is enough for a small vocabulary, and takes a minute less
PROMPTS = (
    "text/aozora_children_valid.jsonl.gz",
    "bench/rakuda_v2_questions.jsonl",
    "bench/japanese_mt_bench_question.jsonl",
)
SEEN = 8  # a character seen less often there becomes bytes: rare kanji would fill a small vocabulary


def train(kind: str, out: Path, *flags: str) -> None:
    """`sakiyomi train KIND`, from its last checkpoint where there is one."""
    if (out / "model").is_dir():
        print(f"{out} is finished", file=sys.stderr)
        return
    command = [sys.executable, "-c", "from sakiyomi.cli import main; main()", "train", kind, "--out", str(out), *flags]
    command += ["--threads", "1", "--note", NOTE]
    if list((out / "checkpoints").glob("step-*.pt")):
        command.append("--resume")
    subprocess.run(command, check=True)


def unigram(text: Path, folder: Path, pieces: int = 2048) -> None:
    """A tokenizer of another kind: whole pieces by their probability, ▁ for the space, bytes for rare characters."""
    texts = [document for document in read_documents(text) if isinstance(document, str)][::FOURTH]
    counts: dict[str, int] = {}
    for document in texts:
        for character in document:
            counts[character] = counts.get(character, 0) + 1
    rare = {character for character, count in counts.items() if count < SEEN}
    common = ["".join(character for character in document if character not in rare) for document in texts]
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    special = ["<unk>", END, *(f"<0x{value:02X}>" for value in range(256))]
    trainer = trainers.UnigramTrainer(
        vocab_size=pieces, special_tokens=special, unk_token="<unk>", max_piece_length=8, show_progress=False
    )
    tokenizer.train_from_iterator((line for document in common for line in document.split("\n")), trainer)
    made = json.loads(tokenizer.to_str())
    vocab = [tuple(entry) for entry in made["model"]["vocab"]]
    own = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    own.normalizer, own.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    own.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    # As in training, a text is led by the end token.
    own.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, own.token_to_id(END))])
    PreTrainedTokenizerFast(
        tokenizer_object=own, unk_token="<unk>", bos_token=END, eos_token=END, clean_up_tokenization_spaces=False
    ).save_pretrained(folder)


def written(samples: Path, tokenizer: Path, out: Path) -> None:
    """The target's own continuations as text, for a model that does not know its tokens."""
    decode = AutoTokenizer.from_pretrained(tokenizer).decode
    with out.open("w", encoding="utf-8") as file:
        for document in read_documents(samples):
            text = decode(document, skip_special_tokens=True)
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def bench(data: Path, out: Path, params: str) -> None:
    """Row `cross` on the inflated target, for each kind of prompt."""
    large = out / f"target-{params}"
    command = [sys.executable, str(Path(__file__).with_name("rows.py"))]
    if not large.is_dir():
        inflate = Path(__file__).with_name("inflate.py")
        subprocess.run(
            [sys.executable, str(inflate), str(large), "--params", params, "--target", str(out / "target/model")],
            check=True,
        )
    models = [
        "--target",
        str(large),
        "--draft",
        f"model:{out / 'draft/model'}",
        "--cross",
        f"model:{out / 'other/model'}",
    ]
    for prompts in PROMPTS:
        subprocess.run([*command, "--rows", "cross", *models, "--prompts", str(data / prompts), "--json"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds text/aozora_children_*.jsonl.gz")
    parser.add_argument("--out", type=Path, default=Path("runs/japanese"))
    parser.add_argument("--bench", action="store_true", help="measure both drafts when they are trained")
    parser.add_argument("--params", default="134M", help="size to which the target is inflated for that")
    given = parser.parse_args()
    text, held_out = (given.data / "text" / f"aozora_children_{name}.jsonl.gz" for name in ("train", "valid"))
    target, draft, other = (given.out / name for name in ("target", "draft", "other"))
    valid = ("--valid", f"aozora={held_out}")
    rows = ("--step-tokens", "4096", "--eval-minutes", "10")
    train(
        "target", target, "--name", "japanese", "--text", str(text), *valid, *rows, "--tokens", "3500000",
        "--hidden", "256", "--layers", "6", "--heads", "4", "--kv-heads", "2", "--intermediate", "704",
        "--max-positions", "512", "--row-tokens", "256", "--row-tokens", "512",
    )  # fmt: skip
    train(
        "draft", draft, "--name", "japanese-draft", "--target", str(target / "model"), "--text", str(text), *valid,
        *rows, "--tokens", "1800000", "--samples", "2048", "--sample-minutes", "6", "--cost", "0.1",
        "--hidden", "96", "--layers", "2", "--heads", "3", "--kv-heads", "1", "--intermediate", "256",
        "--row-tokens", "256",
    )  # fmt: skip
    if not (other / "own").is_dir():
        unigram(text, other / "own")
    if not (other / "written.jsonl").is_file():
        written(draft / "samples.jsonl", target / "model", other / "written.jsonl")
    train(
        "target", other, "--name", "japanese-other", "--tokenizer", str(other / "own"), *valid, *rows,
        "--text", f"{text}@0.5:0.2", "--text", f"{other / 'written.jsonl'}@0.5:0.8", "--tokens", "3500000",
        "--hidden", "128", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--intermediate", "352",
        "--max-positions", "512", "--row-tokens", "256",
    )  # fmt: skip
    if given.bench:
        bench(given.data, given.out, given.params)


if __name__ == "__main__":
    main()
