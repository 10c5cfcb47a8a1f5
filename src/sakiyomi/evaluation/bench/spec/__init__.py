"""Spec-Bench here: every drafter on questions of several kinds, beside plain decoding, and results in a file."""
