"""Importing nccl-tests and rccl-tests: every format says the same of the same run."""

import json
import warnings

import pytest

from calibrate.importers import MeasurementError, MeasurementWarning, parse_nccl_tests, read, read_nccl_tests, recognise
from calibrate.importers.nccl_rows import bus_factor, cliffs, op_name
from calibrate.samples import CollectiveSample

SIZES = {1024: 11.25, 1 << 20: 54.53, 1 << 30: 2871.1}  # bytes: µs, out of place
IN_PLACE = 0.5  # µs less
N = 16


def bandwidths(op, nbytes, time_us, ranks):
    algbw = nbytes / time_us / 1e3
    return f"{algbw:.2f}", f"{algbw * bus_factor(op, ranks):.2f}"


def half(op, nbytes, time_us, ranks, *, tail="0", unit=1.0):
    return f"{time_us * unit:.{2 if unit == 1 else 5}f} {' '.join(bandwidths(op, nbytes, time_us, ranks))} {tail}"


def devices(ranks=N, per_node=8, pid=True):
    return "\n".join(
        f"#   Rank {r:2d} {'Group  0 ' if pid else ''}Pid  {6000 + r} on node-{r // per_node} device  {r % per_node} "
        f"[0000:{r:02x}:00] NVIDIA H100 80GB HBM3"
        for r in range(ranks)
    )


def modern(op="all_reduce", ranks=N, middle="float sum -1", sizes=SIZES):
    rows = "\n".join(
        f"  {s:>11} {s // 4:>11} {middle} {half(op, s, t, ranks)} {half(op, s, t - IN_PLACE, ranks)}"
        for s, t in sizes.items()
    )
    return f"""+ mpirun -np {ranks} ./build/{op_file(op)}_perf -b 1K -e 1G -f 2 -g 1
NCCL version 2.27.3+cuda12.9
# nThread 1 nGpus 1 minBytes 1024 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 graph: 0
#
# Using devices
{devices(ranks)}
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
{rows}
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 123.456
#
"""


def op_file(op):
    return op.replace("all_to_all", "alltoall")


def points(measurements):
    return [(s.op, s.nbytes, s.ranks, s.nodes, s.time_s) for s in measurements.collectives]


def expected(op="all_reduce", ranks=N, nodes=2, less=0.0):
    return [(op, s, ranks, nodes, pytest.approx((t - less) * 1e-6, rel=1e-9)) for s, t in SIZES.items()]


@pytest.mark.parametrize(
    ("op", "middle"),
    [
        ("all_reduce", "float sum -1"),
        ("all_gather", "float none -1"),
        ("reduce_scatter", "bfloat16 avg -1"),
        ("all_to_all", "int8 none -1"),
        ("broadcast", "float none 0"),
        ("reduce", "half sum 0"),
        ("sendrecv", "fp8_e4m3 sum -1"),
    ],
)
def test_every_operation_of_the_modern_format(op, middle):
    made = parse_nccl_tests(modern(op, middle=middle), "run.log")
    assert points(made) == expected(op)
    assert made.provenance["device"] == "NVIDIA H100 80GB HBM3"
    assert {s.stack for s in made.collectives} == {"nccl/2.27.3"}
    assert {s.source for s in made.collectives} == {"run.log"}


def test_the_in_place_half():
    made = parse_nccl_tests(modern(), in_place=True)
    assert points(made) == expected(less=IN_PLACE)
    assert made.provenance["half"] == "in_place"


def old(columns, middle, op, tail="0e+00"):
    rows = "\n".join(
        f"  {s} {s // 4} float {middle} {half(op, s, t, 8, tail=tail)} {half(op, s, t - 0.5, 8, tail=tail)}"
        for s, t in SIZES.items()
    )
    return f"""# nThread 1 nGpus 8 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
{devices(8, 8, pid=False).replace("[0000:", "[0x").replace(":00]", "]")}
#
#                                              out-of-place                       in-place
#       size         count    type {columns}     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
{rows}
"""


@pytest.mark.parametrize(
    ("op", "columns", "middle"),
    [
        ("all_gather", "", ""),
        ("all_reduce", "redop", "sum"),
        ("broadcast", "root", "0"),
        ("reduce", "redop root", "sum 0"),
    ],
)
def test_formats_with_columns_of_the_operation_only(op, columns, middle):
    made = parse_nccl_tests(old(columns, middle, op, tail="N/A"), op=op)
    assert points(made) == expected(op, ranks=8, nodes=1)


def test_the_oldest_format_counts_milliseconds():
    rows = "\n".join(
        f"{s} {s // 4} float sum {half('all_reduce', s, t, 4, tail='0e+00', unit=1e-3)} 1.0 0.0 0.0 N/A"
        for s, t in SIZES.items()
    )
    text = f"""$ ./build/all_reduce_perf
# Using devices
#   Rank  0 on       ncrh device  0 [0x05] GeForce RTX 2080 Ti
#   Rank  1 on       ncrh device  1 [0x06] GeForce RTX 2080 Ti
#   Rank  2 on       ncrh device  2 [0x07] GeForce RTX 2080 Ti
#   Rank  3 on       ncrh device  3 [0x08] GeForce RTX 2080 Ti

#                                                 out-of-place                    in-place
#      bytes             N    type      op     time  algbw  busbw      res     time  algbw  busbw      res
{rows}
"""
    assert points(parse_nccl_tests(text)) == expected(ranks=4, nodes=1)


def test_real_lines_of_2019_leave_the_own_share_out_of_an_all_gather():
    """Two GTX 1080, as published: 32 MiB in 22,517 µs are 1.49 GB/s, half of which is what the other rank sent."""
    text = """===begin all_gather_perf test===
# nThread 1 nGpus 2 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
#   Rank  0 Pid  12991 on    Orlando device  0 [0x45] GeForce GTX 1080
#   Rank  1 Pid  12991 on    Orlando device  1 [0xc4] GeForce GTX 1080
#
#                                             out-of-place                       in-place
#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)             (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
    33554432       4194304   float    22517    0.75    0.75  0e+00    22296    0.75    0.75  0e+00
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 0.347488
===begin broadcast_perf test===
# nThread 1 nGpus 2 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#       size         count    type    root     time   algbw   busbw  error     time   algbw   busbw  error
    33554432       8388608   float       0    22752    1.47    1.47  0e+00    22774    1.47    1.47  0e+00
"""
    assert points(parse_nccl_tests(text)) == [
        ("all_gather", 1 << 25, 2, 1, pytest.approx(22517e-6)),
        ("broadcast", 1 << 25, 2, 1, pytest.approx(22752e-6)),
    ]


@pytest.mark.parametrize("tag", ["[1,0]<stdout>:", "[1,0]<stdout>: ", "[0] ", "[prterun-n1-77@1,0]<stdout>: ", "0: "])
def test_prefixes_of_launchers(tag):
    tagged = "\n".join(tag + line for line in modern().splitlines())
    assert points(parse_nccl_tests(tagged)) == expected()


def test_case_c06_tags_inside_rows_and_a_cliff():
    text = (
        "[0] 1048576 262144 float sum -1[0] 1626.5 0.64 1.24 0[0] 1630.0 0.64 1.23 0\n"
        "[0] 33554432 8388608 float sum -1\n"
        "[0] 2180.0 15.39 29.50 0\n"
        "node3:12:12 [0] NCCL INFO comm 0x55 rank 0\n"
        "[0] 2181.0 15.39 29.49 0\n"
        "[0] 67108864 16777216 float sum -1[0] 24410.0 2.75 5.27 0[0] 24400.0 2.75 5.27 0\n"
    )
    with pytest.warns(MeasurementWarning, match=r"67108864 bytes on 24 ranks takes 24410 µs, 11.2 times the time"):
        made = parse_nccl_tests(text, ranks=24, nodes=3)
    assert points(made) == [
        ("all_reduce", 1 << 20, 24, 3, pytest.approx(1626.5e-6)),
        ("all_reduce", 1 << 25, 24, 3, pytest.approx(2180e-6)),
        ("all_reduce", 1 << 26, 24, 3, pytest.approx(24410e-6)),
    ]


def test_several_runs_in_one_log():
    text = "==begin==\n" + modern() + "==begin==\n" + modern("all_gather", ranks=8, middle="float none -1")
    assert points(parse_nccl_tests(text)) == expected() + expected("all_gather", ranks=8, nodes=1)


def test_timestamps_and_per_iteration_columns_follow_the_header():
    text = (
        modern()
        .replace("#wrong     time", "#wrong i_min i_max time")
        .replace("busbw #wrong\n", "busbw #wrong timestamp\n")
    )
    lines = []
    for line in text.splitlines():
        tokens = line.split()
        if len(tokens) == 13 and tokens[0].isdigit():
            tokens = [*tokens[:9], "10.0", "12.0", *tokens[9:], "2026-05-01", "12:00:00"]
        lines.append(" ".join(tokens))
    assert points(parse_nccl_tests("\n".join(lines))) == expected()
    assert points(parse_nccl_tests("\n".join(lines), in_place=True)) == expected(less=IN_PLACE)


def nvidia_json(op="all_reduce", **changes):
    def body(nbytes, time_us):
        algbw = nbytes / time_us / 1e3
        return {"time": time_us, "alg_bw": algbw, "bus_bw": algbw * bus_factor(op, N), "nwrong": 0.0}

    results = [
        {
            "size": s,
            "count": s // 4,
            "type": "float",
            "redop": "sum",
            "root": "    -1",
            "out_of_place": body(s, t),
            "in_place": body(s, t - IN_PLACE),
        }
        for s, t in SIZES.items()
    ]
    hosts = [{"rank": r, "group": 0, "hostname": f"n{r // 8}", "device_info": "NVIDIA H100"} for r in range(N)]
    document = {
        "version": 2,
        "args": ["./build/all_reduce_perf", "-J", "x"],
        "nccl_version": 22703,
        "config": {"nthreads": 1, "ngpus": 1, "devices": hosts},
        "results": results,
    }
    return {**document, **changes}


def test_json_of_nccl_tests(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(nvidia_json()))
    assert recognise(path) == "nccl-tests"
    made = read(path)
    assert points(made) == expected()
    assert {s.stack for s in made.collectives} == {"nccl/2.27.3"}
    assert points(read_nccl_tests(path, in_place=True)) == expected(less=IN_PLACE)


def test_json_without_mpi_lists_one_device_of_several():
    document = nvidia_json(
        config={"nthreads": 2, "ngpus": 8, "devices": [{"rank": 0, "hostname": "n0", "device_info": "x"}]}
    )
    assert points(parse_nccl_tests(json.dumps(document))) == expected(nodes=1)


def rccl_rows():
    for s, t in SIZES.items():
        for in_place in (0, 1):
            time = t - IN_PLACE * in_place
            algbw, busbw = bandwidths("all_reduce", s, time, N)
            yield {
                "nodes": 2,
                "ranks": N,
                "ranksPerNode": 8,
                "gpusPerRank": 1,
                "size": s,
                "type": "float",
                "redop": "sum",
                "inPlace": in_place,
                "time": time,
                "algBw": float(algbw),
                "busBw": float(busbw),
                "wrong": "0",
            }


@pytest.mark.parametrize("in_place", [False, True])
def test_csv_and_json_of_rccl_tests(tmp_path, in_place):
    rows = list(rccl_rows())
    header = "numCycle,collective,nodes,ranks,ranksPerNode,gpusPerRank,size,type,redop,inplace,time,algbw,busbw,#wrong"
    table = "\n".join([header, *(",".join(map(str, (0, "AllReduce", *row.values()))) for row in rows)])
    path = tmp_path / "run.csv"
    path.write_text(table)
    assert recognise(path) == "nccl-tests"
    want = expected(less=IN_PLACE * in_place)
    assert points(read_nccl_tests(path, in_place=in_place)) == want
    document = [{"numCycle": 0, "name": "AllReduce", **row} for row in rows]
    assert points(parse_nccl_tests(json.dumps(document), in_place=in_place)) == want
    # without the column of nodes, ranks per node tell them
    short = "\n".join(",".join(cells[:2] + cells[3:]) for cells in (line.split(",") for line in table.splitlines()))
    assert points(parse_nccl_tests(short, in_place=in_place)) == want


def test_csv_with_both_halves_as_columns():
    lines = ["size,count,type,redop,root,oop-time,oop-algbw,oop-busbw,oop-error,ip-time,ip-algbw,ip-busbw,ip-error"]
    for s, t in SIZES.items():
        lines.append(
            f"{s},{s // 4},float,sum,-1,{half('all_reduce', s, t, N)} {half('all_reduce', s, t - IN_PLACE, N)}".replace(
                " ", ","
            )
        )
    text = "\n".join(lines)
    given = {"op": "allreduce", "ranks": N, "nodes": 2}
    assert points(parse_nccl_tests(text, **given)) == expected()
    assert points(parse_nccl_tests(text, in_place=True, **given)) == expected(less=IN_PLACE)


BROKEN = modern().splitlines()
ROW = next(i for i, line in enumerate(BROKEN) if line.split()[:1] == ["1048576"])


def broken(change):
    return "\n".join([*BROKEN[:ROW], change(BROKEN[ROW]), *BROKEN[ROW + 1 :]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (broken(lambda row: row.rsplit(maxsplit=2)[0]), rf"a.log:{ROW + 1}: the row '1048576 .*' has 11 of 13 columns"),
        (broken(lambda row: row + " 7 8"), rf"a.log:{ROW + 1}: 15 columns instead of 13"),
        (
            broken(lambda row: row.replace("54.53", "54530.00")),
            rf"a.log:{ROW + 1}: 1048576 bytes in 54530 µs are 0.01923 GB/s, but the row says 19.23",
        ),
        (
            broken(lambda row: row.replace("54.53", "nan")),
            rf"a.log:{ROW + 1}: column time holds 'nan', which is no number",
        ),
        (broken(lambda row: row.replace("54.53", "-54.53")), rf"a.log:{ROW + 1}: time '-54.53' is not positive"),
        ("nothing here\n", r"a.log: no row with out-of-place results"),
        (modern("all_gather"), r"busbw/algbw is 0.93\d*, but all_reduce on 16 ranks has 1.88"),
        ('{"results": [', r"a.log:1: not valid JSON at character 13"),
        ('{"version": 1}', r"no list 'results'"),
        (
            json.dumps(nvidia_json(results=[{"size": 8, "out_of_place": {}}])),
            r"a.log: results\[0\] has no size or no time",
        ),
        ("size,time,algbw\n8,1", r"a.log:2: 2 cells, but the header has 3"),
        ("size,algbw,busbw\n8,1,1", r"a.log:1: no column for times among size, algbw, busbw"),
        ("size,time,ranks\nbig,1,2", r"a.log:2: column size holds 'big'"),
    ],
)
def test_malformed_input_names_file_and_line(text, message):
    op = "all_reduce" if "all_gather_perf" in text else None
    with pytest.raises(MeasurementError, match=message):
        parse_nccl_tests(text, "a.log", op=op)


def test_what_the_file_does_not_say_must_be_given():
    rows = "\n".join(
        line for line in modern("broadcast", middle="float none 0").splitlines() if line.split()[0].isdigit()
    )
    with pytest.raises(MeasurementError, match=r"text:1: the file does not name its operation; pass --op \(in Python"):
        parse_nccl_tests(rows, ranks=N)
    with pytest.raises(MeasurementError, match=r"text:1: the file does not say how many ranks ran"):
        parse_nccl_tests(rows, op="broadcast")
    with pytest.raises(MeasurementError, match=r"unknown operation 'all_redcue'; did you mean 'all_reduce'"):
        parse_nccl_tests(rows, op="all_redcue")
    assert points(parse_nccl_tests(rows, op="broadcast", ranks=N, nodes=2)) == expected("broadcast")


def test_the_operation_may_come_from_the_file_s_name_or_from_whoever_asks():
    unnamed = old("", "", "all_gather", tail="N/A")
    named = parse_nccl_tests(unnamed, "runs/8x-all_gather_perf.log")
    assert points(named) == expected("all_gather", ranks=8, nodes=1)
    assert points(parse_nccl_tests(unnamed, usual_op="all_gather")) == points(named)
    # what a file says of itself counts for more than a usual operation, and less than one that is given for all rows
    assert points(parse_nccl_tests(modern("broadcast"), usual_op="all_gather")) == expected("broadcast")
    with pytest.raises(MeasurementError, match=r"unknown operation 'all_gathr'; did you mean 'all_gather'"):
        parse_nccl_tests(unnamed, usual_op="all_gathr")


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_reductions_are_told_apart_by_their_bandwidths(op, ranks):
    rows = "\n".join(
        line for line in modern(op, ranks=ranks).splitlines() if line.split()[0].isdigit() and line.split()[0] != "1024"
    )
    made = parse_nccl_tests(rows, ranks=ranks)
    assert {s.op for s in made.collectives} == {op}


def test_warnings_for_what_is_left_out_or_looks_wrong():
    with pytest.warns(MeasurementWarning, match=r"operation 'hypercube' is not one of .*; its rows are left out"):
        assert not parse_nccl_tests(
            modern().replace("all_reduce_perf", "hypercube_perf").replace("./build/", "# Collective test starting: ")
        ).collectives
    with pytest.warns(MeasurementWarning, match=r":\d+: 3 elements of the result were wrong"):
        parse_nccl_tests(broken(lambda row: row.replace(" 0 ", " 3 ", 1)))
    with pytest.warns(MeasurementWarning, match=r"hosts hold \[4, 12\] ranks"):
        parse_nccl_tests(
            modern()
            .replace("on node-1 device  4", "on node-0 device  4")
            .replace("on node-1 device  5", "on node-0 device  5")
            .replace("on node-1 device  6", "on node-0 device  6")
            .replace("on node-1 device  7", "on node-0 device  7")
        )


def test_busbw_above_any_link_is_legal():
    """Case C12: it is a fixed rescale of algbw, so trees and NVLS may exceed the wire."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = parse_nccl_tests(modern(sizes={1 << 30: 500.0}))
    assert made.collectives[0].time_s == pytest.approx(500e-6)


def test_cliffs_are_points_off_the_monotone_curve():
    def curve(*times):
        return [CollectiveSample("all_reduce", 2.0**i, 8, 1, t, "x") for i, t in enumerate(times)]

    assert cliffs(curve(1, 1.1, 2, 4, 8, 16)) == ()
    assert [s.nbytes for s, _ in cliffs(curve(1, 2, 3, 13, 14))] == [8.0]  # a jump that stays
    assert [s.nbytes for s, _ in cliffs(curve(4, 2, 2, 2))] == [1.0]  # above the next larger size


def test_operation_names():
    assert [op_name(n) for n in ("AlltoAll", "build/reduce_scatter_perf", "Broadcast", "SendRecv", "gather")] == [
        "all_to_all",
        "reduce_scatter",
        "broadcast",
        "sendrecv",
        "",
    ]


def test_unknown_and_unreadable_files(tmp_path):
    with pytest.raises(MeasurementError, match=r"cannot read '.*absent.log': No such file or directory"):
        read(tmp_path / "absent.log")
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MeasurementError, match=r"byte 0 is not UTF-8 text"):
        read(tmp_path / "a.bin")
    (tmp_path / "b.gz").write_bytes(b"\x1f\x8b\x08broken")
    with pytest.raises(MeasurementError, match=r"cannot read '.*b.gz'"):
        read(tmp_path / "b.gz")
    (tmp_path / "c.txt").write_text("hello\n")
    with pytest.raises(MeasurementError, match=r'is no measurement that can be imported, beginning with "hello"'):
        read(tmp_path / "c.txt")
