"""Single runs published in papers, each with everything that decides its speed, and a prediction.

SC'21 is Narayanan et al., arXiv 2104.04473v5; batches, microbatches and virtual stages of its
figures are from the run scripts that its authors published (Megatron-LM, examples/sc21).
KORTHIKANTI is Korthikanti et al. 2022, arXiv 2205.05198, table 5: seconds of a step; its abstract
gives the same on eight times the GPUs, and its table 4 gives F and B of a single layer of 22B.
All of these ran on A100-SXM4-80GB in 16 bits, with sequences of 2,048 and a vocabulary of 51,200.
SC'21 recomputes every block and has no sequence parallelism.

ELSEWHERE are runs of other software or clusters: MT-NLG (Smith et al. 2022, arXiv 2201.11990,
section 2.4), by DeepSpeed with Megatron-LM, and the runs of Megatron-LM that MegaScale (Jiang et
al. 2024, arXiv 2402.15627, table 2) is compared with, on A100s with their own network; BLOOM (Le
Scao et al. 2022, arXiv 2211.05100) by Megatron-DeepSpeed, on nodes with a quarter of Selene's
network; and Llama 3 405B (arXiv 2407.21783, table 4), by Meta's own software on H100s, whose
constants are assumed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from mtx.config import Layout, ModelConfig
from mtx.plan.calibration import SOFTWARE, Calibration, calibration_of
from mtx.plan.flops import forward_flops, sc21_flops
from mtx.plan.hardware import Hardware, hardware
from mtx.plan.published import TABLE_1
from mtx.plan.time import StepTime, predict_step, stage_times
from mtx.presets import preset

MACHINE = "a100-80gb"


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One point of a table or figure."""

    where: str  # "table 1"
    series: str  # which curve of a figure, "" if there is only one
    x: str  # position on the curve
    model: ModelConfig
    layout: Layout
    global_batch: int
    published: float
    # per GPU, in SC'21's unit; as papers count today, causal, nothing counted twice; of a step
    unit: Literal["tflops", "model tflops", "seconds", "seconds of a layer"] = "tflops"
    zero: Literal[0, 1, 3] = 0
    scatter_gather: bool = True
    software: str = "megatron-2021"
    on: Hardware = hardware(MACHINE)

    def time(self, calibration: Calibration | None = None) -> StepTime:
        """Predicted time of a step by the run's software. calibration: constants for the A100;
        None: the package's, which are fitted to it."""
        return predict_step(
            self.model, self.layout, self.global_batch, self.on, zero=self.zero,
            scatter_gather=self.scatter_gather, calibration=self._calibration(calibration),
        )  # fmt: skip

    def _calibration(self, calibration: Calibration | None) -> Calibration:
        fitted = self.on.peak_tflops == hardware(MACHINE).peak_tflops
        constants = calibration if calibration and fitted else calibration_of(self.on)
        return replace(constants, software=SOFTWARE[self.software])

    def _layer_s(self, calibration: Calibration | None) -> float:
        """Seconds of F and B of one layer: what a second layer adds to a single stage."""

        def of(layers: int) -> float:
            stages, _ = stage_times(
                replace(self.model, layers=layers), self.layout, self.on,
                calibration=self._calibration(calibration),
            )  # fmt: skip
            return sum(stages[0])

        return of(2) - of(1)

    def predicted(self, calibration: Calibration | None = None) -> float:
        """The prediction, in the unit of the published value."""
        if self.unit == "seconds of a layer":
            return self._layer_s(calibration)
        step_s = self.time(calibration).step_s
        if self.unit == "seconds":
            return step_s
        if self.unit == "tflops":
            flops = sc21_flops(self.model, self.global_batch)
        else:
            flops = 3 * forward_flops(self.model, self.global_batch, causal=True).total
        return flops / step_s / self.layout.devices / 1e12

    def error(self, calibration: Calibration | None = None) -> float:
        """Predicted over published, minus 1."""
        return self.predicted(calibration) / self.published - 1


def _gpt(layers: int, hidden: int, heads: int) -> ModelConfig:
    return ModelConfig(
        layers=layers, hidden=hidden, heads=heads, sequence=2048, vocab=51200,
        compute_dtype="float16",
    )  # fmt: skip


def as_published(layout: Layout) -> Layout:
    """The layout as SC'21 ran it: every block recomputed, no sequence parallelism."""
    return replace(layout, sequence_parallel=False, recompute="full", stash="residuals")


def _sc21(**layout) -> Layout:
    return as_published(Layout(**layout))


def _curve(
    where: str, points: Iterable[tuple[str, ModelConfig, Layout, int, float]], *, series: str = "",
    **common,
) -> tuple[PublishedRun, ...]:  # fmt: skip
    return tuple(
        PublishedRun(
            where=where, series=series, x=x, model=model, layout=layout, global_batch=batch,
            published=published, **common,
        )
        for x, model, layout, batch, published in points
    )  # fmt: skip


def _table_1() -> tuple[PublishedRun, ...]:
    points = []
    for row in TABLE_1:
        run = preset(row.preset)
        model = replace(run.model, compute_dtype="float16")
        layout = as_published(run.layout)
        points.append((row.preset, model, layout, run.global_batch, row.tflops_per_gpu))
    one_stage = sum(layout.pipe == 1 for _, _, layout, _, _ in points)
    return _curve("table 1", points[:one_stage], software="megatron-2021-torch-ddp") + _curve(
        "table 1", points[one_stage:]
    )


TABLE_1_RUNS = _table_1()

# One GPU, one microbatch a step. It is not among the scripts that the authors published, and the
# text does not say whether it used the fused operators of section 4.2. We infer that it did not:
# with them it would be predicted 27 to 31 % too fast, by 44 to 52 ms a sequence at every microbatch
# size. Without them, softmax has to be in fp16: in float32 it would be 27 to 35 % too slow, and
# b=16 would hold 96 GiB of one layer's scores. (The remaining 15 to 18 % are as much as the logits'
# FLOPs, if the authors did not count these here.)
FIGURE_7 = _curve(
    "figure 7",
    [
        (f"b={b}", _gpt(4, 4096, 128), _sc21(microbatch=b), b, tflops)
        for b, tflops in zip((1, 2, 4, 8, 16), (68, 78, 86, 89, 91), strict=True)
    ],
    software="megatron-2021-torch-operators-fp16",
)


def _figure_11(batch: int, tflops: tuple[float, ...]) -> tuple[PublishedRun, ...]:
    return _curve(
        "figure 11",
        [
            (f"p={p}", _gpt(3 * p, 20480, 128), _sc21(pipe=p, tensor=8), batch, value)
            for p, value in zip((1, 2, 4, 8), tflops, strict=True)
        ],
        series=f"B={batch}",
    )


FIGURE_11 = _figure_11(8, (165, 142, 121, 87)) + _figure_11(128, (175, 169, 166, 161))

_GPT3 = _gpt(96, 12288, 96)


def _gpt3(where: str, series: str, virtual: int, tflops: tuple, **common) -> tuple:
    layout = _sc21(pipe=12, tensor=8, virtual=virtual)
    points = [
        (f"B={batch}", _GPT3, layout, batch, value)
        for batch, value in zip((12, 24, 36, 48, 60), tflops, strict=True)
    ]
    return _curve(where, points, series=series, **common)


_INTERLEAVED = (119, 134, 141, 143, 146)
FIGURE_12 = _gpt3("figure 12", "v=1", 1, (82, 109, 122, 130, 135)) + _gpt3(
    "figure 12", "v=4", 4, _INTERLEAVED
)
FIGURE_13 = _curve(
    "figure 13",
    [
        (f"p={p}, t={t}", _gpt(32, 20480, 128), _sc21(pipe=p, tensor=t), 32, tflops)
        for p, t, tflops in ((2, 32, 103), (4, 16, 134), (8, 8, 140), (16, 4, 111), (32, 2, 91))
    ],
)


def _figure_16(batch: int, tflops: tuple[float, ...]) -> tuple[PublishedRun, ...]:
    return _curve(
        "figure 16",
        [
            (f"b={b}", _gpt(32, 15360, 128), _sc21(pipe=8, tensor=8, microbatch=b), batch, value)
            for b, value in zip((1, 2, 4, 8), tflops, strict=True)
        ],
        series=f"B={batch}",
    )


FIGURE_16 = _figure_16(128, (156, 159, 139, 120)) + _figure_16(512, (162, 171, 160, 154))
# With scatter/gather it is figure 12's interleaved curve.
FIGURE_18 = _gpt3(
    "figure 18", "without scatter/gather", 4, (107, 121, 127, 130, 131), scatter_gather=False
) + _gpt3("figure 18", "with scatter/gather", 4, _INTERLEAVED)

# Section 5.8: without fused operators 113 teraFLOP/s, with them 135, as in figure 12 at B=60.
FUSED_OPERATORS = (
    replace(
        FIGURE_12[4], where="section 5.8", series="no fused operators", x="175B", published=113,
        software="megatron-2021-torch-operators",
    ),
)  # fmt: skip
# The same for 530 billion parameters, whose layout the paper does not give: 148 over 133.
GAIN_OF_FUSED_OPERATORS_530B = 148 / 133

_530B = _gpt(105, 20480, 128)


def _table_2() -> tuple[PublishedRun, ...]:
    """Data, pipeline and tensor parallelism as in section 5.2: t = 8, p = 12 or 35. The paper does
    not give v; v = 1 fits its throughputs on all numbers of GPUs."""
    runs: list[PublishedRun] = []
    for name, model, batch, pipe, rows in (
        ("175B", _GPT3, 1536, 12, ((384, 153), (768, 149), (1536, 141))),
        ("530B", _530B, 2240, 35, ((560, 171), (1120, 167), (2240, 159))),
    ):
        points = [
            (f"{gpus} GPUs", model, _sc21(pipe=pipe, tensor=8, data=gpus // (8 * pipe)), batch, got)
            for gpus, got in rows
        ]
        runs.extend(_curve("table 2", points, series=f"PTD-P, {name}"))
    for name, model, rows in (
        ("175B", _GPT3, ((384, 4, 1536, 144), (768, 2, 1536, 88), (1536, 1, 1536, 44))),
        ("530B", _530B, ((640, 4, 2560, 138), (1120, 2, 2240, 98), (2240, 1, 2240, 48))),
    ):
        points = [
            (f"{gpus} GPUs", model, _sc21(data=gpus, microbatch=b), batch, got)
            for gpus, b, batch, got in rows
        ]
        runs.extend(_curve("table 2", points, series=f"ZeRO-3, {name}", zero=3))
    return tuple(runs)


TABLE_2 = _table_2()


def _korthikanti() -> tuple[PublishedRun, ...]:
    rows = (
        ("22B", _gpt(48, 6144, 64), _sc21(tensor=8, microbatch=4), 4, 1.42, 1.10),
        ("175B", _GPT3, _sc21(pipe=8, tensor=8, virtual=3), 64, 18.13, 13.75),
        ("530B", _530B, _sc21(pipe=35, tensor=8, virtual=3), 280, 49.05, 37.83),
        ("1T", _gpt(128, 25600, 160), _sc21(pipe=64, tensor=8), 512, 94.42, 71.49),
    )
    full = [(name, model, layout, b, s) for name, model, layout, b, s, _ in rows]
    selective = [
        (name, model, replace(layout, recompute="selective", sequence_parallel=True), b, s)
        for name, model, layout, b, _, s in rows
    ]
    common = dict(unit="seconds", software="megatron-2022")
    where = "Korthikanti table 5"
    return _curve(where, full, series="full, without SP", **common) + _curve(
        where, selective, series="selective, with SP", **common
    )


KORTHIKANTI = _korthikanti()

_22B = KORTHIKANTI[0]
KORTHIKANTI_LAYERS = _curve(
    "Korthikanti table 4",
    [
        (f"recompute {recompute}, {'with' if sp else 'without'} SP", _22B.model,
         replace(_22B.layout, recompute=recompute, sequence_parallel=sp), 4, ms / 1e3)
        for recompute, sp, ms in (
            ("none", False, 19.6), ("none", True, 19.0), ("full", False, 27.2),
            ("selective", False, 20.9), ("selective", True, 20.3),
        )
    ],
    series="22B, F and B of a layer", unit="seconds of a layer", software="megatron-2022",
)  # fmt: skip


def _on_2240_gpus(run: PublishedRun, utilization: float) -> PublishedRun:
    """A run of 530 billion parameters as eight replicas; the paper's MFU counts the full square."""
    layout, batch = replace(run.layout, data=8), 8 * run.global_batch
    flops = 3 * forward_flops(run.model, batch, causal=False).total
    seconds = flops / (utilization * layout.devices * 312e12)
    return replace(
        run, where="Korthikanti abstract", x="2240 GPUs", layout=layout, global_batch=batch,
        published=seconds,
    )  # fmt: skip


KORTHIKANTI_2240 = (_on_2240_gpus(KORTHIKANTI[2], 0.421), _on_2240_gpus(KORTHIKANTI[6], 0.542))

# As in section 2.4: 280, 350 and 420 nodes, 8 to 12 replicas of t = 8, p = 35. The same model on
# the same machine ran a fifth faster in SC'21's table 2 than here on 2,240 GPUs.
MT_NLG = _curve(
    "MT-NLG",
    [
        (f"{280 * d} GPUs", replace(_530B, vocab=50272), _sc21(pipe=35, tensor=8, data=d), 1920, s)
        for d, s in ((8, 60.1), (10, 50.2), (12, 44.4))
    ],
    unit="seconds",
)
# t = 8, p = 8, v = 6. Assumed: nothing is recomputed, and the optimizer is sharded over `data`.
MEGASCALE = _curve(
    "MegaScale table 2",
    [
        (f"{gpus} GPUs", replace(_GPT3, vocab=64000, compute_dtype="bfloat16"),
         Layout(pipe=8, tensor=8, virtual=6, data=gpus // 64), batch, seconds)
        for gpus, batch, seconds in (
            (256, 768, 40.0), (512, 768, 21.2), (768, 768, 15.2), (1024, 768, 11.9),
            (3072, 6144, 29.02), (6144, 6144, 14.78), (8192, 6144, 12.24), (12288, 6144, 8.57),
        )
    ],
    series="Megatron-LM", unit="seconds", software="megatron-2023", zero=1,
)  # fmt: skip
# 384 GPUs: t = 4, p = 12 with the embedding and the head as a layer each. Four links of 100 Gb/s a
# node instead of eight of 200. "About 150 teraFLOP/s", which includes recomputation.
BLOOM = _curve(
    "BLOOM",
    [
        ("384 GPUs",
         ModelConfig(layers=70, hidden=14336, heads=112, sequence=2048, vocab=250880),
         _sc21(pipe=12, tensor=4, data=8, microbatch=2, stage_layers=(5, *[6] * 10, 5)), 2048, 150),
    ],
    zero=1, on=replace(hardware(MACHINE), network_gb_s=6.25),
)  # fmt: skip
# t = 8, p = 16. Assumed: v = 8, as in the preset, and attention's core is recomputed.
_405B = preset("llama-3-405b")
LLAMA_3 = _curve(
    "Llama 3 405B",
    [
        (f"{16 * 8 * data * context} GPUs, c={context}", replace(_405B.model, sequence=sequence),
         replace(_405B.layout, data=data, context=context), data * batch, tflops)
        for data, context, sequence, batch, tflops in (
            (64, 1, 8192, 32, 430), (128, 1, 8192, 16, 400), (8, 16, 131072, 16, 380),
        )
    ],
    unit="model tflops", software="megatron-2023", zero=1, on=hardware("h100"),
)  # fmt: skip
ELSEWHERE = MT_NLG + MEGASCALE + BLOOM + LLAMA_3

# From figure 13, the two runs whose tensor groups span nodes: they determine the network's share.
FITTED_RUNS = TABLE_1_RUNS + FIGURE_13[:2] + FIGURE_16 + FIGURE_18
# Figure 12's other half is part of figure 18. ZeRO-3's two constants were read off table 2.
HELD_OUT_RUNS = (
    FIGURE_7
    + FIGURE_11
    + FIGURE_12[:5]
    + FIGURE_13[2:]
    + FUSED_OPERATORS
    + TABLE_2
    + KORTHIKANTI
    + KORTHIKANTI_2240
    + KORTHIKANTI_LAYERS
)
