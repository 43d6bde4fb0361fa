"""H100 or B200: on which does a training run cost less?

Finds the fastest plan for each among the same choices, and turns step times into money and energy for a whole run.
Prices are assumptions: edit them. The answer is also given as the price ratio up to which B200 is cheaper, which needs
no assumption.

    python scenarios/h100_or_b200.py [chart.html]
"""

import sys
from typing import Any

import simpar
from simpar.view.chart import write_chart

MODEL = "llama3-70b"
NODES = 32  # of 8 GPUs, 400 Gb/s a GPU
GLOBAL_BATCH = 256  # samples a step
SEQ_LEN = 8_192  # tokens a sample
RUN_TOKENS = 1e12  # of the whole training run
PRICES = {"h100-sxm": 2.5, "b200-sxm": 5.0}  # assumed US dollars a GPU-hour, as on-demand clouds ask in 2025
OVERHEAD_W = 300.0  # assumed draw of hosts, NICs and switches for each GPU
PUE = 1.2  # assumed
CHOICES: dict[str, list[Any]] = {  # what is tried on each
    "tp": [4],
    "pp": [1, 4],
    "vpp": [1, 5],
    "zero": [1, 3],
    "sequence_parallel": [True],
    "micro_batch": [1],
    "recompute": ["none", "full"],
}


def main(chart: str = "h100_or_b200.html") -> None:
    """Prints a line for each device, what differs, and the answer."""
    print(f"{MODEL}, {RUN_TOKENS:.0e} tokens on {NODES * 8} GPUs, {GLOBAL_BATCH} × {SEQ_LEN:,} tokens a step\n")
    results = {device: fastest(device, price) for device, price in PRICES.items()}
    print(f"{'':10}{'plan':24}{'step':>8}{'MFU':>8}{'$/GPU-hour':>12}{'days':>7}{'million $':>11}{'GWh':>7}")
    money: dict[str, dict[str, float]] = {"million $": {}, "GWh": {}, "days / 10": {}}
    for device, result in results.items():
        run = result.cost(RUN_TOKENS).run
        assert run is not None
        assert run.price is not None
        assert run.energy_kwh is not None
        days = run.time_s / 86_400
        money["million $"][device] = run.price / 1e6
        money["GWh"][device] = run.energy_kwh / 1e6
        money["days / 10"][device] = days / 10
        print(
            f"{device:10}{described(result.job.plan):24}{result.step_time_s:6.2f} s{result.mfu:8.1%}"
            f"{PRICES[device]:12.2f}{days:7.1f}{run.price / 1e6:11.2f}{run.energy_kwh / 1e6:7.2f}"
        )
    answer = verdict(*results.values())
    print(f"\n{answer}")
    write_chart(
        chart,
        money,
        title=f"H100 or B200 for {RUN_TOKENS:.0e} tokens of {MODEL}?",
        answer=answer,
        across="device",
        value="million $, GWh, tens of days",
        form="bars",
    )
    print(f"\nchart: {chart}")


def fastest(device: str, price: float) -> simpar.Result:
    """The step of the fastest plan on so many nodes of the device."""
    cluster = simpar.Cluster.parse(f"{device}:{NODES}x8").replace(
        price_per_gpu_hour=price, overhead_w_per_gpu=OVERHEAD_W, pue=PUE
    )
    found = simpar.search(MODEL, cluster, global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN, choices=CHOICES, top=1, workers=1)
    return simpar.simulate(found.job(found.best))


def described(plan: simpar.Plan) -> str:
    """What sets the plan apart, in a few words."""
    words = [f"tp{plan.tp}", f"pp{plan.pp}" + (f"×{plan.vpp}" if plan.vpp > 1 else ""), f"zero{plan.zero}"]
    return " ".join(words + (["recompute"] if plan.recompute == "full" else []))


def verdict(h100: simpar.Result, b200: simpar.Result) -> str:
    """Which is cheaper at these prices, up to which price, and how sure the speed-up is."""
    compared = simpar.compare(b200, h100)
    ratio = h100.step_time_s / b200.step_time_s
    low, high = compared.ratio_interval
    names = [result.job.cluster.device.name for result in (h100, b200)]
    asked = PRICES[names[1]] / PRICES[names[0]]
    cheaper, dearer = (names[1], names[0]) if asked < ratio else (names[0], names[1])
    saved = 1 - min(asked / ratio, ratio / asked)
    sure = "" if asked < low or asked > high else "; the interval holds the ratio of the prices, so it may be the other"
    return (
        f"A {names[1]} does the work of {ratio:.2f} {names[0]} (80 %: {low:.2f} to {high:.2f}), so it is cheaper below "
        f"{ratio:.2f} times the price.\n"
        f"At {asked:.2f} times the price, {cheaper} saves {saved:.0%} of the money over {dearer}{sure}."
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
