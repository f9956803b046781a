from __future__ import annotations

import re

from pocketllm.protocol.documentation_text import ROUTES
from pocketllm.server.app import create_app
from pocketllm.server.config import ServerArgs
from pocketllm.server.state import ServerState


def test_every_route_is_documented() -> None:
    rules = create_app(ServerState(ServerArgs(), max_prompts=1)).url_map.iter_rules()
    served = {
        f"{method} {re.sub('<.*>', '<id>', rule.rule)}"
        for rule in rules
        for method in (rule.methods or set()) - {"HEAD"}
    }
    documented = set()
    for entry in ROUTES:
        method, _, paths = entry.partition(" ")
        documented |= {f"{method} {path}" for path in paths.split(", ")}
    assert served == documented
