"""The report: every section on toys, numbers that are kept, pictures, and a page that needs no other file."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM
from typer.testing import CliRunner

import seq2seq_toys
from medusa_toys import new_heads
from sakiyomi.cli import app
from sakiyomi.core.embedded import embedded
from sakiyomi.core.errors import InputError, LoadError, UnsupportedError
from sakiyomi.core.params import SamplingParams
from sakiyomi.drafters import DRAFTERS
from sakiyomi.drafters.medusa_heads.formats import write_heads
from sakiyomi.drafters.ngram import NgramReader
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.draw import NARROW
from sakiyomi.evaluation.bench.figures import run as running
from sakiyomi.evaluation.bench.figures.alphas import ORDERS, minima, model_rows, ngram_rows, tables_of
from sakiyomi.evaluation.bench.figures.config import ReportConfig, words
from sakiyomi.evaluation.bench.figures.guesses import draft_ranks
from sakiyomi.evaluation.bench.figures.page import Section, Shown, page
from sakiyomi.evaluation.bench.figures.run import SECTIONS, run
from sakiyomi.evaluation.bench.figures.speeds import OURS, GreedyDraft
from sakiyomi.evaluation.bench.figures.work import runner_rows
from sakiyomi.evaluation.bench.frame import PairRow
from sakiyomi.evaluation.bench.kinds import bars, columns
from sakiyomi.evaluation.bench.pictures import LIGHT, THEMES, curves, grouped, picture, stack
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.model_executor.loading import load_model
from sakiyomi.sampling.verifiers import VERIFIERS
from sakiyomi.theory import expected_tokens, guess_acceptance
from toys import save_model, tiny_llama, tiny_tokenizer

pytest.importorskip("matplotlib")

PAIRED = [name for name in SECTIONS if name not in ("memory", "predicted", "tasks", "locret", "kept")]


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> ReportConfig:
    """A target, a draft, heads and a folder of both models; the report is not made yet."""
    folder = tmp_path_factory.mktemp("models")
    target, tokenizer = tiny_llama(layers=4), tiny_tokenizer()
    save_model(folder / "pair" / "target", target, tokenizer)
    save_model(folder / "pair" / "draft", tiny_llama(seed=1, layers=1), tokenizer)
    write_heads(new_heads(target, heads=2), folder / "heads", base="toy")
    return ReportConfig(
        str(folder / "report"),
        tuple(PAIRED),
        target=str(folder / "pair" / "target"),
        draft=f"model:{folder / 'pair' / 'draft'}",
        heads=str(folder / "heads"),
        sizes=(),
        temperatures=(0.0, 1.0),
        models=str(folder / "pair"),
        gamma=2,
        repeats=1,
        max_new_tokens=8,
        prompt_tokens=12,
        count=2,
        compile=False,
    )


@pytest.fixture(scope="module")
def made(toys: ReportConfig) -> dict[str, Row]:
    return {row.name: row for row in run(toys)}


# ---------------------------------------------------------------- sections


@pytest.mark.thorough
def test_every_section_measures_and_draws(toys: ReportConfig, made: dict[str, Row]) -> None:
    assert {name: row.error for name, row in made.items()} == dict.fromkeys(PAIRED)
    for name in PAIRED:
        for file in (f"{name}.png", f"{name}-dark.png"):
            assert (Path(toys.out) / file).read_bytes().startswith(b"\x89PNG")
        assert len(SECTIONS[name].seen(made[name])) > 40


@pytest.mark.thorough
def test_numbers_are_what_they_say(made: dict[str, Row]) -> None:
    ranks = made["ranks"].lines
    assert [line["T=0, up to here"] for line in ranks] == sorted(line["T=0, up to here"] for line in ranks)
    rounds = made["rounds"].lines
    assert sum(line["T=1"] for line in rounds) == pytest.approx(1)
    assert sum(line["T=1, alike"] for line in rounds) == pytest.approx(1)
    for line in made["expected"].lines:
        assert line["expected"] == pytest.approx(expected_tokens(line["alpha"], line["gamma"]))
    names = {line["name"] for line in made["drafts"].lines}
    assert {"bigram", "unigram", "its first 2 layers", "draft"} <= names
    assert {line["target"] for line in made["drafts"].lines} >= {"target"}
    ways = {line["name"] for line in made["temperature"].lines}
    ours = {"plain", "sakiyomi", "chain, +2/-1, ratio", "sample and compare", "Medusa", "draft alone"}
    assert ways == ours | {"transformers assisted"}
    greedy = [line for line in made["temperature"].lines if not line["temperature"] and line["name"] != "draft alone"]
    assert all(line["equal"] for line in greedy)


@pytest.mark.thorough
def test_the_tree_is_one_round(made: dict[str, Row]) -> None:
    *nodes, own = made["tree"].lines
    accepted = [line["node"] for line in nodes if line["state"] == "accepted"]
    assert own["parent"] == (accepted[-1] if accepted else -1)
    assert all(line["parent"] < line["node"] and 0 <= line["p"] <= 1 for line in nodes)


def test_ranks_of_a_draft_that_is_the_target_are_all_the_first(toys: ReportConfig) -> None:
    """A row too far, or too near, would be right now and then only."""
    llm = LLM(toys.target, draft=f"model:{toys.target}", compile=False)
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    texts = [EngineView(llm).generate([prompt], params)[0].token_ids for prompt in prompts]
    found = draft_ranks(llm.draft.model, prompts, texts)  # type: ignore[union-attr]
    assert found.places == 22
    assert found.accuracies()[0][0] == 1.0


# ---------------------------------------------------------------- the theory


def test_alpha_of_the_target_as_its_own_draft_is_one(toys: ReportConfig) -> None:
    """Both ways to read rows, the engine's and transformers', agree; a row too far would show."""
    llm = LLM(toys.target, draft="none", compile=False)
    prompts, texts = [[5, 6, 7]], [[8, 9, 10, 11]]
    ours, theirs = runner_rows(llm.target), model_rows(load_model(toys.target, dtype="auto", device="cpu").model)
    assert minima(ours, theirs, prompts, texts, 1.0).alpha == pytest.approx(1, abs=1e-4)
    assert minima(ours, theirs, prompts, texts, 0.0).alpha == 1


def test_ngrams_have_a_whole_distribution() -> None:
    """The one that their drafter ranks by: a bigram knows one token before, a unigram none."""
    tables = tables_of([[1, 2, 3, 1, 2, 4, 1, 2, 3]], 8)
    for name, order in ORDERS.items():
        rows = ngram_rows(tables[name], 8)([1], [2, 3]).exp()
        assert rows.sum(1).tolist() == pytest.approx([1, 1])
        known = NgramReader(tables[name], 8).chances((2,) if order == 2 else (), 16)
        assert {token: rows[1, token].item() for token in known} == pytest.approx(known)


@pytest.mark.thorough
def test_the_formulas_and_the_proof(made: dict[str, Row]) -> None:
    named = {line["name"]: line for line in made["formulas"].lines}
    alpha, gamma = named["alpha"]["predicted"], made["formulas"].conditions["gamma"]
    assert named["E"]["predicted"] == pytest.approx(expected_tokens(alpha, gamma))
    assert named["E[X]"]["predicted"] == pytest.approx(named["E"]["predicted"])
    real, alike = named["speed-up, the pass as it costs"], named["speed-up"]
    rounds = made["formulas"].conditions
    share = (gamma * rounds["c"] + 1) / (gamma * rounds["c"] + rounds["v"])
    assert real["predicted"] == pytest.approx(share * alike["predicted"])
    assert real["measured"] == alike["measured"]
    assert named["reads of the target"]["measured"] == pytest.approx(1 / named["E"]["measured"])
    plain, *others = made["traffic"].lines
    assert plain["counted"] == pytest.approx(plain["predicted"], rel=0.05)
    assert all(line["draft_weights_counted_bytes"] > 0 for line in others)
    apart = {line["name"]: line["largest distance from p"] for line in made["lossless"].lines if "name" in line}
    assert apart["ratio"] < 1e-5 < 0.02 < min(apart["resampled from the target"], apart["always accepted"])
    for line in made["lossless"].lines[3:]:
        assert line["accepted"] + line["recovered"] == pytest.approx(line["p"], abs=1e-5)


@pytest.mark.thorough
def test_alphas_of_encoder_decoders(toys: ReportConfig, tmp_path: Path) -> None:
    """T5, whose prompt is the encoder's; a causal pair beside it is a table of its own."""
    for name, layers in (("large", 3), ("small", 1)):
        model = seq2seq_toys.build("t5", layers=layers)
        model.save_pretrained(tmp_path / "family" / name)
        seq2seq_toys.TOKENIZER.save_pretrained(tmp_path / "family" / name)
    config = dataclasses.replace(toys, out=str(tmp_path / "out"), sections=("alphas",), models=str(tmp_path / "family"))
    (row,) = run(config)
    assert row.error is None
    pairs = {(line["target"], line["draft"]) for line in row.lines}
    assert {("large", "small"), ("large", "bigram"), ("target", "draft")} <= pairs
    assert not {("target", "small"), ("large", "draft")} & pairs
    assert any("another tokenizer" in note for note in row.notes)
    assert all(0 <= line[name] <= 1 for line in row.lines for name in ("T=0", "T=1"))


# ---------------------------------------------------------------- sizes


@pytest.mark.thorough
def test_sizes_of_a_family(tmp_path: Path) -> None:
    """OPT: its own checkpoints are measured, sizes that there are not are skipped with a line each."""
    tokenizer = tiny_tokenizer()
    for name, layers in (("large", 3), ("small", 2), ("draft", 1)):
        torch.manual_seed(layers)
        shape = {"vocab_size": len(tokenizer), "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64}
        opt = OPTConfig(**shape, num_hidden_layers=layers, num_attention_heads=4, max_position_embeddings=128)
        save_model(tmp_path / name, OPTForCausalLM(opt).eval(), tokenizer)
    save_model(tmp_path / "other", tiny_llama(layers=1), seq2seq_toys.TOKENIZER)
    config = ReportConfig(
        str(tmp_path / "out"),
        ("sizes",),
        target=str(tmp_path / "small"),
        draft=f"model:{tmp_path / 'draft'}",
        sizes=(str(tmp_path / "large"), str(tmp_path / "other"), str(tmp_path / "none")),
        repeats=1,
        max_new_tokens=6,
        count=1,
        compile=False,
    )
    (row,) = run(config)
    assert row.error is None
    sizes = list(dict.fromkeys(line["parameters"] for line in row.lines))
    assert len(sizes) == 2 and sizes == sorted(sizes)
    assert {line["name"] for line in row.lines} == {"transformers plain", "transformers assisted", *OURS}
    assert sum("is left out" in note for note in row.notes) == 2
    assert any("another tokenizer" in note for note in row.notes)
    assert all(line["equal"] for line in row.lines)


# ---------------------------------------------------------------- what is kept


@pytest.mark.thorough
def test_what_was_measured_is_kept(
    toys: ReportConfig, made: dict[str, Row], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(work: Any) -> Row:
        raise AssertionError("measured again")

    measured: list[str] = []

    def counted(work: Any) -> Row:
        measured.append("ranks")
        return made["ranks"]

    for name in PAIRED:
        monkeypatch.setitem(running.SECTIONS, name, dataclasses.replace(SECTIONS[name], measure=never))
    some = "ranks", "tree", "temperature"  # each is drawn again
    again = {row.name: row for row in run(dataclasses.replace(toys, sections=some))}
    assert {name: row.to_dict() for name, row in again.items()} == {
        name: json.loads(json.dumps(made[name].to_dict())) for name in some
    }
    picture_of = Path(toys.out) / "ranks.png"
    picture_of.unlink()
    assert [row.name for row in run(dataclasses.replace(toys, sections=("ranks",), redraw=True))] == ["ranks"]
    assert picture_of.is_file()
    monkeypatch.setitem(running.SECTIONS, "ranks", dataclasses.replace(SECTIONS["ranks"], measure=counted))
    list(run(dataclasses.replace(toys, sections=("ranks",), heads=None)))  # ranks do not depend on them
    assert not measured
    list(run(dataclasses.replace(toys, sections=("ranks",), gamma=3)))
    list(run(dataclasses.replace(toys, sections=("ranks",), again=True)))
    assert len(measured) == 2
    with pytest.raises(InputError, match="holds no numbers"):
        run(dataclasses.replace(toys, out=str(tmp_path / "new"), redraw=True))


@pytest.mark.thorough
@pytest.mark.parametrize("section", ["sizes", "temperature"])
def test_a_section_that_was_broken_off_goes_on(
    section: str, toys: ReportConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Races that were run before are not run again: not when a line was half written, nor when a size is added."""
    raced: list[str] = []
    race = PairRow.race

    def watched(self: PairRow, *args: Any, where: str = "", **more: Any) -> Any:
        raced.append(where or self.name)
        if len(raced) == 2:
            raise KeyboardInterrupt
        return race(self, *args, where=where, **more)

    monkeypatch.setattr(PairRow, "race", watched)
    config = dataclasses.replace(toys, out=str(tmp_path), sections=(section,), sizes=(toys.draft[6:],))
    with pytest.raises(KeyboardInterrupt):
        list(run(config))
    (first,) = (tmp_path / "data" / f"{section}.jsonl").read_text(encoding="utf-8").splitlines()
    with (tmp_path / "data" / f"{section}.jsonl").open("a", encoding="utf-8") as file:
        file.write(first[: len(first) // 2])
    (row,) = run(config)
    assert row.error is None
    assert len(raced) == 3 and raced[1] == raced[2] != raced[0]
    lines = json.loads(first)["found"]["lines"]
    assert all(line in row.lines for line in lines) and len(row.lines) > len(lines)
    more = {"sizes": (), "temperatures": (0.0,)}
    assert next(run(dataclasses.replace(config, **more))).lines == lines and len(raced) == 3
    list(run(dataclasses.replace(config, **more, again=True)))
    assert len(raced) == 4


@pytest.mark.thorough
def test_a_section_that_fails_says_why_and_is_tried_again(toys: ReportConfig, tmp_path: Path) -> None:
    config = dataclasses.replace(toys, out=str(tmp_path), sections=("medusa", "predicted"))
    (tmp_path / "none.json").write_text("{", encoding="utf-8")
    broken = dataclasses.replace(config, heads=None, predictions=str(tmp_path / "none.json"))
    rows = list(run(broken))
    assert all(row.error for row in rows)
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert text.count("Not measured: ") == 2
    assert "<img" not in text
    assert not next(run(dataclasses.replace(config, sections=("medusa",)))).error
    assert (tmp_path / "index.html").read_text(encoding="utf-8").count("<img") == 1


@pytest.mark.parametrize("content", ["", "{}", '{"row": {"row": "ranks"}}'])
def test_damaged_numbers_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "ranks.json").write_text(content, encoding="utf-8")
    with pytest.raises(LoadError, match="damaged"):
        run(ReportConfig(str(tmp_path), redraw=True))


def test_heads_of_another_model_are_refused_before_work(toys: ReportConfig, tmp_path: Path) -> None:
    others = dataclasses.replace(toys, out=str(tmp_path), heads=str(embedded("tales-medusa")))
    with pytest.raises(UnsupportedError, match=r"read 384 values; .*: they belong to another model"):
        run(dataclasses.replace(others, sections=(), article="medusa"))
    run(dataclasses.replace(others, sections=("ranks",)))  # reads no heads
    with pytest.raises(LoadError, match=r"no Medusa heads in .*none'"):
        run(dataclasses.replace(others, sections=("sparse",), heads=str(tmp_path / "none")))


@pytest.mark.parametrize(("name", "section"), [("prompts", "places"), ("models", "several"), ("tasks", "tasks")])
def test_files_that_are_not_there_are_refused_before_work(name: str, section: str, tmp_path: Path) -> None:
    given = str(tmp_path / "none")
    with pytest.raises(LoadError, match=f"{name}: there is no file or folder '{re.escape(given)}'; check the path"):
        run(ReportConfig(str(tmp_path), (section,), **{name: (given,) if name == "tasks" else given}))  # type: ignore[arg-type]


def test_refused_before_work(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no section 'rank'"):
        run(ReportConfig(str(tmp_path), ("rank",)))
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="out is"):
        run(ReportConfig(str(tmp_path / "file")))
    with pytest.raises(InputError, match="temperatures"):
        ReportConfig("x", temperatures=(-1.0,))
    with pytest.raises(InputError, match="leave one"):
        ReportConfig("x", redraw=True, again=True)
    with pytest.raises(InputError, match=r"no article 'x'; articles are ntt, medusa"):
        ReportConfig("x", article="x")
    with pytest.raises(InputError, match="leave out sections"):
        ReportConfig("x", ("ranks",), article="ntt")
    with pytest.raises(InputError, match="png or svg"):
        ReportConfig("x", pictures="jpg")


# ---------------------------------------------------------------- sections from elsewhere


def tuned(path: Path) -> Path:
    rows = [{"draft": "none", "gamma": "auto", "predicted_speedup": 1.0, "measured_speedup": 1.0, "error": 0.0}]
    rows += [
        {"draft": draft, "gamma": gamma, "predicted_speedup": 1.1 * gamma, "measured_speedup": gamma, "error": 0.1}
        for draft in ("suffix", "model:a")
        for gamma in (1, 2)
    ]
    path.write_text(
        "a table\n" + json.dumps({"table": rows, "conditions": {"target": "t"}, "A/A": [0.9, 1.1]}) + "\n",
        encoding="utf-8",
    )
    return path


def test_predictions_of_a_file(tmp_path: Path) -> None:
    file = tuned(tmp_path / "tuned.json")
    (row,) = run(ReportConfig(str(tmp_path / "out"), ("predicted",), predictions=str(file)))
    assert row.error is None
    assert len(row.lines) == 4
    assert row.conditions["median_error"] == pytest.approx(0.1)
    assert "4 configurations" in SECTIONS["predicted"].seen(row)


@pytest.mark.thorough
def test_accuracy_by_memory_is_drawn() -> None:
    figures = {"accuracy": 0.5, "accuracy_spread": 0.1, "kv_bytes": 2e6, "starred": False}
    lines = [{"name": name, "budget": None, "length": n} | figures for name in ("full", "h2o") for n in (128, 256)]
    row = Row("memory", "right answers", lines)
    pictures = [picture(SECTIONS["memory"].paint, row, theme) for theme in THEMES]
    assert pictures[0] != pictures[1]
    assert "full 50% with 2 MB" in SECTIONS["memory"].seen(row)


def test_panels_draw_what_the_lines_hold() -> None:
    lines = [{"name": "a", "tau": 1.0, "ratio": None, "n": 1}, {"name": "b+c", "tau": 2.0, "ratio": 3.0, "n": 2}]
    row = Row("x", "", [*lines, {"of another thing": 1}])
    ys: dict[str, str | tuple[str, str]] = {"tau": "tokens", "ratio": ("speed", "--")}
    own = curves("n", ys, of="n", level=1.0, legend="best")
    figure = stack(bars({"tau": ""}, of="name", xlabel="tokens"), own, height=[2.0, lambda row: 1.0 * len(row.lines)])(
        row, LIGHT
    )
    upper, lower = figure.axes
    assert [bar.get_width() for bar in upper.patches] == [1.0, 2.0]
    assert [label.get_text() for label in upper.get_yticklabels()] == ["a", "b\n+ c"]
    assert [list(curve.get_ydata()) for curve in lower.lines[:2]] == [[1.0, 2.0], [3.0]]
    assert [text.get_text() for text in lower.get_legend().get_texts()] == ["tokens", "speed"]
    assert list(figure.get_size_inches()) == [NARROW, 5.0]
    by_name = stack(curves("n", {"tau": ""}, by="name", of=lambda lines: lines[:2], stroke=""), below=True)(row, LIGHT)
    assert [text.get_text() for text in by_name.legends[0].get_texts()] == ["a", "b+c"]
    places = grouped(upper, ["one", "two"], {"x": [1.0, None], "y": [2.0, 3.0]}, LIGHT.colours)
    assert [round(place, 2) for place in places[0]] == [-0.21, 0.79]
    assert [bar.get_height() for bar in upper.patches[2:]] == [1.0, 0.0, 2.0, 3.0]
    by_way = [{"size": "one", "way": "a", "v": 1.0, "low": 0.5, "high": 2.0}, {"size": "two", "way": "b", "v": None}]
    text = {"whiskers": ("low", "high"), "text": "{v:.1f}"}
    (axes,) = stack(columns("size", {"v": ""}, by="way", **text))(Row("x", "", by_way), LIGHT).axes  # type: ignore[arg-type]
    assert [bar.get_height() for bar in axes.patches] == [1.0, 0.0, 0.0, 0.0]
    assert [label.get_text() for label in axes.texts] == ["1.0"]


# ---------------------------------------------------------------- the rival


@pytest.mark.thorough
def test_sample_and_compare_gives_the_targets_own_text(toys: ReportConfig) -> None:
    """The text is that of no draft at all, and what it accepts is the target's chance of the draft's best guess."""
    llm = LLM(toys.target, draft="none", compile=False)
    drafter = llm.drafter(toys.draft)
    rival, plain = EngineView(llm, GreedyDraft(drafter), strict=True), EngineView(llm)
    params = SamplingParams(max_new_tokens=400, temperature=1.0, seed=3, gamma=1, ignore_eos=True, acceptance="coupled")
    prompt = [[5, 6, 7]]
    (found,), (alone,) = rival.generate(prompt, params), plain.generate(prompt, params)
    assert found.token_ids == alone.token_ids
    ids = torch.tensor([[*prompt[0], *found.token_ids]])
    with torch.no_grad():
        p, q = (
            load_model(name, dtype="auto", device="cpu").model(ids).logits[0].double().softmax(-1)
            for name in (toys.target, toys.draft.removeprefix("model:"))
        )
    known = [guess_acceptance(one.tolist(), other.tolist()) for one, other in zip(p, q, strict=True)][3:-1]
    mean = sum(known) / len(known)
    # Five standard deviations of the mean of at least 200 coins.
    assert found.stats.alpha == pytest.approx(mean, abs=5 * (mean / 200) ** 0.5 + 0.02)
    assert {"greedy-draft", "sample and compare"}.isdisjoint({*VERIFIERS, *DRAFTERS})


# ---------------------------------------------------------------- the page


class _Read(HTMLParser):
    """Tags that are open, and what the page refers to."""

    EMPTY = ("meta", "img", "source")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.images: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.EMPTY:
            self.open.append(tag)
        found = dict(attrs)
        self.links += [str(found[name]) for name in ("src", "srcset", "href") if name in found]
        if tag == "img":
            self.images.append(found)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.thorough
def test_the_page_needs_no_other_file(toys: ReportConfig, made: dict[str, Row]) -> None:
    text = (Path(toys.out) / "index.html").read_text(encoding="utf-8")
    read = _Read()
    read.feed(text)
    assert not read.open
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in read.links)
    assert len(read.images) == len(PAIRED)
    assert all(image["alt"] for image in read.images)
    assert 'name="viewport"' in text
    assert text.count('media="(prefers-color-scheme: dark)"') == len(PAIRED)
    anchors = [link[1:] for link in read.links if link.startswith("#")]
    assert all(f'id="{name}"' in text for name in anchors)
    assert text.count("Command: <code>sakiyomi bench report OUT --sections ") == len(PAIRED)
    assert text.count("Conditions: ") == len(PAIRED)


def test_nothing_of_the_numbers_becomes_markup() -> None:
    row = Row(
        "x", "<title>", [{"name": "<b>", "figure": 0.123456, "none": None, "yes": True}], {"c": "<i>"}, ["<note>"]
    )
    section = Section(lambda work: row, lambda row, theme: pytest.fail("drawn"), "<h>", "<t> `a < b`", "")
    text = page("<page>", [Shown("x", section, row, "<command>", {}, {})])
    assert not re.search(r"<(b|i|note|h|t|command|page)>", text)
    assert "<code>a &lt; b</code>" in text
    assert "<td>0.1235</td><td></td><td>yes</td>" in text


# ---------------------------------------------------------------- articles


@pytest.mark.parametrize("name", ["ntt", "medusa", "theory"])
def test_the_page_of_an_article_has_all_of_its_figures(name: str) -> None:
    folder = Path(__file__).parents[2] / "docs" / "articles"
    for own in (folder / f"{name}.md", folder / f"{name}.{'ja' if name == 'ntt' else 'zh'}.md"):
        text = own.read_text(encoding="utf-8")
        assert all(f"`{section}`" in text for section in words()["article"][name]["sections"])
        pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
        assert len(pictures) >= 4 and all((folder / picture).is_file() for picture in pictures)


@pytest.mark.thorough
def test_an_article_is_some_sections_in_its_order(toys: ReportConfig, made: dict[str, Row]) -> None:
    assert all(set(one["sections"]) <= set(SECTIONS) for one in words()["article"].values())
    told: list[str] = []
    drawn = dataclasses.replace(toys, sections=(), article="ntt", redraw=True, pictures="svg")
    names = [row.name for row in run(drawn, told.append)]
    assert names == [name for name in words()["article"]["ntt"]["sections"] if name in made]
    text = (Path(toys.out) / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'<section id="([^"]+)"', text) == names
    assert text.count("data:image/svg+xml;base64,") == 2 * len(names)
    assert f"<h1>{words()['article']['ntt']['title']}, measured here</h1>" in text
    assert "docs/articles/ntt.md" in text
    once = (Path(toys.out) / "ranks.svg").read_bytes()
    list(run(dataclasses.replace(drawn, sections=("ranks",), article=None)))
    assert (Path(toys.out) / "ranks.svg").read_bytes() == once


# ---------------------------------------------------------------- the command


def test_the_command_of_a_section_says_what_is_unusual(toys: ReportConfig) -> None:
    words = shlex.split(toys.command("sizes", ("sizes", "heads")))
    assert words[:6] == ["sakiyomi", "bench", "report", "OUT", "--sections", "sizes"]
    assert words[words.index("--gamma") + 1] == "2"
    assert "--sizes" not in words
    assert "--no-compile" in words
    assert "--temperatures" not in words
    assert shlex.split(ReportConfig("x").command("ranks", ())) == [*words[:5], "ranks"]


@pytest.mark.thorough
def test_on_the_command_line(toys: ReportConfig, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    words = shlex.split(toys.command("ranks", ()))[1:]
    words[2] = out
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.strip().splitlines()[-1])
    assert [row["row"] for row in found["rows"]] == ["ranks"]
    assert Path(found["page"]).is_file()
    again = CliRunner().invoke(app, ["bench", "report", out, "--redraw"])
    assert again.exit_code == 0, again.output
    failed = CliRunner().invoke(app, ["bench", "report", out, "--sections", "predicted", "--predictions", "nothing"])
    assert failed.exit_code == 1
    assert "there is no file or folder 'nothing'" in failed.output
    refused = CliRunner().invoke(app, ["bench", "report", out, "--sections", "nothing"])
    assert refused.exit_code != 0


def test_tasks_come_from_files_or_from_the_pair(toys: ReportConfig, tmp_path: Path) -> None:
    line = {
        "name": "sakiyomi plain",
        "way": "int8",
        "temperature": 0.0,
        "seconds_per_answer": 1.5,
        "over_assisted": 2.0,
    }
    row = {"row": "speech", "lines": [line], "notes": [], "error": None}
    (tmp_path / "speech.txt").write_text("a table\n" + json.dumps({"rows": [row]}) + "\n", encoding="utf-8")
    asked = dataclasses.replace(
        toys, out=str(tmp_path / "a"), sections=("tasks",), tasks=(str(tmp_path / "speech.txt"),)
    )
    (given,) = run(asked)
    assert given.error is None and given.lines == [{"task": "speech", **line}]
    assert "2.0 times transformers' assisted" in SECTIONS["tasks"].seen(given)
    (tmp_path / "bad.txt").write_text("a table\n", encoding="utf-8")
    (refused,) = run(dataclasses.replace(asked, tasks=(str(tmp_path / "bad.txt"),)))
    assert "bench tasks --json" in (refused.error or "")


@pytest.mark.thorough
def test_systems_and_what_they_kept_are_drawn(toys: ReportConfig, tmp_path: Path) -> None:
    lengths = ("512",)
    asked = dataclasses.replace(toys, out=str(tmp_path), sections=("locret", "kept"), memory_lengths=lengths, count=1)
    rows = {row.name: row for row in run(asked)}
    assert {name: row.error for name, row in rows.items()} == {"locret": None, "kept": None}
    assert [line["name"] for line in rows["locret"].lines][-1] == "Locret"
    shares = [sum(line["kept"]) / len(line["kept"]) for line in rows["kept"].lines]
    assert len(shares) == 8 and all(0.31 < share < 0.36 for share in shares), "an eighth, and the last 100 tokens"
    assert (tmp_path / "kept.png").is_file() and "eads" in SECTIONS["kept"].seen(rows["kept"])
