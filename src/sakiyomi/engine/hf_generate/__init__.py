"""``custom_generate``: transformers' own ``generate``, reading ahead."""

from sakiyomi.engine.hf_generate.generate import CustomGenerate, custom_generate

__all__ = ["CustomGenerate", "custom_generate"]
