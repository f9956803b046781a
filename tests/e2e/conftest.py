from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pocketllm.config import EngineArgs
from pocketllm.engine.engine import Engine
from pocketllm.engine.loading import load_engine
from pocketllm.server.config import ServerArgs
from pocketllm.server.state import ServerState
from tests.served import running


@pytest.fixture(scope="session")
def real_engine(real_model: Path) -> Iterator[Engine]:
    """The real model's engine on the reference backend, which the tests of the server share."""
    engine = load_engine(EngineArgs(model=str(real_model), backend="torch", max_model_len=1024, max_num_seqs=8))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def real_server(real_engine: Engine) -> Iterator[str]:
    """The address of a server over it."""
    state = ServerState(ServerArgs(port=0, aliases=("smollm2",)), max_prompts=32)
    state.ready(real_engine)
    with running(state) as address:
        yield address
