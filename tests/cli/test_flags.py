"""Where a flag's value comes from, and what is refused."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pocketllm import env
from pocketllm.cli import flags
from pocketllm.config import EngineArgs
from pocketllm.errors import ConfigurationError
from pocketllm.server.config import ServerArgs
from pocketllm.types import SamplingParams


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    flags.add_engine_flags(parser)
    flags.add_server_flags(parser)
    flags.add_sampling_flags(parser)
    return parser.parse_args(arguments)


def toml(directory: Path, text: str) -> Path:
    path = directory / "pocketllm.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("owner", "table", "left_out"),
    [
        (EngineArgs, flags.ENGINE_FLAGS, {"backend_options", "kernels"}),
        (ServerArgs, flags.SERVER_FLAGS, set()),
    ],
)
def test_the_table_covers_every_field(owner: type, table: tuple[flags.Flag, ...], left_out: set[str]) -> None:
    assert {flag.field for flag in table} == {field.name for field in dataclasses.fields(owner)} - left_out


def test_names_follow_one_rule() -> None:
    for flag in (*flags.ENGINE_FLAGS, *flags.SERVER_FLAGS):
        assert flag.setting is not None
        assert flag.setting.name == "POCKETLLM_" + flag.name.upper().replace("-", "_")
        assert flag.setting in env.VARIABLES


def test_nothing_given_gives_the_defaults() -> None:
    assert flags.engine_args(parsed()) == EngineArgs()
    assert flags.server_args(parsed()) == ServerArgs()
    assert flags.sampling_params(parsed()) == SamplingParams()


def test_the_command_line_beats_the_file_beats_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POCKETLLM_MAX_QUEUE", "POCKETLLM_THREADS", "POCKETLLM_PARALLEL"):
        monkeypatch.setenv(name, "1")
    path = toml(tmp_path, "max-queue = 2\nthreads = 2\n")
    args = flags.engine_args(parsed("--config", str(path), "--max-queue", "3"))
    assert (args.max_queue, args.threads, args.max_num_seqs) == (3, 2, 1)
    assert args.prefill_chunk == EngineArgs().prefill_chunk


def test_a_source_that_is_overruled_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POCKETLLM_PORT", "eight thousand")
    assert flags.server_args(parsed("--port", "1234")).port == 1234
    with pytest.raises(ConfigurationError, match=r"POCKETLLM_PORT='eight thousand': give a whole number"):
        flags.server_args(parsed())


def test_a_switch_is_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POCKETLLM_PREFIX_CACHE", "off")
    assert not flags.engine_args(parsed()).prefix_cache
    assert flags.engine_args(parsed("--prefix-cache", "on")).prefix_cache
    monkeypatch.setenv("POCKETLLM_PREFIX_CACHE", "no")
    with pytest.raises(ConfigurationError, match="POCKETLLM_PREFIX_CACHE='no': give on or off"):
        EngineArgs.from_env()
    with pytest.raises(ConfigurationError, match="prefix_cache is 1: give True or False"):
        EngineArgs(prefix_cache=1)  # type: ignore[arg-type]


def test_engine_arguments_from_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POCKETLLM_PARALLEL", "3")
    monkeypatch.setenv("POCKETLLM_DECODE_SHARE", "0.5")
    monkeypatch.setenv("POCKETLLM_THREADS", "many")
    assert EngineArgs.from_env(threads=2) == EngineArgs(max_num_seqs=3, decode_share=0.5, threads=2)
    with pytest.raises(ConfigurationError, match="POCKETLLM_THREADS"):
        EngineArgs.from_env()


VALUES = {
    env.TEXT: st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1),
    env.WHOLE: st.integers(2, 1024),
    env.NUMBER: st.floats(0.001, 1),
    env.SWITCH: st.booleans(),
    env.TEXTS: st.lists(st.from_regex(r"[a-z]+", fullmatch=True), min_size=1, max_size=3),
}
FREE = [flag for flag in (*flags.ENGINE_FLAGS, *flags.SERVER_FLAGS) if flag.field not in ("backend", "device", "dtype")]


@given(st.data())
def test_all_sources_read_a_value_alike(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    flag = data.draw(st.sampled_from(FREE))
    value = data.draw(VALUES[flag.kind])
    text = ",".join(value) if isinstance(value, list) else flag.kind.show(value)
    make = flags.engine_args if flag.owner is EngineArgs else flags.server_args
    path = toml(tmp_path_factory.getbasetemp(), f"{flag.name} = {json.dumps(value)}\n")
    results = [make(parsed(f"--{flag.name}={text}")), make(parsed("--config", str(path)))]
    assert flag.setting is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(flag.setting.name, text)
        results.append(make(parsed()))
    expected = tuple(value) if isinstance(value, list) else value
    assert [getattr(result, flag.field) for result in results] == [expected] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-qeue = 3", r"no key 'max-qeue': did you mean 'max-queue'\?"),
        ("zzzz = 3", r"no key 'zzzz': the keys are model, backend"),
        ("[max-queue]\nmost = 3", r"max-queue is \{'most': 3\}: give a whole number"),
        ('max-queue = "3"', r"max-queue is '3': give a whole number"),
        ("max-queue = true", r"max-queue is True: give a whole number"),
        ("max-queue = 2.0", r"max-queue is 2.0: give a whole number"),
        ('decode-share = "half"', r"decode-share is 'half': give a number"),
        ('prefix-cache = "on"', r"prefix-cache is 'on': give true or false"),
        ("prefix-cache = 1", r"prefix-cache is 1: give true or false"),
        ("alias = [1]", r"alias is \[1\]: give text, or a list of texts"),
        ("model = 7", r"model is 7: give text"),
        ("port = 80000", r"port is 80000: give a whole number from 0 to 65535"),
        ("max-queue = ", r"this is not TOML"),
        ("max-queue = " + "[" * 3000 + "]" * 3000, r"this is not TOML .*nested too deeply"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    given = parsed("--config", str(toml(tmp_path, text)))
    with pytest.raises(ConfigurationError, match=message):
        flags.server_args(given)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pocketllm.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="this is not TOML"):
        flags.read_config(path)
    with pytest.raises(ConfigurationError, match="Is a directory: give a file"):
        flags.read_config(tmp_path)


def test_one_file_serves_all_commands(tmp_path: Path) -> None:
    given = parsed("--config", str(toml(tmp_path, 'port = 99\nalias = "one"\nthreads = 1\n')))
    assert flags.engine_args(given) == EngineArgs(threads=1)
    assert flags.server_args(given) == ServerArgs(port=99, aliases=("one",))


def test_texts_may_be_repeated() -> None:
    assert flags.server_args(parsed("--alias", "a,b", "--alias", "c")).aliases == ("a", "b", "c")
    assert flags.sampling_params(parsed("--stop", "a,b", "--stop", "c")).stop == ("a,b", "c")


@pytest.mark.parametrize(("name", "most"), [("max_queue", 4096), ("threads", 1024)])
def test_threads_have_an_upper_bound(name: str, most: int) -> None:
    assert getattr(EngineArgs(**{name: most}), name) == most
    with pytest.raises(ConfigurationError, match=rf"{name} is {most + 1}: give a whole number from 1 to {most}"):
        EngineArgs(**{name: most + 1})


@pytest.mark.parametrize("arguments", [("--temperature", "9"), ("--top-p", "0"), ("--seed", "-2"), ("--min-p", "nan")])
def test_sampling_out_of_range_is_refused(arguments: tuple[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=arguments[0].removeprefix("--").replace("-", "_")):
        flags.sampling_params(parsed(*arguments))
