"""What-if: search over plans, and sweeps over any field of a job.

A search enumerates families of plans (:mod:`~simpar.search.space`), drops what cannot fit or cannot be the best by
lower bounds, of families (:mod:`~simpar.search.families`) and then of plans (:mod:`~simpar.search.bound`), and
simulates the rest; the engine decides, the bounds only save work.
"""
