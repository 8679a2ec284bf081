"""Shipped devices are complete and sourced; any spelling finds them; a wrong file is refused in one line."""

import os
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import pytest

import overspill.devices
from overspill.core import Device, LayerType
from overspill.core.errors import RequestError
from overspill.devices import calibrated_path, device_names, load_device, this_cpu

FOLDER = Path(next(iter(overspill.devices.__path__)))
PROMISED = {
    *("k40", "k80", "titan-x", "p40", "p100", "p100-nvlink", "gtx1080ti", "titan-v", "v100", "v100-nvlink"),
    *("titan-rtx", "rtx2080ti", "t4"),
    *("a100-40gb", "a100-80gb", "a10", "a10g", "a6000", "rtx3060", "rtx3070", "rtx3080", "rtx3080ti", "rtx3090"),
    *("rtx4060", "rtx4060ti-16gb", "rtx4070", "rtx4080", "rtx4090", "l4", "l40s", "h100", "h200", "b200", "rtx5090"),
    "cpu",
}
# The machine of each of the five papers: memory in marketing GB, and the most that its link carries one way.
MACHINES_OF_THE_PAPERS = {
    "vDNN, MICRO 2016": ("titan-x", 12, 16e9),
    "Dymem, HPDC 2020": ("titan-x", 12, 16e9),
    "DNNMem, FSE 2020": ("p40", 24, 16e9),
    "profile-guided placement": ("p100-nvlink", 16, 40e9),
    "adaptive window and virtual addressing": ("v100-nvlink", 16, 50e9),
}
# Fields that a file may leave out, such as one written before they existed, or what is no figure of the device alone.
LINK = {"link_bytes_per_second", "link_latency_seconds", "network_bytes_per_second", "network_latency_seconds"}
LINK |= {"host_update_bytes_per_second", "disk_read_bytes_per_second", "disk_write_bytes_per_second", "host_bytes"}
OPTIONAL = {"context_low_bytes", "context_high_bytes", "compute_capability", "multiprocessors"}
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
    """Every number of a device by the key that its source has; the compute capability counts as one."""
    found: dict[str, float] = {}
    for field in fields(device):
        value = getattr(device, field.name)
        if field.name in OPTIONAL | LINK | {"unified_memory"} and not value:
            continue
        if isinstance(value, dict) and field.name != "sources":
            found |= {f"{field.name}.{key}": figure for key, figure in value.items()}
        elif isinstance(value, int | float) or field.name == "compute_capability":
            found[field.name] = float(value)
    return found


def test_all_promised_devices_are_shipped() -> None:
    assert set(device_names()) >= PROMISED
    assert list(device_names()) == sorted(device_names())


@pytest.mark.parametrize("paper", MACHINES_OF_THE_PAPERS)
def test_the_machine_of_every_paper_has_a_device(paper: str) -> None:
    name, gigabytes, link_bytes_per_second = MACHINES_OF_THE_PAPERS[paper]
    device = load_device(name)
    assert gigabytes * 0.93e9 < device.memory_bytes < gigabytes * 2**30
    for rate in (device.offload_bytes_per_second, device.prefetch_bytes_per_second):
        assert 0.6 * link_bytes_per_second < rate < link_bytes_per_second


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
def test_a_gpu_says_what_it_is_and_a_cpu_leaves_that_out(name: str) -> None:
    device = load_device(name)
    written = raw(name).keys() & OPTIONAL
    assert written == (set() if device.kind == "cpu" else OPTIONAL)
    if device.kind == "cuda":
        assert 3.5 <= float(device.compute_capability) <= 12.1
        assert 0 < device.context_low_bytes <= device.context_bytes <= device.context_high_bytes


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

    memory = column(
        "memory_bytes", "b200", "h200", "h100", "a100-80gb", "a6000", "l40s", "a100-40gb", "rtx5090", "rtx3090",
        *("rtx4090", "p40", "a10g", "l4", "p100", "v100", "rtx4080", "titan-x", "rtx3060", "rtx4070", "k40", "k80"),
        *("gtx1080ti", "rtx2080ti", "rtx3080", "rtx4060", "rtx3070"),
    )  # fmt: skip
    bandwidth = column("memory_bytes_per_second", "h200", "h100", "a100-80gb", "a100-40gb", "v100", "p100", "titan-x")
    link = column(
        "offload_bytes_per_second", "h200", "v100-nvlink", "p100-nvlink", "a100-40gb", "titan-x", "v100", "cpu"
    )
    between = column("link_bytes_per_second", "b200", "h100", "a100-80gb", "v100", "cpu", "t4")
    half = [load_device(name).flops_per_second["float16"] for name in ("h100", "a100-80gb", "v100", "p100", "titan-x")]
    # The 80 GB cards of two generations report the same memory to within one part in a thousand, in either order.
    memory[1:3] = [max(memory[1:3])]
    for figures_down in (memory, bandwidth, link, between, half):
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
        ("NVIDIA GeForce RTX 4060", "rtx4060"),
        ("NVIDIA GeForce RTX 3080 Ti", "rtx3080ti"),
        ("GeForce GTX 1080 Ti", "gtx1080ti"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA TITAN RTX", "titan-rtx"),
        ("TITAN V", "titan-v"),
        ("Tesla P40", "p40"),
        ("Tesla T4", "t4"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA B200", "b200"),
        ("RTX 4060 Ti 16GB", "rtx4060ti-16gb"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GB10", "gb10"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 5080", "rtx5080"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("CPU", "cpu"),
    ],
)
def test_any_usual_spelling_finds_the_device(spelling: str, name: str) -> None:
    assert load_device(spelling).name == name


def test_an_unknown_name_is_refused_with_the_closest_ones() -> None:
    with pytest.raises(RequestError, match=r"'rtx40.0.*`overspill devices`") as refusal:
        load_device("rtx4085")
    assert refusal.value.exit_code == 2


def test_two_cards_of_one_name_are_not_guessed_between() -> None:
    with pytest.raises(RequestError, match="rtx4060ti-16gb"):
        load_device("NVIDIA GeForce RTX 4060 Ti")


@pytest.mark.parametrize("name", ["abacus", "", "TITAN X (Pascal)"])
def test_a_name_unlike_all_others_still_leads_to_the_list(name: str) -> None:
    with pytest.raises(RequestError, match="`overspill devices`"):
        load_device(name)


@pytest.mark.parametrize("form", [str, Path])
def test_a_saved_device_loads_from_its_path(tmp_path: Path, form: type[str] | type[Path]) -> None:
    mine = replace(load_device("rtx4090"), name="mine", memory_bytes=10**9)
    mine.save(tmp_path / "mine.json")
    assert load_device(form(tmp_path / "mine.json")) == mine


def test_a_device_saved_before_there_were_bounds_and_capabilities_still_loads(tmp_path: Path) -> None:
    known = msgspec.to_builtins(load_device("rtx3060"))
    (tmp_path / "old.json").write_bytes(msgspec.json.encode({k: v for k, v in known.items() if k not in OPTIONAL}))
    old = load_device(tmp_path / "old.json")
    assert (old.context_low_bytes, old.context_high_bytes, old.compute_capability, old.multiprocessors) == (0, 0, "", 0)
    assert old.context_bytes == load_device("rtx3060").context_bytes


def test_a_toml_file_of_ones_own_may_write_whole_numbers(tmp_path: Path) -> None:
    text = (FOLDER / "h200.toml").read_text(encoding="utf-8").replace("50.0e9", "50_000_000_000")
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    assert load_device(tmp_path / "mine.toml") == load_device("h200")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for suffix in ("toml", "json"):
        with pytest.raises(RequestError, match="cannot read"):
            load_device(tmp_path / f"nowhere.{suffix}")
    with pytest.raises(RequestError, match=r"\.toml or \.json"):
        load_device(tmp_path / "device.yaml")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('kind = "cuda"', "kind = ", "device file"),
        ('kind = "cuda"', "", "`kind`"),
        ('kind = "cuda"', 'kind = "cuda"\nmemmory_bytes = 3', "unknown fields: memmory_bytes"),
        ("memory_bytes = ", 'memory_bytes = "12GB" # ', "memory_bytes"),
        ("memory_bytes = ", "memory_bytes = -", "memory_bytes is -.*above 0"),
        ("offload_bytes_per_second = ", "offload_bytes_per_second = 0 # ", "offload_bytes_per_second is 0.*above 0"),
        ("memory_bytes_per_second = ", "memory_bytes_per_second = nan # ", "memory_bytes_per_second is nan"),
        ("op_overhead_seconds = ", "op_overhead_seconds = -", "op_overhead_seconds is -"),
        ("\nfloat32 = ", "\nfloat31 = ", "no float32"),
        ("\ncontext_high_bytes = ", "\ncontext_high_bytes = 7 # ", "outside its bounds"),
        ("\nmultiprocessors = ", "\nmultiprocessors = -", "multiprocessors is -"),
        ('compute_capability = "9.0"', 'compute_capability = "sm_90"', "compute_capability is 'sm_90'"),
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
    with pytest.raises(RequestError, match=r"cpu\.json.*`overspill calibrate`"):
        this_cpu()


def test_a_calibration_that_no_machine_has_is_refused() -> None:
    replace(this_cpu(), prefetch_bytes_per_second=0.0).save(calibrated_path())
    with pytest.raises(RequestError, match=r"prefetch_bytes_per_second.*`overspill calibrate`"):
        this_cpu()


def test_a_gpu_saved_as_the_cpus_calibration_is_refused() -> None:
    load_device("h200").save(calibrated_path())
    with pytest.raises(RequestError, match="not a CPU"):
        this_cpu()


def test_a_calibration_that_is_no_file_is_refused() -> None:
    calibrated_path().mkdir()
    with pytest.raises(RequestError, match="`overspill calibrate`"):
        this_cpu()


def test_the_cache_is_where_the_environment_says(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert calibrated_path() == cache / "cpu.json"
    monkeypatch.setenv("OVERSPILL_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert calibrated_path() == tmp_path / ".cache" / "overspill" / "cpu.json"
