"""Cases drawn from an op's contract, and what an implementation makes of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pocketllm.errors import PocketLLMError, UnsupportedFeatureError
from pocketllm.kernels.checking.arrays import Backend, Mode
from pocketllm.kernels.checking.comparison import Agreement, KernelMismatchError, check, mismatch
from pocketllm.kernels.contract import Case, Implementation, OpSpec, OpTable
from pocketllm.kernels.registry import spec

AT_AN_END = 0.25
"""How often a size that is drawn is the least or the most that the contract knows: faults sit there."""


def corners(contract: OpSpec) -> tuple[dict[str, int], ...]:
    """The least sizes (which often are none), the least with one of everything, and the most."""
    low, high = ({name: ends[end] for name, ends in contract.dims.items()} for end in (0, 1))
    return low, {name: max(size, 1) for name, size in low.items()}, high


Numbered = Iterable[tuple[int, Case]]
"""Cases with their numbers, each of which tells a case among all that a seed stands for."""


def drawn_cases(contract: OpSpec, seed: int, numbers: Iterable[int]) -> Numbered:
    """Cases of those that `seed` stands for. The first of them have the sizes of the corners."""
    ends = corners(contract)
    for number in numbers:
        rng = np.random.default_rng([seed, number])
        yield number, contract.make_case(rng, ends[number] if number < len(ends) else _sizes(contract, rng))


def _sizes(contract: OpSpec, rng: np.random.Generator) -> dict[str, int]:
    return {
        name: (low, high)[rng.integers(2)] if rng.random() < AT_AN_END else int(rng.integers(low, high + 1))
        for name, (low, high) in contract.dims.items()
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
            return f"WRONG after {self.agreed} right cases"
        if not self.agreed:
            return refused
        exact = "" if self.near_ties else "no error"
        error = f"error to {self.error:.0%} of its bound" if self.error else exact
        ties = f"{self.near_ties} near ties" if self.near_ties else ""
        return ", ".join(filter(None, [f"ok: {self.agreed} cases", error, ties, refused]))


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
            found.append(_checked(spec(op), case, backend, mode, table, give_out=number % 2 == 0))
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


def _checked(
    contract: OpSpec, case: Case, backend: Backend, mode: Mode, table: OpTable, *, give_out: bool
) -> Agreement:
    try:
        return check(contract, case, backend, mode, table=table, give_out=give_out)
    except PocketLLMError:
        raise
    except Exception as error:
        raise mismatch(contract, case).error(f"ends with {type(error).__name__}: {error}") from error
