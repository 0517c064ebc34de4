"""gpt-oss with its experts in MXFP4, as both formats keep them."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import tiny_models
from checkpoints import assert_logits, logits_of
from family_ggufs import converted, published_keys, split_experts
from safetensors.numpy import load_file, save_file
from session_logits import load_for_logits, logits
from test_more_families import GPT_OSS, SIZES

from engine.errors import FormatError, ModelError
from engine.formats import FORMATS, Tensor, open_checkpoint
from engine.formats.quantized.mxfp4 import compose
from engine.formats.quantized.parts import Parts
from engine.models import load_model
from engine.program.experts import expert_rows, turned_experts
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
    settings = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(settings))
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
    tiny_models.finish(writer)
    return path


def both(packed, tmp_path):
    folder, model = packed
    return folder, packed_gguf(folder, model, tmp_path / "model.gguf")


def test_logits_are_those_of_transformers(packed, tmp_path):
    ids = np.random.default_rng().integers(3, tiny_models.VOCAB, 50).tolist()
    for path in both(packed, tmp_path):
        got = logits(load_for_logits(path, "reference"), ids, (40, 1, 9))
        assert_logits(got, packed[1], ids)


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


def plain(array, name):
    return single("w", Tensor("w", array.shape, FORMATS[name], FORMATS[name].encode(array).reshape(-1)))


def bytes_of(name, array):
    return Tensor(name, array.shape, FORMATS["U8"], array.reshape(-1))


def composed(blocks, scales):
    parts = Parts({t.name: t for t in (bytes_of("w_blocks", blocks), bytes_of("w_scales", scales))})
    compose({}, parts)
    return parts.tensors["w"]


PARTS = [slice(None), slice(0, None, 2), slice(1, None, 2), slice(0, 5), slice(5, 10)]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_rows_of_experts_in_mxfp4(part):
    blocks, scales = random_packed(np.random.default_rng(), 3, 10, 2)
    theirs = mxfp4.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
    tensor, want = composed(blocks, scales), theirs.numpy().swapaxes(1, 2)
    np.testing.assert_array_equal(tensor.dense(), want)
    assert_rows(expert_rows("e", single("w", tensor), part), want[:, part])


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_rows_of_turned_experts(name, part):
    weight = plain(np.random.default_rng().standard_normal((3, 16, 10), np.float32), name)
    assert_rows(turned_experts("e", weight, part), weight.dense().swapaxes(1, 2)[:, part])


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_rows_of_turned_experts_in_fp8(part):
    rng = np.random.default_rng()
    codes = rng.integers(0, 127, (3, 64, 64), np.uint8) | rng.integers(0, 2, (3, 64, 64), np.uint8) << 7
    scales = np.repeat(rng.random((3, 2, 2), np.float32), 32, axis=1)
    blocks = np.concatenate([scales[..., None].view(np.uint8), codes.reshape(3, 64, 2, 32)], axis=-1)
    weight = single("w", Tensor("w", (3, 64, 64), FORMATS["FP8"], blocks.reshape(-1)))
    assert_rows(turned_experts("e", weight, part), weight.dense().swapaxes(1, 2)[:, part])


def assert_rows(experts, want):
    assert experts.shape == want.shape
    np.testing.assert_array_equal(experts.dense(), want)
    flat, decode = want.reshape(-1, want.shape[2]), FORMATS[experts.format].decode
    np.testing.assert_array_equal(decode(experts.rows()), flat)
    for start in range(len(flat)):
        np.testing.assert_array_equal(decode(experts.rows(start, start + 7)), flat[start : start + 7])


@pytest.mark.parametrize("shape", [(3, 10, 2, 15), (3, 9, 2, 16), (3, 10, 32), (0, 10, 2, 16)])
def test_blocks_that_do_not_fit_their_scales(shape):
    with pytest.raises(FormatError, match=r"w_blocks is U8 .* must be U8 \[3, 10, 2, 16\]"):
        composed(np.zeros(shape, np.uint8), np.zeros((3, 10, 2), np.uint8))


def test_experts_that_are_none():
    for array, name in ((np.zeros((4, 8), np.float32), "F32"), (np.zeros((2, 4, 32), np.float32), "Q8_0")):
        with pytest.raises(ModelError, match="transposed"):
            turned_experts("e", plain(array, name), slice(None))
    for shape in ((4, 32), (2, 1, 32)):
        with pytest.raises(ModelError, match="experts, outputs, inputs"):
            expert_rows("e", plain(np.zeros(shape, np.float32), "Q8_0"), slice(1, None, 2))


@pytest.mark.parametrize("part", ["gate_up_proj_scales", "down_proj_blocks", "gate_up_proj_bias"])
def test_what_is_missing_is_named(part, packed, tmp_path):
    for file in packed[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.1.mlp.experts.{part}"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises((ModelError, FormatError), match=r"lacks the tensor model\.layers\.1\.mlp\.experts"):
        load_model(open_checkpoint(tmp_path)).program(16, "f16")


def test_blocks_without_a_quantization_config(packed, tmp_path):
    for file in packed[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(FormatError, match="describes no quantization"):
        open_checkpoint(tmp_path)
