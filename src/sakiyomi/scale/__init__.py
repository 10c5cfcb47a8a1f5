"""Beyond one request, and beyond one machine: files of requests, datasets and servers, on Ray where asked for.

A text depends on its request and its seed alone. So work can be repeated, moved or continued elsewhere without a change
in the output; the work of a process that died is done again.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sakiyomi.scale.datasets import processor
    from sakiyomi.scale.serving import build as app

__all__ = ["app", "processor"]


def __getattr__(name: str) -> Any:
    """Public names, imported when they are asked for: they need the server's packages, or Ray."""
    if name == "processor":
        from sakiyomi.scale.datasets import processor

        return processor
    if name == "app":
        from sakiyomi.scale.cluster import import_ray

        import_ray()
        from sakiyomi.scale.serving import build

        return build
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
