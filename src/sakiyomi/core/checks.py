"""Checks of configurations."""

from __future__ import annotations

from sakiyomi.core.errors import InputError


def at_least(config: object, **least: float) -> None:
    """Refuse a configuration with a field below its least value; a field that is None is not checked.

    Raises:
        InputError: names the first such field.
    """
    for name, bound in least.items():
        value = getattr(config, name)
        if value is not None and not value >= bound:
            raise InputError(f"{name} is {value}; expected at least {bound}")
