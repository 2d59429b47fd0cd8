"""LLaVA against transformers in torch: logits, losses, written files, greedy texts, and the
preprocessing of pictures."""

from dataclasses import replace

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is absent: LLaVA is not compared with it")
transformers = pytest.importorskip(
    "transformers", reason="transformers is absent: LLaVA is not compared with it"
)
from mtx.checkpoint.checkpoints import Checkpoints  # noqa: E402
from mtx.config import Layout  # noqa: E402
from mtx.conversion.convert import to_checkpoint, to_huggingface  # noqa: E402
from mtx.data.images import image_prompt, patch_places  # noqa: E402
from mtx.data.pixels import read_picture  # noqa: E402
from mtx.evaluation.generate import Generator  # noqa: E402
from mtx.evaluation.sampling import Sampling  # noqa: E402
from mtx.layers.vision import MEAN, STD  # noqa: E402
from mtx.step.trainer import Trainer  # noqa: E402

V, S, G, SIDE, PATCHES = 301, 40, 4, 15, 9
PLACEHOLDER = 299
LAYOUTS = (
    Layout(data=2, pipe=2, tensor=2, virtual=2, stage_layers="balanced"),
    Layout(pipe=2, context=2, tensor=2, stage_layers=(4, 3)),
    Layout(microbatch=4),
)


def random_model():
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=20, intermediate_size=36, num_hidden_layers=3, num_attention_heads=2,
        image_size=SIDE, patch_size=5, projection_dim=8,
    )  # fmt: skip
    text = transformers.LlamaConfig(
        hidden_size=36, intermediate_size=44, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, vocab_size=V, max_position_embeddings=S, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=PLACEHOLDER,
        image_seq_length=PATCHES,
    )).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def normed(pixels):
    values = (pixels.astype(np.float32) / 255 - np.float32(MEAN)) / np.float32(STD)
    return torch.tensor(values).permute(0, 3, 1, 2)


def trainer_of(checkpoints, layout):
    trainer = Trainer(replace(checkpoints.run(), layout=layout, global_batch=G))
    return trainer, checkpoints.restore(trainer)


def check_outputs(model, checkpoints):
    """Logits and loss of a batch with images at several places."""
    stream = np.random.default_rng(0)
    ids = stream.integers(0, 256, (G, S + 1), dtype=np.int32)
    for row, place in enumerate((0, 3, 17, S - PATCHES - 2)):
        ids[row, place : place + PATCHES] = PLACEHOLDER
    pixels = stream.integers(0, 256, (G, SIDE, SIDE, 3), dtype=np.uint8)
    tokens, targets = ids[:, :-1], ids[:, 1:]
    weights = (targets != PLACEHOLDER).astype(np.float32)
    labels = np.where(ids == PLACEHOLDER, -100, ids)
    with torch.no_grad():
        given = {"pixel_values": normed(pixels)}
        out = model(input_ids=torch.tensor(tokens).long(), **given)
        loss = model(
            input_ids=torch.tensor(ids).long(), labels=torch.tensor(labels).long(), **given
        ).loss
    patches = patch_places(tokens, PLACEHOLDER)
    batch = {"tokens": tokens, "patches": patches, "pixels": pixels[:, None]}
    for layout in LAYOUTS:
        trainer, state = trainer_of(checkpoints, layout)
        last = np.full(G, S - 3, np.int32)
        found = trainer.predict(state, trainer.place(batch | {"last": last}))
        np.testing.assert_allclose(np.asarray(found)[:, :V], out.logits[:, S - 3], atol=1e-4)
        ours, _ = trainer.loss_and_gradients(
            state, batch | {"targets": targets, "weights": weights}
        )
        assert float(ours) == pytest.approx(float(loss), rel=1e-6), layout
        jax.clear_caches()


def check_texts(model, checkpoints):
    """Greedy texts for prompts with an image and for one without."""
    tokenizer, ours = checkpoints.tokenizer(), checkpoints.run().model
    stream, want = np.random.default_rng(1), []
    pictures = [stream.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8) for _ in range(2)]
    prompts = [
        image_prompt(text, [each], tokenizer, ours, chat=False)
        for text, each in zip(("Is it <image>?", "A cat"), pictures)
    ]
    prompts.append(image_prompt("To be", [], tokenizer, ours, chat=False))
    for ids, pixels in prompts:
        given = {"pixel_values": normed(pixels)} if len(pixels) else {}
        written = model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=10, eos_token_id=None, **given
        )
        want.append(written[0, len(ids) :].tolist())
    assert len(set(map(tuple, want))) == 3 and len(set(want[0])) > 3, "texts that say something"
    for layout in LAYOUTS:
        generator = Generator(*trainer_of(checkpoints, layout), tokenizer)
        found = generator.complete(prompts, tokens=10, sampling=Sampling(temperature=0))
        assert [completion.tokens for completion in found] == want, layout
        assert found[0].prompt == "Is it ?"
        jax.clear_caches()


def test_llava_is_transformers_llava(tmp_path):
    model = random_model()
    with torch.no_grad():  # tokens that the tokenizer lacks are never the likeliest
        model.lm_head.weight[256:] = 0
    model.save_pretrained(tmp_path / "in")
    to_checkpoint(tmp_path / "in", tmp_path / "run", tokenizer="bytes", check="ours")
    done = to_huggingface(tmp_path / "run", tmp_path / "out", check="transformers")
    assert done.comparison.largest_difference < 1e-4
    read, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    for key, value in model.state_dict().items():
        assert torch.equal(read.state_dict()[key], value), key
    for part in ("text_config", "vision_config"):
        own, want = (getattr(each.config, part).to_dict() for each in (read, model))
        assert own | {"dtype": None} == want | {"dtype": None}
    checkpoints = Checkpoints(tmp_path / "run")
    check_outputs(model, checkpoints)
    check_texts(model, checkpoints)


@pytest.mark.parametrize("size", [(23, 40), (61, 37), (30, 30)])
def test_pixels_are_those_of_clips_processor(size, tmp_path):
    image = pytest.importorskip("PIL.Image")
    processor = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 30}, crop_size={"height": 30, "width": 30}
    )
    drawn = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    image.fromarray(drawn).save(tmp_path / "a.png")
    want = processor(image.open(tmp_path / "a.png"), return_tensors="np")["pixel_values"][0]
    found = normed(read_picture(tmp_path / "a.png", 30)[None])[0].numpy()
    np.testing.assert_allclose(found, want, atol=2e-6)
