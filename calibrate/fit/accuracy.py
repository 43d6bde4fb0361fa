"""How well a fit does: errors by region, on what was fitted and on what was held out."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from calibrate.fit.robust import FloatArray, Mask
from simpar.hardware.profile import Accuracy

Learn = Callable[[Mask], FloatArray]
"""Fits on the masked measurements and predicts the seconds of all."""

SEED = 0  # of the random fifth
_STACK = "stack "
_FEWEST = 20  # measurements from which on something can be held out


def accuracy(
    what: str, split: str, predicted_s: FloatArray, measured_s: FloatArray, *, regions: Mapping[str, Mask], among: Mask
) -> list[Accuracy]:
    """Statistics of |predicted/measured - 1| in each region that has measurements ``among`` those asked for.

    A region with the same measurements as one before it is not repeated.
    """
    rows = []
    error = np.abs(predicted_s / measured_s - 1.0)
    bias = np.log(predicted_s / measured_s)
    told: list[Mask] = []
    for region, mask in regions.items():
        chosen = mask & among
        if chosen.any() and not any((chosen == other).all() for other in told):
            told.append(chosen)
            rows.append(
                Accuracy(
                    what=what,
                    region=region,
                    split=split,
                    count=int(chosen.sum()),
                    mean=float(error[chosen].mean()),
                    median=float(np.median(error[chosen])),
                    p90=float(np.quantile(error[chosen], 0.9)),
                    bias=float(np.median(bias[chosen])),
                )
            )
    return rows


def assess(
    what: str, learn: Learn, measured_s: FloatArray, regions: Mapping[str, Mask], splits: Mapping[str, Mask]
) -> list[Accuracy]:
    """Errors on what was fitted, and for each split those on the masked measurements after a fit on the others.

    A stack is another machine with other clocks. So it is judged as it is, and once more with the one factor taken out
    by which it differs as a whole in the first region: what is left is the error of the form.
    """
    everything = np.ones(measured_s.size, dtype=bool)
    rows = accuracy(what, "fitted", learn(everything), measured_s, regions=regions, among=everything)
    first = next(iter(regions.values()))
    for name, held in splits.items():
        predicted_s = learn(~held)
        rows += accuracy(what, name, predicted_s, measured_s, regions=regions, among=held)
        if name.startswith(_STACK) and (first & held).any():
            level = np.exp(np.median(np.log(predicted_s / measured_s)[first & held]))
            rows += accuracy(what, f"{name}, level known", predicted_s / level, measured_s, regions=regions, among=held)
    return rows


def kernel_splits(flop: FloatArray, stacks: Sequence[str], shapes: FloatArray) -> dict[str, Mask]:
    """What to hold out of kernels: a random fifth, the tenth with the most FLOP, and each stack if there are several.

    A shape is held out in all stacks or in none, since another stack's time would give away nearly all of it.

    Args:
        flop: shape (kernels,); work by which the largest are found.
        stacks: who ran each.
        shapes: shape (kernels, anything); equal rows are the same kernel.
    """
    if flop.size < _FEWEST:
        return {}
    distinct, which = np.unique(shapes, axis=0, return_inverse=True)
    splits = {"random fifth": (np.random.default_rng(SEED).random(len(distinct)) < 0.2)[which.reshape(-1)]}
    largest = flop >= np.quantile(flop, 0.9)
    if not largest.all():
        splits["largest tenth"] = largest
    names = sorted(set(stacks))
    if len(names) > 1:
        labels = np.array(stacks)
        splits |= {f"{_STACK}{name}": labels == name for name in names}
    return {name: held for name, held in splits.items() if held.any() and (~held).sum() >= _FEWEST // 2}


def collective_splits(nbytes: FloatArray, ranks: FloatArray) -> dict[str, Mask]:
    """What to hold out of collectives: every other size, and the group sizes between smallest and largest."""
    if nbytes.size < _FEWEST:
        return {}
    sizes = np.unique(nbytes)
    splits = {"every other size": np.isin(nbytes, sizes[1::2])} if sizes.size >= 4 else {}
    between = (ranks > ranks.min()) & (ranks < ranks.max())
    if between.any():
        splits["ranks between"] = between
    return splits


def typical(
    rows: Sequence[Accuracy], what: str, regions: Sequence[str], unknowns: int, fewest: int = 8
) -> tuple[float, float] | None:
    """Median and 90th percentile in the first of the regions with enough fitted measurements.

    Few measurements are fitted closer than they would be predicted, by √((n-p)/n) for p unknowns; that is undone.
    """
    for region in regions:
        for row in rows:
            if (row.what, row.region, row.split) == (what, region, "fitted") and row.count >= fewest:
                wider = (row.count / max(1, row.count - unknowns)) ** 0.5
                return row.median * wider, row.p90 * wider
    return None
