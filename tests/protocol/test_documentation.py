from __future__ import annotations

from pathlib import Path

from pocketllm.protocol.documentation import api_page
from pocketllm.protocol.openai.chat import ChatRequest
from pocketllm.protocol.openai.completions import CompletionRequest

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_page_is_up_to_date() -> None:
    again = "python -m pocketllm.protocol.documentation > docs/api.md"
    assert PAGE.read_text(encoding="utf-8") == api_page(), f"the tables have changed: run {again}"


def test_every_field_is_on_it() -> None:
    page = api_page()
    for name in ChatRequest.model_fields | CompletionRequest.model_fields:
        assert f"`{name}`" in page
