"""A model in stages: its layers over several processes, each with the cache of its own layers.

``cut`` writes a folder for each stage. The first stage has embeddings and head, and is an ordinary ``ModelRunner``.
After its last layer the hidden states go through the other processes and come back. A pass crosses each border once,
for any number of rows: a round of speculation has one crossing instead of one for each token.
"""

from sakiyomi.model_executor.stages.cut import cut, is_cut

__all__ = ["cut", "is_cut"]
