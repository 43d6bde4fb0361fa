"""What users get wrong, as one family: each message names the value, the rule and the mend in one sentence."""

from collections.abc import Iterable
from typing import Self

FieldPath = tuple[int | str, ...]
"""Where a field lies, such as ``("plan", "layer_split", 1)``."""

_FEWEST_LETTERS = 3  # of the beginning of a name that tells it from others


class SimparError(ValueError):
    """Base of every error that a user can cause and mend.

    Attributes:
        problems: where fields of a description are wrong, the path of each and what is wrong with it.
    """

    problems: tuple[tuple[FieldPath, str], ...] = ()

    @classmethod
    def of_fields(cls, problems: Iterable[tuple[FieldPath, str]]) -> Self:
        """The error of wrong fields, one line each.

        >>> print(PlanError.of_fields([(("overlap", "tp"), "'some' should be 'none'"), ((), "too much")]))
        overlap.tp: 'some' should be 'none'
        too much
        """
        found = tuple(problems)
        lines = (f"{'.'.join(map(str, path))}: {text}" if path else text for path, text in found)
        error = cls("\n".join(lines))
        error.problems = found
        return error


class ModelError(SimparError):
    """A model description that no transformer or module can have, or an import that does not know the format."""


class ClusterError(SimparError):
    """A cluster that cannot be built, or an unknown device or fabric."""


class FrameworkError(SimparError):
    """A training framework that is not known, or whose description cannot be read."""


class PlanError(SimparError):
    """A plan that breaks a rule of the model, of the cluster or of the strategy itself."""


class JobError(SimparError):
    """A job with wrong fields, or a job file that cannot be read; the message names the field, and the file if any."""


class RunsError(SimparError):
    """A table of measured runs that cannot be read; the message names file, line and column."""


class DoesNotFitError(SimparError):
    """A job that needs more memory than a device has; the message says what would fit.

    Attributes:
        on_command_line: the message with flags in place of fields.
    """

    def __init__(self, text: str, *, on_command_line: str = "") -> None:
        super().__init__(text)
        self.on_command_line = on_command_line or text


class DeadlockError(SimparError):
    """A program in which ranks wait for each other; the message lists who waits for what."""


def nearest(name: str, known: "list[str] | tuple[str, ...]") -> str:
    """A hint such as ``; did you mean 'tp'?`` for a mistyped name, or an empty string.

    >>> nearest("micro_bach", ["micro_batch", "tp"]), nearest("BF16", ["bf16", "fp16"])
    ("; did you mean 'micro_batch'?", "; did you mean 'bf16'?")

    A name that was cut short is nearer than one with as many letters in common:

    >>> nearest("price", ["fabric", "price_per_gpu_hour"])
    "; did you mean 'price_per_gpu_hour'?"
    """
    import difflib  # noqa: PLC0415 - only on the way to an error

    # case, and dashes for underscores, are no difference to who types them
    plain = {each.lower().replace("-", "_"): each for each in reversed(known)}
    typed = name.lower().replace("-", "_")
    begun = [each for each in plain if len(typed) >= _FEWEST_LETTERS and each.startswith(typed)]
    close = difflib.get_close_matches(typed, begun or plain, n=1, cutoff=0.0 if begun else 0.5)
    return f"; did you mean '{plain[close[0]]}'?" if close else ""
