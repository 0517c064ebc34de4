"""Rates of vLLM on the CPU; runs in vLLM's environment, as cpu_peers.py starts it.

usage: vllm_rates.py FOLDER      FOLDER holds config.json; the weights are vLLM's own random ones, in bf16
Reads a JSON object a line: batch, depth, prompt, decode, repetitions, as `engine bench --case` has them; answers a line
"RATES [...]": tokens a second of each repetition, after an untimed one.
"""

import json
import sys

import numpy as np
from vllm import LLM, SamplingParams


def once(llm, work, rng):
    """A prompt's rate is from arrival to the last sequence's first token; decoding's from the first tokens to the last."""
    tokens = work["depth"] + work["prompt"] if work["prompt"] else work["depth"] + 1
    prompts = [{"prompt_token_ids": rng.integers(1000, 30000, tokens).tolist()} for _ in range(work["batch"])]
    params = SamplingParams(temperature=0, max_tokens=work["decode"] + 1, ignore_eos=True, detokenize=False)
    metrics = [output.metrics for output in llm.generate(prompts, params, use_tqdm=False)]
    if work["prompt"]:
        return work["batch"] * work["prompt"] / max(m.first_token_latency for m in metrics)
    seconds = max(m.last_token_ts for m in metrics) - max(m.first_token_ts for m in metrics)
    return work["batch"] * work["decode"] / seconds


def main(folder):
    llm = LLM(folder, dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, max_model_len=1024,
              max_num_seqs=64, enable_prefix_caching=False, disable_log_stats=False)  # fmt: skip
    rng = np.random.default_rng(0)
    print("READY", flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        rates = [once(llm, work, rng) for _ in range(1 + work["repetitions"])]
        print("RATES", json.dumps(rates[1:]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
