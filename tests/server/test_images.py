"""Images in chat messages: the text behind them is that of transformers; what cannot be read is one clear 400."""

from __future__ import annotations

import base64
import copy
import io
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import openai
import pytest
import torch
from PIL import Image
from torch import Tensor

from architectures import VOCAB, prompt
from causal_models import TOKENIZER
from drafters import Branching
from multimodal_toys import IMAGE, MARK, SIDE, Processor, seeing_model, seen
from sakiyomi import LLM
from sakiyomi.server.app import Server
from sakiyomi.server.config import ServerConfig
from server_toys import client, running, toy_llm, web

NAME, NEW = "gemma3", 12
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ '" + MARK + "' if part.type == 'image' else part.text }}{% endfor %}"
    "{% endif %}{% endfor %}"
)
SMALL = {"max_images": 2, "max_image_bytes": 4000, "max_image_pixels": 64 * 64}


class Camera(Processor):
    """Takes PIL images, as those of transformers do."""

    def __call__(self, text: Sequence[str], images: Sequence[Any], return_tensors: str) -> dict[str, Tensor]:
        return super().__call__(text, [pixels(image) for image in images], return_tensors)


def pixels(image: Image.Image) -> Tensor:
    assert image.mode == "RGB"
    return torch.from_numpy(np.asarray(image.resize((SIDE, SIDE)), np.float32).copy()).permute(2, 0, 1) / 16 - 8


def picture(seed: int) -> Image.Image:
    """Blocks of a few colours, 40 x 30."""
    blocks = np.random.default_rng(seed).integers(0, 255, (3, 4, 3), np.uint8)
    return Image.fromarray(blocks.repeat(10, 0).repeat(10, 1))


def url_of(image: Image.Image, form: str = "PNG") -> str:
    memory = io.BytesIO()
    image.save(memory, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(memory.getvalue()).decode()}"


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def said(length: int, seed: int) -> str:
    return str(TOKENIZER.decode([token for token in prompt(length, seed) if token > IMAGE + 3]))


FIRST, SECOND = said(9, 1), said(2, 51)


def seeing_llm() -> LLM:
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = TEMPLATE
    processor, text = Camera(NAME, tokenizer), f"{FIRST}{MARK}{SECOND}"
    tokens = processor([text], [picture(1)], "pt")["input_ids"][0].tolist()
    drafter = Branching({tuple(tokens): wanted(picture(1))}, "sometimes", VOCAB)
    return LLM((seeing_model(NAME), processor), drafter, compile=False, max_batch=2)


def wanted(image: Image.Image) -> list[int]:
    return seen(NAME, Processor(NAME, TOKENIZER), f"{FIRST}{MARK}{SECOND}", [pixels(image)], NEW)


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[Server, str]]:
    with running(seeing_llm(), **SMALL) as found:
        yield found


def ask(url: str, *parts: dict[str, Any], role: str = "user", stream: bool = False, **options: Any) -> Any:
    """Greedily, with two texts around the parts."""
    content = [{"type": "text", "text": FIRST}, *parts, {"type": "text", "text": SECOND}]
    messages: Any = [{"role": role, "content": content}]
    more = {"ignore_eos": True} | options
    return client(url).chat.completions.create(
        model="toy", messages=messages, max_tokens=NEW, temperature=0, stream=stream, extra_body=more
    )


@pytest.mark.parametrize("form", ["PNG", "WEBP", "GIF"])
def test_the_text_behind_an_image_is_that_of_transformers(site: tuple[Server, str], form: str) -> None:
    url = url_of(picture(1), form)
    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as read:
        expected = wanted(read.convert("RGB"))
    reply = ask(site[1], part(url))
    assert reply.choices[0].message.content == TOKENIZER.decode(expected)
    assert reply.usage.prompt_tokens == len(FIRST) + 6 + len(SECOND)


def test_no_image_is_taken_for_another(site: tuple[Server, str]) -> None:
    """Their marks are the same tokens; requests share what they have read of the same beginning."""
    texts = [ask(site[1], part(url_of(picture(seed)))).choices[0].message.content for seed in (1, 2, 1)]
    assert texts == [TOKENIZER.decode(wanted(picture(seed))) for seed in (1, 2, 1)]
    assert texts[0] != texts[1], "the image is not looked at"


def test_several_samples_and_streams(site: tuple[Server, str]) -> None:
    reply = ask(site[1], part(url_of(picture(1))), n=2)
    assert {choice.message.content for choice in reply.choices} == {TOKENIZER.decode(wanted(picture(1)))}
    events = ask(site[1], part(url_of(picture(1))), stream=True)
    text = "".join(event.choices[0].delta.content or "" for event in events)
    assert text == TOKENIZER.decode(wanted(picture(1)))


def turned() -> str:
    memory = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held on its side
    picture(3).save(memory, "PNG", exif=exif)
    return f"data:image/png;base64,{base64.b64encode(memory.getvalue()).decode()}"


def test_an_image_is_turned_as_its_camera_was(site: tuple[Server, str]) -> None:
    upright = picture(3).transpose(Image.Transpose.ROTATE_270)
    assert ask(site[1], part(turned())).choices[0].message.content == TOKENIZER.decode(wanted(upright))


def bomb() -> str:
    """A PNG of a few bytes whose header says 50,000 x 50,000."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    content = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


GOOD = url_of(picture(1))
WRONG = {
    "http": ("https://example.com/cat.png", "this server fetches nothing"),
    "file": ("file:///etc/passwd", "this server fetches nothing"),
    "text": ("data:text/plain;base64,QUJD", "expected data:image/TYPE;base64,"),
    "no base64": ("data:image/png,abc", "expected data:image/TYPE;base64,"),
    "other letters": ("data:image/png;base64,äöü", "is no base64"),
    "half": (GOOD[:200], "cannot be read|is no base64"),
    "nothing": ("data:image/png;base64,", "cannot be read"),
    "other kind": (url_of(picture(1), "BMP").replace("bmp", "png")[:3000], "cannot be read|is no base64"),
    "many bytes": ("data:image/png;base64," + "A" * 8000, "6000 bytes, 4000 are taken"),
    "many pixels": (url_of(Image.new("RGB", (65, 64))), "65 x 64 pixels, 4096 are taken in all images"),
    "bomb": (bomb(), "pixels, 4096 are taken"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_images_are_one_clear_400(site: tuple[Server, str], case: str) -> None:
    url, words = WRONG[case]
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        ask(site[1], part(url))
    assert caught.value.param == "messages[0].content[1].image_url.url"
    assert "Traceback" not in str(caught.value) and len(str(caught.value)) < 500


def test_bounds_of_a_request(site: tuple[Server, str]) -> None:
    with pytest.raises(openai.BadRequestError, match="3 images in one request; this server allows 2"):
        ask(site[1], *[part(GOOD)] * 3)
    large = part(url_of(Image.new("RGB", (60, 60))))
    with pytest.raises(openai.BadRequestError, match="60 x 60 pixels, 496 are taken in all images"):
        ask(site[1], large, large)
    with pytest.raises(openai.BadRequestError, match="images are sent in user messages"):
        ask(site[1], part(GOOD), role="system")
    with pytest.raises(openai.BadRequestError, match="detail"):
        ask(site[1], {"type": "image_url", "image_url": {"url": GOOD, "detail": "high"}})
    with pytest.raises(openai.BadRequestError, match="does not take it"):
        ask(site[1], part(GOOD), {"type": "text", "text": MARK})  # a mark without an image
    with pytest.raises(openai.BadRequestError, match="prompts with images are not scored"):
        ask(site[1], part(GOOD), prompt_logprobs=1)
    messages = [{"role": "user", "content": [part(GOOD)]}]
    reply = web.post(f"{site[1]}/tokenize", json={"model": "toy", "messages": messages})
    assert reply.status_code == 400 and "an image is no text" in reply.json()["error"]["message"]
    server = site[0]
    assert server.max_body == 1 << 25 and server.card()["images"]
    assert web.get(f"{site[1]}/health").status_code == 200


def test_a_model_of_text_says_so() -> None:
    with running(toy_llm("none")) as (server, url):
        with pytest.raises(
            openai.BadRequestError, match="this server reads no images: it is a model of text"
        ) as caught:
            ask(url, part(GOOD))
        assert caught.value.code == "unsupported_value" and not server.card()["images"]


def test_a_model_that_sees_without_a_processor_says_so() -> None:
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = TEMPLATE
    llm = LLM((seeing_model(NAME), tokenizer), "none", compile=False)
    with running(llm) as (_, url), pytest.raises(openai.BadRequestError, match="no image processor"):
        ask(url, part(GOOD))


def test_bounds_are_checked_at_start() -> None:
    with pytest.raises(Exception, match="max_image_pixels"):
        ServerConfig(max_image_pixels=0)
