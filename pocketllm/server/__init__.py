"""The HTTP server: a Flask application over one engine."""
