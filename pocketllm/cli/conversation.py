"""A conversation between lines of input and an LLM."""

from __future__ import annotations

import itertools
import sys
import time
from typing import TYPE_CHECKING, TextIO

from pocketllm.cli.messages import LineReader, read_message
from pocketllm.errors import EngineDeadError, InvalidRequestError, PocketLLMError
from pocketllm.types import SamplingParams, TokenEvent

if TYPE_CHECKING:
    from pocketllm.llm import LLM

COMMANDS = """\
/help           this list
/reset          forget the conversation, keep the system message
/system         show the system message
/system TEXT    replace it, and forget the conversation
/exit           end (ctrl-D too)
A line that ends in \\ goes on in the next one; \"\"\" opens and closes a message of several lines.
Ctrl-C stops a reply."""


class Conversation:
    """Replies to messages and remembers them.

    Replies go to `out`; everything else (help, errors, speed) goes to `notes`.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        *,
        system: str | None = None,
        stats: bool = False,
        out: TextIO | None = None,
        notes: TextIO | None = None,
    ) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._stats = stats
        self._out = out or sys.stdout
        self._notes = notes or sys.stderr
        self._turns: list[dict[str, str]] = []
        self._failures = 0
        self._request_ids = (f"chat-{number}" for number in itertools.count())

    def run(self, read_line: LineReader) -> int:
        """Talk until the input or ``/exit`` ends it.

        Returns:
            How many messages got an error instead of a reply.

        Raises:
            EngineDeadError: nothing can be answered any more.
        """
        while True:
            try:
                message = read_message(read_line)
            except EOFError:
                return self._failures
            except KeyboardInterrupt:
                self._note("(ctrl-D or /exit ends)")
                continue
            if not message.text:
                continue
            if message.verbatim or not message.text.startswith("/"):
                self._answer(message.text)
            elif not self._command(message.text):
                return self._failures

    def _command(self, text: str) -> bool:
        """Do what a command says; False when it ends the conversation."""
        name, _, argument = text.partition(" ")
        argument = argument.strip()
        if name == "/exit":
            return False
        if name == "/system" and not argument:
            self._note(self._system or "(no system message)")
        elif name == "/reset" or name == "/system":
            self._system = argument if name == "/system" else self._system
            self._turns.clear()
            self._note("(the conversation begins anew)")
        elif name == "/help":
            self._note(COMMANDS)
        else:
            self._note(f'there is no command {name}; /help lists them, and a message in """ is sent as it stands')
        return True

    def _answer(self, text: str) -> None:
        """Send a message and write the reply; a turn that fails is forgotten, one that is stopped is kept so far."""
        self._turns.append({"role": "user", "content": text})
        request_id = next(self._request_ids)
        reply = _Reply(self._out)
        try:
            self._stream(reply, request_id)
        except EngineDeadError:
            raise
        except PocketLLMError as error:
            self._failures += 1
            self._note(f"pocketllm: error: {_with_advice(error)}")
            reply.text = ""
        except KeyboardInterrupt:
            self._llm.cancel(request_id)
            self._note("(stopped)")
        if reply.text:
            self._turns.append({"role": "assistant", "content": reply.text})
        else:
            self._turns.pop()

    def _stream(self, reply: _Reply, request_id: str) -> None:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        started = time.perf_counter()
        events = self._llm.chat_stream([*system, *self._turns], self._params, request_id=request_id)
        try:
            for event in events:
                reply.add(event)
        finally:
            reply.end_line()
        if self._stats:
            self._note(reply.speed(started))

    def _note(self, text: str) -> None:
        print(text, file=self._notes, flush=True)


def _with_advice(error: PocketLLMError) -> str:
    full = isinstance(error, InvalidRequestError) and error.code == "context_length_exceeded"
    return f"{error} (/reset forgets the conversation)" if full else str(error)


class _Reply:
    """A reply while it is written."""

    def __init__(self, out: TextIO) -> None:
        self.text = ""
        self._out = out
        self._first_at = 0.0
        self._last_at = 0.0
        self._tokens = 0

    def add(self, event: TokenEvent) -> None:
        self._last_at = time.perf_counter()
        self._first_at = self._first_at or self._last_at
        self._tokens = event.metadata.get("completion_tokens", self._tokens + len(event.token_ids))
        self.text += event.text
        self._out.write(event.text)
        self._out.flush()

    def end_line(self) -> None:
        self._out.write("\n")
        self._out.flush()

    def speed(self, started: float) -> str:
        """Tokens, seconds to the first one, and the rate of those after it."""
        text = f"({self._tokens} tokens, the first after {self._first_at - started:.2f} s"
        if self._tokens > 1 and self._last_at > self._first_at:
            text += f", then {(self._tokens - 1) / (self._last_at - self._first_at):.1f} tokens/s"
        return text + ")"
