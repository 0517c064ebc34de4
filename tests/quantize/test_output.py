"""Results that are written whole or not at all."""

import pytest

from engine.quantize.output import replacing, replacing_folder


def test_two_that_write_the_same_file_do_not_mix(tmp_path):
    out = tmp_path / "out.gguf"
    with replacing(out) as first:
        first.write(b"first" * 1000)
        with pytest.raises(KeyboardInterrupt), replacing(out) as broken_off:
            broken_off.write(b"broken off")
            raise KeyboardInterrupt
        with replacing(out) as second:
            second.write(b"second")
        assert out.read_bytes() == b"second"
    assert out.read_bytes() == b"first" * 1000
    assert [p.name for p in tmp_path.iterdir()] == ["out.gguf"]


def test_two_that_write_the_same_folder_do_not_mix(tmp_path):
    out = tmp_path / "out"
    with replacing_folder(out) as first:
        (first / "config.json").write_text("first")
        with replacing_folder(out) as second:
            (second / "config.json").write_text("second")
    assert (out / "config.json").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
