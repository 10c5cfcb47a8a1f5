"""``bench spec`` on several workers: a question is a piece; all contenders answer it on one worker, interleaved."""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterable
from contextlib import closing

from sakiyomi.evaluation.bench.spec.config import SpecConfig
from sakiyomi.evaluation.bench.spec.results import Results
from sakiyomi.evaluation.bench.spec.run import Asked, Share, Spec
from sakiyomi.scale.cluster import WorkersOption, import_ray
from sakiyomi.scale.spread import OneByOne, spread


def share(option: WorkersOption) -> Share:
    """A function that has workers answer the questions.

    Raises:
        LoadError: Ray is not installed.
    """
    import_ray()

    def shared(config: SpecConfig, template: str, file: str, asked: Iterable[Asked]) -> Generator[Results, None, None]:
        make = functools.partial(_worker, config, template, file)
        with closing(spread(make, option, config.device, ((None, one) for one in asked))) as found:
            for _, result in found:
                yield result

    return shared


def _worker(config: SpecConfig, template: str, file: str) -> OneByOne:
    spec = Spec(config, template, file)
    return OneByOne(lambda asked: spec.answer(*asked))
