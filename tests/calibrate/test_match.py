"""Spans of two traces are paired by what they are, never by when they are."""

import numpy as np
from synthetic import ideal_cluster, program, small_transformer, work

from calibrate.match import SpanKey, lengths, match
from simpar import Plan
from simpar.engine.simulate import execute
from simpar.plan.layout import lay_out
from simpar.program.ir import Record, Wait
from simpar.program.lower import lower


def traced(*works, stream_order=()):
    return execute(program({0: [*works, *stream_order]}), ideal_cluster())


def test_spans_of_the_same_kind_are_paired_in_order_of_start():
    predicted = traced(work(10, "a"), work(20, "b"), work(30, "a"))
    measured = traced(work(11, "a"), work(31, "a"), work(21, "b"))
    pairs = match(predicted, measured)
    assert [(key.name, key.occurrence) for key in pairs.keys] == [("a", 0), ("b", 0), ("a", 1)]
    assert pairs.predicted_ns.tolist() == [10, 20, 30]
    assert pairs.measured_ns.tolist() == [11, 21, 31]
    assert pairs.only_predicted == pairs.only_measured == ()


def test_spans_without_a_partner_are_named():
    pairs = match(traced(work(10, "a"), work(20, "b")), traced(work(10, "b"), work(5, "b"), work(1, "c")))
    assert pairs.predicted_ns.tolist() == [20]
    assert pairs.measured_ns.tolist() == [10]
    assert len(pairs) == 1
    assert pairs.only_predicted == (SpanKey(0, "compute", "elementwise", "a", -1, -1, -1),)
    assert [(key.name, key.occurrence) for key in pairs.only_measured] == [("b", 1), ("c", 0)]


def test_events_and_empty_traces_leave_nothing_to_pair():
    empty = traced(Record("compute", "e"), Wait("compute", "e"))
    assert len(match(empty, empty)) == 0
    assert match(empty, traced(work(1, "a"))).only_measured[0].name == "a"


def test_a_trace_pairs_wholly_with_itself_also_kernel_by_kernel():
    model, cluster = small_transformer(), ideal_cluster(gpus_per_node=4)
    layout = lay_out(Plan(pp=2, grad_accum=3, seq_len=64), model, cluster)
    trace = execute(lower(model, cluster, layout, fold=False), cluster)
    for kernels, spans in ((False, trace.spans), (True, trace.kernels())):
        pairs = match(trace, trace, kernels=kernels)
        assert len(pairs) == len(spans) == len(lengths(trace, kernels=kernels))
        assert np.array_equal(pairs.predicted_ns, pairs.measured_ns)
        assert sorted(pairs.measured_ns.tolist()) == sorted(spans.duration_ns.tolist())
