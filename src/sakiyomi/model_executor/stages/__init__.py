"""A model in stages: its layers over several processes, each with the cache of its own layers.

``cut`` writes a folder for each stage. The first stage has embeddings and head, and is a ``ModelRunner`` like any other
but for the last of its layers, behind which hidden states go from process to process and come back. A pass crosses each
border once, whatever its rows: a round of speculation has one crossing, instead of one for each token.
"""

from sakiyomi.model_executor.stages.cut import cut, is_cut

__all__ = ["cut", "is_cut"]
