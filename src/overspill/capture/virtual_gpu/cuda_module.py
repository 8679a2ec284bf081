"""Answer `torch.cuda` for a GPU that this machine does not have, from the recording."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any, Self

import torch

from overspill.capture.recording.recorder import Recorder
from overspill.pytorch.cuda import EMPTY_HOST_CACHE, LAZY_INIT, RAW_STREAM
from overspill.pytorch.dynamo_stand_in import uncompiled

_GRAPHS = (0, 1)  # the memory pool of CUDA graphs
_POOL = 32  # c10/cuda/CUDAStream.cpp, kStreamsPerPool: streams of one priority; then they are handed out again


class _Stream:
    """A CUDA stream or event that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.cuda_stream = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def is_capturing(self) -> bool:
        """Return False: no CUDA graph is ever captured."""
        return False

    def query(self) -> bool:
        """Return True: everything is done at once."""
        return True

    def elapsed_time(self, _: Any) -> float:
        """Return one millisecond, always: programs divide by it."""
        return 1.0

    def record_event(self, event: Any = None) -> Any:
        """Return an event that has happened."""
        return event or _Stream()

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    record = wait = synchronize = wait_event = wait_stream = _nothing


class _FakeCudaGraph:
    """A CUDA graph: the code that it captures runs once, eagerly on its stream; replays do nothing."""

    capturing = False  # one at a time, as the driver has it

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def capture_begin(self, *_: Any, **__: Any) -> None:
        """Note that a capture begins."""
        _FakeCudaGraph.capturing = True

    def capture_end(self) -> None:
        """Note that the capture ends."""
        _FakeCudaGraph.capturing = False

    def pool(self) -> tuple[int, int]:
        """Return the one pool of all graphs."""
        return _GRAPHS

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    replay = reset = instantiate = enable_debug_mode = debug_dump = _nothing


class _Generator(torch.Generator):
    """A CPU generator, whatever device is requested."""

    def __new__(cls, device: Any = None) -> Self:
        del device
        return super().__new__(cls)


class CudaFunctions:
    """Replacements for functions of `torch.cuda`, for a GPU of this capability and memory."""

    def __init__(self, recorder: Recorder, capability: tuple[int, int], memory_bytes: int) -> None:
        self._recorder = recorder
        self._capability = capability
        self._memory_bytes = memory_bytes

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """Return (owner, name, replacement) for each function that a training script may call."""
        # Streams, which the recorder keeps apart.
        recorder, capability, memory_bytes = self._recorder, self._capability, self._memory_bytes
        properties = SimpleNamespace(
            name="virtual GPU", major=capability[0], minor=capability[1], total_memory=memory_bytes,
            multi_processor_count=108, warp_size=32,
        )  # fmt: skip

        def constant(value: Any) -> Callable[..., Any]:
            return lambda *_, **__: value

        def reset(*_: Any, **__: Any) -> None:
            recorder.peak_bytes = recorder.live_bytes

        nothing = constant(None)
        made = {0: count(), -1: count()}
        streams = {0: _Stream()}

        class FakeStream(_Stream):
            def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
                super().__init__(device)
                priority = min(0, max(-1, priority))
                self.cuda_stream = 1 - _POOL * priority + next(made[priority]) % _POOL
                streams[self.cuda_stream] = self

        @contextmanager
        def on_stream(stream: _Stream | None) -> Iterator[None]:
            before = recorder.stream
            recorder.stream = before if stream is None else stream.cuda_stream
            try:
                yield
            finally:
                recorder.stream = before

        # Functions with an answer, then those to ignore.
        answers: dict[str, Any] = {
            "is_available": constant(True),
            "is_current_stream_capturing": lambda: _FakeCudaGraph.capturing,
            "CUDAGraph": _FakeCudaGraph,
            "graph_pool_handle": constant(_GRAPHS),
            "is_initialized": constant(False),  # where it is true, torch asks the driver
            "device_count": constant(1),
            "current_device": constant(0),
            "get_device_name": constant("virtual GPU"),
            "get_device_capability": constant(capability),
            "get_device_properties": constant(properties),
            "get_arch_list": constant([f"sm_{capability[0]}{capability[1]}"]),
            "is_bf16_supported": lambda including_emulation=True: including_emulation or capability >= (8, 0),
            "mem_get_info": lambda *_, **__: (memory_bytes - recorder.live_bytes, memory_bytes),
            "memory_allocated": lambda *_, **__: recorder.live_bytes,
            "memory_reserved": lambda *_, **__: recorder.live_bytes,
            "max_memory_allocated": lambda *_, **__: recorder.peak_bytes,
            "max_memory_reserved": lambda *_, **__: recorder.peak_bytes,
            "memory_summary": constant(""),
            "memory_stats": constant({}),
            "reset_peak_memory_stats": reset,
            "reset_max_memory_allocated": reset,
            "current_stream": lambda *_, **__: streams[recorder.stream],
            "default_stream": lambda *_, **__: streams[0],
            "set_stream": lambda stream: setattr(recorder, "stream", stream.cuda_stream),
            "Stream": FakeStream,
            "Event": _Stream,
            "stream": on_stream,
            "device": lambda *_, **__: nullcontext(),
            "get_rng_state": lambda *_, **__: torch.get_rng_state(),
            "get_rng_state_all": lambda *_, **__: [torch.get_rng_state()],
        }
        ignored = (
            "init", LAZY_INIT, "set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "seed",
            "seed_all", "set_rng_state", "set_rng_state_all", "set_per_process_memory_fraction", "ipc_collect",
        )  # fmt: skip
        answers |= dict.fromkeys(ignored, nothing)
        found = [
            (module, name, answer)
            for module in (torch.cuda, torch.cuda.graphs, torch.cuda.random)
            for name, answer in answers.items()
            if hasattr(module, name)
        ]
        # torch.accelerator has the same under other names.
        accelerator = answers | {
            "current_accelerator": constant(torch.device("cuda")),
            "current_device_index": constant(0),
            "current_device_idx": constant(0),
            "get_memory_info": answers["mem_get_info"],
            "set_device_index": nothing,
            "set_device_idx": nothing,
        }
        del accelerator["get_device_capability"]  # says other things there than in torch.cuda
        found += [
            (torch.accelerator, name, answer)
            for name, answer in accelerator.items()
            if hasattr(torch.accelerator, name)
        ]
        found += [
            (torch.backends.cudnn, "is_available", constant(True)),
            (torch.backends.cudnn, "is_acceptable", constant(True)),
            (torch, "Generator", _Generator),
            (*EMPTY_HOST_CACHE, nothing),
            (*RAW_STREAM, constant(0)),  # kernels of libraries ask for it when imported
            (torch, "compile", uncompiled),
        ]
        return found
