"""Text of PDF files, read in a process of its own, so that a damaged or hostile file harms nothing else."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from sakiyomi.core.pdf import MEMORY, SECONDS
from sakiyomi.server.errors import ApiError

EXTRACT_BYTES = 1 << 25


async def pdf_text(data: bytes, places: asyncio.Semaphore) -> dict[str, Any]:
    """The text of a PDF and how many pages it has: ``{"text", "pages"}``.

    Args:
        data: the file.
        places: limits how many are read at a time.

    Raises:
        ApiError: it is no PDF, has a password or no text, or takes too long or too much memory.
    """
    if b"%PDF-" not in data[:1024]:
        raise ApiError(400, "the body is no PDF; send the file itself, as it is", code="invalid_value")
    async with places:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sakiyomi.core.pdf",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        out = b""
        try:
            async with asyncio.timeout(4 * SECONDS):  # on a busy machine its seconds of a processor take longer
                out, _ = await process.communicate(data)
        except TimeoutError:
            pass
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    found = json.loads(out) if out else {"error": f"it takes more than {SECONDS} s or {MEMORY >> 30} GiB to read"}
    if "error" in found:
        raise ApiError(400, f"this PDF cannot be read: {found['error']}", code="invalid_value")
    return dict(found)
