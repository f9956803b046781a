"""How fast our backends read prompts and write replies, through the offline API."""

from __future__ import annotations

import argparse

from pocketllm.bench import arguments, report
from pocketllm.bench.circumstances import Circumstances, unrest
from pocketllm.bench.speed import QUICK, Race, Work

NAME = "generate"
HELP = "How fast backends read prompts and write replies."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's options."""
    arguments.add_model_arguments(parser)
    parser.add_argument("--repeat", type=arguments.positive, default=Work().repeat, help="runs of each; medians count")
    parser.add_argument("--quick", action="store_true", help="a few tokens only, to see that it works")
    report.add_output_arguments(parser)


def run(given: argparse.Namespace) -> int:
    """Measure, print, write."""
    circumstances = Circumstances()
    path = arguments.checkpoint_path(given.model)
    work = QUICK if given.quick else Work(repeat=given.repeat)
    race = Race(given.backend, path, work, threads=given.threads, device=given.device)
    try:
        race.start()
        for round_number in race.rounds():
            race.run(round_number)
        race.close()
    finally:
        race.abandon()
    record = {
        "benchmark": NAME,
        "circumstances": circumstances.as_dict(),
        "checkpoint": arguments.file_facts(path),
        "threads": given.threads,
        "work": work.as_dict(),
        "contenders": race.figures(),
    }
    report.publish(record, markdown, given)
    return 0


def markdown(record: report.Record) -> str:
    """The record as a page."""
    return report.page(
        f"Speed of {record['checkpoint']['name']}",
        unrest(record["circumstances"]),
        speeds(record),
        "Tokens a second, medians. " + repeats(record),
        *circumstances_section(record),
    )


def speeds(record: report.Record) -> str:
    """The table of medians, with start and memory."""
    contenders = record["contenders"]
    works = list(next(iter(contenders.values()))["tokens/s"])
    rows = [
        [
            name,
            *(f"{figures['tokens/s'][work]['median']:.0f}" for work in works),
            f"{figures['seconds from process start to first token']:.1f} s",
            f"{figures['peak memory, MiB']} MiB",
        ]
        for name, figures in contenders.items()
    ]
    return report.table(["tokens/s", *works, "start to first token", "peak memory"], rows)


def repeats(record: report.Record) -> str:
    """Whether every repeat gave the same tokens."""
    unequal = {name: figures["unequal repeats"] for name, figures in record["contenders"].items()}
    runs = (record["work"]["repeat"] - 1) * len(record["work"]["sequences"])
    if not any(unequal.values()):
        return f"Every contender's {runs} repeats of the replies gave the tokens of the first."
    told = ", ".join(f"{name} {count}" for name, count in unequal.items() if count)
    return f"Of {runs} repeats of the replies, so many gave other tokens than the first: {told}."


def circumstances_section(record: report.Record) -> tuple[str, ...]:
    """Machine and versions, a line on each contender, and who could not take part."""
    contenders = {
        f"`{name}`": ", ".join(f"{fact}: {value}" for fact, value in figures["facts"].items())
        for name, figures in record["contenders"].items()
    }
    skipped = {f"`{name}` was skipped": reason for name, reason in record.get("skipped", {}).items()}
    return (
        "## Circumstances",
        report.facts(record["circumstances"] | {"threads": record["threads"]}),
        report.facts(contenders | skipped),
    )
