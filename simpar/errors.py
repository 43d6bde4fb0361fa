"""What users get wrong, as one family: each message names the value, the rule and the mend in one sentence."""


class SimparError(ValueError):
    """Base of every error that a user can cause and mend."""


class ModelError(SimparError):
    """A model description that no transformer or module can have, or an import that does not know the format."""


class ClusterError(SimparError):
    """A cluster that cannot be built, or an unknown device or fabric."""


class PlanError(SimparError):
    """A plan that breaks a rule of the model, of the cluster or of the strategy itself."""


class JobError(SimparError):
    """A job file that cannot be read; the message names file and field."""


class DoesNotFitError(SimparError):
    """A job that needs more memory than a device has; the message says what would fit."""


class DeadlockError(SimparError):
    """A program in which ranks wait for each other; the message lists who waits for what."""


def nearest(name: str, known: "list[str] | tuple[str, ...]") -> str:
    """A hint such as ``; did you mean 'tp'?`` for a mistyped name, or an empty string.

    >>> nearest("micro_bach", ["micro_batch", "tp"])
    "; did you mean 'micro_batch'?"
    """
    import difflib  # noqa: PLC0415 - only on the way to an error

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""
