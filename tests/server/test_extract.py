"""PDF files: their text, and what becomes of those that have none, are damaged, or take too much."""

from __future__ import annotations

import io
from collections.abc import Iterator

import httpx
import pytest
from pypdf import PdfReader, PdfWriter

from sakiyomi.core import pdf
from server_toys import running, small_pdf, toy_llm, web


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(toy_llm("none")) as (_, found):
        yield found


def extract(url: str, data: bytes) -> httpx.Response:
    return web.post(f"{url}/extract", content=data, headers={"content-type": "application/pdf"}, timeout=120)


def written(*, password: str = "", pages: int = 0) -> bytes:
    """The small file again, with blank pages behind it, or with a password."""
    writer = PdfWriter()
    for page in PdfReader(io.BytesIO(small_pdf("hidden"))).pages if not pages else ():
        writer.add_page(page)
    for _ in range(pages):
        writer.add_blank_page(100, 100)
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def test_the_text_of_a_file(url: str) -> None:
    assert extract(url, small_pdf("One page")).json() == {"text": "One page", "pages": 1}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"not at all", "the body is no PDF"),
        (b"%PDF-1.4\nbroken", "this PDF cannot be read"),
        (written(password="secret"), "it has a password"),
        (written(pages=2), "it has no text, only pictures"),
    ],
    ids=["none", "damaged", "password", "pictures"],
)
def test_what_cannot_be_read_is_refused_with_a_reason(url: str, data: bytes, said: str) -> None:
    reply = extract(url, data)
    assert reply.status_code == 400 and said in reply.json()["error"]["message"]
    assert extract(url, small_pdf("Next")).status_code == 200


def test_too_much_text_and_every_damage_end_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = small_pdf("Much too long")
    for place in range(0, len(whole), 5):
        for damaged in (whole[:place], whole[:place] + b"\xff" + whole[place + 1 :]):
            assert ("error" in pdf.read_pdf(damaged)) or pdf.read_pdf(damaged)["pages"] == 1
    monkeypatch.setattr(pdf, "CHARACTERS", 5)
    assert pdf.read_pdf(whole) == {"error": "it has more than 5 characters"}
