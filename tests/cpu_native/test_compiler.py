"""What building says where it cannot be done."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD = {  # g++ 11, and one that is older
    "__builtin_shufflevector": '#!/bin/sh\nexec c++ -D__builtin_shufflevector=absent "$@"\n',
    "-mavxvnni": '#!/bin/sh\ncase " $* " in *" -mavxvnni "*) exit 1;; esac\nexec c++ "$@"\n',
}


def configure(folder: Path, compiler: str) -> subprocess.CompletedProcess[str]:
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    if cmake is None or shutil.which("c++") is None:
        pytest.skip("cmake or a C++ compiler is not installed")
    options = ["-DENGINE_KERNEL_SERVER=ON", f"-DCMAKE_CXX_COMPILER={compiler}"]
    command = [cmake, "-S", str(ROOT), "-B", str(folder / "build"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("lacks", OLD)
def test_an_old_compiler_is_refused_before_anything_is_compiled(tmp_path, lacks):
    compiler = tmp_path / "old-c++"
    compiler.write_text(OLD[lacks])
    compiler.chmod(0o755)
    done = configure(tmp_path, str(compiler))
    assert done.returncode != 0
    told = " ".join(done.stderr.split())
    assert "does not compile the kernels, which need g++ 12 or later, or clang 12 or later" in told


def test_this_compiler_is_taken(tmp_path):
    done = configure(tmp_path, "c++")
    assert done.returncode == 0, done.stderr
