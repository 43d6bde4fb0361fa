"""Closed forms of checkpointing under random failures: the optimum of Young and Daly, and Daly's expected run time.

J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974; J. T. Daly, A higher
order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer Systems 22(3), 2006.
Failures come at random with a constant rate (exponential times between them), also while a checkpoint is written or
the job restarts.
"""

import math


def young_interval_s(*, mtbf_s: float, checkpoint_s: float) -> float:
    """Training between two checkpoints that loses least, to first order: sqrt(2 δ M).

    Args:
        mtbf_s: mean time between failures of the whole job (M).
        checkpoint_s: how long training stands still for a checkpoint (δ).
    """
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def daly_interval_s(*, mtbf_s: float, checkpoint_s: float) -> float:
    """The same to higher order: sqrt(2 δ M) (1 + sqrt(δ/2M)/3 + (δ/2M)/9) - δ for δ < 2M, else M (Daly)."""
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    share = checkpoint_s / (2 * mtbf_s)
    return math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - checkpoint_s


def expected_goodput(*, mtbf_s: float, checkpoint_s: float, restart_s: float, interval_s: float) -> float:
    """Share of the time that trains for good, in the long run (0 to 1): τ / (M e^(R/M) (e^((τ+δ)/M) - 1)).

    After Daly: a segment of τ of training and δ of writing succeeds if nothing fails meanwhile; a failure costs
    what was done of it, and a restart R, which itself begins anew if something fails in it.

    Args:
        mtbf_s: mean time between failures of the whole job (M); infinite for none.
        checkpoint_s: how long training stands still for a checkpoint (δ).
        restart_s: from a failure until training goes on (R).
        interval_s: training between two checkpoints (τ).
    """
    if math.isinf(mtbf_s):
        return interval_s / (interval_s + checkpoint_s)
    exponent = (interval_s + checkpoint_s) / mtbf_s
    if exponent + restart_s / mtbf_s > 700:  # e^700 is the largest double; nothing gets done any more
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent))
