"""What all threads of a process share in torch, and who has it to himself."""

from __future__ import annotations

import threading

__all__ = ["TORCH_STATE"]

TORCH_STATE = threading.RLock()
"""Held while something changes torch's default dtype, or puts back what it found.

transformers sets the dtype while it builds a model; dynamo, when it has compiled, sets the one that was there when it
began. A model that is loaded while another is compiled in the background would get parameters of the wrong dtype.
"""
