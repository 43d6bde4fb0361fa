"""Who gets which samples: a data set of samples of different lengths, divided over data-parallel ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from simpar.description import Description
from simpar.errors import PlanError, SimparError
from simpar.reading import read_text

Positive = Annotated[int, Field(ge=1)]
_MOST_SAMPLES = 10_000_000  # some seconds and GB
_DIGITS = 16


class Lengths(Description):
    """Lengths drawn at random.

    Attributes:
        distribution: ``lognormal`` (documents and dialogues nearly are), ``uniform`` from ``shortest`` to ``longest``.
        samples: how many.
        mean: tokens of a sample on the mean, of ``lognormal`` before it is cut off.
        spread: standard deviation of the logarithm, of ``lognormal``.
        shortest: no sample has fewer tokens.
        longest: no sample has more tokens.
        seed: of the generator; equal seeds give equal lengths.
        order: ``random``, or ``sorted`` from short to long (a data set that was sorted, or made of sources one after
            the other).
    """

    error_type: ClassVar[type[SimparError]] = PlanError

    distribution: Literal["lognormal", "uniform"] = "lognormal"
    samples: Annotated[int, Field(ge=1, le=_MOST_SAMPLES)]
    mean: Annotated[float, Field(gt=0, le=1e12)] = 1024.0
    spread: Annotated[float, Field(ge=0, le=10)] = 0.8
    shortest: Positive = 1
    longest: Positive
    seed: Annotated[int, Field(ge=0)] = 0
    order: Literal["random", "sorted"] = "random"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.shortest > self.longest:
            raise ValueError(f"shortest {self.shortest} exceeds longest {self.longest}; swap them or lower shortest")
        return self

    def draw(self) -> tuple[int, ...]:
        """The lengths in tokens."""
        generator = np.random.default_rng(self.seed)
        if self.distribution == "uniform":
            drawn = generator.integers(self.shortest, self.longest, self.samples, endpoint=True).astype(np.float64)
        else:
            middle = np.log(self.mean) - self.spread**2 / 2  # the mean of a lognormal is exp(mu + sigma²/2)
            drawn = np.rint(generator.lognormal(middle, self.spread, self.samples))
        drawn = np.clip(drawn, self.shortest, self.longest)
        if self.order == "sorted":
            drawn = np.sort(drawn)
        return tuple(int(length) for length in drawn)


def _read_lengths(value: Any) -> Any:
    return Lengths.model_validate(value) if isinstance(value, Mapping) else value


class Data(Description):
    """A data set and its partition.

    Attributes:
        lengths: tokens of each sample, in order: a list, the path of a text file with one number a line, or the fields
            of :class:`Lengths`.
        partition: ``block`` gives each rank a run of consecutive samples, ``ring`` deals them out one by one (sample i
            to rank i mod dp).
        multiple: a microbatch is padded to its longest sample, and that to a multiple of this (kernels like multiples
            of 64; Hugging Face's ``pad_to_multiple_of``).
        step: which step of the epoch is simulated, 0 the first.
    """

    error_type: ClassVar[type[SimparError]] = PlanError

    lengths: Annotated[
        Lengths | tuple[Positive, ...] | Annotated[str, Field(min_length=1)], BeforeValidator(_read_lengths)
    ]
    partition: Literal["block", "ring"] = "block"
    multiple: Positive = 64
    step: Annotated[int, Field(ge=0)] = 0

    def read(self) -> tuple[int, ...]:
        """The lengths in tokens.

        Raises:
            PlanError: the file cannot be read, or a line of it is no positive number.
        """
        if isinstance(self.lengths, Lengths):
            return self.lengths.draw()
        return _read_file(Path(self.lengths)) if isinstance(self.lengths, str) else self.lengths


def _read_file(path: Path) -> tuple[int, ...]:
    try:
        lines = read_text(path).split()
    except OSError as error:
        raise PlanError(
            f"lengths file '{path}' cannot be read ({error.strerror}); give one number of tokens a line"
        ) from None
    for number, line in enumerate(lines, 1):
        if not (line.isascii() and line.isdecimal() and len(line) < _DIGITS and int(line) > 0):
            raise PlanError(f"lengths file '{path}', entry {number}: '{line:.40}' is no positive whole number; mend it")
    return tuple(int(line) for line in lines)


@dataclass(frozen=True)
class StepSamples:
    """The samples of one step.

    Attributes:
        samples: lengths in tokens, by replica, by microbatch.
        multiple: see :class:`Data`.
    """

    samples: tuple[tuple[tuple[int, ...], ...], ...]
    multiple: int

    @cached_property
    def padded(self) -> tuple[tuple[int, ...], ...]:
        """Sequence length of every microbatch, by replica: that of its longest sample, rounded up."""
        return tuple(
            tuple(-(-max(batch) // self.multiple) * self.multiple for batch in replica) for replica in self.samples
        )

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of all samples."""
        return tuple(length for replica in self.samples for batch in replica for length in batch)

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return sum(self.lengths)

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """Tokens of every replica, padding included."""
        return tuple(
            sum(length * len(batch) for length, batch in zip(lengths, replica, strict=True))
            for lengths, replica in zip(self.padded, self.samples, strict=True)
        )

    @property
    def padding(self) -> float:
        """Share of the tokens that is padding."""
        return 1.0 - self.tokens / sum(self.loads)

    @property
    def imbalance(self) -> float:
        """Tokens of the fullest replica over the mean, less one."""
        return max(self.loads) * len(self.loads) / sum(self.loads) - 1.0


def owners(samples: int, dp: int, partition: str) -> tuple[range, ...]:
    """The samples of each rank; where they do not divide, the first ranks have one more.

    >>> owners(7, 3, "block"), owners(7, 3, "ring")
    ((range(0, 3), range(3, 5), range(5, 7)), (range(0, 7, 3), range(1, 7, 3), range(2, 7, 3)))
    """
    if partition == "ring":
        return tuple(range(rank, samples, dp) for rank in range(dp))
    share, more = divmod(samples, dp)
    starts = [rank * share + min(rank, more) for rank in range(dp + 1)]
    return tuple(range(start, end) for start, end in pairwise(starts))


def step_samples(
    data: Data, *, dp: int, micro_batch: int, microbatches: int, longest: int | None = None
) -> StepSamples:
    """The samples of the step that ``data`` names; each rank goes through its own ones in order.

    Args:
        data: the data set.
        dp: data-parallel ranks.
        micro_batch: samples of a microbatch.
        microbatches: microbatches of a rank and step.
        longest: longer samples are cut off there, as training code does at its sequence length.

    Raises:
        PlanError: the data set has no such step.
    """
    lengths, each = data.read(), micro_batch * microbatches
    first = data.step * each
    parts = owners(len(lengths), dp, data.partition)
    if min(map(len, parts)) < first + each:
        whole = len(lengths) // (each * dp)
        mend = f"set data.step to at most {whole - 1}" if whole else f"give at least {each * dp} lengths"
        raise PlanError(
            f"data of {len(lengths)} samples has {whole} whole steps of {each * dp}, but step {data.step} is asked for"
            f"; {mend}"
        )

    def length(sample: int) -> int:
        return min(lengths[sample], longest) if longest else lengths[sample]

    return StepSamples(
        tuple(
            tuple(
                tuple(length(sample) for sample in part[start : start + micro_batch])
                for start in range(first, first + each, micro_batch)
            )
            for part in parts
        ),
        data.multiple,
    )
