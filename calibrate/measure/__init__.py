"""Measures this machine: kernels, collectives, launches and their interference, round by round.

* :mod:`~calibrate.measure.plan`: what is measured, as data.
* :mod:`~calibrate.measure.timer`: what differs between a CPU and a GPU.
* :mod:`~calibrate.measure.kernels`, :mod:`~calibrate.measure.collectives`, :mod:`~calibrate.measure.launch`,
  :mod:`~calibrate.measure.interference`: how one item is timed once.
* :mod:`~calibrate.measure.session`: the rounds, as every process runs them.
* :mod:`~calibrate.measure.journal`: what was measured, kept on disk at once.
* :mod:`~calibrate.measure.runner`: checks, processes, fit and profile; its ``run`` is the way in. It is not imported
  here, so that the measuring processes need not wait for what only the fit uses.
"""
