"""T5 against transformers in torch: logits, losses, written files, greedy texts."""

from dataclasses import replace

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is absent: T5 is not compared with it")
transformers = pytest.importorskip(
    "transformers", reason="transformers is absent: T5 is not compared with it"
)
from mtx.checkpoint.checkpoints import Checkpoints  # noqa: E402
from mtx.config import Layout  # noqa: E402
from mtx.conversion.convert import to_checkpoint, to_huggingface  # noqa: E402
from mtx.data.spans import find_span_vocab  # noqa: E402
from mtx.evaluation.generate import Generator  # noqa: E402
from mtx.evaluation.sampling import Sampling  # noqa: E402
from mtx.step.trainer import Trainer  # noqa: E402

V, S, E, G = 357, 20, 28, 4
LAYOUTS = (
    Layout(data=2, pipe=2, tensor=2, virtual=2, stage_layers=(2, 1, 1, 1)),
    Layout(pipe=4, tensor=2, sequence_parallel=False, stage_layers="balanced"),
    Layout(microbatch=4),
)


def random_model(gated: bool):
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=V, d_model=36, d_kv=5, d_ff=44, num_layers=3, num_decoder_layers=2, num_heads=6,
        relative_attention_num_buckets=8, relative_attention_max_distance=20, dropout_rate=0.0,
        feed_forward_proj="gated-gelu" if gated else "relu", tie_word_embeddings=not gated,
        n_positions=E,
    )).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        if gated:
            model.lm_head.weight = torch.nn.Parameter(0.3 * torch.randn(V, 36))
    return model


def trainer_of(checkpoints, layout):
    trainer = Trainer(replace(checkpoints.run(), layout=layout, global_batch=G))
    return trainer, checkpoints.restore(trainer)


def check_outputs(model, checkpoints):
    """Logits and loss of a batch with encoder texts of several lengths."""
    stream = np.random.default_rng(0)
    inputs, tokens, targets = (
        stream.integers(1, V, (G, size), dtype=np.int32) for size in (E, S, S)
    )
    segments = (np.arange(E) < np.array([[E], [E - 5], [7], [1]])).astype(np.int32)
    batch = {"inputs": inputs, "segments": segments, "tokens": tokens}
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor(inputs).long(), attention_mask=torch.tensor(segments).long(),
            decoder_input_ids=torch.tensor(tokens).long(), labels=torch.tensor(targets).long(),
        )  # fmt: skip
    for layout in LAYOUTS:
        trainer, state = trainer_of(checkpoints, layout)
        last = np.full(G, S - 3, np.int32)
        found = trainer.predict(state, trainer.place(batch | {"last": last}))
        np.testing.assert_allclose(np.asarray(found)[:, :V], out.logits[:, S - 3], atol=1e-4)
        weights = {"targets": targets, "weights": np.ones((G, S), np.float32)}
        loss, _ = trainer.loss_and_gradients(state, batch | weights)
        assert float(loss) == pytest.approx(float(out.loss), rel=1e-6), layout
        jax.clear_caches()


def check_texts(model, checkpoints):
    """Greedy texts for prompts with and without sentinels."""
    special = find_span_vocab(checkpoints.tokenizer())
    prompts, want = ["To be<extra_id_0> not", "or "], []
    for ids in ([*b"To be", int(special.sentinels[0]), *b" not"], list(b"or ")):
        written = model.generate(
            torch.tensor([[*ids, special.end]]), do_sample=False, max_new_tokens=12,
            decoder_start_token_id=special.pad, eos_token_id=special.end, pad_token_id=special.pad,
        )  # fmt: skip
        want.append(written[0, 1:].tolist())
    assert len(set(want[0])) > 3 and want[0] != want[1], "texts that say something"
    for layout in LAYOUTS:
        generator = Generator(*trainer_of(checkpoints, layout), checkpoints.tokenizer())
        found = generator.complete(prompts, tokens=12, sampling=Sampling(temperature=0))
        assert [completion.tokens for completion in found] == want, layout
        assert found[0].prompt == prompts[0] + "\n"
        jax.clear_caches()


@pytest.mark.parametrize("gated", [False, True], ids=["t5", "t5-1.1"])
def test_t5_is_transformers_t5(tmp_path, gated):
    model = random_model(gated)
    model.save_pretrained(tmp_path / "in")
    to_checkpoint(tmp_path / "in", tmp_path / "run", tokenizer="bytes", sequence=S, check="none")
    done = to_huggingface(tmp_path / "run", tmp_path / "out", check="transformers")
    assert done.comparison.largest_difference < 1e-4
    read, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert read.config.scale_decoder_outputs == (not gated)
    for key, value in model.state_dict().items():
        assert torch.equal(read.state_dict()[key], value), key
    checkpoints = Checkpoints(tmp_path / "run")
    check_outputs(model, checkpoints)
    if gated:
        check_texts(model, checkpoints)
