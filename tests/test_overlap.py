"""Generation and training at the same time, with a stand-in for the server whose draws depend on the prefix alone."""

import random
import signal
import threading
import time
from contextlib import nullcontext

import pytest
from accelerate.utils import is_deepspeed_available
from factory import digits, train
from launches import launch, wait_until
from models import CPU, make_dataset, make_tokenizer
from overlap_train import SETTINGS, make
from tool_policy import WORDS, Walk, instead_of_look, look, make_tool_dataset, make_tool_tokenizer
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback

from benchmarks.cost.stand_in import StandIn
from fr3e_trl import FR3EConfig, FR3ETrainer
from fr3e_trl.generation import vllm_server
from fr3e_trl.generation.vllm_server import VLLMServerError

DEEPSPEED = pytest.mark.skipif(not is_deepspeed_available(), reason="deepspeed is not installed: see the Makefile")


@pytest.fixture
def server():
    """A stand-in that takes a hundredth of a second for a token, and is left with no request and no thread."""
    with make_server() as stand_in:
        yield stand_in
        check_nothing_is_left(stand_in)


def make_server(kind=StandIn, tokenizer=None):
    tokenizer = tokenizer or make_tokenizer()
    tokenize = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    return kind(tokenize, len(tokenizer), end=1, seconds_per_token=0.01)


def check_nothing_is_left(server):
    def threads():
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("fr3e-")]

    wait_until(lambda: server.num_in_flight == 0 and not threads(), seconds=5)


def trained(server, *args, **settings):
    return train(*args, make=make, vllm_server_base_url=server.url, **settings)


def losses(trainer):
    """What each step logged, with its rewards if its batch is new."""
    names = ("loss", "grad_norm", "reward", "reward_std", "completions/mean_length")
    return [[entry.get(name, 0.0) for name in names] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_staleness": 1},
        {"num_anchors": 0, "value_prior_strength": 0, "reject_degenerate_states": False, "epsilon_high": 0.2},
        {"max_refills": 1, "reward_funcs": digits},
        {"max_steps": 14},  # an epoch has three batches, and a prompt that has none
        {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": make_dataset(4)},
        {"reuse_base": False, "num_generations": 8, "num_anchors": 1},  # branches are asked for afterwards
    ],
    ids=["all", "half", "grpo", "refill", "epochs", "evaluation", "branches afterwards"],
)
def test_losses_are_those_without_overlap(server, settings):
    """With a rate of 0, rollouts are of the same policy whenever they are drawn. No weights are sent amid them."""
    settings = {"dataset": make_dataset(13)} | settings
    server.seconds_per_token = 0.002
    expected = losses(trained(server, **settings | {"max_staleness": 0}))
    server.events.clear()
    trainer = trained(server, **{"max_staleness": 2} | settings)
    assert losses(trainer) == [pytest.approx(step) for step in expected]
    in_flight = 0
    for _, what, adapter in server.events:
        in_flight += {"begin": 1, "end": -1, "aborted": -1}.get(what, 0)
        if what == "load":
            assert in_flight == 0
            last = adapter
        elif what == "begin":
            assert adapter == last
    num_batches = SETTINGS["max_steps"] // 2
    if not settings.keys() & {"max_steps", "eval_steps"}:
        # Those of the constructor, of the first batch and of the later ones. With all updates to come, the second batch
        # begins at the weights of the first
        num_sent = sum(what == "load" for _, what, _ in server.events)
        assert num_sent == num_batches + (trainer.args.max_staleness == 1)


def test_generation_hides_behind_training(server):
    class Slow(FR3ETrainer):
        def _compute_loss(self, *args, **kwargs):
            time.sleep(0.1)
            return super()._compute_loss(*args, **kwargs)

    trainer = trained(server, Slow, max_staleness=2, share_prefixes=False)
    entries = [entry for entry in trainer.state.log_history if "fr3e/overlap/seconds_waited" in entry]
    waited, hidden = ([entry[f"fr3e/overlap/seconds_{name}"] for entry in entries] for name in ("waited", "hidden"))
    assert waited[0] == hidden[0] == 0
    assert all(seconds > 0.1 for seconds in hidden[1:])  # what sleeps takes as long at least
    assert all(seconds >= 0 for seconds in waited)


class CallingStandIn(StandIn):
    """Draws what calls `look` in half of all turns, as likely as anything else."""

    def draw(self, prefix, *seed):
        token, logprobs = super().draw(prefix, *seed)
        before, last = ["", *(WORDS[i] for i in prefix)][-2:]
        if last == "<|assistant|>" and token % 2:
            token = WORDS.index("<call>")
        elif last == "<call>":
            token = WORDS.index(str(token % 10))
        elif "call>" in before + last:
            token = WORDS.index("</call>" if before == "<call>" else "<eos>")
        return token, logprobs


@pytest.fixture
def tools():
    """Settings with tools, and the threads that called them."""
    callers = []

    @instead_of_look
    def noted_look(key: str) -> str:
        callers.append(threading.current_thread())
        return look(key)

    settings = {"tokenizer": make_tool_tokenizer(), "dataset": make_tool_dataset(), "vocab_size": len(WORDS)}
    with make_server(CallingStandIn, settings["tokenizer"]) as stand_in:
        stand_in.seconds_per_token = 0.002
        yield settings | {"tools": [noted_look], "vllm_server_base_url": stand_in.url}, callers
        check_nothing_is_left(stand_in)


def test_tools_are_called_when_the_batch_begins(tools):
    settings, callers = tools
    found = []
    for max_staleness in (0, 2):
        trainer = train(make=make, **settings, max_staleness=max_staleness)
        found.append(losses(trainer))
    assert found[1] == [pytest.approx(step) for step in found[0]]
    assert len(callers) > 20 and set(callers) == {threading.main_thread()}
    hidden = [entry.get("fr3e/overlap/seconds_hidden") for entry in trainer.state.log_history[2:6:2]]
    assert min(hidden) > 0.002


@pytest.mark.parametrize(
    "recipe, options, backend",
    [
        ("ddp", [], "MULTI_CPU"),
        ("fsdp2", ["sharded"], "FSDP"),
        pytest.param("zero3", ["sharded"], "DEEPSPEED", marks=DEEPSPEED),
    ],
)
def test_two_processes(server, tmp_path, recipe, options, backend):
    """Groups that straddle them too, and sharded weights, which all processes send together."""
    settings = {"vllm_server_base_url": server.url, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    script = __file__.replace("test_overlap", "overlap_train")
    of_runs = []
    for m in (0, 2):
        results = launch(tmp_path / str(m), 2, settings | {"max_staleness": m}, *options, recipe=recipe, script=script)
        assert all(backend in result["backend"] for result in results)
        of_runs.append([[entry.get("loss") for entry in result["logs"]] for result in results])
    assert of_runs[0] == of_runs[1]


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_a_resumed_run_begins_its_batch_anew(server, tmp_path, max_staleness):
    """The stand-in's draws do not depend on the weights, so that the run is the one that was not cut."""
    settings = {"max_staleness": max_staleness, "learning_rate": 1e-3, "output_dir": str(tmp_path)}
    whole = trained(server, **settings, save_strategy="steps", save_steps=1)
    for step in (2, 3):
        resumed = trained(server, **settings, resume=f"{tmp_path}/checkpoint-{step}")
        assert losses(resumed)[step:] == losses(whole)[step:]


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"use_vllm": False}, "use_vllm=True and vllm_mode='server'"),
        ({"vllm_mode": "colocate"}, "use_vllm=True and vllm_mode='server'"),
        ({"max_staleness": 3}, "at most steps_per_generation"),
        ({"max_staleness": -1}, "at least 0"),
        ({"steps_per_generation": 3, "num_iterations": 1, "max_staleness": 1}, "divides steps_per_generation"),
        ({"vllm_importance_sampling_correction": False}, "accounts for old rollouts"),
        ({"base_selection": "mixed"}, "base_selection='all'"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_with_it(settings, told):
    defaults = CPU | SETTINGS | {"max_staleness": 2, "output_dir": "output"}
    with pytest.raises(ValueError, match=told):
        FR3EConfig(**defaults | settings)


@pytest.mark.parametrize(
    "arguments, told",
    [
        ({"dataset": make_dataset().to_iterable_dataset()}, "without streaming"),
        ({"sampler": lambda trainer: None}, "which sampler= replaces"),
    ],
    ids=["stream", "sampler"],
)
def test_what_does_not_go_with_it(server, arguments, told):
    with pytest.raises(ValueError, match=told):
        make(vllm_server_base_url=server.url, max_staleness=2, **arguments)


def test_environments(tools):
    settings = tools[0] | {"tools": None, "environment_factory": Walk}
    with pytest.raises(NotImplementedError, match="does not work with environments"):
        make(**settings, max_staleness=2)


def test_another_order_of_the_data(server):
    class Sequential(FR3ETrainer):
        def _get_train_sampler(self, *args, **kwargs):
            return SequentialSampler([0] * 1000)

    with pytest.raises(RuntimeError, match="Set max_staleness=0"):
        trained(server, Sequential, max_staleness=2, dataset=make_dataset(1000))


class Act(TrainerCallback):
    def __init__(self, act, step=2):
        self.act, self.step = act, step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act(control)


@pytest.mark.parametrize("setting, value", [("temperature", 0.7), ("eos_token_ids", [1, 7]), ("top_k", 5)])
def test_a_setting_that_is_changed_meanwhile(server, setting, value):
    trainer = make(vllm_server_base_url=server.url, max_staleness=2)
    trainer.add_callback(Act(lambda control: setattr(trainer, setting, value), step=1))
    given_up, abort = [], trainer.sampler.abort
    trainer.sampler.abort = lambda: given_up.append(trainer.state.global_step) or abort()
    trainer.train()
    assert trainer.state.global_step == 6 and getattr(trainer, setting) == value
    assert given_up == [0, 2, 6]  # where a run begins and ends too
    hidden = [entry.get("fr3e/overlap/seconds_hidden") for entry in trainer.state.log_history]
    assert hidden[0] == hidden[2] == 0 < hidden[4]


def test_prompts_that_are_others_once(server, caplog):
    """As where the chat template has the date, at midnight."""
    trainer = make(vllm_server_base_url=server.url, max_staleness=2, dataset=make_dataset(conversational=True))
    template = "It is another day. " + trainer.processing_class.chat_template
    trainer.add_callback(Act(lambda control: setattr(trainer.processing_class, "chat_template", template), step=1))
    trainer.train()
    assert trainer.state.global_step == 6 and caplog.text.count("because prompts have changed since") == 1


class Other(FR3ETrainer):
    """Evaluates with settings of its own."""

    def evaluate(self, *args, **kwargs):
        self.eos_token_ids, self.top_k, before = [1, 7], 5, (self.eos_token_ids.copy(), self.top_k)
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            self.eos_token_ids, self.top_k = before


def test_settings_of_an_evaluation_are_not_those_of_the_batch_in_flight(server):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": make_dataset(2)}
    settings |= {"per_device_eval_batch_size": 4}
    expected, found = (losses(trained(server, Other, max_staleness=m, **settings)) for m in (0, 2))
    assert found == [pytest.approx(step) for step in expected]


def test_a_run_that_skips_no_data_when_it_is_resumed(server, tmp_path):
    settings = {"output_dir": str(tmp_path), "dataset": make_dataset(13), "save_strategy": "steps", "save_steps": 3}
    trained(server, **settings, max_steps=3)
    settings |= {"resume": True, "ignore_data_skip": True, "max_steps": 12, "save_strategy": "no"}
    expected, found = (losses(trained(server, **settings, max_staleness=m)) for m in (0, 2))
    assert found == [pytest.approx(step) for step in expected]


def fail(*args, **kwargs):
    raise OSError("the reward model is gone")


@pytest.mark.parametrize(
    "act, error",
    [
        (lambda control: setattr(control, "should_training_stop", True), None),
        (fail, OSError),
        (lambda control: signal.raise_signal(signal.SIGINT), KeyboardInterrupt),
    ],
    ids=["stopped", "failed", "interrupted"],
)
def test_ends_amid_a_batch_leave_nothing(server, act, error):
    """What the server still draws is aborted there."""
    trainer = make(vllm_server_base_url=server.url, max_staleness=1)
    trainer.add_callback(Act(lambda control: setattr(server, "seconds_per_token", 60.0), step=1))
    trainer.add_callback(Act(act, step=2))
    began = time.monotonic()
    with pytest.raises(error) if error else nullcontext():
        trainer.train()
    assert time.monotonic() - began < 60
    check_nothing_is_left(server)
    assert any(what == "aborted" for _, what, _ in server.events)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_an_interrupt_while_the_main_thread_asks(server, max_staleness):
    trainer = make(vllm_server_base_url=server.url, max_staleness=max_staleness)
    server.seconds_per_token = 60.0
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 1)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


def test_a_server_that_dies_meanwhile(server, tmp_path, monkeypatch):
    """One error at the batch's beginning, and a checkpoint of the step before, which the run goes on from."""
    monkeypatch.setattr(vllm_server, "MAX_FAULTS", 1)
    settings = {"max_staleness": 2, "output_dir": str(tmp_path)}
    trainer = make(vllm_server_base_url=server.url, **settings)
    trainer.add_callback(Act(lambda control: setattr(server, "is_dead", True), step=1))
    server.seconds_per_token = 0.2
    with pytest.raises(VLLMServerError, match="failed 1 times in a row") as raised:
        trainer.train()
    assert "Step 2, the last that was trained, is saved" in raised.value.__notes__[0]
    assert trainer._last_loaded_step < 2  # an evaluation would send the weights of now
    server.is_dead, server.seconds_per_token = False, 0.001
    assert trained(server, **settings, resume=True).state.global_step == 6


@pytest.mark.parametrize("seed", range(5))
def test_an_interrupt_at_any_moment(server, tmp_path, seed):
    settings = {"max_staleness": 1 + seed % 2, "output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 1}
    trainer = make(vllm_server_base_url=server.url, **settings, max_steps=100)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    # Again after a while, since an interrupt within a destructor is lost
    act = lambda control: signal.setitimer(signal.ITIMER_REAL, random.Random(seed).uniform(0.01, 1), 10)  # noqa: E731
    trainer.add_callback(Act(act))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    signal.setitimer(signal.ITIMER_REAL, 0)
    check_nothing_is_left(server)
    done = trainer.state.global_step
    assert trained(server, **settings, max_steps=done + 2, resume=True).state.global_step == done + 2
