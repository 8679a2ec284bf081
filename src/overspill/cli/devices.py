"""`overspill devices`: the hardware that plans can be made for."""

from __future__ import annotations

import msgspec

from .common import AsJson, Outcome


def devices(json: AsJson = False) -> Outcome:
    """List the devices that `plan --gpu` knows, and this CPU."""
    del json  # `main` reads it from the arguments
    from overspill.devices import device_names, load_device
    from overspill.report.devices import devices_table

    found = [load_device(name) for name in device_names()]
    return Outcome({"devices": [msgspec.to_builtins(device) for device in found]}, devices_table(found))
