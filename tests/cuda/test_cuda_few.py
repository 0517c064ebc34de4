"""The instructions by which few rows of codes and cached bytes are decoded, carried out here as the PTX ISA defines them (9.7.9.7
prmt, 9.7.8.6 lop3), since Triton's interpreter knows none."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from engine_cuda.repack import REPACKED

TABLES = [name for name, form in REPACKED.items() if form.few and form.meaning != "codes"]
WIDE = [name for name, form in REPACKED.items() if form.few and form.meaning == "codes" and form.below > 128]


def prmt(a, b, c):
    """Each nibble of c chooses one of the bytes of b, a, or where its highest bit is set that one's sign."""
    eight, found = a | b << 32, 0
    for n in range(4):
        chosen = c >> 4 * n & 15
        byte = eight >> 8 * (chosen & 7) & 255
        found |= (255 * (byte >> 7) if chosen & 8 else byte) << 8 * n
    return found


def narrow(dtype):
    """cvt.rn.f16x2.f32 and its like: the first operand is the high half."""

    def run(high, low):
        import torch

        numbers = torch.tensor([low, high], dtype=torch.int64).to(torch.int32).view(torch.float32).to(dtype)
        low, high = (int(bits) & 0xFFFF for bits in numbers.view(torch.int16))
        return low | high << 16

    return run


def less(a, b):
    one, other = (np.uint32(bits).view(np.float32) for bits in (a, b))
    return int((one - other).view(np.uint32))


def less_in_halves(a, b):
    one, other = (np.array([bits & 0xFFFF, bits >> 16], np.uint16).view(np.float16) for bits in (a, b))
    low, high = (one - other).view(np.uint16).tolist()
    return low | high << 16


def from_e4m3(two):
    import torch

    numbers = torch.tensor([two & 255, two >> 8], dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float16)
    low, high = (int(bits) & 0xFFFF for bits in numbers.view(torch.int16))
    return low | high << 16


RUN = {
    "prmt.b32": prmt,
    "mov.b32": lambda a: a,
    "xor.b32": lambda a, b: a ^ b,
    "sub.f32": less,
    "sub.rn.f16x2": less_in_halves,
    "cvt.rn.f16x2.e4m3x2": from_e4m3,
    "shr.u32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": lambda a, b, c, table: sum(  # bit a b c of the table
        (table >> ((a >> n & 1) << 2 | (b >> n & 1) << 1 | c >> n & 1) & 1) << n for n in range(32)
    ),
}


def carried_out(text, results, *words):
    """Its results $0 and so on for the operands behind them."""
    import torch

    run = RUN | {"cvt.rn.bf16x2.f32": narrow(torch.bfloat16), "cvt.rn.f16x2.f32": narrow(torch.float16)}
    registers = {f"${results + n}": word for n, word in enumerate(words)}
    for statement in text.strip(" {}").split(";"):
        if not statement.strip() or ".reg" in statement:
            continue
        name, operands = statement.split(maxsplit=1)
        target, given = re.match(r"({.*?}|[^,]+), (.*)", operands).groups()
        given = [f"0x{one[2:]}" if one.startswith("0f") else one for one in given.split(", ")]
        values = [registers[one] if re.match(r"[a-z$]", one) else int(one, 0) for one in given]
        found = run[name](*values) & 0xFFFFFFFF
        if target.startswith("{"):
            registers |= zip(target[1:-1].split(", "), (found & 0xFFFF, found >> 16), strict=True)
        else:
            registers[target] = found
    return [registers[f"${n}"] for n in range(results)]


def halves_of(word):
    return np.array([word & 0xFFFF, word >> 16], np.uint16).view(np.float16).tolist()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", TABLES)
def test_nibbles_become_the_numbers_of_their_table(name, dtype, device):
    import torch

    from engine_cuda.kernels.few import looked_up

    table = REPACKED[name].table
    text = looked_up(table.tobytes(), dtype)
    wanted = torch.from_numpy(table).to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]).view(torch.int16)
    bits = wanted.numpy().astype(np.uint16)
    for word in np.random.default_rng().integers(0, 1 << 32, 50).tolist():
        for n, found in enumerate(carried_out(text, 4, word)):
            low, high = (int(bits[word >> 4 * place & 15]) for place in (n, n + 4))
            assert found == low | high << 16, (hex(word), n)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", WIDE)
def test_bytes_become_their_numbers(name, dtype, device):
    import torch

    from engine_cuda.kernels.few import widened

    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    zero = REPACKED[name].zero
    text = widened(zero, dtype)
    for word in [*np.random.default_rng().integers(0, 1 << 32, 100).tolist(), 0x00FF80FF, 0xFF00FF7F]:
        for n, found in enumerate(carried_out(text, 2, word)):
            halves = torch.tensor([found & 0xFFFF, found >> 16], dtype=torch.int32).to(torch.int16).view(kind)
            assert halves.tolist() == [(word >> 8 * place & 255) - zero for place in (n, n + 2)], hex(word)


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", "bfloat16"), ("fp16", "float16")])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_or_ed_below_what_they_begin_with(bits, dtype, kind, device):
    import torch

    from engine_cuda.kernels.few import BEGUN, added

    for code in range(16 if bits == 4 else 128):
        other = code ^ 5
        word = code | other << 16 | (0xFFF0FFF0 if bits == 4 else 0xFF80FF80)
        [found] = carried_out(added(bits, dtype), 1, word)
        halves = torch.tensor([found & 0xFFFF, found >> 16], dtype=torch.int32).to(torch.int16)
        assert halves.view(getattr(torch, kind)).tolist() == [BEGUN[dtype] + code, BEGUN[dtype] + other]


@pytest.mark.parametrize("signed", [True, False])
def test_cached_bytes_become_their_numbers(signed, device):
    import torch

    from engine_cuda.kernels.words import of_two, of_word

    kind = torch.int8 if signed else torch.float8_e4m3fn
    numbers = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(kind).float().tolist()
    rng = np.random.default_rng()
    for one, other in zip(*(rng.permutation(256).astype(np.uint8).view("<u4").tolist() for _ in range(2)), strict=True):
        ones, others = ([numbers[word >> 8 * n & 255] for n in range(4)] for word in (one, other))
        found = [halves_of(word) for word in carried_out(of_word(signed), 2, one)]
        np.testing.assert_equal(found, [ones[:2], ones[2:]])
        found = [halves_of(word) for word in carried_out(of_two(signed), 4, one, other)]
        np.testing.assert_equal(found, [list(both) for both in zip(ones, others, strict=True)])


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_bytes_become_the_numbers_that_factors_are(dtype, device):
    from engine_cuda.kernels.few import COUNTED, SIGNED

    text = (SIGNED if dtype == np.int8 else COUNTED).value
    for word in [*np.random.default_rng().integers(0, 1 << 32, 50).tolist(), 0x00FF80FF, 0xFF00FF7F]:
        found = np.array(carried_out(text, 4, word), np.uint32).view(np.float32)
        np.testing.assert_array_equal(found, np.array([word], np.uint32).view(dtype))


@pytest.mark.parametrize("kernel", ["few4g32.bf16", "few4g64.bf16", "few8g16.bf16"])
def test_each_way_sums_the_same_spans_in_the_same_order(kernel, device, monkeypatch):
    """Those of each warp, of which there are as many whatever the tiles; and each thread reads the factors it needs itself."""
    from engine_cuda import tiles
    from engine_cuda.cuts import Shape
    from engine_cuda.kernels.few import WARPS

    monkeypatch.setattr(tiles, "INTERPRETED", False)
    monkeypatch.setattr(tiles, "architecture", lambda: "sm_90")
    group = 16 if "g16" in kernel else 32
    for rows in (1, 8, 9, 17, 32):
        ways = Shape(kernel, rows, 4096, 4096, 2).ways()
        assert len(set(ways)) == len(ways) > 4
        for one in ways:
            assert one.warps == WARPS and one.bk in (32 * WARPS, 64 * WARPS) and tiles.FEW_STEP % one.bk == 0
            assert one.bn * one.bm <= 2048 and one.bk // group * one.bn // 4 < 32 * WARPS


@pytest.mark.parametrize("format_", ["Q4_K", "Q6_K", "NF4", "Q3_K", "Q8_0"])
def test_codes_and_factors_come_back_from_their_tiles(format_, device):
    """Of matrices whose rows are no whole tiles."""
    from engine.testing.cases import CaseWeight, random_weight

    weight = CaseWeight("w", random_weight(np.random.default_rng(), format_, (3, 40, 512)))
    [provider] = device.providers()["linear"]
    packed = provider.pack(weight, ("linear",), lambda _: None)
    np.testing.assert_array_equal(packed.unpack(), weight.dense())
