"""The tables of the article on Locret, on the reader's own model: ``sakiyomi bench locret``."""
