"""An OpenAI-compatible server on the engine: one process, one thread for the rounds, one event loop for the clients.

Needs the packages of ``pip install 'sakiyomi[serve]'``; ``import sakiyomi`` does not load them.
"""
