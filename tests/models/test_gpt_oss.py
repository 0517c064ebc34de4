"""gpt-oss with its experts in MXFP4, as both formats keep them."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import tiny_models
from checkpoints import logits_of
from family_ggufs import converted, published_keys, split_experts
from safetensors.numpy import load_file, save_file
from session_logits import load_for_logits, logits
from test_more_families import GPT_OSS, SIZES

from engine.errors import ModelError
from engine.formats import FORMATS, Tensor, open_checkpoint
from engine.models import load_model
from engine.program.experts import mxfp4_experts, turned_experts
from engine.program.weights import single

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")


def random_packed(rng, experts, columns, groups):
    """Blocks and scales as Hugging Face files have them."""
    blocks = rng.integers(0, 256, (experts, columns, groups, 16), np.uint8)
    return blocks, rng.integers(122, 126, (experts, columns, groups), np.uint8)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder whose experts are in MXFP4, and transformers' model with the numbers that it reads from them."""
    torch.manual_seed(5)
    config = transformers.GptOssConfig(**SIZES | GPT_OSS | {"pad_token_id": 0}, attn_implementation="eager")
    model = transformers.GptOssForCausalLM(config).eval().float()
    for name, parameter in model.named_parameters():
        parameter.data = (1 if "norm" in name else 0) + torch.randn_like(parameter) * (
            0.3 if parameter.ndim < 2 else 0.16
        )
    folder, rng = tmp_path_factory.mktemp("mxfp4"), np.random.default_rng()
    model.save_pretrained(folder)
    tiny_models.write_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, depth, columns = tensors.pop(name).shape
        blocks, scales = random_packed(rng, experts, columns, depth // 32)
        tensors |= {name + "_blocks": blocks, name + "_scales": scales}
        dense = mxfp4.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
        model.get_parameter(name).data = dense
    save_file(tensors, folder / "model.safetensors")
    return folder, model


def packed_gguf(folder, model, path):
    """The same in a GGUF, whose blocks the gguf package encodes anew from the numbers; they are all in MXFP4, so exactly."""
    dense = {n: p.detach().numpy() for n, p in model.named_parameters()}
    writer = gguf.GGUFWriter(path, "gpt-oss")
    for key, value in published_keys("gpt-oss", model.config).items():
        if value is not None:
            writer.add_key_value(f"gpt-oss.{key}", value, gguf.GGUFValueType.get_type(value))
    for name, array in converted("gpt-oss", model.config, split_experts(dense)).items():
        plain = np.ascontiguousarray(array, np.float32)
        if "_exps.weight" in name:
            kind = gguf.GGMLQuantizationType.MXFP4
            blocks = gguf.quants.quantize(plain, kind)
            np.testing.assert_array_equal(gguf.quants.dequantize(blocks, kind), plain)
            writer.add_tensor(name, blocks, raw_dtype=kind)
        else:
            writer.add_tensor(name, plain)
    tiny_models._add_vocab(writer, json.loads((folder / "tokenizer.json").read_text()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def both(packed, tmp_path):
    folder, model = packed
    return folder, packed_gguf(folder, model, tmp_path / "model.gguf")


def test_logits_are_those_of_transformers(packed, tmp_path):
    ids = np.random.default_rng().integers(3, tiny_models.VOCAB, 50).tolist()
    want = logits_of(packed[1], ids)
    assert np.abs(want).max() > 1
    for path in both(packed, tmp_path):
        got = logits(load_for_logits(path, "reference"), ids, (40, 1, 9))
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)


def test_the_cpu_runs_it_whole(packed, tmp_path, cpu):
    """The two formats give the same bits there; its 8-bit activations show, and are no more than rounding, but for the few
    tokens whose router they turn to another expert."""
    ids = np.random.default_rng().integers(3, tiny_models.VOCAB, 50).tolist()
    want, found = logits_of(packed[1], ids), []
    for path in both(packed, tmp_path):
        loaded = load_for_logits(path, cpu, strict=True)
        assert not loaded.placement.fallbacks()
        found.append(logits(loaded, ids, (40, 1, 9)))
    np.testing.assert_array_equal(found[0], found[1])
    errors = np.sqrt(np.mean((found[0] - want) ** 2, axis=1) / np.mean(want**2, axis=1))
    assert 1e-6 < np.median(errors) < 0.05, errors


def stored(array, name):
    encoded = FORMATS[name].encode(array) if FORMATS[name].encode else array
    return single(
        "w", Tensor("w", array.shape, FORMATS[name], np.ascontiguousarray(encoded).reshape(-1).view(np.uint8))
    )


@pytest.mark.parametrize(("first", "step"), [(0, 1), (0, 2), (1, 2)])
def test_rows_of_mxfp4_experts(first, step):
    blocks, scales = random_packed(np.random.default_rng(), 3, 10, 2)
    experts = mxfp4_experts("e", stored(blocks, "U8"), stored(scales, "U8"), first, step)
    theirs = mxfp4.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
    want = theirs.numpy().swapaxes(1, 2)[:, first::step]
    assert experts.shape == want.shape
    np.testing.assert_array_equal(experts.dense(), want)
    assert_rows(experts)


@pytest.mark.parametrize(("first", "step"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_rows_of_turned_experts(name, first, step):
    weight = stored(np.random.default_rng().standard_normal((3, 16, 10), np.float32), name)
    experts = turned_experts("e", weight, first, step)
    np.testing.assert_array_equal(experts.dense(), weight.dense().swapaxes(1, 2)[:, first::step])
    assert_rows(experts)


def assert_rows(experts):
    count = experts.shape[0] * experts.shape[1]
    flat, decode = experts.dense().reshape(count, -1), FORMATS[experts.format].decode
    np.testing.assert_array_equal(decode(experts.rows()), flat)
    for start in range(count):
        np.testing.assert_array_equal(decode(experts.rows(start, start + 7)), flat[start : start + 7])


@pytest.mark.parametrize("shape", [(3, 10, 2, 15), (3, 9, 2, 16), (3, 10, 32)])
def test_blocks_that_do_not_fit_their_scales(shape):
    blocks, scales = stored(np.zeros(shape, np.uint8), "U8"), stored(np.zeros((3, 10, 2), np.uint8), "U8")
    with pytest.raises(ModelError, match="no MXFP4 experts"):
        mxfp4_experts("e", blocks, scales)


def test_experts_that_cannot_be_turned():
    for array, name in ((np.zeros((4, 8), np.float32), "F32"), (np.zeros((2, 4, 32), np.float32), "Q8_0")):
        with pytest.raises(ModelError, match="transposed"):
            turned_experts("e", stored(array, name))


@pytest.mark.parametrize("part", ["gate_up_proj_scales", "down_proj_blocks", "gate_up_proj_bias"])
def test_what_is_missing_is_named(part, packed, tmp_path):
    for file in packed[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.1.mlp.experts.{part}"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks the tensor model\.layers\.1\.mlp\.experts"):
        load_model(open_checkpoint(tmp_path)).program(16, "f16")
