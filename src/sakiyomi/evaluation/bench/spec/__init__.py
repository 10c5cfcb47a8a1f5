"""``sakiyomi bench spec``: drafters beside plain decoding on questions of several kinds, with results in a file."""
