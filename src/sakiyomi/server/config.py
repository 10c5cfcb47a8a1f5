"""Settings of the server, without its model. Flags, environment variables and the file are derived from them."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from sakiyomi.core.checks import at_least
from sakiyomi.core.errors import InputError

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True)
class ServerConfig:
    """Where the server listens, whom it serves, and its limits.

    Attributes:
        host: address to listen on; 0.0.0.0 for all interfaces.
        port: port to listen on; 0 takes a free one.
        api_key: bearer token that clients must send; with several, separated by commas, each is a client that gets a
            fair share (otherwise each address is). Prefer SAKIYOMI_API_KEY to the flag: other users of the machine can
            see a command line.
        served_name: model name for clients; by default the target's name.
        chat_template: auto (the tokenizer's own, or plain text if it has none), none, or a Jinja file.
        max_queue: most requests that wait for a slot; further ones are refused with status 429.
        request_timeout: seconds after which a request is ended, finished or not.
        shutdown_timeout: seconds that running requests get to finish when the server is stopped.
        header_timeout: seconds that the header of a request may take.
        max_connections: most connections at once; one address may hold half of them.
        max_body: largest request body, in bytes; by default enough for a few prompts of the context's length, and at
            least 32 MiB if the model reads images or sounds.
        max_images: most images per request.
        max_image_bytes: largest image, in bytes of its file.
        max_image_pixels: most pixels of all images of a request together.
        max_audio_seconds: longest sound, in seconds, for a speech model.
        max_n: most samples per request: prompts times n.
        cors_origins: origins whose web pages may call the server (* for all); none by default.
        reuse: requests share the keys and values of a common prompt prefix (prefix caching).
        kv_events: ZeroMQ address (tcp://*:5557) that publishes which prefixes the cache holds, as vLLM's KV events; off
            by default. Needs the extra events.
        kv_events_replay: address (tcp://*:5558) where routers can ask for earlier messages again.
        kv_events_topic: topic of these messages; llm-d expects kv@HOST:PORT@MODEL.
        warm_up: record a pass before the first request (one), or when it is first needed (none). Kernels are compiled
            at the first start on a machine.
        while_loading: requests that come while the model loads wait for it (wait), or are refused with status 503
            (refuse). /health says what is being done.
        log_format: text, or json (one object per line).
        log_prompts: write prompts and replies to the log.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_name: str | None = None
    chat_template: str = "auto"
    max_queue: int = 64
    request_timeout: float = 600.0
    shutdown_timeout: float = 30.0
    header_timeout: float = 10.0
    max_connections: int = 1024
    max_body: int | None = None
    max_images: int = 16
    max_image_bytes: int = 8 << 20
    max_image_pixels: int = 1 << 24
    max_audio_seconds: float = 900.0
    max_n: int = 16
    cors_origins: tuple[str, ...] = ()
    reuse: bool = True
    kv_events: str | None = None
    kv_events_replay: str | None = None
    kv_events_topic: str = ""
    warm_up: str = "one"
    while_loading: str = "wait"
    log_format: str = "text"
    log_prompts: bool = False

    def __post_init__(self) -> None:
        at_least(self, max_queue=0, max_body=1, max_n=1, port=0, max_connections=1)
        at_least(self, max_images=0, max_image_bytes=1, max_image_pixels=1)
        if self.port > 65535:
            raise InputError(f"port is {self.port}; the largest is 65535")
        for name in ("request_timeout", "shutdown_timeout", "header_timeout", "max_audio_seconds"):
            if not 0 < (seconds := getattr(self, name)) < 1e9:  # also refuses what is no number
                raise InputError(f"{name} is {seconds}; expected seconds above 0")
        if self.log_format not in ("text", "json"):
            raise InputError(f"log_format is {self.log_format!r}; it is text or json")
        if self.warm_up not in ("one", "none"):
            raise InputError(f"warm_up is {self.warm_up!r}; it is one or none")
        if self.while_loading not in ("wait", "refuse"):
            raise InputError(f"while_loading is {self.while_loading!r}; it is wait or refuse")
        if not all(key and key == key.strip() and key.isascii() and key.isprintable() for key in self.keys):
            raise InputError(
                "api_key cannot be sent in a header; expected printable ASCII characters without spaces around them, "
                "and commas only between keys"
            )
        if self.kv_events is None and (self.kv_events_replay is not None or self.kv_events_topic):
            raise InputError("kv_events_replay and kv_events_topic need kv_events; give its address, or leave them out")
        if self.kv_events is not None and not self.reuse:
            raise InputError("kv_events publishes shared prefixes, and reuse is off; leave one of them out")
        for name in ("host", "served_name"):
            text = getattr(self, name)
            if text is not None and not (text and text == text.strip()):
                raise InputError(f"{name} is {text!r}; expected a name, no space around it")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise InputError(
                    f"cors_origins has {origin!r}; expected * or scheme and host, as browsers send them, without a "
                    "slash at the end: https://chat.example"
                )

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that is accepted; none: clients need none."""
        return () if self.api_key is None else tuple(self.api_key.split(","))

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
