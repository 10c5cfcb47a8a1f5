"""Which replica takes a request: the one that has its beginning in the cache, unless that one is busy.

Nothing is remembered and nobody is asked: every front comes to the same answer from the request, the names of the
replicas and how many requests each has. Rendezvous hashing (Thaler and Ravishankar 1998): a replica that joins or
leaves moves its own share of the conversations alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["SLACK", "affinity_key", "preference", "ranked"]

SLACK = 4  # requests that a replica may have more than the least loaded before others are asked first
PROMPT_CHARACTERS = 512  # of a prompt without messages; a longer one names no conversation better


def affinity_key(body: Mapping[str, Any], session: str = "") -> str:
    """What all requests of one conversation have in common.

    Args:
        body: of a request, as the server takes it: with `messages`, `input` or `prompt`.
        session: name of the conversation, of a header; it decides alone where there is one.

    Returns:
        The session, or else the system and the first user message, or the beginning of the prompt. Whole prompts
        would move a conversation at every turn.
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
    """How much a key likes a replica: of several, it likes that with the largest value best."""
    return hashlib.blake2b(f"{replica}\0{key}".encode(errors="surrogatepass"), digest_size=8).digest()


def ranked(key: str, loads: Mapping[str, int]) -> list[str]:
    """The replicas in the order in which they are asked.

    Args:
        key: see `affinity_key`.
        loads: requests that each replica has, by its name.

    Returns:
        First those that have less than ``SLACK`` more than the least loaded, in the order in which the key likes
        them; then the others by their load.
    """
    least = min(loads.values(), default=0)
    liked = sorted(loads, key=lambda replica: preference(key, replica), reverse=True)
    return sorted(liked, key=lambda replica: max(loads[replica] - least - SLACK + 1, 0))
