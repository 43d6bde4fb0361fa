"""Does the simulator reproduce the tables of the two Megatron-LM papers?

Predicts steps that were published and prints them beside the published times: Korthikanti et al. 2022
(arXiv:2205.05198), Table 5, the effect of sequence parallelism with selective recomputation; and Narayanan et al. 2021
(SC21, arXiv:2104.04473), Table 2, pipeline with tensor parallelism on more and more GPUs. Nothing is fitted to these
rows: devices and networks are those of the catalog, and what the software did is in the framework's description. Rows
of Table 5 that take longer to simulate, of 530 B and 1 T parameters, are left out here; `simpar validate` has them all.

    python scenarios/published_tables.py [chart.html]
"""

import sys
from collections.abc import Mapping
from statistics import mean, median
from typing import Any, NamedTuple

import simpar
from simpar import Plan
from simpar.units import TFLOP
from simpar.view.chart import write_chart

DEVICE = "a100-sxm"  # 80 GB, in nodes of 8 with NVLink 3; 200 Gb/s InfiniBand for each GPU
SOFTWARE = Plan(framework="megatron-lm-2021", precision="fp16", attention="unfused", seq_len=2_048, tp=8)


PIPELINE: dict[str, Any] = {"pp": 8, "schedule": "interleaved", "vpp": 3}


class Row(NamedTuple):
    """A published run, and what is published of it: the time of a step, or FLOP/s of a GPU."""

    source: str
    model: str
    gpus: int
    plan: Mapping[str, Any]
    step_s: float | None = None
    tflop_per_s: float | None = None

    @property
    def name(self) -> str:
        """What sets the row apart."""
        kept = "selective, SP" if self.plan["recompute"] == "selective" else "full recompute"
        return f"{self.model}, {self.gpus:,} GPUs, {kept}"

    @property
    def published_s(self) -> float:
        """Seconds of a step; from FLOP/s by the formula that the paper counts them with (its equation 3)."""
        if self.step_s is not None:
            return self.step_s
        assert self.tflop_per_s is not None
        model = simpar.Job(model=self.model, cluster=DEVICE + ":8").model
        assert isinstance(model, simpar.Transformer)
        layers, hidden, vocab, seq_len = model.layers, model.hidden, model.vocab, SOFTWARE.seq_len or 0
        tokens = self.plan["global_batch"] * seq_len
        # a forward pass is 24 tokens layers hidden² and more; backward takes two of it, recomputation one
        flop: float = 96 * tokens * layers * hidden**2 * (1 + seq_len / (6 * hidden) + vocab / (16 * layers * hidden))
        return flop / (self.gpus * self.tflop_per_s * TFLOP)


FULL: dict[str, Any] = {"recompute": "full"}
PRESENT: dict[str, Any] = {"recompute": "selective", "sequence_parallel": True}
GPT3: dict[str, Any] = {"pp": 12, "global_batch": 1_536, **FULL}
KORTHIKANTI, NARAYANAN = "Korthikanti et al. 2022, Table 5", "Narayanan et al. 2021, Table 2"
ROWS = (
    Row(KORTHIKANTI, "gpt3-22b", 8, {"micro_batch": 4, "global_batch": 4, **FULL}, step_s=1.42),
    Row(KORTHIKANTI, "gpt3-22b", 8, {"micro_batch": 4, "global_batch": 4, **PRESENT}, step_s=1.10),
    Row(KORTHIKANTI, "gpt3-175b", 64, {**PIPELINE, "global_batch": 64, **FULL}, step_s=18.13),
    Row(KORTHIKANTI, "gpt3-175b", 64, {**PIPELINE, "global_batch": 64, **PRESENT}, step_s=13.75),
    Row(NARAYANAN, "gpt3-175b", 384, GPT3, tflop_per_s=153),
    Row(NARAYANAN, "gpt3-175b", 768, GPT3, tflop_per_s=149),
    Row(NARAYANAN, "gpt3-175b", 1_536, GPT3, tflop_per_s=141),
    Row(NARAYANAN, "gpt3-530b", 2_240, {"pp": 35, "global_batch": 2_240, **FULL}, tflop_per_s=159),
)


def main(chart: str = "published_tables.html") -> None:
    """Prints predicted beside published step times, and the errors."""
    width = max(len(row.name) for row in ROWS)
    results = [predict(row) for row in ROWS]
    for source in dict.fromkeys(row.source for row in ROWS):
        print(f"{source}\n{'':{width}}{'published':>12}{'predicted':>12}{'error':>8}")
        for row, result in zip(ROWS, results, strict=True):
            if row.source == source:
                print(
                    f"{row.name:{width}}{row.published_s:10.2f} s{result.step_time_s:10.2f} s"
                    f"{result.step_time_s / row.published_s - 1:+8.1%}"
                )
        print()
    answer = verdict(results)
    print(answer)
    names = [row.name for row in ROWS]
    ratios = (result.step_time_s / row.published_s for row, result in zip(ROWS, results, strict=True))
    series = {"published": dict.fromkeys(names, 1.0), "predicted": dict(zip(names, ratios, strict=True))}
    write_chart(
        chart,
        series,
        title="Published and predicted steps of Megatron-LM",
        answer=answer,
        across="run",
        value="step time over the published one",
        form="bars",
    )
    print(f"\nchart: {chart}")


def predict(row: Row) -> simpar.Result:
    """The step of a published run."""
    cluster = f"{DEVICE}:{row.gpus // 8}x8"
    return simpar.simulate(simpar.Job(model=row.model, cluster=cluster, plan=SOFTWARE.replace(**row.plan)))


def verdict(results: list[simpar.Result]) -> str:
    """The errors, and whether what the first paper claims comes out too."""
    times = {row.name: result.step_time_s for row, result in zip(ROWS, results, strict=True)}
    errors = [times[row.name] / row.published_s - 1 for row in ROWS]
    full, present = (row for row in ROWS if row.model == "gpt3-175b" and row.source == KORTHIKANTI)
    return (
        f"Over {len(ROWS)} runs the median error is {median(map(abs, errors)):.1%}, the largest "
        f"{max(map(abs, errors)):.1%}, the mean with its sign {mean(errors):+.1%}.\n"
        f"Selective recomputation with sequence parallelism makes GPT-3 175B "
        f"{full.published_s / present.published_s - 1:.0%} faster as published, "
        f"{times[full.name] / times[present.name] - 1:.0%} as predicted."
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
