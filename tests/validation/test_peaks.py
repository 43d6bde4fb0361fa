"""Peak memory as a run's framework counts it: of which rank, and what of it."""

import pytest

from simpar.errors import FrameworkError
from simpar.framework.framework import Peak, framework
from simpar.program.footprint import Footprint
from simpar.validation.predict import counted_peak_bytes

STAGES = (
    Footprint(0, 0, 70, {"weights": 30, "activations": 30, "context": 10}),
    Footprint(1, 4, 90, {"weights": 20, "activations": 60, "context": 10}),
)


@pytest.mark.parametrize(
    ("peak", "expected"),
    [
        (Peak(), 80),
        (Peak(of="first"), 60),
        (Peak(counts="reserved", of="first", fragmentation=0.5), 60 + 15),
        (Peak(counts="reserved", fragmentation=0.1), 80 + 6),
        (Peak(counts="reserved", fragmentation=0.5), 100 - 10),  # the driver has no more
    ],
)
def test_a_figure_is_of_a_rank_and_counts_what_is_allocated_or_reserved(peak, expected):
    assert counted_peak_bytes(STAGES, peak, 100) == expected


def test_what_is_allocated_counts_even_where_it_does_not_fit():
    assert counted_peak_bytes(STAGES, Peak(counts="reserved", fragmentation=0.5), 50) == 80


def test_only_what_is_reserved_is_fragmented():
    with pytest.raises(FrameworkError, match=r"fragmentation 0\.1 belongs to a peak that counts 'reserved'"):
        Peak(fragmentation=0.1)


def test_nanotron_tells_what_rank_0_reserved():
    peak = framework("nanotron").peak
    assert (peak.counts, peak.of) == ("reserved", "first")
