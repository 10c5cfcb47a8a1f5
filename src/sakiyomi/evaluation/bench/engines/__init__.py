"""Other programs that run the same models: each in a process, and an environment, of its own."""
