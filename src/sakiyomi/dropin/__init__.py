"""``custom_generate``: transformers' own ``generate``, reading ahead."""

from sakiyomi.dropin.generate import CustomGenerate, custom_generate

__all__ = ["CustomGenerate", "custom_generate"]
