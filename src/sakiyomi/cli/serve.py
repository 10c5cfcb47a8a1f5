"""``sakiyomi serve``: an OpenAI-compatible server."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from sakiyomi.cli.common import load, server_packages
from sakiyomi.cli.output import note
from sakiyomi.core.errors import InputError
from sakiyomi.engine.config import LLMConfig
from sakiyomi.scale.cluster import ReplicaOptions, import_ray
from sakiyomi.scale.model_options import ModelOptions, read_models, room_of
from sakiyomi.server.config import ServerConfig

if TYPE_CHECKING:
    from sakiyomi.server.run import Listening


def serve(config: ServerConfig, options: ModelOptions, model: LLMConfig, scaled: ReplicaOptions) -> None:
    """Serve a model, or several by name, over an OpenAI-compatible HTTP API.

    Every flag can also be set by an environment variable (--max-queue by SAKIYOMI_MAX_QUEUE), or in a TOML file
    (max_queue = 8) that --config names. Flags override the environment, and the environment overrides the file.

    Example: sakiyomi serve --model FOLDER --port 8000
    """
    models = read_models(options, model)
    several, room = len(models) > 1 or options.models is not None, 0
    if several:
        _check_several(config, scaled)
        room = room_of(options, models)
    elif options.model_memory is not None:
        raise InputError("model_memory is of several models; give --model more than once, or --models")
    if scaled.replicas is not None and config.kv_events is not None:
        raise InputError("kv_events are for routers in front of one server each; with replicas leave it out")
    with server_packages():
        from sakiyomi.server.logs import set_up
        from sakiyomi.server.run import Listening, check
    check(config)
    model = next(iter(models.values()))
    say: Callable[[str], None] = note
    if config.log_format == "json":  # every line, from now on
        set_up(config.log_format)
        say = logging.getLogger("sakiyomi.server").info
    if scaled.replicas is not None:
        import_ray()
    with Listening(config) as listening:
        if scaled.replicas is not None:
            with server_packages():
                from sakiyomi.scale.launch import run as run_replicas
            listening.tell("starting replicas")
            run_replicas(model, config, scaled, listening, say)
        elif several:
            _serve_several(models, config, room, listening, say)
        else:
            _serve_one(model, config, listening, say)


def _serve_one(model: LLMConfig, config: ServerConfig, listening: Listening, say: Callable[[str], None]) -> None:
    listening.tell("reading the model")
    with server_packages():
        from sakiyomi.server.app import Server
        from sakiyomi.server.logs import set_up
        from sakiyomi.server.paths import make_app
        from sakiyomi.server.run import warm_up
    llm = load(model, say)
    if config.warm_up != "none" and not llm.compiled():
        say("preparing: seconds, or a minute the first time on this machine, while kernels compile (--warm-up)")
    listening.tell("recording passes")
    warm_up(llm, config)
    gc.freeze()  # to search all that is here took a quarter of a second, in which no request went on
    set_up(config.log_format)
    server = Server(llm, config)
    listening.run(make_app(server), server.worker, lambda url: say(f"serving {server.name} at {url}"))


def _serve_several(
    models: Mapping[str, LLMConfig], config: ServerConfig, room: int, listening: Listening, say: Callable[[str], None]
) -> None:
    with server_packages():
        from sakiyomi.scale.models import ModelTable, make_models_app
        from sakiyomi.server.logs import set_up
    set_up(config.log_format)
    table = ModelTable(models, config, room)
    names = ", ".join(models)
    listening.run(make_models_app(table, config), table, lambda url: say(f"serving {names} at {url}"))


def _check_several(config: ServerConfig, scaled: ReplicaOptions) -> None:
    """Refuse what only one model can have."""
    if scaled.replicas is not None:
        raise InputError("replicas are of one model; give one, or leave replicas out")
    if config.kv_events is not None:
        raise InputError("kv_events tell of one model's cache; serve one model, or leave them out")
    if config.served_name is not None:
        raise InputError(
            "served_name is the name of one model; several get theirs from their folders, or from --models"
        )
