"""The maths reward: TRL's answers, and no LaTeX that hangs or crashes it."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from datasets import Dataset
from factory import digits, make_trainer
from launches import wait_until
from trl.rewards import accuracy_reward

from fr3e_trl.rewards import WORKER, get_math_reward, math_answers

ORDINARY = [
    (r"It is \boxed{0.5}.", r"\frac{1}{2}"),
    (r"It is \boxed{\frac{1}{3}}.", r"\frac{1}{2}"),
    (r"First \boxed{3}, no, \boxed{4}", "4"),
    (r"\boxed{x^2 + 2x + 1}", "$(x+1)^2$"),
    (r"\boxed{(1, 2]}", "$(1, 2]$"),
    ("It is 4.", "4"),
    ("", "4"),
    (r"\boxed{}", "4"),
    (r"\boxed{4}", "no number here"),
    ("línea\nnew \x00 \ud800 \\boxed{7}", "7"),
]

# Each takes `accuracy_reward` longer than the seconds that it gets below, if it ever ends
HOSTILE = [
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{((9!)!)!}",
    r"\boxed{\binom{10^9}{5\cdot 10^8}}",
    r"\boxed{" + "{" * 100_000 + "1" + "}" * 100_000 + "}",
    r"\boxed{" + "1+" * 200_000 + "1}",
    r"\boxed{" + "9" * 5_000_000 + "}",
]


def columns(pairs):
    return [list(column) for column in zip(*pairs, strict=True)]


@pytest.mark.parametrize("conversational", [False, True])
def test_ordinary_answers_get_what_trl_gives(conversational):
    texts, solutions = columns(ORDINARY)
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    rewards = get_math_reward(time_limit=60)(messages if conversational else texts, solution=solutions)
    assert rewards == accuracy_reward(messages, solutions)
    assert {1.0, 0.0, None} == set(rewards)


def test_answers_of_dialogues_and_long_ones():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    last = [{"type": "text", "text": "So "}, {"type": "text", "text": r"\boxed{4}"}]
    told = [
        [call, {"role": "tool", "content": "4"}, {"role": "assistant", "content": said}]
        for said in (r"\boxed{4}", last)
    ]
    assert get_math_reward()([*told, [call]], solution=["4"] * 3) == [1.0, 1.0, 0.0]
    # A long answer of many bytes leaves the next as it is
    texts = [r"\boxed{\text{" + "𝑥" * 900 + "}}", r"\boxed{7}", r"\boxed{8}"]
    first, *others = math_answers(texts)
    assert len(first) == 500 and others == ["7", "8"]


def test_hostile_answers_score_0_and_are_counted():
    logged = {}
    texts = [*HOSTILE, r"\boxed{4}", r"\boxed{5}"]
    reward = get_math_reward(time_limit=4, num_workers=2)
    rewards = reward(texts, solution=["4"] * len(texts), log_metric=logged.__setitem__, prompts=texts)
    assert rewards == [0.0] * len(HOSTILE) + [1.0, 0.0]
    assert sum(logged.values()) == pytest.approx(len(HOSTILE) / len(texts))
    assert logged["math_reward/timeouts"] > 0


def test_it_works_in_any_thread_and_in_several_at_once():
    reward = get_math_reward(time_limit=60, num_workers=2)

    def call(i):
        return reward([rf"\boxed{{{i}}}", r"\boxed{1}"] * 5, solution=[str(i), "2"] * 5)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(call, range(4))) == [[1.0, 0.0] * 5] * 4


def workers_of(pid: int) -> list[int]:
    children = [child for child in psutil.Process(pid).children() if child.status() != psutil.STATUS_ZOMBIE]
    return [worker.pid for child in children if str(WORKER) in child.cmdline() for worker in child.children()]


def test_a_worker_that_is_killed_is_replaced():
    """As when the system is out of memory. It is counted where it dies of an answer."""
    reward, before, logged = get_math_reward(time_limit=60, num_workers=1), set(workers_of(os.getpid())), {}
    assert reward([r"\boxed{4}"], solution=["4"]) == [1.0]
    (worker,) = set(workers_of(os.getpid())) - before
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(worker))
    assert reward([r"\boxed{4}"], solution=["4"], log_metric=logged.__setitem__) == [1.0]
    assert logged["math_reward/crashes"] == 0
    (second,) = set(workers_of(os.getpid())) - before
    with ThreadPoolExecutor() as threads:
        began = psutil.Process(second).cpu_times().user
        results = threads.submit(reward, [HOSTILE[0], r"\boxed{4}"], ["4", "4"], log_metric=logged.__setitem__)
        wait_until(lambda: psutil.Process(second).cpu_times().user > began + 0.5)  # of that answer
        os.kill(second, signal.SIGKILL)
        assert results.result() == [0.0, 1.0]
    assert logged == {"math_reward/timeouts": 0.0, "math_reward/crashes": 0.5}


@pytest.mark.parametrize("answer", [r"\boxed{4}", r"\boxed{9^{9^{9^9}}}"], ids=["idle", "busy"])
def test_workers_do_not_outlive_a_parent_that_is_killed(answer):
    script = f"""
import threading
from fr3e_trl.rewards import get_math_reward
reward = get_math_reward(time_limit=2, num_workers=1)
reward([r"\\boxed{{4}}"], solution=["4"])
threading.Thread(target=reward, args=([{answer!r}], ["4"])).start()
print("running", flush=True)
threading.Event().wait()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout.readline() == "running\n"
            workers = workers_of(parent.pid)
            assert len(workers) == 1
        finally:
            parent.kill()
    wait_until(lambda: not Path(f"/proc/{workers[0]}").exists())


def test_a_worker_that_cannot_start_says_why(monkeypatch, tmp_path):
    # A module in the place of math-verify's that cannot be imported
    (tmp_path / "latex2sympy2_extended.py").write_text("raise OSError('no such library')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"did not start[\s\S]*no such library"):
        get_math_reward()([r"\boxed{4}"], solution=["4"])


def test_what_cannot_be_is_refused(monkeypatch):
    for name in ("time_limit", "num_workers"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            get_math_reward(**{name: 0})
    with pytest.raises(TypeError, match="solution 4 is not a string"):
        get_math_reward()([r"\boxed{4}"], solution=[4])
    with pytest.raises(ValueError, match="zip"):
        get_math_reward()([r"\boxed{4}"], solution=["4", "5"])
    # Without math-verify it says what to install
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "fr3e-trl\[math\]"'):
        get_math_reward()([r"\boxed{4}"], solution=["4"])


def test_it_trains():
    reward = get_math_reward(time_limit=3)

    def hostile_math_reward(completions, **kwargs):
        return reward([HOSTILE[0], *completions[1:]], **kwargs)

    dataset = Dataset.from_dict({"prompt": ["1+1=", "2+2="], "solution": ["2", "4"]})
    sizes = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 8}
    trainer = make_trainer(reward_funcs=[hostile_math_reward, digits], dataset=dataset, **sizes)
    trainer.train()
    for entry in trainer.state.log_history[:2]:
        assert entry["math_reward/timeouts"] == pytest.approx(1 / 4)
        assert entry["rewards/hostile_math_reward/mean"] == 0
