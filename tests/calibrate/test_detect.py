"""What a machine is, from the texts and files of systems that are not here."""

import socket
import sys
from types import SimpleNamespace

import pytest

from calibrate.detect import Gpu, Machine, Nic, Topology, base_device, busy_gpus, detect, find_nics, parse_topology
from calibrate.errors import MeasurementError
from simpar.errors import ClusterError

DGX = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPXB\tSYS\t0-55,112-167\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tPXB\t56-111,168-223\t1\t\tN/A
NIC0\tPXB\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tPXB\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_bond_0
"""
OLD_PCIE = """\
\tGPU0\tGPU1\tGPU2\tmlx5_0\tCPU Affinity
GPU0\t X \tPIX\tSYS\tNODE\t0-15
GPU1\tPIX\t X \tSYS\tNODE\t0-15
GPU2\tSYS\tSYS\t X \tSYS\t16-31
mlx5_0\tNODE\tNODE\tSYS\t X \t
"""


def test_a_uniform_node_s_topology_is_read_with_its_cards():
    found = parse_topology(DGX)
    assert found.gpus == ("GPU0", "GPU1")
    assert found.nics == ("mlx5_0", "mlx5_bond_0")
    assert found.between_gpus == ("NV18",)
    assert found.nvlink
    assert found.paths["GPU1", "mlx5_bond_0"] == "PXB"
    assert found.paths["mlx5_0", "GPU1"] == "SYS"
    assert len(found.paths) == 4 * 3


def test_an_old_pcie_server_s_topology_is_read():
    found = parse_topology(OLD_PCIE)
    assert (found.gpus, found.nics) == (("GPU0", "GPU1", "GPU2"), ("mlx5_0",))
    assert found.between_gpus == ("PIX", "SYS")
    assert not found.nvlink


@pytest.mark.parametrize("text", ["", "command not found", "GPU0: no", "\tGPU0\nGPU0\t?\n", "\tGPU0\nGPU0\t X \n"])
def test_texts_without_paths_give_no_paths(text):
    assert parse_topology(text).paths == {}
    assert parse_topology(text).between_gpus == ()
    assert not parse_topology(text).nvlink


def test_gpus_that_others_use_are_warned_of():
    warnings = busy_gpus("0, 0, 4\n1, 97, 40123\n2, 3, 900\n3, [N/A], 0\n")
    assert warnings == [
        "GPU 1 is busy with other work (97 % utilisation, 40123 MiB in use), so times will be too long; stop that work "
        "or leave the GPU out with CUDA_VISIBLE_DEVICES"
    ]


def machine(name: str = "", **fields) -> Machine:
    gpus = (Gpu(name, 1, 1),) if name else ()
    return Machine(**{"host": "h", "cpu": "c", "cores": 4, "gpus": gpus, **fields})


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA B200", "b200-sxm"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("A100-PCIE-40GB", "a100-pcie"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm-16gb"),
    ],
)
def test_a_gpu_s_product_name_leads_to_the_catalog(product, name):
    assert base_device(machine(product), ranks=1, cuda=True).name == name


@pytest.mark.parametrize("product", ["NVIDIA GeForce RTX 4090", "NVIDIA H100 NVL", "NVIDIA L40"])
def test_a_gpu_that_the_catalog_lacks_is_named_with_the_way_out(product):
    with pytest.raises(MeasurementError, match=rf"^GPU '{product}' is not in the catalog.*with --base, of a100-pcie, "):
        base_device(machine(product), ranks=1, cuda=True)
    assert base_device(machine(product), ranks=1, cuda=True, named="h100").name == "h100-sxm"
    with pytest.raises(ClusterError, match="unknown device 'h1000'"):
        base_device(machine(product), ranks=1, cuda=True, named="h1000")


def test_a_cpu_s_peak_is_what_a_rank_s_cores_could_do():
    found = base_device(machine(cores=8, vectors="avx2", clock_hz=3e9, memory_bytes=64 * 2**30), ranks=2, cuda=False)
    # 4 cores × 3 GHz × 2 units × 8 fp32 lanes × a multiply and an add
    assert found.peak("fp32") == pytest.approx(4 * 3e9 * 2 * 8 * 2)
    assert found.memory_bytes == 32 * 2**30
    assert found.sms == 4
    assert "4 of 8 cores × 3.00 GHz × avx2" in found.sources["peak_flop_per_s"]


def test_infiniband_devices_are_found_with_their_rates(tmp_path):
    for name, rate in (("mlx5_0", "400 Gb/sec (4X NDR)"), ("mlx5_1", "200 Gb/sec (4X HDR)")):
        port = tmp_path / "sys/class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "rate").write_text(rate)
    assert find_nics(tmp_path) == (Nic("mlx5_0", 400.0), Nic("mlx5_1", 200.0))


def test_only_physical_interfaces_count_as_cards(tmp_path):
    for name, speed, physical in (("eth0", "25000", True), ("eth1", "-1", True), ("docker0", "10000", False)):
        folder = tmp_path / "sys/class/net" / name
        folder.mkdir(parents=True)
        (folder / "speed").write_text(speed)
        if physical:
            (folder / "device").mkdir()
    assert find_nics(tmp_path) == (Nic("eth0", 25.0), Nic("eth1", 0.0))
    assert find_nics(tmp_path / "nowhere") == ()


def fake_torch(gpus: int):
    facts = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85_018_877_624, multi_processor_count=132)
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda="13.0"),
        distributed=SimpleNamespace(is_nccl_available=lambda: True),
        cuda=SimpleNamespace(
            is_available=lambda: gpus > 0,
            device_count=lambda: gpus,
            get_device_properties=lambda index: facts,
            nccl=SimpleNamespace(version=lambda: (2, 29, 3)),
        ),
    )


def answers(words):
    text = " ".join(words)
    if "topo" in text:
        return DGX
    return {"clocks": "1980\n1980\n", "utilization": "0, 55, 100\n1, 0, 4\n", "driver": "580.1\n580.1\n"}[
        next(key for key in ("clocks", "utilization", "driver") if key in text)
    ]


def test_a_gpu_box_is_described_without_its_name():
    found = detect(run=answers, torch=fake_torch(2))
    assert found.gpus == (Gpu("NVIDIA H100 80GB HBM3", 85_018_877_624, 132, 1980),) * 2
    assert found.topology.nvlink
    assert {key: found.versions[key] for key in ("torch", "cuda", "nccl", "driver")} == {
        "torch": "2.13.0", "cuda": "13.0", "nccl": "2.29.3", "driver": "580.1",
    }  # fmt: skip
    assert [text.split(" is ")[0] for text in found.warnings] == ["GPU 0"]
    assert found.facts["gpus"] == "2 × NVIDIA H100 80GB HBM3"
    assert found.facts["paths between gpus"] == "NV18"
    assert socket.gethostname() not in str(found.facts.values())
    assert found.host == detect(run=answers, torch=fake_torch(2)).host


def test_a_box_without_gpus_asks_nvidia_smi_nothing():
    found = detect(run=lambda words: pytest.fail(f"ran {words}"), torch=fake_torch(0))
    assert found.gpus == ()
    assert found.topology == Topology()
    assert found.cores >= 1
    assert "nccl" not in found.versions


def test_without_torch_one_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MeasurementError, match=r"^measuring needs torch, which is not installed; install it with: pip"):
        detect()


def test_a_torch_that_cannot_communicate_is_named(monkeypatch):
    bare = SimpleNamespace(distributed=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", bare)
    with pytest.raises(MeasurementError, match=r"^this torch was built without torch\.distributed; install a build"):
        detect()
