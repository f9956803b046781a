"""PocketLLM as a person has it: in a process with a terminal of its own."""

from __future__ import annotations

from tests.cli.terminal import BACKSPACE, CTRL_C, CTRL_D, UP, chat, terminal
from tests.cli.terminal_session import WINDOW


def test_lines_are_edited_and_continued() -> None:
    with chat() as opened:
        opened.type(b"hi\\\nthereX" + BACKSPACE + b"!\n")
        opened.shows("[USER]HI\nTHERE!\n> ")
        opened.type('"""one\n\n  two"""\n')
        opened.shows("[USER]ONE\n\n  TWO\n> ")
        opened.type("/exit\n")
        opened.ends(0)


def test_the_history_gives_earlier_lines_again() -> None:
    with chat() as opened:
        opened.type("first\n")
        opened.shows("[USER]FIRST\n> ")
        opened.type("second\n")
        opened.shows("[USER]SECOND\n> ")
        opened.type(UP + UP + b", please\n")
        opened.shows("[USER]FIRST, PLEASE\n> ")


def test_the_system_message_is_shown_and_replaced() -> None:
    with chat("--system", "be brief") as opened:
        opened.type("/system\n")
        opened.shows("\nbe brief\n> ")
        opened.type("/system be kind\n")
        opened.shows("(the conversation begins anew)\n> ")
        opened.type("hi\n")
        opened.shows("[SYSTEM]BE KIND[USER]HI\n> ")


def test_ctrl_c_stops_the_reply_and_not_the_program() -> None:
    with chat() as opened:
        opened.type("go on forever\n")
        opened.shows("...")
        opened.type(CTRL_C)
        opened.shows("\n(stopped)\n> ")
        opened.type("/reset\n")
        opened.shows("anew)\n> ")
        opened.type("still there?\n")
        opened.shows("[USER]STILL THERE?\n> ")


def test_ctrl_c_at_the_prompt_drops_what_was_typed() -> None:
    with chat() as opened:
        opened.type('"""half a message\n')
        opened.shows(". ")
        # The interpreter overlooks a ctrl-C between showing the prompt and waiting for a key.
        opened.shows("\n(ctrl-D or /exit ends)\n> ", press=CTRL_C)
        opened.type("whole\n")
        opened.shows("[USER]WHOLE\n> ")


def test_ctrl_d_ends_and_leaves_the_line() -> None:
    with chat() as opened:
        opened.type(CTRL_D)
        opened.shows("\n")
        opened.ends(0)


def test_an_error_is_one_line_and_the_conversation_goes_on() -> None:
    with chat() as opened:
        opened.type("x" * WINDOW + "\n")
        opened.shows("pocketllm: error: ")
        assert "\n" not in opened.shows(" (/reset forgets the conversation)\n> ")
        opened.type("hi\n")
        opened.shows("[USER]HI\n> ")


def test_generate_shows_the_reply_while_it_grows() -> None:
    with terminal("generate", "on and on forever>") as opened:
        opened.shows("....")
        opened.type(CTRL_C)
        opened.ends(130)


def test_generate_says_what_is_wrong_in_one_line() -> None:
    with terminal("generate", "x" * WINDOW) as opened:
        assert opened.shows("pocketllm: error: ") == ""
        assert f"{WINDOW} tokens" in opened.shows("\n")
        opened.ends(1)


def test_verbose_shows_the_traceback() -> None:
    with terminal("generate", "x" * WINDOW, "--verbose") as opened:
        opened.shows("Traceback (most recent call last):\n")
        opened.shows("InvalidRequestError: ")
        opened.ends(1)
