"""Shipped devices are complete and sourced; any spelling finds them; a wrong file is refused in one line."""

import os
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest

import overspill.devices
from overspill.core import Device, LayerType
from overspill.core.errors import RequestError
from overspill.devices import calibrated_path, device_names, load_device, this_cpu

FOLDER = Path(next(iter(overspill.devices.__path__)))
PROMISED = {
    *("titan-x", "p100", "v100", "a100-40gb", "a100-80gb", "h100", "h200"),
    *("rtx3060", "rtx3090", "rtx4090", "cpu"),
}
RAM_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
every_device = pytest.mark.parametrize("name", device_names())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, so that no test sees the calibration of the machine it runs on."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("OVERSPILL_CACHE", str(folder))
    return folder


def raw(name: str) -> dict[str, object]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def figures(device: Device) -> dict[str, float]:
    """Every number of a device by the key that its source has."""
    found: dict[str, float] = {}
    for field in fields(device):
        value = getattr(device, field.name)
        if isinstance(value, dict) and field.name != "sources":
            found |= {f"{field.name}.{key}": figure for key, figure in value.items()}
        elif isinstance(value, int | float):
            found[field.name] = value
    return found


def test_all_promised_devices_are_shipped() -> None:
    assert set(device_names()) >= PROMISED
    assert list(device_names()) == sorted(device_names())


@every_device
def test_a_device_is_named_as_its_file_and_keeps_to_the_fields_of_the_noun(name: str) -> None:
    assert load_device(name).name == name
    assert raw(name).keys() <= {field.name for field in fields(Device)}


@every_device
def test_a_device_survives_json(name: str) -> None:
    device = load_device(name)
    assert Device.from_json(device.to_json()) == device


@every_device
def test_every_figure_has_its_source_and_every_source_its_figure(name: str) -> None:
    device = load_device(name)
    assert device.sources.keys() == figures(device).keys()
    assert all(source.strip() for source in device.sources.values())


@every_device
def test_figures_are_positive_and_shares_at_most_one(name: str) -> None:
    device = load_device(name)
    may_be_zero = {"full_duplex", "transfer_compute_share"} | ({"context_bytes"} if device.kind == "cpu" else set())
    assert all(figure > 0 for field, figure in figures(device).items() if field not in may_be_zero)
    assert 0 <= device.transfer_compute_share <= 1
    assert all(share <= 1 for share in device.efficiency.values())


@every_device
def test_layer_types_and_dtypes_are_spelled_as_elsewhere(name: str) -> None:
    device = load_device(name)
    assert set(device.efficiency) <= set(LayerType)
    assert {"float32", "float16", "bfloat16", "float64"} <= set(device.flops_per_second)
    assert set(device.flops_per_second) <= {"float32", "tfloat32", "float16", "bfloat16", "float64"}


@every_device
def test_memory_is_faster_than_the_link_and_the_context_is_small(name: str) -> None:
    device = load_device(name)
    assert device.kind in {"cpu", "cuda"}
    assert device.memory_bytes_per_second > max(device.offload_bytes_per_second, device.prefetch_bytes_per_second)
    assert device.context_bytes < 0.06 * device.memory_bytes


def test_devices_stand_in_the_order_that_their_makers_claim() -> None:
    def column(field: str, *names: str) -> list[float]:
        return [getattr(load_device(name), field) for name in names]

    memory = column("memory_bytes", "h200", "h100", "a100-80gb", "a100-40gb", "rtx3090", "p100", "v100", "titan-x")
    bandwidth = column("memory_bytes_per_second", "h200", "h100", "a100-80gb", "a100-40gb", "v100", "p100", "titan-x")
    link = column("offload_bytes_per_second", "h200", "v100-nvlink", "a100-40gb", "titan-x", "v100", "cpu")
    half = [load_device(name).flops_per_second["float16"] for name in ("h100", "a100-80gb", "v100", "p100", "titan-x")]
    # The 80 GB cards of two generations report the same memory to within one part in a thousand, in either order.
    memory[1:3] = [max(memory[1:3])]
    for figures_down in (memory, bandwidth, link, half):
        assert figures_down == sorted(set(figures_down), reverse=True)


@every_device
def test_narrow_numbers_are_never_slower_than_wide_ones_on_a_gpu(name: str) -> None:
    device = load_device(name)
    if device.kind == "cuda":
        rate = device.flops_per_second
        assert rate["float16"] >= rate["float32"] >= rate["float64"]
        assert rate.get("tfloat32", rate["float32"]) >= rate["float32"]


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("RTX 4090", "rtx4090"),
        ("rtx_4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("titanx", "titan-x"),
        ("TITAN X", "titan-x"),
        ("a100", "a100-40gb"),
        ("A100-80", "a100-80gb"),
        ("a100 80gb", "a100-80gb"),
        ("NVIDIA GeForce RTX 3060", "rtx3060"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla P100-PCIE-16GB", "p100"),
        ("GeForce GTX TITAN X", "titan-x"),
        ("CPU", "cpu"),
    ],
)
def test_any_usual_spelling_finds_the_device(spelling: str, name: str) -> None:
    assert load_device(spelling).name == name


def test_an_unknown_name_is_refused_with_the_closest_ones() -> None:
    with pytest.raises(
        RequestError, match=r"'rtx4080'; did you mean rtx4090.*`overspill devices` lists all"
    ) as refusal:
        load_device("rtx4080")
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize("name", ["abacus", "", "TITAN X (Pascal)"])
def test_a_name_unlike_all_others_still_leads_to_the_list(name: str) -> None:
    with pytest.raises(RequestError, match="`overspill devices` lists all"):
        load_device(name)


@pytest.mark.parametrize("form", [str, Path])
def test_a_saved_device_loads_from_its_path(tmp_path: Path, form: type[str] | type[Path]) -> None:
    mine = replace(load_device("rtx4090"), name="mine", memory_bytes=10**9)
    mine.save(tmp_path / "mine.json")
    assert load_device(form(tmp_path / "mine.json")) == mine


def test_a_toml_file_of_ones_own_may_write_whole_numbers(tmp_path: Path) -> None:
    text = (FOLDER / "h200.toml").read_text(encoding="utf-8").replace("50.0e9", "50_000_000_000")
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    assert load_device(tmp_path / "mine.toml") == load_device("h200")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for suffix in ("toml", "json"):
        with pytest.raises(RequestError, match="cannot read"):
            load_device(tmp_path / f"nowhere.{suffix}")
    with pytest.raises(RequestError, match=r"ends in \.toml or \.json"):
        load_device(tmp_path / "device.yaml")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('kind = "cuda"', "kind = ", "not a device file"),
        ('kind = "cuda"', "", "missing required field `kind`"),
        ('kind = "cuda"', 'kind = "cuda"\nmemmory_bytes = 3', "unknown fields: memmory_bytes"),
        ("memory_bytes = ", 'memory_bytes = "12GB" # ', "memory_bytes"),
        ("memory_bytes = ", "memory_bytes = -", "memory_bytes is -.*above 0"),
        ("offload_bytes_per_second = ", "offload_bytes_per_second = 0 # ", "offload_bytes_per_second is 0.*above 0"),
        ("memory_bytes_per_second = ", "memory_bytes_per_second = nan # ", "memory_bytes_per_second is nan"),
        ("op_overhead_seconds = ", "op_overhead_seconds = -", "op_overhead_seconds is -.*must not be negative"),
        ("\nfloat32 = ", "\nfloat31 = ", "no float32"),
    ],
)
def test_a_wrong_device_file_is_refused_with_what_is_wrong(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    text = (FOLDER / "h200.toml").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "wrong.toml").write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(RequestError, match=complaint) as refusal:
        load_device(tmp_path / "wrong.toml")
    assert "wrong.toml" in str(refusal.value)


def test_this_cpu_without_calibration_is_the_shipped_one_with_this_machines_memory() -> None:
    assert raw("cpu")["memory_bytes"] == 0
    assert this_cpu().memory_bytes == RAM_BYTES
    assert this_cpu().flops_per_second == raw("cpu")["flops_per_second"]
    assert load_device("cpu") == this_cpu()


def test_this_cpu_is_the_calibrated_one_where_there_is_one() -> None:
    measured = replace(this_cpu(), name="my-box", memory_bytes=1, memory_bytes_per_second=99e9)
    measured.save(calibrated_path())
    assert this_cpu() == replace(measured, memory_bytes=RAM_BYTES)
    assert load_device("cpu").name == "my-box"


@pytest.mark.parametrize("text", ["", "{", "{}", '{"name": "cpu"}', "\0"])
def test_a_broken_calibration_is_refused_with_the_way_out(text: str) -> None:
    calibrated_path().write_text(text)
    with pytest.raises(RequestError, match=r"cpu\.json is broken.*`overspill calibrate` again or delete the file"):
        this_cpu()


def test_a_calibration_that_no_machine_has_is_refused() -> None:
    replace(this_cpu(), prefetch_bytes_per_second=0.0).save(calibrated_path())
    with pytest.raises(RequestError, match=r"prefetch_bytes_per_second is 0.*`overspill calibrate` again"):
        this_cpu()


def test_a_gpu_saved_as_the_cpus_calibration_is_refused() -> None:
    load_device("h200").save(calibrated_path())
    with pytest.raises(RequestError, match="not a CPU"):
        this_cpu()


def test_a_calibration_that_is_no_file_is_refused() -> None:
    calibrated_path().mkdir()
    with pytest.raises(RequestError, match=r"cannot be read.*`overspill calibrate` again"):
        this_cpu()


def test_the_cache_is_where_the_environment_says(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert calibrated_path() == cache / "cpu.json"
    monkeypatch.setenv("OVERSPILL_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert calibrated_path() == tmp_path / ".cache" / "overspill" / "cpu.json"
