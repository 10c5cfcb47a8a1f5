"""Systems that keep fewer keys and values, side by side over long contexts: ``sakiyomi bench long``."""
