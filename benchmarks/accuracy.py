"""How far are predictions from measured training steps? Reads a table of runs and predicts each row; fits nothing.

    python benchmarks/accuracy.py runs.csv [--source korthikanti2022 sc21_megatron] [--json]

The table has one row a run and a header (id, source, framework, model, gpu, ... step_time_s); a blank means that the
source does not say. What a framework does without saying so stands in one function for each framework, with where that
is known from; add a function to ``FRAMEWORKS`` to predict more sources.
"""

import argparse
import csv
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from simpar import Cluster, Job, Plan, SimparError, Transformer, simulate

Row = Mapping[str, str]
SOURCES = ("korthikanti2022", "sc21_megatron")
FABRICS = {  # fabric and Gb/s a GPU: name in the catalog
    ("infiniband", 200.0): "hdr200",
    ("infiniband", 400.0): "ndr400",
}


class CannotExpressError(ValueError):
    """A row that a job cannot describe, and why."""


@dataclass(frozen=True)
class Prediction:
    """One row: measured and predicted time of a step; ``error`` is predicted over measured, minus one."""

    id: str
    source: str
    model: str
    gpus: int
    plan: str
    measured_s: float
    predicted_s: float
    error: float
    fits: bool


@dataclass(frozen=True)
class Summary:
    """The errors of one source; ``bias`` is the mean with its sign."""

    source: str
    rows: int
    median: float
    p90: float
    bias: float


# ---- from a row to a job ------------------------------------------------------------------------------------------


def megatron_lm_2021(row: Row) -> Job:
    """Megatron-LM of 2021 and 2022, as its two papers ran it.

    * GPT: learned positions, LayerNorm, biases everywhere, tied embeddings, dropout (``megatron/model`` at v2.5).
    * Mixed fp16 (Narayanan et al. 2021, section 5; Korthikanti et al. 2022, section 6). Gradients stay fp16: only bf16
      switches ``--accumulate-allreduce-grads-in-fp32`` on (``megatron/arguments.py``).
    * All gradients are reduced after the last backward pass (``megatron/model/distributed.py``), and a stage waits for
      the end of its exchanges with its neighbours (``torch.cuda.synchronize`` in ``megatron/p2p_communication.py``).
    """
    if row["zero"] == "3":
        raise CannotExpressError("DeepSpeed ZeRO-3 of 2021 in Megatron's comparison, not Megatron-LM")
    model = transformer(
        row,
        position="learned",
        max_positions=int(row["seq_len"]),
        norm="layernorm",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        dropout=True,
    )
    overlap = {"grad_reduce": False, "param_gather": False, "p2p": False}
    return Job(model=model, cluster=cluster(row), plan=plan(row, precision="fp16", grad_dtype="fp16", overlap=overlap))


FRAMEWORKS: dict[str, Callable[[Row], Job]] = {"megatron-lm-2021": megatron_lm_2021}


def transformer(row: Row, **facts: Any) -> Transformer:
    """The model of a row, with what its framework adds."""
    if row["experts"]:
        raise CannotExpressError("mixture of experts")
    sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab")
    flags = ("gated_mlp", "tied_embeddings")
    return Transformer(
        name=row["model"],
        **{name: int(row[name]) for name in sizes},
        **{name: row[name] == "true" for name in flags},
        **facts,
    )


def cluster(row: Row) -> Cluster:
    """The cluster of a row."""
    gpus, local = int(row["num_gpus"]), int(row["gpus_per_node"])
    nodes = -(-gpus // local)
    if nodes * local != gpus and nodes > 1:
        raise CannotExpressError(f"{gpus} GPUs do not fill nodes of {local}")
    fields: dict[str, Any] = {"device": row["gpu"], "nodes": nodes, "gpus_per_node": min(local, gpus)}
    if nodes > 1:
        network = (row["fabric"], float(row["nic_gbps_per_gpu"]))
        if network not in FABRICS:
            raise CannotExpressError(f"no fabric for {network[0]} with {network[1]:g} Gb/s a GPU")
        fields["fabric"] = FABRICS[network]
    return Cluster.model_validate(fields)


def plan(row: Row, **facts: Any) -> Plan:
    """The plan of a row, with what its framework adds."""
    if row["cp"] not in ("", "1"):
        raise CannotExpressError("context parallelism")
    vpp = int(row["vpp"] or 1)
    fields: dict[str, Any] = {name: int(row[name]) for name in ("tp", "pp", "dp", "micro_batch", "global_batch")}
    fields |= {
        "seq_len": int(row["seq_len"]),
        "zero": int(row["zero"] or 0),
        "vpp": vpp,
        "schedule": "interleaved" if vpp > 1 else "1f1b",
        "sequence_parallel": row["sequence_parallel"] == "true",
        "recompute": row["recompute"] or "none",
        "attention": row["attention"] or "auto",
    }
    if row["recompute_fraction"]:
        layers = int(row["layers"]) / (fields["pp"] * vpp)
        fields["recompute_layers"] = max(1, round(float(row["recompute_fraction"]) * layers))
    return Plan(**{**fields, **facts})


# ---- from rows to errors ------------------------------------------------------------------------------------------


def predict(row: Row) -> Prediction:
    """Predicts the step of a row.

    Raises:
        CannotExpressError: a job cannot describe it, or its framework is not known here.
        ValueError: the row is at odds with itself.
    """
    if row["framework"] not in FRAMEWORKS:
        raise CannotExpressError(f"framework {row['framework']} is not described yet")
    if row["flag"]:
        raise CannotExpressError(f"flagged: {row['flag']}")
    result = simulate(FRAMEWORKS[row["framework"]](row), allow_oom=True)
    measured = float(row["step_time_s"])
    degrees = " ".join(f"{name}{row[name]}" for name in ("tp", "pp", "dp", "vpp") if row[name] not in ("", "1"))
    options = [row["recompute"] or "no", *(["SP"] if row["sequence_parallel"] == "true" else [])]
    return Prediction(
        id=row["id"],
        source=row["source"],
        model=row["model"],
        gpus=int(row["num_gpus"]),
        plan=f"{degrees} {' '.join(options)}".strip(),
        measured_s=measured,
        predicted_s=result.step_time_s,
        error=result.step_time_s / measured - 1,
        fits=result.fits,
    )


def predict_all(rows: Sequence[Row]) -> tuple[list[Prediction], dict[str, str]]:
    """Predictions, and for every other row why there is none."""
    predictions, skipped = [], {}
    for row in rows:
        try:
            predictions.append(predict(row))
        except (CannotExpressError, SimparError, ValueError) as error:  # pydantic's errors are ValueErrors
            skipped[row["id"]] = " ".join(str(error).split())
    return predictions, skipped


def summarise(predictions: Sequence[Prediction]) -> list[Summary]:
    """The errors of each source, in order of appearance."""
    summaries = []
    for source in dict.fromkeys(p.source for p in predictions):
        errors = [p.error for p in predictions if p.source == source]
        sizes = sorted(map(abs, errors))
        p90 = sizes[-(-9 * len(sizes) // 10) - 1]  # the smallest error that nine tenths of the rows do not exceed
        summaries.append(Summary(source=source, rows=len(sizes), median=median(sizes), p90=p90, bias=mean(errors)))
    return summaries


def read(path: Path, sources: Sequence[str]) -> list[Row]:
    """The rows of some sources.

    Raises:
        ValueError: a source has no row.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    known = sorted({row["source"] for row in rows})
    for source in sources:
        if source not in known:
            raise ValueError(f"no row of {path.name} has the source '{source}'; it has {', '.join(known)}")
    return [row for row in rows if row["source"] in sources]


def print_table(predictions: Sequence[Prediction], skipped: Mapping[str, str]) -> None:
    """Rows, then sources."""
    print(f"{'row':22} {'model':18} {'GPUs':>6}  {'plan':32} {'measured':>10} {'predicted':>10} {'error':>8}")
    for p in predictions:
        print(
            f"{p.id:22} {p.model:18} {p.gpus:6,}  {p.plan:32} {p.measured_s:8.2f} s {p.predicted_s:8.2f} s "
            f"{p.error:+8.1%}{'' if p.fits else '  does not fit'}"
        )
    reasons: dict[str, int] = {}
    for reason in skipped.values():
        reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in reasons.items():
        print(f"not predicted: {count} rows ({reason[:160]})")
    print(f"\n{'source':22} {'rows':>5} {'median |error|':>15} {'p90 |error|':>12} {'mean error':>11}")
    for s in summarise(predictions):
        print(f"{s.source:22} {s.rows:5,} {s.median:15.1%} {s.p90:12.1%} {s.bias:+11.1%}")


def main() -> None:
    """Predicts and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", type=Path, help="CSV file with a row for each measured run")
    parser.add_argument(
        "--source", nargs="+", default=SOURCES, help=f"sources to predict (default: {' '.join(SOURCES)})"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    try:
        rows = read(args.runs, args.source)
    except (OSError, ValueError) as error:
        sys.exit(f"accuracy.py: {error}")
    predictions, skipped = predict_all(rows)
    if args.json:
        sources, found = map(asdict, summarise(predictions)), map(asdict, predictions)
        shown = {"sources": list(sources), "rows": list(found), "skipped": skipped}
        print(json.dumps(shown, indent=2, ensure_ascii=False))
    else:
        print_table(predictions, skipped)


if __name__ == "__main__":
    main()
