"""Checks a profile on the machine that it describes: predicts training steps, runs them, and compares.

Every plan is judged twice: by its own program, executed by :mod:`calibrate.replay` on the real devices, and by a real
training step that knows nothing of the simulator (:mod:`calibrate.training`). Nothing is fitted here.

* :mod:`~calibrate.check.cases`: what is checked, as data.
* :mod:`~calibrate.check.pulse`: how fast the machine is at this minute, and what compute and communication cost each
  other.
* :mod:`~calibrate.check.run`: the rounds.
* :mod:`~calibrate.check.report`: table, JSON and page.

A script that checks keeps its calls under ``if __name__ == "__main__":``, because processes are started.
"""

from calibrate.check.cases import PLANS, Case, CheckError, case_of, cases
from calibrate.check.run import Outcome, Row, check, check_cases

__all__ = ["PLANS", "Case", "CheckError", "Outcome", "Row", "case_of", "cases", "check", "check_cases"]
