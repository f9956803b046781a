"""The same checkpoint on our backends and on other engines in one run, beside what the machine can do at best."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from pocketllm.bench import agreement, arguments, limits, report
from pocketllm.bench.circumstances import Circumstances, unrest
from pocketllm.bench.contenders.registry import PEERS, start
from pocketllm.bench.generate import circumstances_section, repeats, speeds
from pocketllm.bench.process import Remote
from pocketllm.bench.speed import QUICK, Race, Work, runs_with_median

NAME = "compare"
HELP = "Our backends beside llama.cpp and transformers, and beside the machine's limits."

QUICK_LIMITS = {"size": 64, "read_bytes": 2**20}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's options."""
    arguments.add_model_arguments(parser)
    parser.add_argument("--repeat", type=arguments.positive, default=Work().repeat, help="runs of each; medians count")
    parser.add_argument("--quick", action="store_true", help="a few tokens only, to see that it works")
    report.add_output_arguments(parser)


def run(given: argparse.Namespace) -> int:
    """Measure, compare tokens, print, write."""
    circumstances = Circumstances()
    path = arguments.checkpoint_path(given.model)
    work = QUICK if given.quick else Work(repeat=given.repeat)
    skipped = {name: reason for name, peer in PEERS.items() if (reason := peer.lacks(path))}
    names = [*given.backend, *(name for name in PEERS if name not in skipped)]
    race = Race(names, path, work, threads=given.threads, device=given.device)
    with limits.start(given.threads, **(QUICK_LIMITS if given.quick else {})) as meter:
        readings = _run(race, meter, skipped)
    record = {
        "benchmark": NAME,
        "checkpoint": arguments.file_facts(path),
        "threads": given.threads,
        "work": work.as_dict(),
        "limits": {
            name: {"unit": unit} | runs_with_median([reading[name] for reading in readings])
            for name, unit in limits.LIMITS.items()
            if name in readings[0]
        },
        "contenders": race.figures(),
        "skipped": skipped,
        "agreement": _agreement(race, given.backend[0]),
    }
    record["circumstances"] = circumstances.as_dict()
    report.publish(record, markdown, given)
    return 0


def _run(race: Race, meter: Remote, skipped: dict[str, str]) -> list[dict[str, float]]:
    """Every round of the race, with the limits measured before each; peers that fail to start join `skipped`."""
    readings = []
    try:
        skipped |= race.start()
        for round_number in race.rounds():
            readings.append(meter.call("measure"))
            race.run(round_number)
        race.close()
    finally:
        race.abandon()
    return readings


def _agreement(race: Race, reference: str) -> dict[str, Any]:
    """Where each contender's replies part from those of `reference`, which is read once more for its margins."""
    count = max(race.work.sequences)
    replies = race.courses[reference].replies[count]
    with start(reference, race.setup) as remote:
        leads = [_margins(remote, prompt, reply) for prompt, reply in zip(race.contexts, replies, strict=False)]
    partings = {
        name: [
            agreement.parting(ours, theirs, lead)
            for ours, theirs, lead in zip(replies, course.replies[count], leads, strict=True)
        ]
        for name, course in race.courses.items()
        if name != reference
    }
    return {"reference": reference, "near tie below": agreement.NEAR_TIE, "partings": partings}


def _margins(remote: Remote, prompt: Sequence[int], reply: Sequence[int]) -> list[float]:
    return agreement.margins(remote.call("log_probabilities", [*prompt, *reply]), len(prompt))


def markdown(record: report.Record) -> str:
    """The record as a page."""
    return report.page(
        f"{record['checkpoint']['name']} beside other engines",
        unrest(record["circumstances"]),
        speeds(record),
        "Tokens a second, medians; decode N is N sequences at once. " + repeats(record),
        "## Limits",
        _limits(record),
        "## Against the limit and the peers",
        _ratios(record),
        "## Greedy replies",
        _agreements(record),
        *circumstances_section(record),
    )


def _limits(record: report.Record) -> str:
    rows = [
        [name, f"{limit['median']:.0f} {limit['unit']}", ", ".join(f"{run:.0f}" for run in limit["runs"])]
        for name, limit in record["limits"].items()
    ]
    size = record["checkpoint"]["bytes"]
    note = (
        f"The file has {size / 1e6:.0f} MB. A token of one sequence reads all of it, so the read limit allows "
        f"{_read_limit(record):.0f} tokens a second."
    )
    return report.table(["limit", "median", "runs"], rows) + "\n\n" + note


def _read_limit(record: report.Record) -> float:
    """Tokens a second at which reading the file takes all of the memory's bandwidth."""
    return float(record["limits"]["read"]["median"]) * 1e9 / float(record["checkpoint"]["bytes"])


def _ratios(record: report.Record) -> str:
    """Each contender's share of the read limit, and its speed as a multiple of each peer's."""
    contenders = record["contenders"]
    works = _works(record)
    speeds_of = {name: [figures["tokens/s"][work]["median"] for work in works] for name, figures in contenders.items()}
    peers = [name for name in contenders if name in PEERS]
    rows = []
    for name, own in speeds_of.items():
        share = contenders[name]["tokens/s"][Work.decode(1)]["median"] / _read_limit(record)
        times = (" / ".join(map(_ratio, own, speeds_of[peer])) if peer != name else "" for peer in peers)
        rows.append([name, f"{share:.0%}", *times])
    header = ["", "decode 1 / read limit", *(f"times {peer}: {' / '.join(works)}" for peer in peers)]
    return report.table(header, rows)


def _ratio(own: float, other: float) -> str:
    return f"{own / other:.2f}"


def _works(record: report.Record) -> list[str]:
    return list(next(iter(record["contenders"].values()))["tokens/s"])


def _agreements(record: report.Record) -> str:
    found = record["agreement"]
    rows = [[name, agreement.summary(partings)] for name, partings in found["partings"].items()]
    note = (
        f"Replies of {record['work']['reply_tokens']} tokens to {max(record['work']['sequences'])} prompts, against "
        f"those of `{found['reference']}`, up to the first token that differs. A near tie is a step at which "
        f"`{found['reference']}` found its token less than exp({found['near tie below']}) times as likely as the next."
    )
    return (report.table(["", "replies"], rows) + "\n\n" if rows else "") + note
