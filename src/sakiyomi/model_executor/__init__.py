"""Models as the engine runs them: loading, packed passes, attention backends, compiled passes."""
