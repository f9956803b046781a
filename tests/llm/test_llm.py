"""The offline API over scripted engines: results, streams, cancelling, lists of any length, threads, closing."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from pocketllm.config import EngineArgs
from pocketllm.errors import EngineDeadError, EngineError, InvalidRequestError, QueueFullError
from pocketllm.llm import LLM
from pocketllm.types import SamplingParams
from tests.llm.steps import step_sizes
from tests.scripted import TEMPLATE, Vocabulary, arithmetic, scripted_engine
from tests.served import Gate, eventually

SHORT = SamplingParams(max_tokens=5)
LONG = SamplingParams(max_tokens=900)
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def llm(make_llm) -> LLM:
    return make_llm(arithmetic(Vocabulary()))


def test_results_keep_the_order_of_the_prompts_and_their_params(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=count) for count in (9, 1, 5)]
    results = llm.generate(["abc", [1, 2], np.array([3])], params)
    assert [len(result.token_ids) for result in results] == [9, 1, 5]
    assert [result.prompt_token_ids for result in results] == [(97, 98, 99), (1, 2), (3,)]
    alone = [llm.generate(prompt, own)[0] for prompt, own in zip(["abc", [1, 2], [3]], params, strict=True)]
    assert [result.outputs for result in results] == [result.outputs for result in alone]
    assert llm.generate([]) == []


def test_a_stream_tells_what_the_whole_does(llm: LLM) -> None:
    prompts, params = ["abc", "de"], SamplingParams(max_tokens=7, n=2, seed=3)
    whole = llm.generate(prompts, params)
    texts: dict[tuple[int, int], str] = {}
    for event in llm.generate_stream(prompts, params):
        key = (event.prompt_index, event.index)
        texts[key] = texts.get(key, "") + event.text
    assert texts == {(p, c): whole[p].outputs[c].text for p in range(2) for c in range(2)}


def test_chat_runs_what_the_template_writes(llm: LLM) -> None:
    prompt = llm.apply_template(MESSAGES)
    assert prompt == "[user]Hi>"
    assert llm.apply_template(MESSAGES, add_generation_prompt=False) == "[user]Hi"
    result = llm.chat(MESSAGES, SHORT)[0]
    assert llm.detokenize(result.prompt_token_ids) == prompt
    assert "".join(event.text for event in llm.chat_stream(MESSAGES, SHORT)) == result.text
    assert llm.generate(prompt, SHORT)[0].text == result.text


def test_a_template_variable_reaches_the_template(make_engine) -> None:
    engine = make_engine(lambda context: 65)
    engine.template = type(engine.template)(TEMPLATE + "{% if shout %}!{% endif %}")
    llm = LLM.over(engine)
    assert llm.apply_template(MESSAGES, shout=True) == "[user]Hi>!"
    assert llm.chat(MESSAGES, SHORT, shout=True)[0].prompt_token_ids == tuple(b"[user]Hi>!")


def test_tokens_and_text(llm: LLM) -> None:
    ids = llm.tokenize("a\u00ed<|end|>")
    assert ids == [97, 0xC3, 0xAD, 256]
    for form in (ids, tuple(ids), np.array(ids)):
        assert llm.detokenize(form) == "a\u00ed<|end|>"
    assert llm.detokenize([]) == llm.detokenize(llm.tokenize("")) == ""
    with pytest.raises(InvalidRequestError, match="prompt token 1 is 99999"):
        llm.detokenize([1, 99999])
    for wrong in ("a", 5, [1.5], None):
        with pytest.raises(TypeError, match="token_ids"):
            llm.detokenize(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="text is"):
        llm.tokenize(5)  # type: ignore[arg-type]


def test_scores(make_llm) -> None:
    vocabulary = Vocabulary()
    row = np.linspace(0, 5, vocabulary.size, dtype=np.float32)
    logprobs = row - np.log(np.exp(row.astype(np.float64)).sum())
    llm = make_llm(lambda context: row, vocabulary)
    first, second = llm.score(["abc", [7]], logprobs=2)
    assert (first.tokens, first.prompt_token_ids) == ((b"a", b"b", b"c"), (97, 98, 99))
    assert first.logprobs[0] is None
    assert [entry.logprob for entry in first.logprobs[1:]] == pytest.approx(logprobs[[98, 99]].tolist(), abs=1e-5)
    assert [len(entry.top) for entry in first.logprobs[1:]] == [2, 2]
    assert first.total_logprob == pytest.approx(logprobs[[98, 99]].sum(), abs=1e-5)
    assert (second.logprobs, second.total_logprob) == ((None,), 0.0)
    with pytest.raises(ValueError, match="logprobs is 21"):
        llm.score("abc", logprobs=21)


def test_a_list_longer_than_the_queue_is_done(make_llm) -> None:
    llm = make_llm(arithmetic(Vocabulary()), max_queue=3, max_sequences=2)
    prompts = [[1 + place % 250] for place in range(60)]
    results = llm.generate(prompts, SHORT)
    assert [list(result.prompt_token_ids) for result in results] == prompts
    assert all(result.finish_reason == "length" for result in results)


def test_others_get_a_turn_beside_a_long_list(make_engine) -> None:
    engine = make_engine(arithmetic(Vocabulary()), max_sequences=2)
    stream = LLM.over(engine).generate_stream([[1]] * 60, SHORT)
    next(stream)
    assert engine.statistics().requests_total <= 5
    stream.close()


def test_a_queue_that_others_filled_is_told(make_engine) -> None:
    gate = Gate()
    engine = make_engine(gate, max_queue=1, max_sequences=1)
    handles = [engine.submit([1], SHORT)]
    assert gate.reached.wait(10)
    handles.append(engine.submit([1], SHORT))
    with pytest.raises(QueueFullError):
        LLM.over(engine).generate("a", SHORT)
    gate.opened.set()
    for handle in handles:
        handle.result()


def test_a_list_with_a_prompt_that_cannot_run_starts_nothing(make_engine) -> None:
    engine = make_engine(lambda context: 65)
    llm = LLM.over(engine)
    for prompts, params in (
        ([[1]] * 40 + [[]], SHORT),
        ([[1]] * 40 + [[1] * 2000], SHORT),
        ([[1]], SamplingParams(logit_bias={99999: 1})),
    ):
        for call in (llm.generate, llm.generate_stream):
            with pytest.raises(InvalidRequestError):
                call(prompts, params)
    assert engine.statistics().requests_total == 0


def test_a_stream_that_is_never_read_runs_nothing(make_engine) -> None:
    engine = make_engine(lambda context: 65)
    LLM.over(engine).generate_stream("a", LONG)
    assert engine.statistics().requests_total == 0


def test_leaving_a_stream_cancels_what_is_left(make_engine) -> None:
    engine = make_engine(lambda context: 65)
    for _ in LLM.over(engine).generate_stream([[1]] * 40, LONG):
        break
    eventually(lambda: engine.statistics().kv_blocks_free == engine.statistics().kv_blocks_total)
    assert engine.statistics().completion_tokens_total < 900


def test_a_failing_prompt_ends_the_call(make_engine) -> None:
    def script(context: tuple[int, ...]) -> int:
        if 200 in context:
            raise RuntimeError("a kernel broke")
        return 65

    engine = make_engine(script, max_sequences=1)
    with pytest.raises(EngineError, match="a kernel broke"):
        LLM.over(engine).generate([[1], [200], [2]], SHORT)
    eventually(lambda: engine.statistics().running + engine.statistics().waiting == 0)
    assert LLM.over(engine).generate([[1]], SHORT)[0].finish_reason == "length"


def test_cancelling_a_call_ends_all_its_prompts(make_engine) -> None:
    gate = Gate()
    llm = LLM.over(make_engine(gate, max_sequences=2))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.generate, [[1]] * 30, LONG, request_id="mine")
        assert gate.reached.wait(10)
        assert llm.cancel("mine")
        gate.opened.set()
        results = call.result(10)
    assert {result.finish_reason for result in results} == {"cancelled"}
    assert [result.request_id for result in results] == [f"mine-{place}" for place in range(30)]
    assert sum(result.usage.completion_tokens for result in results) <= 2
    assert not llm.cancel("mine")


def test_cancelling_one_prompt_of_a_call(make_engine) -> None:
    gate = Gate()
    llm = LLM.over(make_engine(gate))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.generate, [[1], [2]], SHORT, request_id="mine")
        assert gate.reached.wait(10)
        assert llm.cancel("mine-0")
        gate.opened.set()
        results = call.result(10)
    assert [result.finish_reason for result in results] == ["cancelled", "length"]


def test_the_id_of_a_running_call_is_taken(make_engine) -> None:
    llm = LLM.over(make_engine(lambda context: 65))
    stream = llm.generate_stream([[1], [2]], LONG, request_id="mine")
    next(stream)
    for prompts in ([[3]], [[3], [4]]):
        with pytest.raises(InvalidRequestError, match="'mine' belongs to a call that is still active") as refused:
            llm.generate(prompts, SHORT, request_id="mine")
        assert refused.value.code == "request_id_active"
    assert llm.cancel("mine")
    assert {event.finish_reason for event in stream} >= {"cancelled"}
    assert llm.generate([[1]], SHORT, request_id="mine")[0].request_id == "mine"
    with pytest.raises(TypeError):
        llm.cancel()  # type: ignore[call-arg]
    assert not llm.cancel("unknown")


def test_requests_of_several_threads_share_their_steps(make_engine) -> None:
    gate = Gate()
    engine = make_engine(gate, max_sequences=4)
    sizes = step_sizes(engine)
    llm = LLM.over(engine)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(llm.generate, [place + 1], SHORT) for place in range(4)]
        eventually(lambda: engine.statistics().requests_total == 4)
        gate.opened.set()
        assert [call.result(10)[0].text for call in calls] == ["a" * 5] * 4
    assert max(sizes) == 4


def test_threads_get_what_they_would_get_alone(make_llm) -> None:
    llm = make_llm(arithmetic(Vocabulary()), max_sequences=3)
    prompts = [[place + 1] * (place % 7 + 1) for place in range(24)]
    alone = [llm.generate([prompt], SHORT)[0].text for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: llm.chat(MESSAGES, SHORT) and llm.generate([prompt], SHORT), prompts))
    assert [results[0].text for results in together] == alone


def closed(llm: LLM) -> LLM:
    llm.close()
    llm.close()
    return llm


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: llm.generate("a"),
        lambda llm: llm.generate_stream("a"),
        lambda llm: llm.chat(MESSAGES),
        lambda llm: llm.chat_stream(MESSAGES),
        lambda llm: llm.score("a"),
        lambda llm: llm.cancel("a"),
        lambda llm: llm.tokenize("a"),
        lambda llm: llm.detokenize([1]),
        lambda llm: llm.apply_template(MESSAGES),
        lambda llm: llm.capabilities,
    ],
)
def test_a_closed_llm_says_so(llm: LLM, use) -> None:
    with pytest.raises(EngineDeadError, match="this LLM is closed: make a new one"):
        use(closed(llm))


def test_closing_ends_what_runs(make_engine) -> None:
    with LLM.over(make_engine(lambda context: 65)) as llm:
        stream = llm.generate_stream("a", LONG)
        next(stream)
    assert [event.finish_reason for event in stream][-1] == "cancelled"
    assert repr(llm) == "<LLM, closed>"


def test_an_llm_says_what_it_runs(llm: LLM) -> None:
    assert repr(llm) == "<LLM scripted on null (cpu, float32), window 1024 tokens>"
    assert llm.capabilities.max_model_len == 1024


def test_a_forgotten_llm_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted_engine(lambda context: 65)
    monkeypatch.setattr("pocketllm.llm.load_engine", lambda args, progress: engine)
    llm = LLM("any")
    stream = llm.generate_stream("a", SHORT)
    del llm
    gc.collect()
    assert next(stream).text == "A"
    assert engine.statistics().alive
    del stream
    gc.collect()
    assert not engine.statistics().alive


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"bakend": "torch"}, TypeError, "LLM takes no argument 'bakend': did you mean 'backend'"),
        ({"zzzz": 1}, TypeError, "LLM takes no argument 'zzzz': there are model, backend"),
        ({"model": "a"}, TypeError, "LLM got two models, 'any' and 'a'"),
        ({"backend": "abacus"}, ValueError, "backend is 'abacus': give one of"),
        ({"device": "tpu"}, ValueError, r"device is 'tpu': give auto, cpu or cuda\[:i\]"),
        ({"threads": 0}, ValueError, "threads is 0"),
    ],
)
def test_arguments_are_checked(arguments, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLM("any", **arguments)


def test_the_two_constructions_are_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    seen = []

    def load(args: EngineArgs, progress: object) -> None:
        seen.append(args)
        raise InvalidRequestError("enough seen")

    monkeypatch.setattr("pocketllm.llm.load_engine", load)
    args = EngineArgs(model=str(tmp_path), backend="torch", max_queue=3)
    for construct in (
        lambda: LLM(args),
        lambda: LLM(str(tmp_path), backend="torch", max_queue=3),
        lambda: LLM(tmp_path, backend="torch", max_queue=3),
        lambda: LLM(model=str(tmp_path), backend="torch", max_queue=3),
    ):
        with suppress(InvalidRequestError):
            construct()
    assert seen == [args] * 4
    with pytest.raises(TypeError, match="LLM got EngineArgs and backend beside it"):
        LLM(args, backend="torch")
