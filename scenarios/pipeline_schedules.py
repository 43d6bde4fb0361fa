"""Which pipeline schedule is fastest when all may use the same memory?

Schedules buy a smaller bubble with activations that live longer, so a comparison at equal microbatches is unfair to
those that save memory. Here each schedule gets the same budget per GPU and recomputes as many layers as it must to stay
within; then the fastest wins. Recomputation helps those least that put weight gradients off to fill bubbles: what was
recomputed has to wait for them.

    python scenarios/pipeline_schedules.py [chart.html]
"""

import sys
from functools import cache

import simpar
from simpar import Plan
from simpar.units import GIB
from simpar.view.chart import write_chart

MODEL = "llama2-13b"  # 40 layers
CLUSTER = "h100-sxm:4x8"
SHAPE = Plan(tp=2, pp=4, zero=1, sequence_parallel=True, global_batch=64, seq_len=4_096)  # 16 microbatches
STAGE_LAYERS = 10  # of the model on each GPU
BUDGETS_GIB = (64, 40, 26)  # memory that a GPU may use
RECOMPUTED = (0.0, 0.4, 0.8, 1.0)  # shares of the layers to recompute, of which the least that fits is taken
CHUNKS = {"interleaved": 2, "looped-bfs": 2, "zb-1p": 2, "zb-v": 2, "dualpipev": 2}  # model chunks per rank
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "looped-bfs",
    "zb-h1",
    "zb-h2",
    "zb-1p",
    "zb-v",
    "dualpipe",
    "dualpipev",
)


def main(chart: str = "pipeline_schedules.html") -> None:
    """Prints every schedule within every budget, and which one wins in each."""
    print(f"{MODEL} on {CLUSTER}, tp {SHAPE.tp}, pp {SHAPE.pp}, {SHAPE.global_batch} × {SHAPE.seq_len:,} tokens a step")
    print("Each cell: step time, bubble, share of layers recomputed\n")
    print(f"{'':12}{'needs':>9}" + "".join(f"{f'within {budget} GiB':>24}" for budget in BUDGETS_GIB))
    table = {name: fit(name) for name in SCHEDULES}
    for name, row in table.items():
        needs = simulate(name, 0.0).peak_memory_bytes / GIB
        print(f"{name:12}{needs:5.1f} GiB" + "".join(f"{cell(choice):>24}" for choice in row.values()))
    answer = verdict(table)
    print(f"\n{answer}")
    series = {
        f"{budget} GiB": {
            name: choice and choice[1].step_time_s for name, row in table.items() for choice in (row[budget],)
        }
        for budget in BUDGETS_GIB
    }
    write_chart(
        chart,
        series,
        title="Which pipeline schedule is fastest at equal memory?",
        answer=answer,
        across="schedule",
        value="step time (s)",
        form="bars",
    )
    print(f"\nchart: {chart}")


Choice = tuple[float, simpar.Result] | None  # share of the layers recomputed, and the step


def fit(schedule: str) -> dict[int, Choice]:
    """For each budget the step with the least recomputation that stays within; None where none does."""
    row: dict[int, Choice] = {}
    for budget in BUDGETS_GIB:
        tried = ((share, simulate(schedule, share)) for share in RECOMPUTED)
        row[budget] = next((choice for choice in tried if choice[1].peak_memory_bytes <= budget * GIB), None)
    return row


@cache
def simulate(schedule: str, share: float) -> simpar.Result:
    """A step with that share of the layers recomputed."""
    chunks = CHUNKS.get(schedule, 1)
    plan = SHAPE.replace(schedule=schedule, vpp=chunks)
    if share:
        plan = plan.replace(recompute="full", recompute_layers=round(share * STAGE_LAYERS / chunks))
    return simpar.simulate(simpar.Job(model=MODEL, cluster=CLUSTER, plan=plan), allow_oom=True)


def cell(choice: Choice) -> str:
    """A step within its budget."""
    if choice is None:
        return "-"
    share, result = choice
    return f"{result.step_time_s:.2f} s {result.bubble_fraction:6.1%} {share:5.0%}"


def verdict(table: dict[str, dict[int, Choice]]) -> str:
    """The fastest schedule of each budget, against 1F1B."""
    lines = []
    for budget in BUDGETS_GIB:
        within = {name: choice[1].step_time_s for name, row in table.items() if (choice := row[budget])}
        if not within:
            lines.append(f"Within {budget} GiB none fits.")
            continue
        best = min(within, key=lambda name: within[name])
        out = [name for name in table if name not in within]
        lines.append(
            f"Within {budget} GiB {best} is fastest with {within[best]:.2f} s"
            + (f", {within['1f1b'] / within[best] - 1:.0%} faster than 1f1b" if best != "1f1b" in within else "")
            + (f"; {', '.join(out)} cannot stay within." if out else ".")
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
