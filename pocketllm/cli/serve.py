"""``pocketllm serve``: the HTTP server."""

from __future__ import annotations

import argparse
import logging

from pocketllm.cli import flags
from pocketllm.cli.models import model_store

NAME = "serve"
HELP = "Serve a model over HTTP."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.set_defaults(log_level=logging.INFO)
    flags.add_engine_flags(parser)
    flags.add_server_flags(parser)


def run(given: argparse.Namespace) -> int:
    """Serve until a signal; see `pocketllm.server.serve.serve`.

    Raises:
        ConfigurationError: a flag, variable or file key cannot be used.
        ModelNotFoundError: the model was not pulled; asked before anything listens.
    """
    engine_args, server_args = flags.engine_args(given), flags.server_args(given)

    from pocketllm.engine.loading import load_engine
    from pocketllm.server.serve import serve

    store = model_store()
    if engine_args.model in store.known:
        store.path(engine_args.model)
    return serve(engine_args, server_args, load_engine)
