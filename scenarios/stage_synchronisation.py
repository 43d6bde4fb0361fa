"""Do pipeline stages lose time if they hand over by rendezvous instead of by messages with buffers?

With message passing a sender goes on at once and the receiver buffers what comes; with condition variables a transfer
starts only when both sides are there. Stages of equal speed meet on time either way; stages that differ, always or by
chance, do not. Compares both on a pipeline of equal stages, with one slow stage, and with noise.

    python scenarios/stage_synchronisation.py [chart.html]
"""

import sys

import simpar
from simpar import Plan
from simpar.faults.description import Faults, Jitter
from simpar.view.chart import write_chart

MODEL = "llama2-13b"
CLUSTER = "h100-sxm:8x8"  # one pipeline stage a node
SHAPE = Plan(tp=8, pp=8, sequence_parallel=True, global_batch=64, seq_len=4_096)  # 64 microbatches
SLOW_SPEED = 0.8  # of the GPUs of the slow stage
SPREAD = 0.2  # of the time of each microbatch's pass: standard deviation over mean

STAGES = {
    "equal stages": Faults(),
    "one slow stage": Faults(slow_gpus=dict.fromkeys(range(24, 32), SLOW_SPEED)),
    "noisy stages": Faults(jitter=Jitter(spread=SPREAD)),
}
WAYS = {
    "messages, no limit": {"stage_sync": "message_passing"},
    "messages, buffer 2": {"stage_sync": "message_passing", "stage_buffer": 2},
    "messages, buffer 1": {"stage_sync": "message_passing", "stage_buffer": 1},
    "condition variables": {"stage_sync": "condition_variable"},
}
SCHEDULES = ("gpipe", "1f1b")


def main(chart: str = "stage_synchronisation.html") -> None:
    """Prints the step time of every way, schedule and kind of stages."""
    print(f"{MODEL} on {CLUSTER}, tp {SHAPE.tp}, pp {SHAPE.pp}, {SHAPE.global_batch} microbatches; step time (bubble)\n")
    print(f"{'':30}" + "".join(f"{way:>22}" for way in WAYS))
    series: dict[str, dict[str, float]] = {way: {} for way in WAYS}
    for schedule in SCHEDULES:
        for stages, faults in STAGES.items():
            case = f"{schedule}, {stages}"
            results = {way: simulate(schedule, faults, fields) for way, fields in WAYS.items()}
            print(f"{case:30}" + "".join(f"{cell(result):>22}" for result in results.values()))
            for way, result in results.items():
                series[way][case] = result.step_time_s
    answer = verdict(series)
    print(f"\n{answer}")
    write_chart(
        chart,
        series,
        title="Message passing or condition variables between stages?",
        answer=answer,
        across="schedule and stages",
        value="step time (s)",
        form="bars",
    )
    print(f"\nchart: {chart}")


def simulate(schedule: str, faults: Faults, fields: dict[str, object]) -> simpar.Result:
    """A step with that way to hand over."""
    plan = SHAPE.replace(schedule=schedule, recompute="full", **fields)
    return simpar.simulate(simpar.Job(model=MODEL, cluster=CLUSTER, plan=plan, faults=faults))


def cell(result: simpar.Result) -> str:
    """Time and bubble of a step."""
    return f"{result.step_time_s:.3f} s ({result.bubble_fraction:.1%})"


def verdict(series: dict[str, dict[str, float]]) -> str:
    """What rendezvous costs where the stages are equal, and where it costs most."""
    free, *_, strict = WAYS
    loss = {case: series[strict][case] / series[free][case] - 1 for case in series[free]}
    worst = max(loss, key=lambda case: loss[case])
    rest = ", ".join(f"{case} {lost:.1%}" for case, lost in loss.items() if case != worst)
    small = series[list(WAYS)[-2]][worst] / series[free][worst] - 1
    return (
        f"Condition variables cost most with {worst}: {loss[worst]:.1%} of the step over messages without limit "
        f"(elsewhere: {rest}).\nA buffer of one microbatch loses {small:.1%} there."
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
