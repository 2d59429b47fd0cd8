"""Converted mixtures of experts against transformers in torch: logits, losses, gradients, greedy
texts, tensors bit for bit."""

import math
from dataclasses import replace

import jax
import pytest

pytest.importorskip("torch", reason="torch is absent: conversions are not compared with it")
from safetensors.torch import load_file  # noqa: E402
from test_convert_transformers import (  # noqa: E402
    YARN,
    S,
    differences,
    random_batch,
    random_model,
    torch,
    transformers,
    without_states,
)

from mtx.checkpoint.checkpoints import Checkpoints  # noqa: E402
from mtx.config import Layout  # noqa: E402
from mtx.conversion.checkpoint import canonical_shapes  # noqa: E402
from mtx.conversion.convert import to_checkpoint, to_huggingface  # noqa: E402
from mtx.evaluation.generate import Generator  # noqa: E402
from mtx.evaluation.sampling import Sampling  # noqa: E402
from mtx.presets import preset  # noqa: E402
from mtx.step.trainer import Trainer  # noqa: E402

SIZES = dict(
    vocab_size=97, hidden_size=36, num_hidden_layers=4, num_attention_heads=6,
    num_key_value_heads=2, intermediate_size=20, max_position_embeddings=S,
    pad_token_id=None, bos_token_id=None, eos_token_id=0,
)  # fmt: skip
LATENT = dict(
    num_key_value_heads=6, moe_intermediate_size=12, n_routed_experts=8, num_experts_per_tok=3,
    n_group=4, topk_group=2, n_shared_experts=2, first_k_dense_replace=1, kv_lora_rank=14,
    q_lora_rank=18, qk_rope_head_dim=6, qk_nope_head_dim=10, v_head_dim=12,
    rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
)  # fmt: skip


def made(kind, **values):
    config = getattr(transformers, f"{kind}Config")(**SIZES | values)
    model = getattr(transformers, f"{kind}ForCausalLM")
    return model._from_config(config, attn_implementation="eager")


def with_balance(model):
    """The model with balance biases away from 0."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += 0.05 * torch.randn_like(buffer)
    return model


MIXTURES = {
    "mixtral": lambda **c: made("Mixtral", num_local_experts=6, **c),
    "qwen3_moe": lambda **c: made(
        "Qwen3Moe", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=12,
        norm_topk_prob=True, **c,
    ),
    "deepseek_v3": lambda **c: with_balance(made("DeepseekV3", **LATENT | c)),
    "gpt_oss": lambda **c: made(
        "GptOss", num_local_experts=6, num_experts_per_tok=3, sliding_window=7,
        rope_parameters=YARN | {"truncate": False}, **c,
    ),
}  # fmt: skip
LAYOUTS = [
    Layout(),
    Layout(expert=2, pipe=2, virtual=2, tensor=2),
    Layout(expert=2, data=2, tensor=2, expert_tensor=False, sequence_parallel=True, zero=3),
]


@pytest.mark.parametrize("name", MIXTURES)
def test_logits_loss_and_gradients(tmp_path, name):
    layouts = LAYOUTS if name == "deepseek_v3" else LAYOUTS[1:2]
    for layout, found in differences(MIXTURES[name], tmp_path, layouts):
        assert found["logits"] < 1e-5, layout
        assert found["loss"] < 1e-6, layout
        assert found["norm"] < 1e-5, layout
        assert found["gradient"] < 1e-4, layout


@pytest.mark.parametrize("name", MIXTURES)
def test_what_we_write_is_the_same_bit_for_bit_and_greedy_texts_as_well(tmp_path, name):
    model = random_model(lambda: MIXTURES[name](vocab_size=256), scale=12)
    model.save_pretrained(tmp_path / "in")
    to_checkpoint(tmp_path / "in", tmp_path / "run", tokenizer="bytes", check="none")
    done = to_huggingface(tmp_path / "run", tmp_path / "out", check="transformers")
    assert done.comparison.largest_difference < 1e-4
    theirs, info = type(model).from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    for key, value in model.state_dict().items():
        assert torch.equal(theirs.state_dict()[key], value), key
    files = [load_file(tmp_path / place / "model.safetensors") for place in ("in", "out")]
    assert files[0].keys() == files[1].keys()
    ids = torch.tensor([list(b"To be or")])
    written = (
        theirs.eval()
        .generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=15,
            pad_token_id=0,
        )[0, 8:]
        .tolist()
    )
    assert len(set(written)) > 3, "a text that says something"
    checkpoints = Checkpoints(tmp_path / "run")
    for layout in (Layout(expert=2, pipe=2, tensor=2), Layout(tensor=2)):
        trainer = Trainer(replace(checkpoints.run(), layout=layout, global_batch=2))
        generator = Generator(trainer, checkpoints.restore(trainer), checkpoints.tokenizer())
        [found] = generator.complete(["To be or"], tokens=15, sampling=Sampling(temperature=0))
        assert found.tokens == written, layout
        jax.clear_caches()


def of_second(second, start):
    """The tensors of transformers' module under their names in a whole model's file."""
    found = {}
    for name, value in second.layers[0].state_dict().items():
        name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        found[f"{start}.{name}"] = value
    return found


def test_the_loss_of_a_second_token(tmp_path):
    """The layer after the last, as transformers runs it for drafts, and its tensors' names."""
    from transformers.modeling_layers import MtpModel

    model = random_model(MIXTURES["deepseek_v3"])
    second = MtpModel(model, 1)
    with torch.no_grad():
        for values in (*second.layers.parameters(), *second.layers.buffers()):
            values.copy_(0.1 * torch.randn_like(values) + (values.ndim == 1))
    start, tensors = "model.layers.4", model.state_dict()
    model.save_pretrained(tmp_path / "in", state_dict=tensors | of_second(second, start))
    batch = random_batch(model)
    tokens = torch.tensor(batch["tokens"]).long()
    with torch.no_grad():
        hidden = model.model(tokens).last_hidden_state[:, :-1]
        places = torch.arange(S - 1)[None]
        seen = second.forward_layer(0, hidden, places, None, input_ids=tokens[:, 1:])
        logits = second._project_to_logits(seen)[:, :-1].flatten(0, 1)
        want = torch.nn.functional.cross_entropy(logits, tokens[:, 2:].flatten())
    done = to_checkpoint(tmp_path / "in", tmp_path / "run", check="ours")
    assert done.model.second_token and done.model.layers == 5
    batch["weights"][:, -1] = 0  # the target after the last token
    run = Checkpoints(tmp_path / "run").run()
    for layout in LAYOUTS[0], Layout(expert=2, pipe=2, tensor=2, stage_layers=(3, 2)):
        trainer = Trainer(replace(run, layout=layout, global_batch=4))
        state = Checkpoints(tmp_path / "run").restore(trainer)
        _, metrics = trainer.train_step(state, trainer.place(batch))
        found = float(metrics.second_loss) / run.model.second_weight * (S - 1) / (S - 2)
        assert found == pytest.approx(float(want), rel=1e-6)
    to_huggingface(tmp_path / "run", tmp_path / "out", check="ours")
    files = [load_file(tmp_path / place / "model.safetensors") for place in ("in", "out")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[1][name], value) for name, value in files[0].items())


def test_deepseek_v3_has_as_many_parameters():
    with torch.device("meta"):
        theirs = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config())
    ours = replace(preset("deepseek-v3").model, second_token=False, layers=61)
    counted = without_states(canonical_shapes(ours)).values()
    assert sum(map(math.prod, counted)) == sum(p.numel() for p in theirs.parameters())
