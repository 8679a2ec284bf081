"""Large jobs of today on cards that are too small: `auto` against what people do about it, at equal memory.

    python bench/llm.py [--jobs llama-1b,…] [--shares 0.9,…] [--papers] [--json FILE]
    python bench/llm.py --read bench/results/llm.json
    python bench/llm.py --picture docs/pictures/llm.png --read bench/results/llm.json

All is simulated on the GPU named, but the CPU seconds of planning. The optimizer is AdamW's fused kernel, Trainer's
default; Mixtral, whose experts of a layer are one parameter, has AdamW's other kernels, which can update it in slices.
Of each job the first lines are budgets: shares of the card that it takes unmanaged. `auto` plans the whole step
for a card of that size; beside its slowdown over the unmanaged step are the proven bound, what the card holds over what
is live at the peak, and, with --papers, the fastest of the papers' policies that fits (of live bytes alone, so without
fragmentation, which favours them).

Then what people do: activation checkpointing of all blocks, the same with what blocks keep offloaded to the host, all
saved activations offloaded, and each of these with a loss in pieces of 1024 tokens whose logits are computed again in
backward. Each takes a card of some size, by PyTorch's caching allocator, and a step of some length: `auto` is planned
for the same card. What comes back is fetched as early as two saved tensors before it is read, which is at least as early as
libraries do.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ground_truth.beside import add_directory
from ground_truth.torchvision_models import without_fake_operators
from paired import json_record
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from overspill import models
from overspill.core import Device, Graph, Schedule
from overspill.core.errors import OverspillError
from overspill.core.units import format_bytes
from overspill.devices import load_device
from overspill.job import Job
from overspill.models import BuiltModel
from overspill.planning.assemble import Transfer, assemble
from overspill.planning.gaps import earliest_return, saved_gaps
from overspill.planning.step_program import StepProgram
from overspill.planning.timing import releases
from overspill.plans.plan import NO_LIMIT_BYTES, make_plan
from overspill.policies import POLICIES
from overspill.policies.base import Policy
from overspill.policies.in_core import checkpointed, given_to_checkpoints
from overspill.runtime.options import Options
from overspill.runtime.preview import step_of

SHARES = (0.9, 0.75, 0.55, 0.4)
AHEAD = 2
"""Saved tensors before whose use the next is fetched, where people offload."""
NEAR = 0.02
"""What backward reads within so much of the step after forward stays: libraries leave the head and the loss alone."""
PIECE = 1024
"""Tokens of a piece of a loss in pieces."""
OURS, PLAIN = "auto", "liveness"


# -- jobs


def _text(config: str, seq_len: int, *, pieces: bool) -> BuiltModel:
    """A language model of transformers by its configuration, or with its loss in pieces."""
    built = models.load(f"hf:{config}", seq_len=seq_len)
    return replace(built, module=LossInPieces(built.module), loss=_own_loss) if pieces else built


class LossInPieces(nn.Module):
    """A causal language model whose head and loss run over pieces of the tokens, and again in backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, text: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of all predicted tokens."""
        hidden = self.model.base_model(input_ids=text, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        wanted = labels[:, 1:].flatten()
        parts = zip(hidden.split(PIECE), wanted.split(PIECE), strict=True)
        sums = [checkpoint(self._sum, *part, use_reentrant=False) for part in parts]
        return torch.stack(sums).sum() / wanted.numel()

    def _sum(self, hidden: Tensor, wanted: Tensor) -> Tensor:
        return cross_entropy(self.model.get_output_embeddings()(hidden).float(), wanted, reduction="sum")


def _own_loss(module: nn.Module, *batch: Tensor) -> Tensor:
    found: Tensor = module(*batch)
    return found


def _unet(*, pieces: bool) -> BuiltModel:
    """The UNet of Stable Diffusion 1.5 at 512 x 512 pixels (latents of 64 x 64)."""
    assert not pieces  # its loss is small
    add_directory("OVERSPILL_JOBS", first=False)
    with without_fake_operators():
        from diffusers import UNet2DConditionModel  # noqa: PLC0415 - `make jobs-libraries`
    config = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}

    def batches(samples: int) -> tuple[Tensor, ...]:
        latents, noise = torch.randn(2, samples, 4, 64, 64, device="cpu")
        return (
            latents,
            torch.randint(1000, (samples,), device="cpu"),
            torch.randn(samples, 77, 768, device="cpu"),
            noise,
        )

    def loss(module: nn.Module, latents: Tensor, times: Tensor, text: Tensor, noise: Tensor) -> Tensor:
        return nn.functional.mse_loss(module(latents, times, text).sample.float(), noise.float())

    return BuiltModel("sd-unet", UNet2DConditionModel(**config).train(), batches, loss)


def _whisper(*, pieces: bool) -> BuiltModel:
    """Whisper large v3 on 30 seconds of sound and 448 tokens."""
    import transformers  # noqa: PLC0415

    assert not pieces  # its loss is small
    config = transformers.WhisperConfig(
        vocab_size=51866, num_mel_bins=128, encoder_layers=32, encoder_attention_heads=20, decoder_layers=32,
        decoder_attention_heads=20, encoder_ffn_dim=5120, decoder_ffn_dim=5120, d_model=1280, use_cache=False,
    )  # fmt: skip

    def batches(samples: int) -> tuple[Tensor, ...]:
        return torch.randn(samples, 128, 3000, device="cpu"), torch.randint(51866, (samples, 448), device="cpu")

    def loss(module: nn.Module, sound: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = module(input_features=sound, labels=labels).loss
        return found

    return BuiltModel("whisper", transformers.WhisperForConditionalGeneration(config).train(), batches, loss)


@dataclass(frozen=True)
class Trained:
    """A job: what makes the model, samples in a step, the GPU, and how it is trained."""

    make: Callable[..., BuiltModel]
    batch: int
    gpu: str
    in_pieces: bool = True
    optimizer: str = "adamw-fused"
    dtype: str = "bfloat16"
    how: tuple[tuple[str, Any], ...] = ()

    def job(self, *, pieces: bool = False, **how: Any) -> Job:
        """The Job, with its loss in `pieces` or whole."""
        return Job(
            functools.partial(self.make, pieces=pieces),
            self.batch,
            self.optimizer,
            self.dtype,
            **{**dict(self.how), **how},
        )


def llama(layers: int, hidden: int, inner: int, heads: int, tied: str) -> str:
    return (
        f"llama,vocab_size=128256,num_hidden_layers={layers},hidden_size={hidden},intermediate_size={inner},"
        f"num_attention_heads={heads},num_key_value_heads=8,max_position_embeddings=131072,rms_norm_eps=1e-5,tie_word_embeddings={tied}"
    )


def qwen(layers: int, hidden: int, inner: int, heads: int, tied: str) -> str:
    return (
        f"qwen3,vocab_size=151936,num_hidden_layers={layers},hidden_size={hidden},intermediate_size={inner},head_dim=128,"
        f"num_attention_heads={heads},num_key_value_heads=8,max_position_embeddings=40960,tie_word_embeddings={tied}"
    )


def _of(config: str, seq_len: int) -> Callable[..., BuiltModel]:
    return functools.partial(_text, config, seq_len)


LLAMA_1B = llama(16, 2048, 8192, 32, "True")
LLAMA_8B = llama(32, 4096, 14336, 32, "False")
MIXTRAL = (
    "mixtral,vocab_size=32000,num_hidden_layers=12,hidden_size=2048,intermediate_size=4096,num_attention_heads=32,"
    "num_key_value_heads=8,num_local_experts=8,num_experts_per_tok=2"
)
JOBS = {
    "llama-1b": Trained(_of(LLAMA_1B, 4096), 1, "rtx4090"),
    "llama-8b": Trained(_of(LLAMA_8B, 8192), 1, "h100"),
    "llama-8b-lora": Trained(_of(LLAMA_8B, 4096), 1, "rtx4090", how=(("lora", 16), ("checkpointing", True))),
    "qwen3-0.6b": Trained(_of(qwen(28, 1024, 3072, 16, "True"), 4096), 1, "rtx3060"),
    "qwen3-4b": Trained(_of(qwen(36, 2560, 9728, 32, "True"), 4096), 1, "h100"),
    "mixtral-8-experts": Trained(_of(MIXTRAL, 4096), 1, "h100", optimizer="adamw"),
    "gpt2": Trained(_of("gpt2,n_positions=1024", 1024), 8, "rtx3060", dtype="amp-bfloat16"),
    "sd-unet": Trained(_unet, 8, "rtx4090", in_pieces=False, dtype="amp-bfloat16"),
    "whisper": Trained(_whisper, 2, "rtx4090", in_pieces=False),
}  # fmt: skip


# -- what people do


class OffloadSaved(Policy):
    """Every saved activation goes to the host as forward has read it, and comes back shortly before backward does."""

    name = "offload-saved"
    offloads = True

    def __init__(self, dropped: Sequence[int] | None = None) -> None:
        """`dropped` is made again in backward; None: what the program's own checkpoints make again."""
        super().__init__()
        self.dropped = dropped

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        dropped = checkpointed(graph) if self.dropped is None else self.dropped
        program = StepProgram(graph, dropped, kept=given_to_checkpoints(graph))
        clock = np.concatenate([[0.0], np.cumsum(program.durations(seconds))])
        far = program.length * NEAR
        saved = (gap for tensor, gap in saved_gaps(program).items() if not graph.is_gathered(tensor))
        gaps = sorted((gap for gap in saved if gap.end - gap.start > far), key=lambda gap: gap.end)
        released = releases(program, gaps, program.live_bytes().copy(), clock, device, NO_LIMIT_BYTES)
        ends = [gap.end for gap in gaps]
        transfers = []
        for at, gap in enumerate(gaps):
            first = max(ends[max(0, at - AHEAD)], earliest_return(program, gap), released[gap])
            transfers.append(Transfer(gap, gap.start + 1, released[gap], min(first, gap.end), gap.end))
        return assemble(program, transfers, self.name, budget_bytes)


@dataclass(frozen=True)
class Row:
    """A budget, or something that people do, and `auto` for the same card; sizes in bytes."""

    job: str
    gpu: str
    what: str
    card_bytes: int
    theirs: float | None
    auto: float | None
    bound: float | None
    card_over_live: float | None
    plan_seconds: float | None

    def line(self) -> str:
        """The row of the table."""
        cells = [
            "" if self.theirs is None else f"{self.theirs:.3f}",
            "no plan" if self.auto is None else f"{self.auto:.3f}",
            "" if self.bound is None else f"{self.bound:.3f}",
            "" if self.card_over_live is None else f"{self.card_over_live:.3f}",
            "" if self.plan_seconds is None else f"{self.plan_seconds:.1f} s",
        ]
        return (
            f"| `{self.job}` | {self.gpu} | {self.what} | {format_bytes(self.card_bytes)} | " + " | ".join(cells) + " |"
        )


HEADER = (
    "| job | GPU | budget, or what people do | card | theirs | `auto` | bound | card over live | planning (CPU) |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


class Bench:
    """The rows of one job."""

    def __init__(self, name: str, trained: Trained, shares: Sequence[float], *, papers: bool) -> None:
        self.name, self.trained, self.shares, self.papers = name, trained, shares, papers
        self.given = Options(device=load_device(trained.gpu), whole_step=True)
        self.step = step_of(trained.job(), self.given)
        self.graph, self.account, self.planned = self.step.graph, self.step.account, self.step.planner
        self.plain = make_plan(self.graph, self.account.device, PLAIN, NO_LIMIT_BYTES)

    def rows(self) -> Iterator[Row]:
        """Budgets first, then what people do."""
        whole = self.account.unmanaged(self.graph)
        for share in self.shares:
            budget = int(share * whole)
            best = self._best_of_papers(budget) if self.papers else None
            yield self._row(f"{share:.0%} of {format_bytes(whole)}", budget, best)
        for what, job, policy in self._ways():
            step = step_of(job, replace(self.given, placement="pytorch"))
            found = make_plan(step.graph, step.account.device, policy, NO_LIMIT_BYTES)
            card = step.account.measured(found)
            assert card.device_bytes is not None
            yield self._row(what, card.device_bytes, found.step_seconds / self.plain.step_seconds)

    def _ways(self) -> Iterator[tuple[str, Job, str]]:
        trained = self.trained
        for pieces in (False, True) if trained.in_pieces else (False,):
            also = ", loss in pieces" if pieces else ""
            again, plain = trained.job(pieces=pieces, checkpointing=True), trained.job(pieces=pieces)
            if pieces:
                yield "loss in pieces", plain, PLAIN
            if again != plain:
                yield f"checkpointing{also}", again, PLAIN
            yield f"checkpointing, blocks' inputs offloaded{also}", again, OffloadSaved.name
            if again != plain:
                yield f"saved activations offloaded{also}", plain, OffloadSaved.name

    def _row(self, what: str, card_bytes: int, theirs: float | None) -> Row:
        about = self.name, self.trained.gpu, what, card_bytes, theirs
        began = time.process_time()
        try:
            plan = self.planned(card_bytes)
        except OverspillError:
            return Row(*about, None, None, None, None)
        took = time.process_time() - began
        assert plan.device_bytes is not None
        assert plan.reserved_bytes is not None
        context = plan.device_bytes - plan.reserved_bytes
        return Row(
            *about, plan.step_seconds / self.plain.step_seconds, plan.lower_bound_seconds / self.plain.step_seconds,
            plan.device_bytes / (plan.peak_bytes + context), took,
        )  # fmt: skip

    def _best_of_papers(self, card_bytes: int) -> float | None:
        """The least slowdown of the papers' policies whose live bytes fit beside the context."""
        room = card_bytes - self.account.context_bytes
        found = []
        for name, policy in POLICIES.loaded()[0].items():
            if name in (OURS, OffloadSaved.name) or policy.unlimited:
                continue
            try:
                plan = make_plan(self.graph, self.account.device, name, room)
            except OverspillError:
                continue
            found.append(plan.step_seconds / self.plain.step_seconds)
        return min(found, default=None)


def run(names: Sequence[str], shares: Sequence[float], *, papers: bool) -> Iterator[Row]:
    """The rows of the jobs, as they come."""
    for name in names:
        begun = time.process_time()
        bench = Bench(name, JOBS[name], shares, papers=papers)
        print(f"{name}: {len(bench.graph.ops)} ops, captured in {time.process_time() - begun:.1f} s", file=sys.stderr)
        yield from bench.rows()


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Where `auto` has no plan or is slower than what people do with the same card."""
    met = [row for row in rows if row.theirs is not None]
    slower = [r for r in met if r.auto is None or (r.theirs is not None and r.auto > r.theirs * (1 + 1e-9))]
    yield f"{len(rows)} rows, {len(met)} with what people do or papers' plans; `auto` is slower than these in {len(slower)}"
    yield from (f"- `{row.job}`, {row.what}" for row in slower)


def picture(rows: Sequence[Row], path: Path) -> None:
    """Draw the card against the slowdown: a panel for each job."""
    import matplotlib.pyplot as plt  # noqa: PLC0415 - the recipes have it

    names = list(dict.fromkeys(row.job for row in rows))
    across = min(len(names), 3 + (len(names) == 4))
    down = -(-len(names) // across)
    figure, axes = plt.subplots(down, across, figsize=(4.2 * across, 3.2 * down), squeeze=False, layout="constrained")
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for axis, name in zip(axes.flat, names, strict=False):
        here = sorted((row for row in rows if row.job == name), key=lambda row: row.card_bytes)
        ours = [(row.card_bytes / 2**30, row.auto) for row in here if row.auto is not None]
        theirs = [row for row in here if row.theirs is not None and "% of" not in row.what]
        axis.plot(*zip(*ours, strict=True), "o-", ms=3, label="Overspill, auto")
        for colour, what in enumerate(dict.fromkeys(row.what for row in rows if "% of" not in row.what), 1):
            if at := [(row.card_bytes / 2**30, row.theirs) for row in theirs if row.what == what]:
                axis.plot(*zip(*at, strict=True), "x", color=f"C{colour}", label=what)
        axis.set(title=f"{name}, {here[0].gpu}", xlabel="card (GiB)", ylabel="step over unmanaged")
        axis.set_ylim(bottom=min(1.0, *(step for _, step in ours)) - 0.05)
    handles = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the jobs, print the rows as they come, and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--shares", default=",".join(map(str, SHARES)))
    parser.add_argument("--papers", action="store_true", help="plan by the papers' policies too, which takes long")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="the record to write; jobs that are not run stay in it"
    )
    parser.add_argument("--read", type=Path, metavar="FILE", help="print the table of a record, and run nothing")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the rows as .png or .svg")
    arguments = parser.parse_args()
    names = arguments.jobs.split(",")
    if unknown := [name for name in names if name not in JOBS]:
        parser.error(f"no job is called {unknown[0]}; there are {', '.join(JOBS)}")
    print(HEADER)
    rows: list[Row] = []
    if arguments.read:
        rows = [Row(**row) for row in json.loads(arguments.read.read_text())["rows"]]
        print(*(row.line() for row in rows), sep="\n")
    else:
        POLICIES.register(OffloadSaved.name, OffloadSaved)
        for row in run(names, [float(share) for share in arguments.shares.split(",")], papers=arguments.papers):
            rows.append(row)
            print(row.line(), flush=True)
            if arguments.json:
                _record(arguments.json, names, rows)
    print("", *summary(rows), sep="\n")
    if arguments.picture:
        picture(rows, arguments.picture)


def _record(path: Path, names: Sequence[str], rows: Sequence[Row]) -> None:
    """Write the rows so far, beside those of other jobs that the record has."""
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [row for row in old if row["job"] not in names]
    path.write_text(json_record(torch.device("cpu"), rows=[*kept, *(asdict(row) for row in rows)]))


if __name__ == "__main__":
    main()
