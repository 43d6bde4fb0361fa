"""How do parameter servers and all-reduce scale, predicted beside measured? Fits nothing.

    python benchmarks/cnn_scaling.py parameter_server.csv

The table is the TensorFlow benchmarks of May 2017 (tensorflow.org/performance/benchmarks, synthetic data on a DGX-1
with P100): convolutional networks on 1 to 8 GPUs with the parameters on the processors (``parameter_server``), or on
every GPU with NCCL between them (``replicated``). Compute is taken from the row of one GPU: its device is as fast as
that row says. Everything else is the machine as described by others, below; what is compared is the speed-up from 1 to
n GPUs.

Nobody published whether NCCL's all-reduces ran beside the backward pass in that TensorFlow. They are taken not to, with
which all rows come out within 14 %; with ``--overlap``, two of the nine rows with NCCL miss by 22 and 24 %.
"""

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from simpar import Cluster, Device, Job, Plan, simulate
from simpar.hardware.device import device

NETWORKS = {
    "InceptionV3": "inception-v3",
    "ResNet-50": "resnet-50",
    "ResNet-152": "resnet-152",
    "AlexNet": "alexnet",
    "VGG16": "vgg-16",
}
# NVIDIA DGX-1 with P100: two Xeon E5-2698 v4 (four channels of DDR4-2400 each) and four PCIe 3.0 switches with two GPUs
# and 16 lanes each, of which copies reach some 12 GB/s
HOST = {
    "device": {"base": "cpu", "memory_bytes_per_s": 2 * 76.8e9},
    "link_bytes_per_s": 12e9,
    "gpus_per_link": 2,
}
# NCCL 1, which TensorFlow had in May 2017, runs one ring in the order of the devices' numbers (commBuildMaps in its
# core.cu). Among four GPUs each hop is one NVLink: 20 GB/s, of which copies reach 18.31 (Dell, p2pBandwidthLatencyTest
# on P100-SXM2). Of eight, 3 to 4 and 7 to 0 have none and lie below different processors: they go through the hosts'
# memory, at PCIe's rate.
RING = {
    "base": "nvlink1",
    "nominal_bytes_per_s": 20e9,
    "bandwidth_bytes_per_s": 18.31e9,
    "reach": 4,
    "beyond": {
        "kind": "pcie",
        "nominal_bytes_per_s": 15.75e9,
        "bandwidth_bytes_per_s": 12e9,
        "base_latency_s": 8.7e-6,
        "step_latency_s": 1e-6,
        "p2p_latency_s": 11.5e-6,
    },
}


@dataclass(frozen=True)
class Scaling:
    """Speed-up from one GPU to ``gpus``, predicted and measured; ``error`` is the former over the latter, less one."""

    model: str
    batch: int
    sync: str
    gpus: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error."""
        return self.predicted / self.measured - 1


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def scalings(table: Sequence[Mapping[str, str]], *, overlap: bool = False) -> Iterator[Scaling]:
    """Every row of several GPUs, beside the row of one with the same model and batch.

    Args:
        table: the rows.
        overlap: whether NCCL's all-reduces run beside the backward pass.
    """
    alone = {_key(row): row for row in table if row["num_gpus"] == "1"}
    devices = {key: _as_fast_as(row) for key, row in alone.items()}
    for row in table:
        gpus, one = int(row["num_gpus"]), alone[_key(row)]
        if gpus == 1:
            continue
        chosen = devices[_key(row)]
        times = [simulate(_job(row, chosen, n, overlap), allow_oom=True).step_time_s for n in (1, gpus)]
        yield Scaling(
            model=row["model"],
            batch=int(row["mbs"]),
            sync="parameter server" if _has_servers(row) else "all-reduce",
            gpus=gpus,
            predicted=gpus * times[0] / times[1],
            measured=gpus * float(one["step_time_s"]) / float(row["step_time_s"]),
        )


def _key(row: Mapping[str, str]) -> tuple[str, str, str]:
    return row["table_id"], row["model"], row["mbs"]


def _has_servers(row: Mapping[str, str]) -> bool:
    return "variable_update=parameter_server" in row["other_flags"]


def _as_fast_as(row: Mapping[str, str]) -> Device:
    """A P100 whose matrix products make the network's step as long as measured on one GPU."""
    slow, fast = 0.05, 5.0
    for _ in range(14):
        speed = sqrt(slow * fast)
        job = _job(row, _p100(speed), 1, overlap=True)
        time = simulate(job.replace(plan=job.plan.replace(sync="all_reduce")), allow_oom=True).step_time_s
        slow, fast = (speed, fast) if time > float(row["step_time_s"]) else (slow, speed)
    return _p100(speed)


def _p100(speed: float) -> Device:
    base = device("p100-sxm")
    plain = {"peak_efficiency": 1.0, "bandwidth_efficiency": 1.0, "overhead_s": 0.0}
    return base.replace(peak_flop_per_s={"fp32": base.peak_flop_per_s["fp32"] * speed}, gemm={"fp32": plain})


def _job(row: Mapping[str, str], chosen: Device, gpus: int, overlap: bool) -> Job:
    servers = _has_servers(row)
    plan: dict[str, Any] = {
        "micro_batch": int(row["mbs"]),
        "optimizer": "sgd",
        "bucket_parameters": 1,  # variable by variable
        "launch_s": 0.0,  # it is in the measured time of one GPU
        "sync": {"servers": 1, "on": "hosts"} if servers else "all_reduce",
        "overlap": {"grad_reduce": servers or overlap, "param_gather": True},
    }
    cluster = Cluster.model_validate(
        {"device": chosen, "nodes": 1, "gpus_per_node": gpus, "node_link": RING, "host": HOST}
    )
    return Job(model=f"cnn:{NETWORKS[row['model']]}", cluster=cluster, plan=Plan.model_validate(plan))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line for every row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--overlap", action="store_true", help="NCCL's all-reduces run beside the backward pass")
    given = parser.parse_args(arguments)
    print(f"{'model':12}{'batch':>6}{'GPUs':>6}  {'sync':18}{'predicted':>10}{'measured':>10}{'error':>8}")
    found = list(scalings(rows(given.table), overlap=given.overlap))
    for each in found:
        print(
            f"{each.model:12}{each.batch:6}{each.gpus:6}  {each.sync:18}{each.predicted:9.2f}x{each.measured:9.2f}x"
            f"{each.error:+8.1%}"
        )
    print(f"largest error {max(abs(each.error) for each in found):.1%} of {len(found)} rows")


if __name__ == "__main__":
    main()
