"""From measurements to a profile: robust fits of the cost functions' parameters, with uncertainty and held-out errors.

One file for the estimator (:mod:`~calibrate.fit.robust`), one for error statistics and splits
(:mod:`~calibrate.fit.accuracy`), one for each family of costs, and :mod:`~calibrate.fit.profile`, which puts a profile
together. Only numpy and scipy are needed.
"""

from calibrate.fit.profile import fit_profile, select

__all__ = ["fit_profile", "select"]
