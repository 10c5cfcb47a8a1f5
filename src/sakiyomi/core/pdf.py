"""The text of a PDF, as a program that reads a file from its input, within limits that a damaged or hostile one meets.

``python -m sakiyomi.core.pdf < FILE.pdf`` writes a JSON object: ``text`` and ``pages``, or ``error``; nothing where it
is ended for taking more than ``SECONDS`` of a processor or ``MEMORY`` bytes.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any

SECONDS, MEMORY, CHARACTERS = 30, 1 << 30, 1 << 22
"""What a file may take: seconds of a processor, bytes of memory, characters of text."""


def read_pdf(data: bytes) -> dict[str, Any]:
    """Text and number of pages, or the error, of a file's bytes."""
    from pypdf import PdfReader

    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            return {"error": "it has a password"}
        texts: list[str] = []
        for page in reader.pages:
            texts.append(page.extract_text())
            if sum(map(len, texts)) > CHARACTERS:
                return {"error": f"it has more than {CHARACTERS} characters"}
    except MemoryError:
        raise
    except Exception as error:  # pypdf raises errors of any kind
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    text = "\n\n".join(texts)
    return {"text": text, "pages": len(texts)} if text.strip() else {"error": "it has no text, only pictures"}


def _main() -> None:
    with contextlib.suppress(ImportError):  # there are no such limits on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with contextlib.suppress(MemoryError):
        json.dump(read_pdf(sys.stdin.buffer.read()), sys.stdout)


if __name__ == "__main__":
    _main()
