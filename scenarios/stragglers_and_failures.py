"""What do slow GPUs, a bad link, noise and failures cost a run of Llama 3 8B on 32 H100?

First one step: a slow GPU, a NIC at a quarter of its rate, a lossy one, a late data loader, and noise on every kernel,
each by two plans. Then a run of days: how often to write a checkpoint, and how much of the time trains. At last the
published run of Llama 3 405B, which 419 failures interrupted in 54 days. Copy the file and edit what stands in
capitals.

    python scenarios/stragglers_and_failures.py [chart.html]
"""

import sys

import simpar
from simpar import Plan
from simpar.reliability.failures import Failures
from simpar.reliability.goodput import goodput
from simpar.units import format_duration
from simpar.view.chart import write_chart

MODEL = "llama3-8b"
CLUSTER = "h100-sxm:4x8"
SEQ_LEN = 4_096  # tokens a sample
GLOBAL_BATCH = 64  # samples a step
PLANS = {
    "FSDP": Plan(zero=3, micro_batch=2),
    "TP4, ZeRO-1": Plan(tp=4, sequence_parallel=True, zero=1, micro_batch=2),
}
FAULTS = {
    "GPU 3 at 90 %": {"slow_gpus": {3: 0.9}},
    "GPU 3 at 60 %": {"slow_gpus": {3: 0.6}},
    "NIC of GPU 3 at 25 %": {"slow_links": {"nic3": 0.25}},
    "NIC of GPU 3 loses 0.1 %": {"lossy_links": {"nic3": 0.001}, "resent_packets": 1_000},  # go-back-N
    "one loader late by 0.5 s": {"loader": {"delay_s": 0.5, "replicas": (2,)}},
}
JITTER = 0.05  # standard deviation of a pass of a microbatch over its mean
DRAWS = 5

MTBF_GPU_H = 50_000  # hours; Llama 3's run had 50,700
RESTART_S = 600  # from a failure until training goes on
DAYS = 54
LLAMA3_GPUS = 16_384
LLAMA3_UNEXPECTED = 419  # interruptions in these days: arXiv:2407.21783, section 3.3.4, with over 90 % effective time


def main(chart: str = "stragglers_and_failures.html") -> None:
    """Prints the cost of faults in a step, of failures in a run, and the published run; draws the first."""
    print(f"{MODEL} on {CLUSTER}: step time, and what each fault adds\n")
    added = print_steps()
    print(f"\nA pass of a microbatch varies by {JITTER:.0%}: {DRAWS} steps of FSDP\n")
    print_noise()
    print(f"\n{DAYS} days on {LLAMA3_GPUS:,} GPUs that fail every {MTBF_GPU_H:,} h each\n")
    print_goodput(MTBF_GPU_H)
    print(f"\nLlama 3 405B: {LLAMA3_UNEXPECTED} failures in {DAYS} days, more than 90 % effective training time\n")
    print_llama3()
    worst = max(FAULTS, key=lambda fault: max(plan[fault] for plan in added.values()))
    write_chart(
        chart,
        added,
        title="What a fault adds to a step",
        answer=f"{worst} costs most: up to {max(plan[worst] for plan in added.values()):.0f} %",
        across="fault",
        value="longer step (%)",
        form="bars",
    )
    print(f"\nchart: {chart}")


def job(plan: Plan, faults: dict | None = None) -> simpar.Job:
    """The job by one plan."""
    plan = plan.replace(seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH)
    return simpar.Job(model=MODEL, cluster=CLUSTER, plan=plan, faults=faults or {})


def print_steps() -> dict[str, dict[str, float]]:
    """One line a fault, one column a plan; what each adds, in per cent, by plan and fault."""
    print(f"{'':26}" + "".join(f"{name:>14}" for name in PLANS))
    healthy = {name: simpar.simulate(job(plan)).step_time_s for name, plan in PLANS.items()}
    print(f"{'healthy':26}" + "".join(f"{step_s:12.3f} s" for step_s in healthy.values()))
    added: dict[str, dict[str, float]] = {name: {} for name in PLANS}
    for fault, faults in FAULTS.items():
        slow = [simpar.simulate(job(plan, faults)).step_time_s / healthy[name] for name, plan in PLANS.items()]
        print(f"{fault:26}" + "".join(f"{factor - 1:+14.1%}" for factor in slow))
        for name, factor in zip(PLANS, slow, strict=True):
            added[name][fault] = 100 * (factor - 1)
    return added


def print_noise() -> None:
    """What noise costs because all wait for the slowest."""
    found = simpar.monte_carlo(job(PLANS["FSDP"], {"jitter": {"spread": JITTER}}), n=DRAWS, workers=1)
    shown = ", ".join(f"{share:.0%} within {time:.3f} s" for share, time in found.quantiles((0.5, 0.9)).items())
    print(f"without {found.quiet_s:.3f} s, with it {found.mean_s:.3f} s ({found.slowdown - 1:+.1%}): {shown}")


def print_goodput(mtbf_gpu_h: float) -> None:
    """The best interval between checkpoints, and the goodput with it, by how long a checkpoint stops training."""
    print(f"{'checkpoint':>10}  {'best interval':>13}  {'Daly':>8}  goodput  done again  checkpoints  restarts")
    for checkpoint_s in (1, 10, 60, 300):
        found = goodput(failures(mtbf_gpu_h, checkpoint_s, RESTART_S), runs=2)
        again, saving, restarting = (found.shares()[name] for name in ("done again", "checkpoints", "restarts"))
        print(
            f"{checkpoint_s:8} s  {format_duration(found.best.interval_s):>13}  {format_duration(found.daly_s):>8}  "
            f"{found.goodput:7.1%}  {again:10.1%}  {saving:11.1%}  {restarting:8.1%}"
        )


def print_llama3() -> None:
    """Which checkpoints and restarts agree with the published share of time."""
    mtbf_gpu_h = DAYS * 24 * LLAMA3_GPUS / LLAMA3_UNEXPECTED
    for checkpoint_s, restart_s in ((5, 600), (5, 1_200), (30, 600), (60, 300)):
        found = goodput(failures(mtbf_gpu_h, checkpoint_s, restart_s), runs=2)
        agrees = "agrees" if found.goodput > 0.9 else "too slow"
        print(f"checkpoints of {checkpoint_s:2} s, restarts of {restart_s // 60:2} min: {found.goodput:.1%}  {agrees}")


def failures(mtbf_gpu_h: float, checkpoint_s: float, restart_s: float) -> Failures:
    """The failures of Llama 3's cluster, with these costs."""
    costs = {"checkpoint_s": checkpoint_s, "restart_s": restart_s}
    return Failures(gpus=LLAMA3_GPUS, mtbf_gpu_h=mtbf_gpu_h, days=DAYS, **costs)


if __name__ == "__main__":
    main(*sys.argv[1:])
