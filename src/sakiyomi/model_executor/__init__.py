"""Models as the engine runs them: loading, packed passes, attention backends, recorded passes."""
