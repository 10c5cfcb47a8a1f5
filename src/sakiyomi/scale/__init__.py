"""Beyond one request at a time: files of requests, answered in pieces that are whole or not there.

A text depends on its request and its seed alone. So work can be repeated, moved or continued elsewhere without a change
in what comes out, and whoever died is replaced by doing again what is missing.
"""
