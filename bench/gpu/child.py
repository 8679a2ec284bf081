"""One experiment in this process: `python -m gpu.child CATALOGUE NAME --device cuda --result FILE`; what the campaign starts."""

from __future__ import annotations

import argparse
import json
import platform
import traceback
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from . import lines
from .experiment import Experiment, Setting, Waiting, write_atomically


def main() -> None:
    """Write the outcome to the result file; the exit code is 0 also where the outcome is an error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("catalogue")
    parser.add_argument("name", help="of the experiment, or `about`")
    parser.add_argument("--device", required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--memory-bytes", type=int, default=0)
    parser.add_argument("--earlier", type=Path, nargs="*", default=[])
    parser.add_argument("--result", type=Path, required=True)
    asked = parser.parse_args()
    if asked.name == "about":
        write_atomically(asked.result, about(asked.device))
        return
    known = lines.latest(lines.read(path for path in asked.earlier if path.exists()))
    figures = {line.experiment: line.figures for line in known.values() if line.status == lines.OK}
    setting = Setting(asked.device, asked.small, asked.memory_bytes, figures, asked.result)
    experiments: dict[str, Experiment] = import_module(asked.catalogue).EXPERIMENTS
    write_atomically(asked.result, outcome(experiments[asked.name], setting))


def outcome(experiment: Experiment, setting: Setting) -> dict[str, Any]:
    """Status, figures and error of the experiment, run here and now; what it had noted is among the figures."""
    try:
        for name in experiment.needs:
            setting.figures_of(name)
        found = experiment.run(setting)
    except Waiting as error:
        return {"status": lines.WAITING, "figures": setting.noted, "error": str(error)}
    except BaseException:  # noqa: BLE001 - whatever it is, it is what this experiment found
        return {"status": lines.FAILED, "figures": setting.noted, "error": traceback.format_exc()[-4000:]}
    result = {"status": lines.OK, "figures": setting.noted | found, "error": ""}
    json.dumps(result)  # a figure that is no JSON is the experiment's error, with its own traceback
    return result


def about(device: str) -> dict[str, dict[str, object]]:
    """The device and the versions, as far as they can be told."""
    import torch  # noqa: PLC0415 - the other experiments import it when they run

    where: dict[str, object] = {"kind": device, "cpus": torch.get_num_threads(), "machine": platform.machine()}
    versions: dict[str, object] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("overspill", "triton", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        where |= {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
        }
        versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {"device": where, "versions": versions}


if __name__ == "__main__":
    main()
