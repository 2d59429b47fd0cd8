"""A peer for the benchmark: Megatron-Core's own pipelines on preset `bench-s`, on the CPU.

    python experiments/peers/megatron_pipeline.py --schedule 1f1b --steps 8

One gloo process a stage, as in torch_pipeline.py, whose command line, batch and output these are;
layers, pipeline, gradients, clipping and optimizer are Megatron-Core's (written for 0.16.1). What
differs from ours: attention writes its scores out (there is no fused one on CPUs without
Transformer Engine); GELU is exact; the first and the last stage each keep a copy of the tied
embedding. Exit codes: 1 a process failed or time was up, 2 wrong arguments, 3 no Megatron-Core.

Megatron-Core asks for CUDA without looking; `_without_cuda` says what is answered.
"""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
import zlib
from functools import partial

from mtx.config import ModelConfig, OptimizerConfig, RunConfig

warnings.filterwarnings("ignore", module=r"megatron\.")  # of what is not installed

try:
    import torch
    import torch.distributed as dist
    import torch_pipeline
    from megatron.core import optimizer as megatron_optimizer
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig
    from torch import Tensor, nn
except ModuleNotFoundError as error:
    if __name__ != "__main__" or (error.name or "").split(".")[0] not in ("torch", "megatron"):
        raise
    print("needs torch and Megatron-Core: pip install 'mtx[peers]'", file=sys.stderr)
    sys.exit(3)

CHUNKS = {"1f1b": 1, "interleaved": 2}  # on each process, for every schedule


def _without_cuda() -> None:
    """Answers for the CPU where Megatron-Core asks torch for CUDA with no check for it."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_, **__: None
    Tensor.cuda = lambda self, *_, **__: self

    def on_cpu(make, *arguments, **options):
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return make(*arguments, **options)

    for name in ("tensor", "zeros", "ones"):
        setattr(torch, name, partial(on_cpu, getattr(torch, name)))


@contextlib.contextmanager
def _float32_named_as_on_cuda():
    """Clipping asserts the name of a CUDA tensor's type."""
    type_of = Tensor.type

    def named(tensor, *arguments, **options):
        if arguments or options or tensor.dtype != torch.float32:
            return type_of(tensor, *arguments, **options)
        return "torch.cuda.FloatTensor"

    Tensor.type = named
    try:
        yield
    finally:
        Tensor.type = type_of


def transformer_config(model: ModelConfig, stages: int, chunks: int) -> TransformerConfig:
    initialize = partial(nn.init.normal_, std=model.init_std)
    return TransformerConfig(
        num_layers=model.layers, hidden_size=model.hidden, ffn_hidden_size=model.ffn_hidden,
        num_attention_heads=model.heads, layernorm_epsilon=model.norm_epsilon,
        hidden_dropout=0.0, attention_dropout=0.0, attention_softmax_in_fp32=True,
        params_dtype=torch.float32, pipeline_dtype=torch.float32, use_cpu_initialization=True,
        init_method=initialize, output_layer_init_method=initialize,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        # As Megatron-LM has them by default. Overlapped, an output is freed while gloo still sends
        # it (in CUDA's order of streams that is safe), unless it is told to keep it.
        batch_p2p_comm=chunks == 1, overlap_p2p_comm=chunks > 1,
        deallocate_pipeline_outputs=chunks == 1,
        # What is fused is compiled by torch; of the three fusions only the loss's was a gain.
        gradient_accumulation_fusion=False, masked_softmax_fusion=False,
        bias_activation_fusion=False, bias_dropout_fusion=False,
        cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="native",
    )  # fmt: skip


def make_optimizer(models: list[nn.Module], config: OptimizerConfig):
    """Megatron's own, which falls back on torch's AdamW without Transformer Engine and Apex."""
    how = config.hyperparameters("adamw")
    settings = megatron_optimizer.OptimizerConfig(
        optimizer="adam", lr=config.lr, min_lr=config.lr, weight_decay=config.weight_decay,
        adam_beta1=how["b1"], adam_beta2=how["b2"], adam_eps=how["epsilon"],
        clip_grad=config.clip, params_dtype=torch.float32,
    )  # fmt: skip
    return megatron_optimizer.get_megatron_optimizer(settings, models)


@torch.no_grad()
def _initialize(gpt: nn.Module, std: float) -> None:
    """Matrices from a parameter's name in the whole model alone, so that no layout changes them."""
    for name, parameter in gpt.named_parameters():
        if parameter.dim() == 2:
            layer = re.search(r"layers\.(\d+)", name)
            if layer:
                number = gpt.decoder.layers[int(layer[1])].layer_number
                name = name.replace(layer[0], f"layer {number}")
            name = name.replace("output_layer", "embedding.word_embeddings")  # one, tied
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.normal_(std=std, generator=generator)


class MegatronTraining:
    """This process's stage: the losses are with the last."""

    def __init__(self, run: RunConfig, schedule: str):
        chunks, stages, model = CHUNKS[schedule], dist.get_world_size(), run.model
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        )
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
        config = transformer_config(model, stages, chunks)
        self.chunks = [self._chunk(config, model, n, chunks) for n in range(chunks)]
        self.optimizer = make_optimizer(self.chunks, run.optimizer)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        batch = [tensor.chunk(run.microbatches) for tensor in torch_pipeline.make_batch(run)]
        self.batch = list(zip(*batch, strict=True))
        self.positions_BS = torch.arange(model.sequence).expand_as(self.batch[0][0])
        self.hidden_11ST = torch.ones(1, 1, model.sequence, model.sequence, dtype=bool).triu(1)
        self.run_schedule = partial(
            get_forward_backward_func(), forward_step_func=self._forward, model=self.chunks,
            num_microbatches=run.microbatches, seq_length=model.sequence,
            micro_batch_size=run.global_batch // run.microbatches,
        )  # fmt: skip

    @staticmethod
    def _chunk(config: TransformerConfig, model: ModelConfig, number: int, chunks: int):
        stage = number if chunks > 1 else None
        where = {"ignore_virtual": False, "vp_stage": stage}
        gpt = GPTModel(
            config, get_gpt_layer_local_spec(), model.vocab, model.sequence,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=True,
            position_embedding_type="learned_absolute", vp_stage=stage,
        )  # fmt: skip
        _initialize(gpt, model.init_std)
        reduce = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        return DistributedDataParallel(config, reduce, gpt, disable_bucketing=number > 0)

    def _forward(self, microbatches, chunk):
        tokens_BS, targets_BS = next(microbatches)
        output = chunk(tokens_BS, self.positions_BS, self.hidden_11ST, labels=targets_BS)
        return output, self._mean_loss

    @staticmethod
    def _mean_loss(losses_BS: Tensor) -> tuple[Tensor, Tensor]:
        loss = losses_BS.mean()
        return loss, loss.detach().clone()  # the schedule divides the first in place

    def step(self) -> list[Tensor]:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = [iter(self.batch) for _ in self.chunks]
        losses = self.run_schedule(data_iterator=batches if len(batches) > 1 else batches[0])
        with _float32_named_as_on_cuda():
            self.optimizer.step()
        return losses


def make_training(run: RunConfig, schedule: str) -> MegatronTraining:
    _without_cuda()
    return MegatronTraining(run, schedule)


if __name__ == "__main__":
    sys.exit(torch_pipeline.main(make_training, CHUNKS, "Megatron-Core", __doc__))
