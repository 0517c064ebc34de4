"""Compiles a grammar in a process of its own, which is all that its time and memory can cost: a program, not to be imported.

Reads the grammar as llguidance takes it. Exit status 0 whether it is right or wrong; where it is too much for the limits the
process is ended, or ends itself.
"""

import sys

SECONDS = 1  # of processor time
BYTES = 1 << 30  # beyond what the process has when it begins


class Letters:
    """A vocabulary of bytes: conditions on a value meet before any token is looked at."""

    tokens = (*(bytes([byte]) for byte in range(256)), b"</s>")
    special_token_ids = (256,)
    eos_token_id = 256
    bos_token_id = None

    def __call__(self, data: bytes | str) -> list[int]:
        return list(data.encode() if isinstance(data, str) else data)


def limit() -> None:
    """Bounds of this process, where the system has them."""
    try:
        import resource
    except ImportError:  # the caller's clock remains
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    grammar = sys.stdin.buffer.read().decode()
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    vocabulary = LLTokenizer(TokenizerWrapper(Letters()))
    limit()
    LLMatcher(vocabulary, grammar, log_level=0)


if __name__ == "__main__":
    main()
