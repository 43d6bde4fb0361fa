"""What users get wrong when they measure or bring measurements: one sentence with value, rule and mend."""

from simpar.errors import SimparError


class MeasurementError(SimparError):
    """A machine that cannot be measured so, or measurements that cannot be read; the message names file and line."""
