"""A product tuned on a GPU that is not there: prints its ways, which kernels were compiled before any was timed, by how many
threads, and what was launched. Run without TRITON_INTERPRET."""

import json
import sys
import threading
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from engine_cuda.cuts import Cuts, Shape
from engine_cuda.kernels import common, matmul
from engine_cuda.ops.dense import Product
from engine_cuda.weights import Dense


class Sm90:
    """As much of a driver as compiling asks."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def main(folder):
    driver.set_active(Sm90())
    torch.cuda.current_device, torch.cuda.set_device = (lambda: 0), (lambda device: None)
    launched, timed, threads = [], [], set()
    common.submit = launched.append
    run = matmul.dense.run

    def watched(*args, **kwargs):
        threads.add(threading.get_ident())
        return run(*args, **kwargs)

    matmul.dense.run = watched

    def seconds(start):
        timed.append(compiled())
        return 1.0

    def compiled():
        return sum(len(cache[0]) for cache in matmul.dense.device_caches.values())

    cuts = Cuts({}, Path(folder) / "card.json", "card", seconds)
    x, weight, y = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((5, 64), (32, 64), (5, 32)))
    with cuts.tuning():
        Product(x, Dense(weight), y, cuts).run()
    ways = Shape("dense.bf16", 5, 32, 64, 2).ways()
    found = {"ways": len(ways), "timed": timed, "threads": len(threads), "launched": len(launched)}
    print(json.dumps(found | {"main": threading.get_ident() in threads}))


if __name__ == "__main__":
    main(sys.argv[1])
