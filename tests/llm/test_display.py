"""Results in notebooks: every character of the text, nothing that a page would run, shades that grow with surprise."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pocketllm.types import CompletionOutput, RequestOutput, ScoreOutput, TokenLogprob, Usage


class Page(HTMLParser):
    """The text of a page's `pre` elements, the tags it uses, and its balance."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: set[str] = set()
        self.titles: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        self.tags.add(tag)
        assert {name for name, _ in attributes} <= {"style", "title"}
        self.titles += [value or "" for name, value in attributes if name == "title"]
        if tag == "pre":
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "pre" in self._open:
            self.texts[-1] += data


def output(*choices: CompletionOutput) -> RequestOutput:
    return RequestOutput("id", (1,), choices, 0, Usage(1, 1))


def with_logprobs(tokens: list[tuple[bytes, float]]) -> RequestOutput:
    text = b"".join(token for token, _ in tokens).decode(errors="replace")
    entries = tuple(TokenLogprob(1, token, value, (TokenLogprob(2, b"<b>", -0.5),)) for token, value in tokens)
    return output(CompletionOutput(0, text, (1,) * len(entries), "stop", logprobs=entries))


# Carriage returns and NUL are what a parser of pages changes by itself.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"))


@given(st.lists(TEXT, min_size=1, max_size=3))
def test_plain_texts(texts: list[str]) -> None:
    choices = [CompletionOutput(place, text, (), "length") for place, text in enumerate(texts)]
    page = Page(output(*choices)._repr_html_())
    assert page.texts == texts
    assert page.tags == {"div", "pre"}


@given(TEXT.filter(bool), st.data())
def test_shaded_texts(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw)))) | {0, len(raw)})
    tokens = [(raw[a:b], data.draw(st.floats(-50, 0))) for a, b in pairwise(cuts)]
    page = Page(with_logprobs(tokens)._repr_html_())
    assert page.texts == [text]
    assert page.tags == {"div", "pre", "span"}
    assert all("likeliest:\n'<b>' 0.6065" in title for title in page.titles)


def test_markup_in_a_text_is_text() -> None:
    evil = "<script>alert('x')</script>&lt;\""
    for shown in (
        output(CompletionOutput(0, evil, (), "stop", stop_match="<i>"))._repr_html_(),
        with_logprobs([(evil.encode(), -1.0)])._repr_html_(),
        ScoreOutput("<b>", (1,), (evil.encode(),), (None,))._repr_html_(),
    ):
        assert "<script" not in shown
        assert "<i>" not in shown
        assert Page(shown).texts == [evil]


def opacities(shown: str) -> list[float]:
    return [float(found) for found in re.findall(r"rgba\(\d+, \d+, \d+, ([0-9.]+)\)", shown)]


def test_the_less_likely_the_darker() -> None:
    shades = opacities(with_logprobs([(b"a", 0.0), (b"b", -0.1), (b"c", -1.0), (b"d", -math.inf)])._repr_html_())
    assert shades == sorted(shades)
    assert (shades[0], shades[-1]) == (0.0, 0.7)


def test_tokens_that_share_a_character_are_one_piece() -> None:
    smiley = "\U0001f60a".encode()
    shown = with_logprobs([(smiley[:2], -1.0), (smiley[2:], -2.0), (b"!", 0.0)])._repr_html_()
    assert Page(shown).texts == ["\U0001f60a!"]
    assert opacities(shown) == [round(0.7 * (1 - math.exp(-3)), 2), 0.0]
    assert Page(with_logprobs([(smiley[:2], -1.0)])._repr_html_()).texts == ["\ufffd"]


def test_a_score_shows_its_prompt() -> None:
    entries = (None, TokenLogprob(2, b" b", math.log(0.25)))
    shown = ScoreOutput("id", (1, 2), (b"a", b" b"), entries)._repr_html_()
    assert Page(shown).texts == ["a b"]
    assert "1 tokens scored, log probability -1.386, perplexity 4.000" in shown
    assert opacities(shown) == [0.52]
