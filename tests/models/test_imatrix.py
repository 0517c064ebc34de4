"""Importance matrices against what hooks on transformers' layers see, and their files."""

from __future__ import annotations

import checkpoints
import gguf
import numpy as np
import pytest
import test_more_families as more
import tiny_models
from test_gguf_export import written
from test_more_families import saved  # noqa: F401 - a fixture

from engine.errors import ConfigError, EngineError, FormatError
from engine.formats import open_checkpoint
from engine.formats.gguf_writer import Header, TensorInfo, encode_value
from engine.quantize.collect import collect
from engine.quantize.imatrix import Entry, Importance, read_imatrix, write_imatrix
from engine.quantize.mix import quant_type
from engine.quantize.to_gguf import quantize_to_gguf

torch = pytest.importorskip("torch")
TEXT = "Once upon a time there was a small engine that could. " * 8


def seen_by_hooks(model, ids, context):
    """Module name -> (sum of squares of its input [cols], rows), windows each with the beginning of sequence first."""
    sums = {}

    def hook(name):
        def run(module, given):
            flat = given[0].reshape(-1, given[0].shape[-1]).double()
            old = sums.get(name, (0, 0))
            sums[name] = old[0] + flat.square().sum(0).numpy(), old[1] + len(flat)

        return run

    kinds = (torch.nn.Linear, *((type(model.transformer.h[0].mlp.c_fc),) if hasattr(model, "transformer") else ()))
    handles = [
        module.register_forward_pre_hook(hook(name))
        for name, module in model.named_modules()
        if isinstance(module, kinds)
    ]
    body = ids[1:]
    with torch.no_grad():
        for begin in range(0, len(body), context - 1):
            model(torch.tensor([[ids[0], *body[begin : begin + context - 1]]]))
    for handle in handles:
        handle.remove()
    return sums


def seen_by_experts(model, ids, context):
    """The first layer's choice of two experts a token, worked out from its router: sums of squares [experts, cols] and rows
    [experts], with the windows of ``seen_by_hooks``."""
    name, router = next((name, module) for name, module in model.named_modules() if name.endswith("gate"))
    inputs, body = [], ids[1:]
    handle = router.register_forward_pre_hook(lambda module, given: inputs.append(given[0].reshape(-1, 64)))
    with torch.no_grad():
        for begin in range(0, len(body), context - 1):
            model(torch.tensor([[ids[0], *body[begin : begin + context - 1]]]))
    handle.remove()
    assert ".0." in name
    x = torch.cat(inputs)
    chosen = (x @ router.weight.T).topk(2).indices
    seen = [x[(chosen == expert).any(1)].detach().double() for expert in range(4)]
    return np.stack([rows.square().sum(0).numpy() for rows in seen]), [len(rows) for rows in seen]


def check(found, sums, names):
    for name, module in names.items():
        entry = found.entries[name]
        np.testing.assert_allclose(entry.sums[0], sums[module][0], rtol=2e-3, err_msg=name)
        assert entry.counts.tolist() == [sums[module][1]]


@pytest.mark.parametrize("family", ["qwen3", "llama biases"])
def test_a_llama_sees_what_transformers_sees(family, tmp_path, backend):
    folder = checkpoints.save(family, tmp_path)
    out = tmp_path / "imatrix.gguf"
    found = collect(folder, TEXT, "text", 24, out, backend=backend, threads=2, kv_cache_dtype="f32")
    ids = open_checkpoint(folder).tokenizer().encode(TEXT, add_special=True)
    sums = seen_by_hooks(checkpoints.model_of(family), ids, 24)
    parts = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    parts |= {"attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"}
    parts["ffn_down"] = "mlp.down_proj"
    names = {f"blk.{i}.{own}.weight": f"model.layers.{i}.{hf}" for i in range(2) for own, hf in parts.items()}
    assert set(found.entries) == set(names)
    check(found, sums, names)
    assert (found.chunks, found.chunk_size) == (-(-(len(ids) - 1) // 23), 24)


def test_fused_and_transposed_matrices_have_their_files_names(saved, tmp_path, cpu):  # noqa: F811
    found = collect(saved("gpt2"), TEXT, "text", 32, tmp_path / "i.gguf", backend=cpu, threads=2, kv_cache_dtype="f32")
    ids = open_checkpoint(saved("gpt2")).tokenizer().encode(TEXT, add_special=True)
    sums = seen_by_hooks(more.model_of("gpt2"), ids, 32)
    parts = {"attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
    names = {f"blk.{i}.{own}.weight": f"transformer.h.{i}.{hf}" for i in range(2) for own, hf in parts.items()}
    assert set(found.entries) == set(names)
    check(found, sums, names)


SPLIT = ("granitemoe shared", "granite 4", "granite 4 states", "granite 4 states, experts", "gpt_oss", "phi3")


@pytest.mark.parametrize("family", [*SPLIT, "nemotron_h", "nemotron_h experts"])
def test_a_folder_has_the_names_of_its_gguf(family, saved, tmp_path, cpu):  # noqa: F811
    """Gate and up lie in one tensor of many of these folders, and of all but the last in two of a GGUF."""
    settings = {"backend": cpu, "threads": 2, "kv_cache_dtype": "f32"}
    found = collect(saved(family), TEXT, "text", 32, tmp_path / "i.gguf", **settings)
    want = collect(written(saved(family), tmp_path / "m.gguf").path, TEXT, "text", 32, tmp_path / "j.gguf", **settings)
    assert set(found.entries) == set(want.entries)
    for name, entry in want.entries.items():
        np.testing.assert_allclose(found.entries[name].sums, entry.sums, rtol=1e-2, atol=1e-4, err_msg=name)


def test_experts_are_counted_apart(tmp_path, cpu):
    folder = checkpoints.save("mixtral", tmp_path)
    found = collect(folder, TEXT, "text", 32, tmp_path / "i.gguf", backend=cpu, threads=2, kv_cache_dtype="f32")
    router = found.entries["blk.0.ffn_gate_inp.weight"]
    gate, up, down = (found.entries[f"blk.0.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
    assert gate.sums.shape == (4, 64) and down.sums.shape == (4, 96)
    assert gate.counts.sum() == 2 * router.counts[0]  # two experts a token
    np.testing.assert_array_equal(gate.sums, up.sums)
    np.testing.assert_array_equal(gate.counts, down.counts)
    np.testing.assert_allclose(gate.sums.sum(axis=0), 2 * router.sums[0], rtol=1e-4)
    ids = open_checkpoint(folder).tokenizer().encode(TEXT, add_special=True)
    sums, counts = seen_by_experts(checkpoints.model_of("mixtral"), ids, 32)
    np.testing.assert_array_equal(gate.counts, counts)
    np.testing.assert_allclose(gate.sums, sums, rtol=2e-3)
    gguf_path = tmp_path / "q.gguf"
    result = quantize_to_gguf(open_checkpoint(folder), gguf_path, quant_type("Q4_0"), found)
    assert [notice for notice in result.notices if "importance" in notice] == [
        "1 tensor had no entry in the importance matrix, such as token_embd.weight."
    ] or "2 tensors" in result.notices[-1]


def test_several_ranks_are_refused(llama):
    with pytest.raises(ConfigError, match="needs whole inputs, which one rank alone has"):
        collect(llama, TEXT, "text", 64, llama / "imatrix.gguf", tensor_parallel_size=2)


def test_a_file_comes_back_and_llama_cpp_could_read_it(tmp_path):
    rng = np.random.default_rng()
    entries = {
        f"blk.{i}.x.weight": Entry(rng.random((n, 96), np.float32), np.full(n, 7, np.float32))
        for i, n in ((0, 1), (1, 3))
    }
    path = tmp_path / "imatrix.gguf"
    write_imatrix(Importance(path, entries, ("a.txt", "b.txt"), 9, 512))
    again = read_imatrix(path)
    assert (list(again.datasets), again.chunks, again.chunk_size) == (["a.txt", "b.txt"], 9, 512)
    for name, entry in entries.items():
        np.testing.assert_array_equal(again.entries[name].sums, entry.sums)
        np.testing.assert_array_equal(again.entries[name].counts, entry.counts)
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.type"].contents() == "imatrix"
    assert [(t.name, list(t.shape)) for t in reader.tensors][:2] == [
        ("blk.0.x.weight.in_sum2", [96, 1]),
        ("blk.0.x.weight.counts", [1, 1]),
    ]
    np.testing.assert_allclose(again.of("blk.0.x.weight", (4, 96)), entries["blk.0.x.weight"].sums[0] / 7, rtol=1e-6)
    assert again.of("other", (4, 96)) is None
    with pytest.raises(FormatError, match="another model"):
        again.of("blk.0.x.weight", (4, 64))


def test_experts_that_saw_nothing_weigh_all_alike(tmp_path):
    sums = np.array([[4.0, 8.0], [0.0, 0.0]], np.float32)
    found = Importance(tmp_path, {"x": Entry(sums, np.array([4.0, 0.0], np.float32))}, (), 1, 1)
    np.testing.assert_array_equal(found.of("x", (2, 5, 2)), [[1, 2], [1, 1]])


def test_importance_moves_the_error_where_it_matters_less(tmp_path):
    rng = np.random.default_rng()
    folder = tmp_path / "m"
    folder.mkdir()
    tiny_models.write_llama(folder, rng)
    name, cols = "blk.0.ffn_up.weight", 64
    weight = np.where(np.arange(cols) % 4 == 0, 100, 1).astype(np.float32)
    found = Importance(tmp_path, {name: Entry(weight[None], np.ones(1, np.float32))}, ("d",), 1, 1)
    source = open_checkpoint(folder)
    errors = []
    for n, importance in enumerate((None, found)):
        out = tmp_path / f"{n}.gguf"
        quantize_to_gguf(source, out, quant_type("Q4_0"), importance)
        after = open_checkpoint(out)
        wrong = after.tensors[name].dense() - source.tensors["model.layers.0.mlp.up_proj.weight"].dense()
        errors.append(float((wrong**2 * weight).sum()))
    assert errors[1] < 0.8 * errors[0]
    assert after.metadata["quantize.imatrix.entries_count"] == 1


@pytest.mark.parametrize("fault", ["other type", "no counts", "negative", "nan", "empty", "counts"])
def test_broken_files_are_refused(tmp_path, fault):
    path = tmp_path / "imatrix.gguf"
    sums, counts = np.ones((2, 4), np.float32), np.ones((2, 1), np.float32)
    if fault == "negative":
        sums[1, 2] = -1
    if fault == "nan":
        sums[0, 0] = np.nan
    if fault == "counts":
        counts = np.ones((3, 1), np.float32)
    arrays = {"x.in_sum2": sums} | ({} if fault == "no counts" else {"x.counts": counts})
    if fault == "empty":
        arrays = {"y": sums}
    infos = [TensorInfo(name, array.shape, "F32") for name, array in arrays.items()]
    header = Header({"general.type": encode_value("model" if fault == "other type" else "imatrix")}, infos)
    data = header.encode()
    for info, array in zip(infos, arrays.values(), strict=True):
        data += array.tobytes() + bytes(header.padded(info.nbytes) - info.nbytes)
    path.write_bytes(data)
    with pytest.raises(EngineError, match=r"imatrix\.gguf"):
        read_imatrix(path)
