"""The HTTP process: an OpenAI-compatible API in front of the engine process.

``app.create_app`` builds the FastAPI application over an engine client, ``lifecycle.serve`` runs it
together with the engine: listen at once, load, become ready, drain on SIGTERM, die loudly when the
engine does.  A request passes ``schema`` (what may be asked), ``admission`` (limits, tokens),
``generation`` (tokens become text) and ``completions`` or ``chat`` (the wire format).
Nothing here imports torch.
"""
