"""The bench's task with a tool: the register, conversations with it, and what is measured of them."""

import functools
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import CPU
from test_arms import check_stale
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from trl import GRPOConfig, GRPOTrainer

from benchmarks.arms import make_trainer
from benchmarks.evaluation import evaluate
from benchmarks.policies import demonstrations, starting_policy
from benchmarks.tasks import TASKS, Search
from benchmarks.tasks.search import KIND, MEANINGS, REGISTER, RELATIONS, look_up

EXAMPLES = Path(__file__).parents[2] / "examples"
TASK = TASKS["search"]
GRPO = {"trainer": "grpo", "num_prompts": 4, "num_generations": 4, "num_train_examples": 16, "learning_rate": 1e-3}
GRPO |= {"epsilon_high": None, "scale_rewards": "none"}


def call(name, relation, title="kin"):
    function = {"name": "look_up", "arguments": {"key": name, "relation": relation}}
    return {"role": "assistant", "content": title, "tool_calls": [{"type": "function", "function": function}]}


def found(content):
    return {"role": "tool", "name": "look_up", "content": content}


def said(content):
    return {"role": "assistant", "content": content}


def test_demonstrations_without_noise_find_the_answer():
    for problem in TASK.examples("heldout", 0, 100):
        _, name, _, *titles, _ = problem["prompt"][0]["content"].split()
        messages = TASK.demonstrate(problem, random.Random(0), is_noisy=False)
        expected = []
        for title in titles:
            relation = MEANINGS[KIND[name], title]
            expected += [call(name, relation, title), found(look_up(name, relation))]
            name = REGISTER[name, relation]
        assert messages == [*expected, said(f"= {name}")]
        assert TASK.is_right(messages, problem)


def test_reward():
    looked_up = [call("keru", "home"), found("town bado")]
    for completion, reward in (
        ([said("= bado")], 1.0),
        ([*looked_up, said("= bado")], 1.0),
        ([*looked_up, said("= keru")], 0.0),
        ([*looked_up, said("bado")], 0.0),
        ([*looked_up, said("= bado = bado")], 0.0),
        ([call("keru", "home"), found("= bado")], 0.0),  # it is the tool that says so
        ([call("keru", "home", "= bado")], 0.0),  # and goes on
        ([said("")], 0.0),
    ):
        prompt = [{"role": "user", "content": "town keru : kin ="}]
        assert TASK.reward([completion], answer=["bado"], prompt=[prompt]) == [reward], completion


class Reciter(Qwen3ForCausalLM):
    """Knows some sequences by heart, and goes on with the one that it sees the beginning of."""

    known: list[list[int]]

    def forward(self, input_ids, **kwargs):
        logits = torch.full((*input_ids.shape, self.config.vocab_size), -1e4)
        for row, ids in zip(logits, input_ids, strict=True):
            seen = ids[ids != self.config.pad_token_id].tolist()
            # What is written behind the end is not looked at
            (following,) = {[*known, 0][len(seen)] for known in self.known if known[: len(seen)] == seen}
            row[-1, following] = 0.0
        return CausalLMOutputWithPast(logits=logits)


def test_a_demonstration_is_what_the_loop_makes_of_it():
    """Token by token, with what the tool answers, up to the limit of calls; only the others are the policy's."""
    tokenizer, rows = TASK.make_tokenizer(), demonstrations(TASK, 24)
    rendered = [tokenizer.apply_chat_template(row["prompt"] + row["completion"], return_dict=False) for row in rows]
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    model = Reciter(Qwen3Config(**sizes, pad_token_id=0))
    model.known = rendered
    made = []

    def keep(prompts, completions, completion_ids, **kwargs):
        made.extend(zip(prompts, completions, completion_ids, strict=True))
        return [0.0] * len(prompts)

    settings = {name: getattr(TASK, name) for name in ("max_completion_length", "max_tool_calling_iterations")}
    settings |= {"generation_kwargs": {"use_cache": False}, "gradient_checkpointing": False}
    args = GRPOConfig(**CPU | settings, per_device_train_batch_size=48, num_generations=2, max_steps=1)
    prompts, tools = rows.select_columns("prompt"), list(TASK.tools)
    trainer = GRPOTrainer(model, keep, args, prompts, processing_class=tokenizer, tools=tools)
    trainer.train()
    assert len(made) == 48
    for prompt, completion, ids in made:
        (index,) = [i for i, row in enumerate(rows) if row["prompt"] == prompt[:1]]
        assert rendered[index][-len(ids) :] == ids
        expected = [{name: value for name, value in m.items() if value is not None} for m in rows[index]["completion"]]
        assert completion == expected
    assert {len(completion) for _, completion, _ in made} >= {9, 11, 13}
    (log,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    # A call is a title, look_up, two arguments of two words and <eos>, and an answer is = and a name and <eos>
    messages = [message for row in rows for message in row["completion"] if message["role"] == "assistant"]
    own = sum(7 if message["tool_calls"] else 3 for message in messages)
    assert log["completions/mean_length"] == pytest.approx(own / 24)
    assert log["tools/failure_frequency"] == 0


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """One that calls the tool, if not wisely."""
    return starting_policy(replace(TASK, policy_steps=60), tmp_path_factory.mktemp("policies") / "search")


class Counted(Search):
    def __init__(self):
        super().__init__()
        self.__dict__["calls"] = []  # it is frozen

    @property
    def tools(self):
        @functools.wraps(look_up)
        def counting(*args, **kwargs):
            found = look_up(*args, **kwargs)
            self.calls.append(found)
            return found

        return (counting,)


def test_calls_of_training_are_counted(policy, tmp_path):
    task = Counted()
    trainer = make_trainer(GRPO, policy, task, tmp_path, seed=0, max_steps=2, logging_steps=1)
    trainer.train()
    assert trainer.costs.tool_calls > 16
    # TRL counts calls that lack an argument, too
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    tried = sum(16 * entry["tools/call_frequency"] for entry in logs)
    failed = sum(16 * entry["tools/call_frequency"] * entry["tools/failure_frequency"] for entry in logs)
    assert len(task.calls) == round(tried - failed) <= trainer.costs.tool_calls <= round(tried)
    own = sum(16 * entry["completions/mean_length"] for entry in logs)
    assert trainer.costs.generated_tokens == round(own)


def test_trees_are_counted_by_what_is_sampled_and_called(policy, tmp_path):
    """A branch asks nothing again that its prefix has asked."""
    task, sampled = Counted(), []
    settings = {"trainer": "fr3e", "num_base_trajectories": 1, "num_anchors": 3, "credit": "tree"}
    trainer = make_trainer(GRPO | settings | {"epsilon_high": 0.2}, policy, task, tmp_path, seed=0, max_steps=1)
    inner = trainer.sampler.sampler
    sample = inner.sample
    inner.sample = lambda requests: sampled.append(sample(requests)) or sampled[-1]
    trainer.train()
    tokens = sum(len(one.token_ids) for samples in sampled for of_request in samples for one in of_request)
    assert trainer.costs.generated_tokens == tokens
    rollouts = [rollout for tree in trainer.trees for state in tree.states for rollout in state.rollouts]
    assert any(tree.states[-1].position > 12 for tree in trainer.trees)  # behind a look-up
    asked = sum(message["role"] == "tool" for rollout in rollouts for message in rollout.dialogue.messages)
    assert 0 < len(task.calls) <= trainer.costs.tool_calls < asked


class Lengths(Search):
    """Every step teaches."""

    def reward(self, completions, **kwargs):
        return [float(len(str(completion)) % 7) for completion in completions]


def test_all_turns_of_stale_dialogues_are_of_the_policy_that_began_them(policy, tmp_path):
    settings = GRPO | {"trainer": "fr3e", "epsilon_high": 0.28, "num_iterations": 2, "staleness": 1}
    trainer = make_trainer(settings, policy, Lengths(), tmp_path, seed=0, max_steps=6, logging_steps=1)
    check_stale(trainer, updates=2)
    assert trainer.costs.tool_calls > 48 and measured(trainer).completion_length > 7


def measured(trainer, task=TASK, num_samples=4, batch_size=16):
    heldout = task.examples("heldout", 0, 8)
    return evaluate(trainer, task, heldout, num_samples, batch_size)


def test_evaluation_has_the_loop_and_leaves_no_trace(policy, tmp_path):
    task = Counted()
    trainer = make_trainer(GRPO | {"temperature": 0.5}, policy, task, tmp_path, 0, max_completion_length=32)
    trainer.model.train()
    config, state = trainer.generation_config, torch.get_rng_state()
    first = measured(trainer, task)
    assert len(task.calls) > 16 and trainer.costs.tool_calls == 0
    assert trainer.generation_config is config and trainer.max_completion_length == 32 and trainer.model.training
    assert torch.equal(torch.get_rng_state(), state)
    # As any trainer of that policy has it, whatever its own settings
    assert measured(make_trainer(GRPO, policy, TASK, tmp_path, seed=1)) == first


def test_entropy_is_of_what_the_policy_writes(policy, tmp_path, monkeypatch):
    trainer = make_trainer(GRPO, policy, TASK, tmp_path, seed=0)
    generated, generate = [], trainer._generate
    monkeypatch.setattr(trainer, "_generate", lambda prompts: generated.append(generate(prompts)) or generated[-1])
    evaluation = measured(trainer)
    entropies = []
    for prompt_ids, completion_ids, is_own, *_ in generated:
        for prompt, ids, own in zip(prompt_ids, completion_ids, is_own, strict=True):
            with torch.no_grad():
                log_probs = trainer.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            of_tokens = -(log_probs.exp() * log_probs).sum(-1)
            entropies += of_tokens[torch.tensor(own).bool()].tolist()
            assert 0 in own or len(own) == sum(own)
    assert len(entropies) < sum(len(ids) for _, completion_ids, *_ in generated for ids in completion_ids)
    assert evaluation.completion_length == len(entropies) / 32
    assert evaluation.entropy == pytest.approx(sum(entropies) / len(entropies), rel=1e-4)


def test_agent_is_launched_with_a_model(policy, tmp_path):
    command = [sys.executable, str(EXAMPLES / "agent.py"), f"--model_name_or_path={policy}", "--max_steps=1"]
    command += ["--num_train_examples=8", "--num_heldout=4", "--per_device_train_batch_size=16", "--num_generations=4"]
    result = subprocess.run([*command, f"--output_dir={tmp_path}"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    pattern = r"Held-out questions (\w+) training: [\d.]+% right, ([\d.]+) look-ups an answer"
    before, after = re.findall(pattern, result.stdout)
    assert (before[0], after[0]) == ("before", "after") and float(before[1]) > 0.5 and float(after[1]) > 0.5
    assert AutoTokenizer.from_pretrained(tmp_path).response_template == TASK.make_tokenizer().response_template


def test_agent_tells_a_model_what_to_do_and_rewards_it(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import agent

    told, untold = (agent.questions("train", 3, 5, prompt) for prompt in (agent.SYSTEM_PROMPT, None))
    assert untold.to_list() == TASK.examples("train", 3, 5).to_list()
    for with_prompt, without in zip(told, untold, strict=True):
        opening, *question = with_prompt["prompt"]
        assert opening["role"] == "system" and question == without["prompt"]
        assert all(relation in opening["content"] for relation in RELATIONS)
        assert with_prompt["answer"] == without["answer"]
    answers = {"= bado": 1.0, "It is = bado.": 0.0, "So it is\n= bado ": 1.0, "bado": 1.0, "": 0.0}
    for content, reward in answers.items():
        assert agent.is_right([[call("keru", "home"), found("town bado"), said(content)]], ["bado"]) == [reward]
        assert agent.is_right([[call("keru", "home"), found(content)]], ["bado"]) == [0.0]
