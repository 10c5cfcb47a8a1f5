"""`Conversation`: successive requests that compute only the new part of each prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any, Self

from sakiyomi.cache.prefix import Prefix
from sakiyomi.core.errors import InputError
from sakiyomi.core.outputs import Generation, Stats, Step
from sakiyomi.core.params import SamplingParams, as_params
from sakiyomi.engine.engine import Engine
from sakiyomi.engine.request import Request, RetainedSlot


class Conversation:
    """Successive requests, each with its whole prompt, in one slot of the cache; see ``LLM.conversation``.

    The slot holds the last prompt and its reply. The longest beginning that a new prompt shares with them is used
    again, and only the tokens behind it are computed. So a conversation may be continued, taken back or edited
    anywhere; ``Stats.reused`` says how many tokens were used again. Greedy or with a seed, the tokens are those that
    ``LLM.generate`` gives the same prompt: in float32, and, bit for bit, with ``exact=True``. There only whole chunks
    of earlier prompts (of ``chunk_size`` tokens) are used again: other rows were rounded differently.

    With a seed the randomness of a reply depends on the seed, on ``index`` and on the positions of its tokens only.

    One request at a time. The slot is kept until ``close``. When other requests need a slot or its memory, the
    conversation that was idle longest loses its own; its next prompt is then computed as a whole.
    """

    def __init__(self, engine: Engine, prefix: Prefix | None = None, *, beginning: bool = False) -> None:
        self._engine, self._place = engine, RetainedSlot(prefix=prefix, beginning=beginning)
        self._request: Request | None = None

    @property
    def stats(self) -> Stats:
        """Figures of the last request, also if it was left early."""
        return self._request.stats if self._request is not None else Stats()

    def generation(self) -> Generation:
        """The whole reply of the last request, which is over."""
        assert self._request is not None
        return self._request.generation()

    def stream(
        self, prompt: Any, params: SamplingParams | None = None, *, index: int = 0
    ) -> Generator[Step, None, None]:
        """Yield every round's tokens and text. Leaving the loop early ends the request; its tokens are kept.

        Args:
            prompt: text or token ids: all of the conversation so far and what is new. Where the target has an encoder,
                its source, which is read anew every time.
            params: None for the defaults.
            index: with a seed the text is that which ``generate`` gives the prompt in this place of a list.

        Raises:
            InputError, MemoryLimitError: at the first step, before any work is done.
        """
        params = as_params(params)
        if params.n > 1:
            raise InputError(f"n={params.n} samples cannot be one stream; use generate, or one stream a sample")
        steps: deque[Step] = deque()
        request = self._submit(prompt, params, key=(index,), outbox=steps)
        try:
            while steps or not request.over:
                if not steps:
                    self._engine.step()
                while steps:
                    step = steps.popleft()
                    if step.error is not None:
                        raise step.error
                    yield step
        finally:
            self._engine.remove(request.id)

    def generate(self, prompt: Any, params: SamplingParams | None = None, *, index: int = 0) -> Generation:
        """The whole reply at once; arguments and errors as of ``stream``."""
        params = as_params(params)
        if params.n > 1:
            raise InputError(f"n={params.n} samples cannot be one reply; use LLM.generate")
        return self._engine.complete(self._submit(prompt, params, key=(index,), live=False) for _ in range(1))[0]

    def snapshot(self, text: str, recipe: dict[str, str]) -> Prefix:
        """A prefix of the last prompt and its reply, see ``LLM.prefix``."""
        return self._engine.snapshot(self._place, text, recipe)

    def close(self) -> None:
        """Free the slot. The next prompt, if there is one, is computed as a whole and kept again."""
        self._engine.release(self._place)

    def _submit(self, prompt: Any, params: SamplingParams, **options: Any) -> Request:
        self._request = request = self._engine.submit(prompt, params, place=self._place, **options)
        return request

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
