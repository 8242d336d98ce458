"""
Worker process of `math_reward`, run as a script: scores an answer a line, until its input ends.

A line in is the JSON of [completion, solution, time limit in seconds], a line out that of the reward; or, where the
solution is null, of the answer that is read in the completion. It may be killed at any moment.
"""

import json
import os
import resource
import signal
import sys

MEMORY_LIMIT = 4 * 2**30  # bytes
MAX_ANSWER = 500  # characters


def main() -> None:
    # Replies go by a descriptor of their own, so that nothing a library prints gets between them
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if sys.platform == "linux":  # others do not enforce it
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    from trl.rewards import accuracy_reward

    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        completion, solution, time_limit = json.loads(line)
        # The trainer kills a worker that takes too long. Should the trainer be gone, the signal of this timer of CPU
        # time does, also in the middle of a computation that Python cannot interrupt.
        signal.setitimer(signal.ITIMER_PROF, 2 * time_limit)
        if solution is None:
            reply = read_answer(completion)
        else:
            (reply,) = accuracy_reward([[{"role": "assistant", "content": completion}]], [solution])
        print(json.dumps(reply), file=replies, flush=True)


def read_answer(completion: str) -> str | None:
    """The answer that `accuracy_reward` reads in a completion."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    config = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    parsed = parse(completion, extraction_config=[config], extraction_mode="first_match", parsing_timeout=10)
    return str(parsed[-1])[:MAX_ANSWER] if parsed else None


if __name__ == "__main__":
    main()
