"""Conversations with scripted replies."""

from __future__ import annotations

import io
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pocketllm.cli.conversation import COMMANDS, Conversation
from pocketllm.cli.messages import piped_lines
from pocketllm.errors import EngineDeadError
from pocketllm.llm import LLM
from pocketllm.types import SamplingParams
from tests.scripted import Vocabulary, scripted_engine

VOCABULARY = Vocabulary()
Script = Callable[[tuple[int, ...]], int]


def prompt_and_reply(context: tuple[int, ...]) -> tuple[str, str]:
    """The prompt up to the template's last mark, and what was replied since."""
    prompt, _, reply = bytes(token for token in context if token < 256).decode().rpartition(">")
    return prompt, reply


def scripted(answer: Callable[[str], str]) -> Script:
    """Answers a rendered prompt; a reply has no ``>`` in it."""

    def script(context: tuple[int, ...]) -> int:
        prompt, reply = prompt_and_reply(context)
        text = answer(prompt)
        return ord(text[len(reply)]) if len(reply) < len(text) else VOCABULARY.end

    return script


@contextmanager
def llm(answer: Callable[[str], str], **options: int) -> Iterator[LLM]:
    with LLM.over(scripted_engine(scripted(answer), VOCABULARY, **options)) as made:
        yield made


def talk(llm: LLM, text: str, *, system: str | None = None, stats: bool = False) -> tuple[str, str, int]:
    """Replies, notes and failures of a conversation over piped lines."""
    out, notes = io.StringIO(), io.StringIO()
    conversation = Conversation(llm, SamplingParams(), system=system, stats=stats, out=out, notes=notes)
    failures = conversation.run(piped_lines(io.StringIO(text)))
    return out.getvalue(), notes.getvalue(), failures


def test_the_model_sees_the_conversation_so_far() -> None:
    with llm(lambda prompt: prompt.upper()) as model:
        out, notes, failures = talk(model, "a\nb\n", system="s")
    first = "[SYSTEM]S[USER]A"
    assert out == f"{first}\n[SYSTEM]S[USER]A[ASSISTANT]{first}[USER]B\n"
    assert (notes, failures) == ("", 0)


def test_commands() -> None:
    with llm(lambda prompt: prompt.upper()) as model:
        out, notes, _ = talk(
            model, '/system\na\n/reset now\nb\n/system be kind\n/system\nc\n/helo\n/help\n\n"""/d"""\n/exit\ne'
        )
    assert out.splitlines() == ["[USER]A", "[USER]B", "[SYSTEM]BE KIND[USER]C", out.splitlines()[-1]]
    assert out.endswith("[USER]/D\n")
    anew = "(the conversation begins anew)"
    assert notes.splitlines() == [
        "(no system message)",
        anew,
        anew,
        "be kind",
        'there is no command /helo; /help lists them, and a message in """ is sent as it stands',
        *COMMANDS.splitlines(),
    ]


def test_stats_tell_the_speed() -> None:
    with llm(lambda prompt: "four") as model:
        _, notes, _ = talk(model, "a", stats=True)
    assert notes.startswith("(5 tokens, the first after ")
    assert notes.endswith(" tokens/s)\n")


def test_a_turn_that_fails_is_forgotten() -> None:
    with llm(lambda prompt: prompt.upper(), max_model_len=100) as model:
        out, notes, failures = talk(model, "a\n" + "b" * 100 + "\nc\n")
    assert out.splitlines()[0] == "[USER]A"
    assert out.splitlines()[-1] == "[USER]A[ASSISTANT][USER]A[USER]C"
    assert "maximum context length is 100 tokens" in notes
    assert "/reset" in notes
    assert failures == 1


def test_a_dead_engine_ends_the_conversation() -> None:
    with llm(lambda prompt: "") as model:
        model.close()
        with pytest.raises(EngineDeadError):
            talk(model, "a\n")


def test_ctrl_c_stops_the_reply_and_not_the_conversation() -> None:
    class Out(io.StringIO):
        """Presses ctrl-C once the reply has begun."""

        pressed = False

        def flush(self) -> None:
            if len(self.getvalue()) > 3 and not self.pressed:
                self.pressed = True
                signal.raise_signal(signal.SIGINT)

    prompts: list[str] = []

    def answer(prompt: str) -> str:
        if not prompts or prompts[-1] != prompt:
            prompts.append(prompt)
        return "x" * 900 if prompt == "[user]a" else "done"

    out, notes = Out(), io.StringIO()
    with llm(answer) as model:
        conversation = Conversation(model, SamplingParams(), out=out, notes=notes)
        assert conversation.run(piped_lines(io.StringIO("a\nb\n"))) == 0
    stopped, last = out.getvalue().splitlines()
    assert set(stopped) == {"x"}
    assert len(stopped) < 900
    assert last == "done"
    assert notes.getvalue() == "(stopped)\n"
    assert prompts == ["[user]a", f"[user]a[assistant]{stopped}[user]b"]


def test_ctrl_c_while_waiting_for_the_first_token() -> None:
    running, free = threading.Event(), threading.Event()

    def answer(prompt: str) -> str:
        running.set()
        assert free.wait(30)
        return "late"

    def press() -> None:
        assert running.wait(30)
        time.sleep(0.2)  # until the main thread waits for the token: on its way there it may overlook a signal
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    presser = threading.Thread(target=press)
    out, notes = io.StringIO(), io.StringIO()
    with llm(answer) as model:
        lines = iter(["a"])

        def read_line(prompt: str) -> str:
            for line in lines:
                presser.start()
                return line
            free.set()
            raise EOFError

        Conversation(model, SamplingParams(), out=out, notes=notes).run(read_line)
    presser.join()
    assert (out.getvalue(), notes.getvalue()) == ("\n", "(stopped)\n")


def test_ctrl_c_at_the_prompt_ends_nothing() -> None:
    pressed = iter([True, False])

    def read_line(prompt: str) -> str:
        if next(pressed):
            raise KeyboardInterrupt
        raise EOFError

    out, notes = io.StringIO(), io.StringIO()
    with llm(lambda prompt: "") as model:
        Conversation(model, SamplingParams(), out=out, notes=notes).run(read_line)
    assert notes.getvalue() == "(ctrl-D or /exit ends)\n"
