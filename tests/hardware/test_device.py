"""The device catalog: every number sourced, every file valid, every error a sentence that names the mend."""

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from simpar.errors import ClusterError
from simpar.hardware.device import ALIASES, Device, device, device_names, load_device

FOLDER = files("simpar.hardware") / "catalog" / "devices"
NAMES = (
    "a100-pcie", "a100-sxm-40gb", "a100-sxm-80gb", "a800-sxm", "b200-sxm", "b300-sxm", "cpu", "gaudi2", "gaudi3",
    "gb200", "gb300", "gh200", "h100-pcie", "h100-sxm", "h100-sxm-96gb-500w", "h20", "h200-sxm", "h800-sxm", "l40s",
    "mi300x", "mi325x", "mi355x", "p100-sxm", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e",
    "tpu-v7x", "trainium2",
    "v100-sxm-16gb", "v100-sxm-32gb",
)  # fmt: skip


def raw(name: str) -> dict[str, Any]:
    data = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(data, dict)
    return data


def numeric_leaves(data: Any, path: str = "") -> Iterator[str]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from numeric_leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(data, (int, float)) and not isinstance(data, bool):
        yield path


def is_covered(path: str, sources: dict[str, str]) -> bool:
    return any(path == field or path.startswith(f"{field}.") for field in sources)


def smallest(tmp_path: Path, **changes: Any) -> Path:
    """A file with the generic CPU's fields, some of them changed."""
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"base": "cpu", "name": "mine", "title": "mine", **changes}), encoding="utf-8")
    return path


def test_the_catalog_holds_the_promised_devices() -> None:
    assert device_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_a_file_has_a_source_in_that_file(name: str) -> None:
    data = raw(name)
    sources = data["sources"]
    bare = [path for path in numeric_leaves(data) if not is_covered(path, sources)]
    assert bare == []


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_a_device_has_a_source_that_says_something(name: str) -> None:
    data = device(name).model_dump(mode="json")
    bare = [path for path in numeric_leaves(data) if not is_covered(path, data["sources"])]
    assert bare == []
    assert all(len(source) > 10 for source in data["sources"].values())


@pytest.mark.parametrize("name", NAMES)
def test_sources_point_at_fields_that_exist(name: str) -> None:
    # A source for a field that was renamed or removed would be a lie about nothing.
    data = device(name).model_dump(mode="json")
    paths = [*numeric_leaves(data), "attention_kernel"]
    assert [f for f in data["sources"] if not any(p == f or p.startswith(f"{f}.") for p in paths)] == []


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_through_plain_data(name: str) -> None:
    one = device(name)
    assert one.name == name
    assert Device.model_validate(one.model_dump(mode="json")) == one
    assert Device.model_validate_json(one.model_dump_json()) == one


@pytest.mark.parametrize(
    "name",
    ["a800", "b200", "b300", "gb200", "gb300", "h20", "h800", "mi300x", "p100", "trn2", "v100", "tpu-v4", "tpu-v5p"],
)
def test_the_names_that_people_use_resolve(name: str) -> None:
    assert device(name).title


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_aliases_lead_to_a_device(alias: str, name: str) -> None:
    assert device(alias).name == name


@pytest.mark.parametrize(
    ("name", "dense_over_sparse_datasheet"),
    # bf16 with sparsity as the datasheets print it, in TFLOP/s
    [
        ("a100", 624),
        ("h100", 1979),
        ("h100-pcie", 1513),
        ("h200", 1979),
        ("b200", 4500),
        ("gb200", 5000),
        ("l40s", 733),
        ("h20", 296),
        ("b300", 4500),
        ("gb300", 5000),
        ("mi300x", 2614.9),
        ("mi325x", 2614.9),
        ("mi355x", 5033.2),
    ],
)
def test_peaks_are_dense(name: str, dense_over_sparse_datasheet: float) -> None:
    assert device(name).peak("bf16") == pytest.approx(dense_over_sparse_datasheet * 1e12 / 2, rel=0.02)


OTHERWISE = {"gaudi3", "trainium2"}  # fp8 no faster than bf16; tf32 as fast, fp8 not quite twice


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OTHERWISE])
def test_peaks_double_from_wide_to_narrow_tensor_core_types(name: str) -> None:
    peaks = device(name).peak_flop_per_s
    if "tf32" in peaks:
        assert peaks["bf16"] == pytest.approx(2 * peaks["tf32"], rel=0.02)
    if "fp8" in peaks:
        assert peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=0.02)
    if "bf16" in peaks and "fp16" in peaks:
        assert peaks["fp16"] == peaks["bf16"]
        assert device(name).gemm["fp16"] == device(name).gemm["bf16"]


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("a100-sxm-40gb", 40),
        ("a100", 80),
        ("h100", 80),
        ("h200", 141),
        ("b200", 180),
        ("gb200", 186),
        ("l40s", 48),
        ("h20", 96),
        ("h100-sxm-96gb-500w", 96),
        ("mi300x", 192),
        ("mi325x", 256),
        ("mi355x", 288),
        ("b300", 288),
        ("tpu-v5e", 16),
        ("tpu-v6e", 32),
    ],
)
def test_memory_is_what_is_sold_less_what_is_kept(name: str, gigabytes: int) -> None:
    # Vendors mean GiB by GB for HBM of 40 and 80 "GB"; a part is kept for ECC, tables and the driver.
    assert 0.92 * gigabytes * 2**30 < device(name).memory_bytes < gigabytes * 2**30


def test_inherited_numbers_say_so() -> None:
    one = device("v100-sxm-16gb")
    assert one.fit_from == "a100-sxm-80gb"
    assert one.sources["attention"].startswith("assumed from a100-sxm-80gb: forward fitted")
    assert one.sources["sms"] == "assumed from v100-sxm-32gb: NVIDIA V100 whitepaper"
    assert one.sources["memory_bytes"].startswith("total capacity")
    assert one.attention == device("a100").attention
    assert device("a100").fit_from is None


def test_null_removes_what_the_base_has() -> None:
    assert set(device("v100").gemm) == {"fp16", "fp32"}
    assert device("v100").attention_kernel_speed == {"flash1": 0.5}


def test_a_rescaled_fit_reaches_the_rates_of_its_base() -> None:
    gb200, b200 = device("gb200"), device("b200")
    for dtype in b200.gemm:
        if dtype == "fp32":
            continue  # its datasheet peaks do not differ by the tensor cores' ratio
        ours = gb200.peak(dtype) * gb200.gemm_fit(dtype).peak_efficiency
        assert ours == pytest.approx(b200.peak(dtype) * b200.gemm_fit(dtype).peak_efficiency, rel=1e-3)
    for memory_class, fit in b200.memory_bound.items():
        ours = gb200.memory_bytes_per_s * gb200.memory_bound[memory_class].bandwidth_efficiency
        assert ours == pytest.approx(b200.memory_bytes_per_s * fit.bandwidth_efficiency, rel=1e-3)


def test_a_missing_dtype_names_what_to_use() -> None:
    with pytest.raises(ClusterError) as error:
        device("v100").gemm_fit("bf16")
    assert str(error.value) == ("device 'v100-sxm-32gb' does not compute in bf16 (it has fp16, fp32); use fp16 instead")
    with pytest.raises(ClusterError) as error:
        device("a100").peak("fp8")
    assert str(error.value) == (
        "device 'a100-sxm-80gb' does not compute in fp8 (it has bf16, fp16, tf32, fp32); use bf16 instead"
    )


def test_an_unknown_device_names_the_nearest() -> None:
    with pytest.raises(
        ClusterError, match=r"^unknown device 'h100-smx'; did you mean 'h100-sxm'\? \(known: a100-pcie, "
    ):
        device("h100-smx")


def test_a_file_may_build_on_the_catalog(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: h100\nname: h100-500w\ntitle: H100 at 500 W\nsustained_slowdown: 1.2\n", encoding="utf-8")
    mine = load_device(path)
    assert mine.sustained_slowdown == 1.2
    assert mine.fit_from == "h100-sxm"
    assert mine.gemm == device("h100").gemm


def test_a_device_written_out_can_be_read_back(tmp_path: Path) -> None:
    path = tmp_path / "h100.yaml"
    path.write_text(yaml.safe_dump(device("h100").model_dump(mode="json")), encoding="utf-8")
    assert load_device(path) == device("h100")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "must be a mapping of device fields; start with 'name: ...'"),
        ("name: [\n", "is not valid YAML"),
        ("base: h1000\n", "base 'h1000' is not in the catalog"),
        ("base: cpu\nname: mine\nsms: 0\n", "sms: 0 should be greater than 0"),
        ("base: cpu\nmemory: 3\n", "memory: unknown key; did you mean 'memory_bytes'?"),
        ("name: mine\n", "title, peak_flop_per_s, memory_bytes"),
    ],
)
def test_a_bad_file_is_named_with_its_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ClusterError) as error:
        load_device(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"none.yaml: cannot be read \(No such file or directory\); give the path"):
        load_device(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"peak_flop_per_s": {"fp16": 1e12}},
            "gemm and peak_flop_per_s must cover the same dtypes, but only one has fp16",
        ),
        ({"attention_kernel_speed": {"flash2": 0.9}}, "attention_kernel_speed['flash2'] must be 1"),
        (
            {"attention_kernel_speed": {"unfused": 0.9}},
            "'unfused' attention is priced by its products and softmax",
        ),
        ({"memory_bound": {"norm": None}}, "memory_bound must fit every class; add norm"),
        ({"context_bytes": 2**40}, "context_bytes must be smaller than memory_bytes"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError) as error:
        load_device(smallest(tmp_path, **changes))
    assert message in str(error.value)


def test_a_device_is_frozen_and_varied_by_copy() -> None:
    one = device("cpu")
    with pytest.raises(ClusterError):
        one.sms = 3  # type: ignore[misc]
    assert one.replace(sms=3).sms == 3
    assert device("cpu").sms == 8
