"""Training of small language models: a target from text, and a draft distilled from any target.

Nothing here is imported by `import sakiyomi`; the modules below load torch and transformers when they are used.
"""
