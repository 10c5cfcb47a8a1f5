"""Measurements: side-by-side runs in one process, with equal outputs checked in the same run."""
