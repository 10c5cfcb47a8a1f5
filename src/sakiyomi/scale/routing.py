"""Routes a request to the replica that has its prefix in the cache, unless that one is busy.

Routing has no state: every front computes the same replica from the request, the names of the replicas and the number
of requests that each has. Rendezvous hashing (Thaler and Ravishankar 1998): a replica that joins or leaves moves only
its own share of the conversations.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

SLACK = 4  # requests that a replica may have beyond the least loaded one before others are preferred
PROMPT_CHARACTERS = 512  # of a prompt without messages that make the key


def affinity_key(body: Mapping[str, Any], session: str = "") -> str:
    """A key that all requests of a conversation share.

    Args:
        body: of a request, as the server takes it: with `messages`, `input` or `prompt`.
        session: name of the conversation from a header, which is then the key.

    Returns:
        The session, or the system and first user message, or the beginning of the prompt. Whole prompts would move a
        conversation with every request.
    """
    if session:
        return session
    turns = body.get("messages") or body.get("input")
    if isinstance(turns, list) and any(isinstance(turn, Mapping) for turn in turns):
        turns = [turn for turn in turns if isinstance(turn, Mapping)]
        first = [next((t.get("content") for t in turns if t.get("role") == role), None) for role in ("system", "user")]
        return json.dumps([body.get("system") or body.get("instructions"), *first], sort_keys=True, default=str)
    prompt = turns or body.get("prompt")
    return (prompt if isinstance(prompt, str) else json.dumps(prompt, default=str))[:PROMPT_CHARACTERS]


def preference(key: str, replica: str) -> bytes:
    """Weight of a replica for a key; the largest weight wins."""
    return hashlib.blake2b(f"{replica}\0{key}".encode(errors="surrogatepass"), digest_size=8).digest()


def ranked(key: str, loads: Mapping[str, int]) -> list[str]:
    """Replicas in the order of preference.

    Args:
        key: see `affinity_key`.
        loads: requests that each replica has, by its name.

    Returns:
        First those that have less than ``SLACK`` more than the least loaded, by weight; then the others by load.
    """
    least = min(loads.values(), default=0)
    liked = sorted(loads, key=lambda replica: preference(key, replica), reverse=True)
    return sorted(liked, key=lambda replica: max(loads[replica] - least - SLACK + 1, 0))
