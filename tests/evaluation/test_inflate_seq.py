"""Inflated encoder-decoder models: the same function at another size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    BartConfig,
    BartForConditionalGeneration,
)

import inflate as module
import inflating
from edits import train_edits
from held_out import read_examples
from inflate import InflateConfig, inflate
from inflate_seq import EncoderDecoder
from pair_toys import edits_config, tones_config
from sakiyomi.core.errors import InputError, SakiyomiError, UnsupportedError
from sakiyomi.evaluation.bench.config import silent
from tones import train_tones


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hardly trained targets of both kinds; two layers, so that some come between."""
    folder = tmp_path_factory.mktemp("pairs")
    return {
        "edits": Path(train_edits(edits_config(folder, layers=2, encoder_layers=2))["target"]),
        "tones": Path(train_tones(tones_config(folder, layers=2, encoder_layers=2))["target"]),
    }


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models grow in both directions: theirs are not the proportions of large ones."""
    monkeypatch.setattr(inflating, "ASPECT", 20)


@pytest.mark.thorough
@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize(("kind", "params"), [("edits", 900_000), ("tones", 900_000)])
def test_the_same_function(folders: dict[str, Path], tmp_path: Path, kind: str, params: int) -> None:
    out = tmp_path / "large"
    found = inflate(InflateConfig(str(out), str(params), str(folders[kind])), silent)
    auto = AutoModelForSeq2SeqLM if kind == "edits" else AutoModelForSpeechSeq2Seq
    small, large = (auto.from_pretrained(path, dtype=torch.float32).eval() for path in (folders[kind], out))
    assert abs(found["parameters"] / params - 1) < 0.15
    assert found["parameters"] == sum(parameter.numel() for parameter in large.parameters())
    assert large.config.d_model > small.config.d_model
    assert large.config.decoder_layers > small.config.decoder_layers
    assert large.config.sakiyomi_inflated == {"from": str(folders[kind]), "params": found["parameters"]}
    generator = torch.Generator().manual_seed(1)
    if kind == "edits":
        # Two texts of other lengths than the one it was checked on, one of them filled up.
        mask = torch.ones(2, 50, dtype=torch.long)
        mask[1, 30:] = 0
        read = {"input_ids": torch.randint(2, 300, (2, 50), generator=generator), "attention_mask": mask}
    else:
        read = {"input_features": torch.randn(2, 40, 100, generator=generator)}
    decoded = torch.randint(2, 29, (2, 12), generator=generator)
    with torch.no_grad():
        logits = [model(**read, decoder_input_ids=decoded).logits for model in (small, large)]
    assert logits[0].std() > 0.01
    assert (logits[0] - logits[1]).abs().max() < 1e-4
    assert 0 < found["random_to_real_activations"] < 1
    assert read_examples(out) == read_examples(folders[kind])


@pytest.mark.thorough
@pytest.mark.usefixtures("deep")
def test_random_weights_are_there_and_what_they_write_is_zero(folders: dict[str, Path], tmp_path: Path) -> None:
    inflate(InflateConfig(str(tmp_path / "large"), "900K", str(folders["edits"])), silent)
    small, large = (
        AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float32)
        for path in (folders["edits"], tmp_path / "large")
    )
    for part in ("encoder", "decoder"):
        old, new = (getattr(model.model, part).layers for model in (small, large))
        real = new[-1]
        for name in ("self_attn.q_proj", "self_attn.v_proj", "fc1"):
            before, after = (layer.get_submodule(name).weight for layer in (old[-1], real))
            rows, columns = before.shape
            assert torch.equal(after[:rows, :columns], before)
            assert after[:, columns:].std() > 0
            assert after[rows:].std() > 0
        assert not real.fc2.weight[:, old[-1].fc2.in_features :].any()
        added = [layer for layer in new if not layer.self_attn.out_proj.weight.any()]
        assert len(added) == len(new) - len(old)
        assert all(layer.fc1.weight.std() > 0 and not layer.fc2.weight.any() for layer in added)


@pytest.mark.thorough
def test_proportions_of_a_real_size(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        shape, parameters = EncoderDecoder.load(str(folder)).wider(134_000_000)
        assert abs(parameters / 134e6 - 1) < 0.03
        layers = shape.encoder_layers + shape.decoder_layers
        assert 20 < 2 * shape.d_model / layers < 200
        assert shape.encoder_layers == shape.decoder_layers
        assert 1 < shape.decoder_ffn_dim / shape.d_model < 4


@pytest.mark.thorough
def test_what_cannot_be_inflated_is_refused(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(target: Path, params: str = "200K") -> None:
        inflate(InflateConfig(str(tmp_path / "out"), params, str(target)), silent)

    with pytest.raises(InputError, match="already"):
        run(folders["tones"], "1K")
    config = BartConfig(
        vocab_size=20, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=16,
    )  # fmt: skip
    BartForConditionalGeneration(config).save_pretrained(tmp_path / "bart")
    with pytest.raises(UnsupportedError, match="BartForConditionalGeneration cannot be inflated"):
        run(tmp_path / "bart")
    with monkeypatch.context() as patch, pytest.raises(SakiyomiError, match="not the same function"):
        patch.setattr(inflating, "gain", lambda weight, factor: weight.repeat(factor))
        patch.setattr(inflating, "ASPECT", 20)
        run(folders["edits"], "900K")
    assert not (tmp_path / "out").exists()
    assert module.TOLERANCE <= 1e-3
