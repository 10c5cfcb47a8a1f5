"""``sakiyomi bench tasks``: a pair on the user's own tasks, by dtype and temperature, with scores of the answers."""
