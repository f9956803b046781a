"""Cases drawn from an op's contract, and what an implementation makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from pocketllm.errors import UnsupportedFeatureError
from pocketllm.kernels.checking.arrays import Backend, Mode
from pocketllm.kernels.checking.comparison import Agreement, KernelMismatchError, check
from pocketllm.kernels.contract import Case, Implementation, OpSpec
from pocketllm.kernels.registry import spec

AT_AN_END = 0.25
"""How often a size that is drawn is the least or the most that the contract knows: faults sit there."""


def corners(contract: OpSpec) -> tuple[dict[str, int], ...]:
    """The least sizes (which often are none), the least with one of everything, and the most."""
    low, high = ({name: ends[end] for name, ends in contract.dims.items()} for end in (0, 1))
    return low, {name: max(size, 1) for name, size in low.items()}, high


FEW = 3
"""The most of any other dimension where one is as wide as in a model, so that such a case costs little."""

WIDEST_EMULATED = 600
"""The most of a dimension where an emulator takes the processor's place and every number costs microseconds."""


def wide_sizes(contract: OpSpec, *, emulated: bool = False) -> tuple[tuple[str, int], ...]:
    """Each dimension that is timed at more than the contract's cases have, with that size.

    A kernel can be right up to the most that the cases have and wrong beyond. Where it is emulated, each dimension has
    one, of at most `WIDEST_EMULATED`, and composites have none but those of their parts.
    """
    if emulated and contract.compose is not None:
        return ()
    timed = [pair for shape in contract.bench for pair in shape.dims.items()]
    wide = tuple(dict.fromkeys((name, size) for name, size in timed if size > contract.dims[name][1]))
    if not emulated:
        return wide
    return tuple((name, min(size, WIDEST_EMULATED)) for name, size in dict(wide).items())


MOST_OPERATIONS = 2 * 10**8
"""Of a case with all the sizes of a model at once, so that its reference takes about a second at most."""


def whole_sizes(contract: OpSpec, *, emulated: bool = False) -> tuple[dict[str, int], ...]:
    """The sizes at which the op is timed, each with all its dimensions, where they cost little.

    A kernel shares work among threads, or takes larger tiles, from some amount of work on, which neither small nor wide
    cases reach. Nothing is cheap where it is emulated, and composites are made of parts that have these themselves.
    """
    if emulated or contract.compose is not None:
        return ()
    return tuple(shape.dims for shape in contract.bench if shape.operations <= MOST_OPERATIONS)


Numbered = Iterable[tuple[int, Case]]
"""Cases with their numbers, each of which tells a case among all that a seed stands for."""


def drawn_cases(contract: OpSpec, seed: int, numbers: Iterable[int], *, emulated: bool = False) -> Numbered:
    """Cases of those that `seed` stands for.

    The first have the sizes of the corners; each of the next has one of the wide sizes and few of everything else, and
    then come the whole sizes. For an emulated backend the wide ones are less wide, with one of everything else, and
    there are no whole ones.
    """
    ends = corners(contract)
    wide = wide_sizes(contract, emulated=emulated)
    whole = whole_sizes(contract, emulated=emulated)
    most = 1 if emulated else FEW
    few = {name: (max(low, 1), max(low, min(most, high))) for name, (low, high) in contract.dims.items()}
    for number in numbers:
        rng = np.random.default_rng([seed, number])
        if number < len(ends):
            sizes = ends[number]
        elif number < len(ends) + len(wide):
            name, size = wide[number - len(ends)]
            sizes = _sizes(few, rng) | {name: size}
        elif number < len(ends) + len(wide) + len(whole):
            sizes = whole[number - len(ends) - len(wide)]
        else:
            sizes = _sizes(contract.dims, rng)
        yield number, contract.make_case(rng, sizes)


def _sizes(ranges: Mapping[str, tuple[int, int]], rng: np.random.Generator) -> dict[str, int]:
    return {
        name: (low, high)[rng.integers(2)] if rng.random() < AT_AN_END else int(rng.integers(low, high + 1))
        for name, (low, high) in ranges.items()
    }


def timed_cases(contract: OpSpec, seed: int) -> Numbered:
    """One case of each size that the op is timed at."""
    for number, shape in enumerate(contract.bench):
        yield number, contract.make_case(np.random.default_rng([seed, number]), shape.dims)


@dataclass(frozen=True, slots=True)
class Failure:
    """The first case on which an implementation departs from its contract.

    Attributes:
        number: of the case.
        error: what is wrong.
    """

    number: int
    error: KernelMismatchError


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What an implementation made of some cases.

    Attributes:
        agreed: cases on which it agrees with its contract.
        refused: cases that it does not serve.
        refusal: the reason of the first of them.
        error: the largest error as a share of its bound.
        near_ties: decisions that came down on the other side of a near tie.
        failure: the first case that is wrong; none was run after it.
    """

    agreed: int
    refused: int
    refusal: str | None
    error: float
    near_ties: int
    failure: Failure | None

    def __str__(self) -> str:
        """The verdict, in one line."""
        refused = f"{self.refused} refused: {self.refusal}" if self.refused else ""
        if self.failure is not None:
            return f"WRONG after {self.agreed} right {_cases(self.agreed)}"
        if not self.agreed:
            return refused
        exact = "" if self.near_ties else "no error"
        error = f"error to {self.error:.0%} of its bound" if self.error else exact
        ties = f"{self.near_ties} near ties" if self.near_ties else ""
        return ", ".join(filter(None, [f"ok: {self.agreed} {_cases(self.agreed)}", error, ties, refused]))


def check_cases(
    op: str, backend: Backend, mode: Mode, cases: Numbered, *, override: Implementation | None = None
) -> CheckReport:
    """Run the backend's implementation of an op, or an override of it, on cases, up to the first that is wrong.

    It is given arrays to write to on cases with an even number.
    """
    table = backend.table(mode, {} if override is None else {op: override})
    found: list[Agreement] = []
    refusals: list[str] = []
    failure = None
    for number, case in cases:
        try:
            found.append(check(spec(op), case, backend, mode, table=table, give_out=number % 2 == 0))
        except UnsupportedFeatureError as refusal:
            refusals.append(str(refusal))
        except KernelMismatchError as error:
            failure = Failure(number, error)
            break
    return CheckReport(
        agreed=len(found),
        refused=len(refusals),
        refusal=refusals[0] if refusals else None,
        error=max((agreement.error for agreement in found), default=0.0),
        near_ties=sum(agreement.near_ties for agreement in found),
        failure=failure,
    )


def _cases(count: int) -> str:
    return "case" if count == 1 else "cases"
