"""
Worker process of `math_reward`, run as a script: scores an answer a line, until its input ends.

A line in is the JSON of [completion, solution, time limit in seconds], a line out that of the reward. It may be killed
at any moment.
"""

import json
import os
import resource
import signal
import sys

MEMORY_LIMIT = 4 * 2**30  # bytes


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
        (reward,) = accuracy_reward([[{"role": "assistant", "content": completion}]], [solution])
        print(json.dumps(reward), file=replies, flush=True)


if __name__ == "__main__":
    main()
