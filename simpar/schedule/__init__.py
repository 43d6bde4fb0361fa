"""Pipeline schedules: orders of forward and backward passes as data, apart from time.

One module a schedule; :func:`build` makes one by name, :func:`validate` checks any, :func:`from_csv` reads
torch's.
"""

from simpar.schedule.breadth_first import looped_bfs
from simpar.schedule.dualpipe import dualpipe, dualpipev
from simpar.schedule.gpipe import gpipe
from simpar.schedule.interleaved import interleaved
from simpar.schedule.measure import Span, bubble_fraction, makespan, peak_live, timetable
from simpar.schedule.one_f_one_b import one_f_one_b
from simpar.schedule.registry import SCHEDULES, Recipe, build
from simpar.schedule.schedule import Action, Op, Schedule
from simpar.schedule.text import from_csv, read_csv, to_csv
from simpar.schedule.validate import validate
from simpar.schedule.zero_bubble import zb_1p, zb_h1, zb_h2
from simpar.schedule.zero_bubble_v import zb_v

__all__ = [
    "SCHEDULES",
    "Action",
    "Op",
    "Recipe",
    "Schedule",
    "Span",
    "bubble_fraction",
    "build",
    "dualpipe",
    "dualpipev",
    "from_csv",
    "gpipe",
    "interleaved",
    "looped_bfs",
    "makespan",
    "one_f_one_b",
    "peak_live",
    "read_csv",
    "timetable",
    "to_csv",
    "validate",
    "zb_1p",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
