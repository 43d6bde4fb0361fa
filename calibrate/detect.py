"""What this machine is: accelerators, their topology, network cards, CPU, and the versions of what drives them.

Everything is asked of the system (torch, ``nvidia-smi``, ``/proc``, ``/sys``) and nothing is measured here. What cannot
be found out is left empty: a box without ``nvidia-smi`` has no topology, not an error.
"""

import hashlib
import os
import platform
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calibrate.errors import MeasurementError
from simpar.errors import nearest
from simpar.hardware.device import Device, device, device_names
from simpar.units import GB, GIB, TFLOP

Command = Callable[[Sequence[str]], str]
"""Runs a program and returns what it prints, or an empty text if it is not there or fails."""

_TIMEOUT_S = 20.0
_BUSY_PERCENT = 10  # a card that shows a desktop stays below
_LINK = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC|NVB")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines its header, also into pipes
_INSTALL = "install it with: pip install 'simpar[calibrate]'"
# fp32 operations a cycle and core: two vector units, each with a multiply-add of all lanes.
_VECTORS: Mapping[str, int] = {"avx512f": 64, "avx2": 32, "avx": 16, "asimd": 16}
_PLAIN_FLOP_PER_CYCLE = 8
_USUAL_HZ = 2.5e9
# Words of a GPU's name that decide which catalog device it is; the first line that matches counts.
_CATALOG: Sequence[tuple[tuple[str, ...], str]] = (
    (("GB200",), "gb200"),
    (("B200",), "b200-sxm"),
    (("H200",), "h200-sxm"),
    (("H100", "PCIE"), "h100-pcie"),
    (("H100",), "h100-sxm"),
    (("A100", "PCIE"), "a100-pcie"),
    (("A100", "40GB"), "a100-sxm-40gb"),
    (("A100",), "a100-sxm-80gb"),
    (("L40S",), "l40s"),
    (("V100", "SXM2", "16GB"), "v100-sxm-16gb"),
    (("V100", "SXM"), "v100-sxm-32gb"),
)
# What nobody would tune alike, though the names begin alike.
_OTHER_PRODUCTS = ("NVL", "MIG")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: its product name, memory, multiprocessors, and highest clock in MHz (0 if unknown)."""

    name: str
    memory_bytes: int
    sms: int
    clock_mhz: int = 0


@dataclass(frozen=True, slots=True)
class Nic:
    """A network card: interface or InfiniBand device, and its rate in Gb/s (0 if it does not say)."""

    name: str
    gbps: float = 0.0


@dataclass(frozen=True, slots=True)
class Topology:
    """Paths as ``nvidia-smi topo -m`` names them: ``NV18``, ``PIX``, ``NODE``, ``SYS``, ...

    Attributes:
        gpus: names, such as ``GPU0``.
        nics: names of cards, such as ``mlx5_0`` (or ``NIC0`` where the legend is missing).
        paths: path of each ordered pair of different names.
    """

    gpus: tuple[str, ...] = ()
    nics: tuple[str, ...] = ()
    paths: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def between_gpus(self) -> tuple[str, ...]:
        """The kinds of paths between GPUs, sorted: one kind means a uniform node."""
        return tuple(sorted({self.paths[a, b] for a in self.gpus for b in self.gpus if (a, b) in self.paths}))

    @property
    def nvlink(self) -> bool:
        """Whether every pair of GPUs has NVLink."""
        return bool(self.between_gpus) and all(path.startswith("NV") for path in self.between_gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What :func:`detect` found.

    Attributes:
        host: a hash of the machine's name, so that two runs can be told to be of one machine without naming it.
        cpu: model.
        cores: cores that this process may use.
        vectors: widest vector instructions (``avx2``), or an empty string.
        clock_hz: the CPU's clock as the system states it, 0 if it does not.
        memory_bytes: main memory.
        gpus: accelerators that torch sees.
        topology: paths between them.
        nics: network cards.
        versions: of python, torch, cuda, nccl and the driver, as far as they are there.
        warnings: what may spoil a measurement, one sentence each.
    """

    host: str
    cpu: str
    cores: int
    vectors: str = ""
    clock_hz: float = 0.0
    memory_bytes: int = 0
    gpus: tuple[Gpu, ...] = ()
    topology: Topology = Topology()
    nics: tuple[Nic, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def facts(self) -> dict[str, str]:
        """What to record with measurements."""
        facts = {
            "host": self.host,
            "cpu": self.cpu,
            "cores": str(self.cores),
            "memory": f"{self.memory_bytes / GIB:.0f} GiB",
            **self.versions,
        }
        if self.gpus:
            facts["gpus"] = f"{len(self.gpus)} × {self.gpus[0].name}"
            facts["gpu clock"] = f"{self.gpus[0].clock_mhz} MHz" if self.gpus[0].clock_mhz else "unknown"
        if self.topology.between_gpus:
            facts["paths between gpus"] = ", ".join(self.topology.between_gpus)
        if self.nics:
            facts["nics"] = ", ".join(f"{nic.name} {nic.gbps:g} Gb/s" if nic.gbps else nic.name for nic in self.nics)
        return facts


def detect(*, run: Command | None = None, torch: Any = None, root: Path = Path("/")) -> Machine:
    """Looks at this machine.

    Args:
        run: what stands for running programs.
        torch: what stands for the torch module; imported by default.
        root: what stands for the root of the file system.

    Raises:
        MeasurementError: torch is not installed.
    """
    run = run or _run
    torch = torch if torch is not None else import_torch()
    gpus = _gpus(torch, run)
    model, vectors, clock_hz = _cpu(root)
    cores = usable_cores()
    warnings = [*(busy_gpus(run(_BUSY_QUERY)) if gpus else ())]
    if not gpus and (load := _load()) > cores / 2:
        warnings.append(f"this machine is busy (load {load:.1f} on {cores} cores), so rounds will differ")
    return Machine(
        host=hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12],
        cpu=model,
        cores=cores,
        vectors=vectors,
        clock_hz=clock_hz,
        memory_bytes=_memory_bytes(root),
        gpus=gpus,
        topology=parse_topology(run(("nvidia-smi", "topo", "-m"))) if gpus else Topology(),
        nics=find_nics(root),
        versions=_versions(torch, run if gpus else None),
        warnings=tuple(warnings),
    )


def import_torch() -> Any:
    """The torch module.

    Raises:
        MeasurementError: it is not installed, or was built without ``torch.distributed``.
    """
    try:
        import torch  # noqa: PLC0415 - only where devices are touched
    except ImportError:
        raise MeasurementError(f"measuring needs torch, which is not installed; {_INSTALL}") from None
    if not torch.distributed.is_available():
        raise MeasurementError("this torch was built without torch.distributed; install a build that has it")
    return torch


def base_device(machine: Machine, *, ranks: int, cuda: bool, named: str | None = None) -> Device:
    """The device whose datasheet rates the fits relate to.

    A GPU's come from the catalog. A CPU has no datasheet that a program could read: its peak is what the vector units
    of one rank's share of the cores could do at the stated clock, its memory the rank's share.

    Args:
        machine: what was detected.
        ranks: processes on this machine.
        cuda: whether GPUs are measured.
        named: a catalog device to take instead.

    Raises:
        MeasurementError: the GPU is not in the catalog.
        ClusterError: no such catalog device.
    """
    if named is not None:
        return device(named)
    if cuda:
        return device(_catalog_name(machine.gpus[0].name))
    base = device("cpu")
    threads = max(1, machine.cores // ranks)
    hz = machine.clock_hz or _USUAL_HZ
    peak = threads * hz * _VECTORS.get(machine.vectors, _PLAIN_FLOP_PER_CYCLE)
    memory = max(int(machine.memory_bytes / ranks), 2 * base.context_bytes)
    shown = f"{threads} of {machine.cores} cores × {hz / 1e9:.2f} GHz × {machine.vectors or 'plain'} multiply-adds"
    return base.replace(
        title=f"{machine.cpu or 'CPU'}, {threads} thread{'s' if threads > 1 else ''} a rank",
        peak_flop_per_s={dtype: float(f"{peak:.4g}") for dtype in base.peak_flop_per_s},
        memory_bytes=memory,
        sms=threads,
        sources={
            **base.sources,
            "peak_flop_per_s": f"{shown}: {peak / TFLOP:.3g} TFLOP/s",
            "memory_bytes": f"{memory / GB:.1f} GB, a rank's share of the machine's memory",
            "sms": "threads of a rank",
        },
    )


def _catalog_name(gpu: str) -> str:
    words = gpu.upper().replace("-", " ").split()
    if not any(word.startswith(other) for word in words for other in _OTHER_PRODUCTS):
        for wanted, name in _CATALOG:
            if all(word in words or word in gpu.upper() for word in wanted):
                return name
    raise MeasurementError(
        f"GPU '{gpu}' is not in the catalog{nearest(gpu.lower(), device_names())}; name the one with the nearest "
        f"datasheet with --base, of {', '.join(device_names())}"
    )


def parse_topology(text: str) -> Topology:
    """Reads the matrix of ``nvidia-smi topo -m``; an empty or foreign text gives an empty topology."""
    lines = [_ESCAPE.sub("", line).strip() for line in text.splitlines()]
    head = next((n for n, line in enumerate(lines) if line.startswith("GPU0")), None)
    if head is None:
        return Topology()
    # Columns behind the devices (CPU Affinity, NUMA ...) have names of several words; a device's has one.
    columns = [word for word in lines[head].split() if re.fullmatch(r"(GPU|NIC)\d+|(mlx|bnxt|rdma|efa|hns)\S*", word)]
    paths: dict[tuple[str, str], str] = {}
    for line in lines[head + 1 :]:
        name, *cells = line.split()[: len(columns) + 1] or [""]
        if name in columns and len(cells) == len(columns) and all(_LINK.fullmatch(cell) for cell in cells):
            paths |= {(name, column): cell for column, cell in zip(columns, cells, strict=True) if column != name}
    legend = dict(re.findall(r"^(NIC\d+): (\S+)$", "\n".join(lines), re.MULTILINE))
    named = {pair: path for pair, path in paths.items() if pair[0] != pair[1]}
    return Topology(
        gpus=tuple(column for column in columns if column.startswith("GPU")),
        nics=tuple(legend.get(column, column) for column in columns if not column.startswith("GPU")),
        paths={(legend.get(a, a), legend.get(b, b)): path for (a, b), path in named.items()},
    )


_BUSY_QUERY = (
    "nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits",
)  # fmt: skip


def busy_gpus(text: str) -> list[str]:
    """Warnings on GPUs that others compute on; a line of ``text`` has index, utilisation in % and MiB in use."""
    warnings = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and all(cell.isdigit() for cell in cells) and int(cells[1]) > _BUSY_PERCENT:
            warnings.append(
                f"GPU {cells[0]} is busy with other work ({cells[1]} % utilisation, {cells[2]} MiB in use), so times "
                "will be too long; stop that work or leave the GPU out with CUDA_VISIBLE_DEVICES"
            )
    return warnings


def find_nics(root: Path = Path("/")) -> tuple[Nic, ...]:
    """InfiniBand and RoCE devices where there are any, else physical Ethernet interfaces."""
    found = []
    for card in _listed(root / "sys/class/infiniband"):
        rates = [_leading_number(_read(port / "rate")) for port in _listed(card / "ports")]
        found.append(Nic(card.name, max(rates, default=0.0)))
    if found:
        return tuple(found)
    return tuple(
        Nic(interface.name, max(0.0, _leading_number(_read(interface / "speed"))) / 1000)
        for interface in _listed(root / "sys/class/net")
        if (interface / "device").exists()  # loopback, bridges and tunnels have none
    )


def usable_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def _gpus(torch: Any, run: Command) -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    text = run(("nvidia-smi", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits"))
    clocks = [int(line) for line in text.split() if line.isdigit()]
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        clock = clocks[index] if index < len(clocks) else 0
        found.append(Gpu(facts.name, facts.total_memory, facts.multi_processor_count, clock))
    return tuple(found)


def _versions(torch: Any, run: Command | None) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.cuda:
        found["cuda"] = str(torch.version.cuda)
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    driver = run(("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")).split() if run else []
    return {**found, "driver": driver[0]} if driver else found


def _cpu(root: Path) -> tuple[str, str, float]:
    text = _read(root / "proc/cpuinfo")

    def first(*keys: str) -> str:
        matches = (re.search(rf"^{key}\s*: (.*)$", text, re.MULTILINE) for key in keys)
        return next((match[1].strip() for match in matches if match), "")

    flags = set(first("flags", "Features").split())
    vectors = next((name for name in _VECTORS if name in flags), "")
    return first("model name") or platform.processor() or platform.machine(), vectors, _clock_hz(root, first("cpu MHz"))


def _clock_hz(root: Path, now_mhz: str) -> float:
    """The highest clock if the system names it, else the present one."""
    highest_khz = _leading_number(_read(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq"))
    return highest_khz * 1e3 if highest_khz > 0 else max(0.0, _leading_number(now_mhz)) * 1e6


def _memory_bytes(root: Path) -> int:
    found = re.search(r"^MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _load() -> float:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return 0.0


def _run(words: Sequence[str]) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not there, or (a NIC's speed while it is down) not readable
        return ""


def _listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _leading_number(text: str) -> float:
    found = re.match(r"\s*-?\d+(\.\d+)?", text)
    return float(found[0]) if found else 0.0
