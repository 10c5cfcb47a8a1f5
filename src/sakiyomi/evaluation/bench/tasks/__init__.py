"""A pair on its readers' own tasks, by dtype and temperature, with scores of the answers: ``sakiyomi bench tasks``."""
