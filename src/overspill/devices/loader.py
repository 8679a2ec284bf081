"""Load devices by name, alias or file, and this machine's CPU."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import msgspec

from overspill.core import Device
from overspill.core.errors import RequestError
from overspill.core.files import read_whole
from overspill.core.registry import Registry, did_you_mean

_FOLDER = Path(__file__).parent
_SUFFIXES = (".toml", ".json")
DEVICES: Registry[Path | Device] = Registry(
    "device", "devices", {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}
)
"""Device files, or Devices, by name."""

# Other names by `_key`, so without spaces, dashes, underscores and vendor words. What the driver calls a card is here
# too (`Tesla V100-SXM2-16GB`, `NVIDIA H100 80GB HBM3`), so that `torch.cuda.get_device_name()` finds its file. An
# RTX 4060 Ti is not: the driver calls the 8 GB and the 16 GB card the same.
_ALIASES = {
    "gtxtitanx": "titan-x", "titanxmaxwell": "titan-x",
    "p100pcie": "p100", "p100pcie16gb": "p100", "p10016gb": "p100",
    "v100sxm2": "v100", "v100sxm216gb": "v100", "v10016gb": "v100",
    "a100": "a100-40gb", "a10040": "a100-40gb", "a100sxm": "a100-40gb", "a100sxm4": "a100-40gb",
    "a100sxm440gb": "a100-40gb", "a10080": "a100-80gb", "a100sxm480gb": "a100-80gb",
    "h100sxm": "h100", "h100sxm5": "h100", "h10080gb": "h100", "h10080gbhbm3": "h100",
    "h200sxm": "h200", "h200141gb": "h200",
    "3060": "rtx3060", "rtx306012gb": "rtx3060", "3070": "rtx3070", "3080": "rtx3080", "rtx308010gb": "rtx3080",
    "3080ti": "rtx3080ti", "3090": "rtx3090", "4060": "rtx4060", "4060ti16gb": "rtx4060ti-16gb", "4070": "rtx4070",
    "4080": "rtx4080", "4090": "rtx4090", "5090": "rtx5090", "2080ti": "rtx2080ti", "1080ti": "gtx1080ti",
    "rtxa6000": "a6000", "a1024gb": "a10", "l424gb": "l4", "l40s48gb": "l40s", "b200sxm": "b200",
    "p4024gb": "p40", "t416gb": "t4", "5080": "rtx5080",
    "gh200480gb": "gh200", "gh20096gb": "gh200", "gb200nvl72": "gb200", "dgxspark": "gb10",
    "amdinstinctmi300x": "mi300x", "amdinstinctmi300xoam": "mi300x", "instinctmi300x": "mi300x",
    "rtxpro6000blackwell": "rtx-pro-6000", "rtxpro6000blackwellworkstationedition": "rtx-pro-6000",
    "rtxpro6000blackwellserveredition": "rtx-pro-6000", "rtxpro6000blackwellmaxqworkstationedition": "rtx-pro-6000",
}  # fmt: skip


def device_names() -> tuple[str, ...]:
    """Return all device names, sorted."""
    return tuple(sorted(DEVICES))


def load_device(name: str | Path) -> Device:
    """Return the device called `name`, or the one in the file at that path.

    Args:
        name: A name, alias or path; case, spaces, dashes and underscores do not matter. `cpu` is this machine's, with
            its physical memory, and `cuda` its GPU. The driver's name of a GPU works too, and a torch.device.

    Returns:
        The Device: memory in bytes, rates in bytes and FLOP per second, each figure with its source.

    Raises:
        RequestError: For an unknown name or a broken file.
    """
    if not isinstance(name, (str, Path)):  # a torch.device
        name = str(name)
    if str(name).partition(":")[0] == "cuda":
        name = _here(str(name))
    if isinstance(name, Path) or os.sep in name or name.lower().endswith(_SUFFIXES):
        return _from_file(Path(name))
    # Find the name, or suggest one like it.
    known = _known()
    found = known.get(_key(name))
    if found is None:
        raise RequestError(
            f"unknown device {name!r}{did_you_mean(_key(name), known, most=3, shown_as=known)} `overspill devices` "
            "lists all, and a path of a "
            ".toml or .json file works too"
        )
    if found == "cpu":
        return this_cpu()
    device = DEVICES[found]
    return device if isinstance(device, Device) else _from_file(Path(device))


def _here(name: str) -> str:
    """Return the driver's name of this machine's GPU `name`. Raises RequestError if there is none."""
    import torch  # noqa: PLC0415 - only here

    if not torch.cuda.is_available():
        raise RequestError(f"there is no GPU here for {name!r}; name the one that you mean, as rtx4090")
    return torch.cuda.get_device_name(name)


def this_cpu() -> Device:
    """Return this machine's CPU, with its physical memory.

    Its figures are those that `overspill calibrate` measured, otherwise the shipped defaults.
    """
    path = calibrated_path()
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return _from_file(_FOLDER / "cpu.toml")
    except OSError as error:
        raise _bad_calibration(path, f"cannot be read: {error.strerror}") from None
    try:
        device = _checked(Device.from_json(text), path)
    except RequestError as error:
        raise _bad_calibration(path, f"is broken: {error}") from None
    if device.kind != "cpu":
        raise _bad_calibration(path, f"describes a {device.kind} device, not a CPU")
    return replace(device, memory_bytes=physical_bytes())


def measured_update_rate() -> float:
    """Return the bytes per second of updates on this host, as `overspill calibrate` measured them; 0 if it has not."""
    return this_cpu().host_update_bytes_per_second if calibrated_path().is_file() else 0.0


def calibrated_path() -> Path:
    """Return the path of this CPU's calibrated profile: `cpu.json` in `$OVERSPILL_CACHE` or `~/.cache/overspill`."""
    folder = os.environ.get("OVERSPILL_CACHE") or "~/.cache/overspill"
    return Path(folder).expanduser() / "cpu.json"


def _key(name: str) -> str:
    """Return `name` normalised for comparison: lower case, no separators, no vendor words."""
    return re.sub(r"nvidia|geforce|tesla|[\s_-]", "", name.lower())


def _known() -> dict[str, str]:
    """Return device names by every key that finds them."""
    return {_key(name): name for name in device_names()} | _ALIASES


def _from_file(path: Path) -> Device:
    """Return the device in a `.toml` or `.json` file.

    A CPU without a figure for its memory gets this machine's.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise RequestError(f"{path} is not a device file; its name ends in .toml or .json")
    device = _checked(_from_toml(path) if path.suffix.lower() == ".toml" else Device.load(path), path)
    if device.kind == "cpu" and device.memory_bytes == 0:
        return replace(device, memory_bytes=physical_bytes())
    return device


def _from_toml(path: Path) -> Device:
    """Return the device in a TOML file.

    Raises RequestError if the file does not exist, or a field is wrong or unknown.
    """
    try:
        table = tomllib.loads(read_whole(path).decode())
        device = msgspec.convert(table, Device)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise RequestError(f"{path} is not a device file: {error}") from None
    # msgspec lets unknown keys pass, and a misspelt optional one would then be lost without a word.
    if unknown := sorted(table.keys() - {field.name for field in fields(Device)}):
        raise RequestError(
            f"{path} has unknown fields: {', '.join(unknown)}; leave them out (`overspill devices --json` shows all "
            "there are)"
        )
    return device


def _checked(device: Device, path: Path) -> Device:
    """Return `device` itself, if its figures are possible.

    Raises RequestError for figures that no hardware has, such as a bandwidth of zero.
    """
    # Rates and sizes above 0.
    positive = {
        "memory_bytes_per_second": device.memory_bytes_per_second,
        "offload_bytes_per_second": device.offload_bytes_per_second,
        "prefetch_bytes_per_second": device.prefetch_bytes_per_second,
        **{f"flops_per_second.{dtype}": rate for dtype, rate in device.flops_per_second.items()},
        **{f"efficiency.{layer}": share for layer, share in device.efficiency.items()},
    }
    if device.kind != "cpu":  # a CPU may leave it at 0, for the machine's own
        positive["memory_bytes"] = device.memory_bytes
    for field, figure in positive.items():
        if not figure > 0:
            raise RequestError(f"{path}: {field} is {figure}; it must be above 0")
    # Times and shares from 0.
    not_negative = {
        "memory_bytes": device.memory_bytes,
        "context_bytes": device.context_bytes,
        "context_low_bytes": device.context_low_bytes,
        "context_high_bytes": device.context_high_bytes,
        "multiprocessors": device.multiprocessors,
        "transfer_latency_seconds": device.transfer_latency_seconds,
        "op_overhead_seconds": device.op_overhead_seconds,
        "transfer_host_seconds": device.transfer_host_seconds,
        "transfer_compute_share": device.transfer_compute_share,
        "link_bytes_per_second": device.link_bytes_per_second,
        "link_latency_seconds": device.link_latency_seconds,
        "network_bytes_per_second": device.network_bytes_per_second,
        "network_latency_seconds": device.network_latency_seconds,
        "host_update_bytes_per_second": device.host_update_bytes_per_second,
        "host_update_call_seconds": device.host_update_call_seconds or 0.0,
        "host_bytes": device.host_bytes,
        "disk_read_bytes_per_second": device.disk_read_bytes_per_second,
        "disk_write_bytes_per_second": device.disk_write_bytes_per_second,
    }
    for field, figure in not_negative.items():
        if not figure >= 0:
            raise RequestError(f"{path}: {field} is {figure}; it must not be negative")
    # Bounds and formats.
    low, high = (bound or device.context_bytes for bound in (device.context_low_bytes, device.context_high_bytes))
    if not low <= device.context_bytes <= high:
        raise RequestError(f"{path}: context_bytes is {device.context_bytes}, outside its bounds {low} and {high}")
    if not re.fullmatch(r"(\d+\.\d)?", device.compute_capability):
        raise RequestError(
            f"{path}: compute_capability is {device.compute_capability!r}; write 8.6, or nothing for a CPU"
        )
    if "float32" not in device.flops_per_second:  # what the costs fall back on for a dtype without a figure
        raise RequestError(f"{path}: flops_per_second has no float32; give its FLOP/s")
    return device


def _bad_calibration(path: Path, what: str) -> RequestError:
    return RequestError(f"the calibrated profile {path} {what}; run `overspill calibrate` again or delete the file")


def physical_bytes() -> int:
    """Return the bytes of this machine's physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
