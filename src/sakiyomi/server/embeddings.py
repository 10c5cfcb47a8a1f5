"""``/v1/embeddings``: the mean of the last layer's hidden states over each text.

Each text is a request that ends with its prompt: it is scheduled like others, and shares passes with them.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sakiyomi.server.bodies import BodyReader
from sakiyomi.server.errors import unsupported
from sakiyomi.server.jobs import Job
from sakiyomi.server.replies import Piece, Style
from sakiyomi.server.schema import CompletionRequest, EmbeddingsRequest, Speculation, read_as

if TYPE_CHECKING:
    from sakiyomi.engine.llm import LLM

NAMES = {"prompt": "input", "max_tokens": "input"}
"""Fields of completions that have another name here."""


def asked(body: EmbeddingsRequest) -> CompletionRequest:
    """A completion request for one token after each text, for the engine."""
    alone = {"max_tokens": 1, "temperature": 0.0, "speculation": Speculation(drafter="off")}
    return read_as(CompletionRequest, {"model": body.model, "prompt": body.input, "user": body.user, **alone}, NAMES)


def embedding_jobs(llm: LLM, bodies: BodyReader, body: EmbeddingsRequest, request: CompletionRequest) -> list[Job]:
    """Jobs of a request for embeddings, one for each text.

    Args:
        llm: the server's.
        bodies: reads the request.
        body: as it came.
        request: ``asked`` of it.

    Raises:
        ApiError: the cache evicts, or the model has another number of dimensions.
    """
    if llm.target.eviction.chunked:
        raise unsupported("the server's cache evicts, so that texts have no embeddings; start it with --cache full")
    width = int(llm.target.config.hidden_size)
    if body.dimensions not in (None, width):
        raise unsupported(
            f"dimensions is {body.dimensions}, and this model's embeddings have {width}, which are not made to be cut; "
            "leave it out",
            "dimensions",
        )
    jobs = bodies.completion(request, counted=False)
    for job in jobs:
        job.unwritten, job.states = True, []
    return jobs


class EmbeddingsStyle(Style):
    """Of ``/v1/embeddings``; ``packed``: vectors are base64."""

    def __init__(self, *args: Any, packed: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._packed = packed

    def whole(self, pieces: Sequence[Piece], figures: dict[str, Any]) -> dict[str, Any]:
        """The reply."""
        data = [{"object": "embedding", "index": p.index, "embedding": self._vector(p)} for p in pieces]
        counts = dict.fromkeys(("prompt_tokens", "total_tokens"), figures["prompt_tokens"])
        return {"object": "list", "data": data, "model": self._head["model"], "usage": counts}

    def _vector(self, piece: Piece) -> list[float] | str:
        assert piece.mean is not None
        if self._packed:
            return base64.b64encode(piece.mean.cpu().numpy().astype("<f4").tobytes()).decode()
        return list(piece.mean.tolist())
