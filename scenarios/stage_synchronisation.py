"""Do pipeline stages lose time if they hand over by rendezvous instead of by messages with buffers?

With message passing a sender goes on at once and the receiver buffers what comes; with condition variables a transfer
starts only when both sides are there. Stages of equal speed meet on time either way; stages that differ, always or by
chance, do not. Compares both on a pipeline of equal stages, with one slow stage, and with noise.

    python scenarios/stage_synchronisation.py [chart.html]
"""

import sys
from statistics import mean
from typing import Any

import simpar
from simpar import Overlap, Plan
from simpar.faults.description import Faults, Jitter
from simpar.view.chart import write_chart

MODEL = "llama2-7b"
CLUSTER = {"base": "h100-sxm:8x1", "fabric": {"nic_gbps": 25}}  # a pipeline stage on each node, 25 Gb/s between them
SHAPE = Plan(pp=8, recompute="full", global_batch=16, seq_len=4_096, overlap=Overlap(p2p=True))  # 16 microbatches
SLOW_GPU, SLOW_SPEED = 3, 0.8  # the stage that is always slower, and its speed
SPREAD = 0.3  # of the time of each microbatch's pass: standard deviation over mean
SEEDS = range(2)  # steps of random times, of which the mean is taken

NOISE = tuple(Faults(jitter=Jitter(spread=SPREAD), seed=seed) for seed in SEEDS)
STAGES = {"equal": (Faults(),), "one slow": (Faults(slow_gpus={SLOW_GPU: SLOW_SPEED}),), "noisy": NOISE}
WAYS: dict[str, dict[str, Any]] = {
    "messages, no limit": {"stage_sync": "message_passing"},
    "messages, buffer 1": {"stage_sync": "message_passing", "stage_buffer": 1},
    "condition variables": {"stage_sync": "condition_variable"},
}
SCHEDULES: dict[str, dict[str, Any]] = {"gpipe": {}, "1f1b": {}, "interleaved": {"vpp": 2}}


def main(chart: str = "stage_synchronisation.html") -> None:
    """Prints the step time of every way, schedule and kind of stages."""
    print(f"{MODEL} on {SHAPE.pp} stages, {SHAPE.global_batch} microbatches; step time (idle)\n")
    print(f"{'schedule, stages':22}" + "".join(f"{way:>22}" for way in WAYS))
    series: dict[str, dict[str, float]] = {way: {} for way in WAYS}
    for schedule in SCHEDULES:
        for stages, faults in STAGES.items():
            case = f"{schedule}, {stages}"
            line = f"{case:22}"
            for way in WAYS:
                results = [simulate(schedule, way, one) for one in faults]
                series[way][case] = mean(result.step_time_s for result in results)
                line += f"{series[way][case]:12.3f} s ({mean(map(idle, results)):5.1%})"
            print(line)
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


def simulate(schedule: str, way: str, faults: Faults) -> simpar.Result:
    """A step with that way to hand over."""
    plan = SHAPE.replace(schedule=schedule, **SCHEDULES[schedule], **WAYS[way])
    return simpar.simulate(simpar.Job(model=MODEL, cluster=CLUSTER, plan=plan, faults=faults))


def idle(result: simpar.Result) -> float:
    """Share of the step in which GPUs wait for each other or for a transfer."""
    return result.bubble_fraction + result.exposed_fraction


def verdict(series: dict[str, dict[str, float]]) -> str:
    """What rendezvous costs where the stages are equal, and where it costs most."""
    free, *_, strict = WAYS
    loss = {case: series[strict][case] / series[free][case] - 1 for case in series[free]}
    small = {case: series["messages, buffer 1"][case] / series[free][case] - 1 for case in series[free]}
    worst, tight = max(loss, key=lambda case: loss[case]), max(small, key=lambda case: small[case])
    least = min(loss, key=lambda case: loss[case])
    return (
        f"Condition variables cost {loss[least]:.1%} ({least}) to {loss[worst]:.1%} ({worst}) of a step over messages "
        f"without limit.\nA buffer of one microbatch costs at most {small[tight]:.1%} ({tight})."
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
