"""The palette, against colour science: kinds that share a lane stay apart for every kind of colour vision."""

from itertools import combinations

import numpy as np
import pytest

from simpar.trace.bubbles import BUBBLE_CAUSES
from simpar.trace.trace import COMMUNICATION_KINDS, COMPUTE_KINDS, KERNEL_KINDS, MEMORY_CATEGORIES
from simpar.view.palette import DRAWN_KINDS, palette, readable_on

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency"
# (2009), severity 1.0, in linear RGB.
VISIONS = {
    "normal": np.eye(3).tolist(),
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
SRGB_TO_XYZ = [
    [0.4124564, 0.3575761, 0.1804375],
    [0.2126729, 0.7151522, 0.0721750],
    [0.0193339, 0.1191920, 0.9503041],
]
SHARED_LANES = (
    COMPUTE_KINDS,
    (*KERNEL_KINDS, "optimizer"),
    tuple(kind for kind in COMMUNICATION_KINDS if kind != "copy"),  # copies have lanes of their own
)


def linear(colour: str) -> np.ndarray:
    value = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = SRGB_TO_XYZ @ np.clip(rgb, 0, 1) / [0.95047, 1.0, 1.08883]
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), xyz * 841 / 108 + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize(("dark", "least"), [(False, 35.0), (True, 26.0)])
@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("kinds", SHARED_LANES, ids=["operations", "kernels", "communication"])
def test_kinds_on_a_lane_differ(kinds: tuple[str, ...], vision: str, dark: bool, least: float) -> None:
    colours = palette(dark).kinds
    seen = {kind: lab(np.array(VISIONS[vision]) @ linear(colours[kind])) for kind in kinds}
    for first, second in combinations(kinds, 2):
        assert np.linalg.norm(seen[first] - seen[second]) >= least, (first, second)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("vision", VISIONS)
def test_causes_of_bubbles_differ_from_each_other_and_from_what_computes(vision: str, dark: bool) -> None:
    colours = palette(dark).kinds
    beside = (*COMPUTE_KINDS, *KERNEL_KINDS)
    seen = {kind: lab(np.array(VISIONS[vision]) @ linear(colours[kind])) for kind in (*BUBBLE_CAUSES, *beside)}
    for cause in BUBBLE_CAUSES:
        for other in set(seen) - {cause}:
            least = 16.0 if other in BUBBLE_CAUSES else 21.0
            assert np.linalg.norm(seen[cause] - seen[other]) >= least, (cause, other)


@pytest.mark.parametrize("dark", [False, True])
def test_exposed_communication_has_another_hue_than_attention(dark: bool) -> None:
    exposed, attention = (lab(linear(palette(dark).kinds[kind])) for kind in ("exposed communication", "attention"))
    assert np.linalg.norm((exposed - attention)[1:]) >= 35.0  # whatever their lightness


@pytest.mark.parametrize("dark", [False, True])
def test_streams_that_share_a_panel_differ(dark: bool) -> None:
    colours = palette(dark)
    streams = ("tp", "cp", "ep", "pp", "dp", "dp_experts", "dp_replicas", "dp_expert_replicas")
    seen = {stream: lab(linear(colours.family(stream))) for stream in streams}
    for first, second in combinations(streams, 2):
        assert np.linalg.norm(seen[first] - seen[second]) >= 25.0, (first, second)
    assert colours.family("pp_forward") == colours.family("pp")
    assert colours.family("unheard of") == colours.faint


@pytest.mark.parametrize("dark", [False, True])
def test_every_kind_has_a_colour_on_which_its_number_can_be_read(dark: bool) -> None:
    colours = palette(dark)
    assert set(colours.kinds) == set(DRAWN_KINDS)
    assert set(colours.memory) == set(MEMORY_CATEGORIES)

    def luminance(colour: str) -> float:
        return float(linear(colour) @ [0.2126, 0.7152, 0.0722])

    for kind, colour in colours.kinds.items():
        low, high = sorted((luminance(colour), luminance(readable_on(colour))))
        assert (high + 0.05) / (low + 0.05) >= 3.5, kind
    low, high = sorted((luminance(colours.text), luminance(colours.surface)))
    assert (high + 0.05) / (low + 0.05) >= 7


def test_the_ramp_passes_through_its_three_colours() -> None:
    colours = palette(False)
    assert tuple(colours.ramp_at(at) for at in (0.0, 0.5, 1.0)) == colours.ramp
