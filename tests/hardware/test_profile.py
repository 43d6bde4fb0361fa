"""Profiles as files, and clusters made of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from simpar import simulate
from simpar.errors import ClusterError
from simpar.hardware.cluster import Cluster, named_fabric, named_node_link
from simpar.hardware.device import device, load_device
from simpar.hardware.profile import Accuracy, Profile, Provenance, load_profile
from simpar.hardware.shipped import shipped_profile, shipped_profile_names


def profile(**changes: Any) -> Profile:
    fields: dict[str, Any] = {
        "name": "box",
        "device": device("h100").replace(name="box"),
        "node_link": named_node_link("pcie5"),
        "fabric": named_fabric("roce200"),
        "uncertainty": {"device.gemm.bf16.peak_efficiency": 0.03},
        "accuracy": (
            Accuracy(
                what="gemm.bf16",
                region="training",
                split="fitted",
                count=12,
                mean=0.05,
                median=0.04,
                p90=0.1,
                bias=-0.01,
            ),
        ),
        "notes": ("launch time was not measured",),
        "provenance": Provenance(command="simpar calibrate fit a.csv", files={"a.csv": 12}),
    }
    return Profile(**{**fields, **changes})


def test_round_trip_through_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    profile().write(path)
    assert load_profile(path) == profile()
    text = path.read_text(encoding="utf-8")
    assert load_profile(path).to_json() == text
    assert text.splitlines()[1:3] == [' "schema_version": 1,', ' "name": "box",']
    assert list(json.loads(text)["device"]["errors"]) == sorted(profile().device.errors)
    assert [file.name for file in tmp_path.iterdir()] == ["box.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "box.json"
    profile().write(path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ClusterError, match=r"cannot be written \(No space left on device\); choose another place"):
        profile(name="new").write(path)
    assert load_profile(path).name == "box"
    assert [file.name for file in tmp_path.iterdir()] == ["box.json"]


def changed(tmp_path: Path, **fields: Any) -> Path:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**json.loads(profile().to_json()), **fields}), encoding="utf-8")
    return path


def test_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(ClusterError) as error:
            load_profile(path)
        return str(error.value).removeprefix(str(path))

    assert message(tmp_path / "none.json") == (
        ": cannot be read (No such file or directory); give the path of a profile that simpar calibrate wrote"
    )
    assert message(changed(tmp_path, schema_version=2)) == (
        ": has schema_version 2, but this simpar reads 1; calibrate again, or install the simpar that wrote it"
    )
    path = tmp_path / "p.json"
    path.write_text('{"device": \n}', encoding="utf-8")
    assert message(path).startswith(": is not JSON: Expecting value at line 2, column 1; give a profile that")
    path.write_text("[1]", encoding="utf-8")
    assert message(path) == ": is no profile; give one that simpar calibrate wrote"
    path.write_bytes(b"\xff\xfe\x00")
    assert message(path) == (
        ": cannot be read (it is no UTF-8 text); give the path of a profile that simpar calibrate wrote"
    )
    assert message(changed(tmp_path, hostess="x")).startswith(": hostess: unknown key")
    device_fields = {**json.loads(profile().to_json())["device"], "sms": 0}
    assert message(changed(tmp_path, device=device_fields)) == ": device.sms: 0 should be greater than 0"


def test_a_cluster_of_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    profile().write(path)
    cluster = Cluster.parse(f"{path}:2x4")
    assert (cluster.nodes, cluster.gpus_per_node) == (2, 4)
    assert (cluster.device, cluster.node_link, cluster.fabric) == (
        profile().device,
        profile().node_link,
        profile().fabric,
    )
    assert Cluster.model_validate({"profile": str(path), "nodes": 2, "gpus_per_node": 4}) == cluster
    assert Cluster.parse(f"{path}:2x4@ndr400").fabric == named_fabric("ndr400")
    assert Cluster.parse(f"{path}:1x1").replace(nodes=3).device == profile().device


def test_a_profile_without_links_takes_those_of_its_device(tmp_path: Path) -> None:
    path = tmp_path / "h100.json"
    profile(device=device("h100"), node_link=None, fabric=None).write(path)
    assert Cluster.parse(f"{path}:2x8") == Cluster.parse("h100-sxm:2x8")
    profile(node_link=None, fabric=None).write(path)
    with pytest.raises(ClusterError, match="device 'box' has no usual node_link; name one of "):
        Cluster.parse(f"{path}:8")


def test_a_cluster_of_a_wrong_profile_says_so(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"none\.json: cannot be read"):
        Cluster.parse("none.json:1x2")
    with pytest.raises(ClusterError, match="has schema_version 0, but this simpar reads 1"):
        Cluster.parse(f"{changed(tmp_path, schema_version=0)}:8")
    with pytest.raises(ClusterError, match="brings its own device, so 'device' cannot be given too; leave one"):
        Cluster.model_validate({"profile": "p.json", "device": "h100"})


def test_a_slower_profile_predicts_longer_steps(tmp_path: Path) -> None:
    h100 = device("h100")
    slow = {dtype: fit.replace(peak_efficiency=fit.peak_efficiency / 2) for dtype, fit in h100.gemm.items()}
    steps = []
    for name, fits in (("fast", h100.gemm), ("slow", slow)):
        path = tmp_path / f"{name}.json"
        profile(device=h100.replace(gemm=fits)).write(path)
        job = {"model": "gpt2", "cluster": f"{path}:1x2", "plan": {"dp": 2, "micro_batch": 16, "global_batch": 32}}
        steps.append(simulate(job).step_time_s)
    assert 1.2 * steps[0] < steps[1] < 2 * steps[0]


@pytest.mark.parametrize("name", shipped_profile_names())
def test_shipped_profiles_are_valid_and_are_what_the_catalog_uses(name: str) -> None:
    shipped = Profile.model_validate(shipped_profile(name))
    one = device(name)
    assert {key: one.gemm[key] for key in shipped.device.gemm} == shipped.device.gemm
    assert {key: one.attention[key] for key in shipped.device.attention} == shipped.device.attention
    assert one.errors == shipped.device.errors
    assert one == shipped.device  # what the catalog states besides is what the fit started from
    assert Cluster.parse(f"{name}:8").node_link.bandwidth_bytes_per_s == shipped.node_link.bandwidth_bytes_per_s  # type: ignore[union-attr]
    assert shipped.provenance.command.startswith("simpar calibrate fit gemm_")
    assert "fitted by simpar calibrate fit" in one.sources["gemm.bf16"]


def test_an_unknown_fit_names_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("fit: h100-sxn\nname: mine\n", encoding="utf-8")
    with pytest.raises(
        ClusterError, match=r"fit 'h100-sxn' is not in the catalog; did you mean 'h100-sxm'\?; use one of "
    ):
        load_device(path)
    path.write_text("fit: h100-sxm\nname: mine\nattention: {128: {efficiency: 0.5}}\n", encoding="utf-8")
    mine = load_device(path)
    assert mine.attention[128].efficiency == 0.5
    assert mine.attention[64] == device("h100").attention[64]
