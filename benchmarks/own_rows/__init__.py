"""Rows about sakiyomi's own code, see `rows.py`."""
