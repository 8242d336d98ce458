"""LoRA training through a real vLLM server."""

import json
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import requests
import torch
from datasets import Dataset
from factory import letters, logged
from models import make_tokenizer
from peft import LoraConfig
from policies import load_policy, logprobs_of_policy, lora, loss_mask, make_dataset, make_trainer, ratios, with_adapter
from servers import BLOCK_SIZE, MAX_LORA_RANK, POLICY
from transformers import AutoTokenizer, BitsAndBytesConfig
from trees import rollouts_of
from trl.generation.vllm_client import VLLMClient

from fr3e_trl import FR3EConfig, FR3ETrainer
from fr3e_trl.commands.check import read_setup
from fr3e_trl.commands.check_lines import vllm_server
from fr3e_trl.generation.generate import GenerateSampler
from fr3e_trl.generation.vllm_server import VLLMServer, VLLMServerError
from fr3e_trl.method.sampling import SamplingRequest
from fr3e_trl.rollout import tokenized

ROOT = Path(__file__).parents[2]
SHARDED = Path(__file__).with_name("sharded_train.py")
DEEPSPEED = ROOT / ".venv" / "bin" / "python"  # of `make test`: vLLM's environment has no DeepSpeed


def test_the_check_of_an_installation_asks_it(server):
    found = vllm_server(read_setup([f"--vllm_server_base_url={server.url}"]))
    assert re.fullmatch(r".*demo_policy at http\S+: 4 completions of \d+ tokens", found)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7, "reuse_base": False},
        {"temperature": 1.5},
        {"top_p": 0.8, "temperature": 1.3},
        {"top_k": 5},
        {"min_p": 0.1, "top_k": 8, "top_p": 0.9, "temperature": 1.5},
    ],
    ids=str,
)
def test_samples_are_the_policys_after_each_sync(server, settings):
    """On-policy ratios are 1, whatever the distribution that is sampled from, though each step moves the policy."""
    trainer = make_trainer(server, **settings)
    trainer.train()
    assert trainer.vllm_generation.syncs_adapter
    assert len(trainer.batches) == 3
    for batch, trees in trainer.batches:
        check_budgets(trees, trainer.max_completion_length)
        check_rows(batch, trees)
    # A step whose rewards are all alike has no row in the loss
    assert (torch.cat([ratios(batch) for batch, _ in trainer.batches]) - 1).abs().max() < 1e-3
    stale = trainer.batches[0][0]["sampling_per_token_logps"] - logprobs_of_policy(trainer, trainer.batches[0][1])
    assert stale[loss_mask(trainer.batches[0][0])].abs().max() > 0.05  # so it would have shown


def check_budgets(trees, max_completion_length):
    for _, state, rollout in rollouts_of(trees):
        length = len(state.prefix_ids) + len(rollout.token_ids)
        assert length <= max_completion_length
        assert rollout.token_ids[-1] == 1 or length == max_completion_length
        assert len(rollout.logprobs) == len(rollout.token_ids)


def check_rows(batch, trees):
    """The server's log-probs lie on the continuations' tokens, and nowhere else."""
    for i, (_, state, rollout) in enumerate(rollouts_of(trees)):
        start, end = len(state.prefix_ids), len(state.prefix_ids) + len(rollout.token_ids)
        in_loss = range(start, end) if batch["in_loss"][i] else []
        assert loss_mask(batch)[i].nonzero().flatten().tolist() == list(in_loss)
        assert batch["sampling_per_token_logps"][i, :start].isnan().all()
        assert batch["sampling_per_token_logps"][i, start:end].isfinite().all()
        assert batch["completion_ids"][i, :end].tolist() == state.prefix_ids + rollout.token_ids


def sampled(trainer, temperature=1.0, **settings):
    """Samples of four prompts, each with the log-probs and entropies that the trainer computes of its tokens."""
    trainer.vllm_generation.sync_weights()
    prompts = [ids[:60] for ids in tokenized(trainer, list(make_dataset(4)["prompt"]))]
    samples = trainer.sampler.sample([SamplingRequest(ids, 4, 40, temperature, **settings) for ids in prompts])
    rows = [(prompt, sample) for prompt, of_one in zip(prompts, samples, strict=True) for sample in of_one]
    statistics = trainer.token_statistics([prompt for prompt, _ in rows], [sample.token_ids for _, sample in rows])
    return [(sample, *of_tokens) for (_, sample), of_tokens in zip(rows, statistics, strict=True)]


def test_logprobs_equal_the_trainers(server):
    """Directly, and after weights large enough to make another policy of it."""
    trainer, seen = make_trainer(server), []
    for _ in range(3):
        rows = sampled(trainer)
        for sample, logprobs, _ in rows:
            assert torch.tensor(sample.logprobs).sub(logprobs).abs().max() < 1e-4
        seen.append(rows[0][0].logprobs[0])
        with_adapter(trainer.model, scale=0.1)
    assert len(set(seen)) == 3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropies_are_the_trainers(server, temperature):
    """But for what the tokens beyond the most likely ones have, of which there is a lower bound. A flat policy."""
    trainer = make_trainer(server, temperature=temperature)
    with_adapter(trainer.model, scale=0.1)
    rows = sampled(trainer, temperature, with_entropies=True)
    errors = torch.cat([entropies - torch.tensor(sample.entropies) for sample, _, entropies in rows])
    assert errors.min() > -1e-3 and errors.max() < 0.1 and errors.abs().mean() < 0.03


@pytest.mark.parametrize("settings", [{}, {"anchor_threshold": 0.3, "credit": "tree"}, {"anchor_score": "surprisal"}])
def test_branches_are_asked_for_as_soon_as_their_base_trajectories_are_there(server, settings):
    """No forward pass, no second round; and the trees are those that two rounds would have."""
    trainer = make_trainer(server, **settings)
    calls, statistics = [], trainer.token_statistics
    sample = trainer.sampler.sample
    trainer.sampler.sample = lambda requests: calls.append(len(requests)) or sample(requests)
    trainer.token_statistics = lambda prompts, completions, multimodal: (
        calls.append(f"{len(prompts)} passed") or statistics(prompts, completions)
    )
    trainer.train()
    assert calls == [2, "0 passed", 0] * 3  # prompts; nothing is missing then
    for batch, trees in trainer.batches:
        assert (ratios(batch) - 1).abs().max() < 1e-3
        check_budgets(trees, trainer.max_completion_length)
        check_rows(batch, trees)
        for tree in trees:
            assert sum(len(state.rollouts) for state in tree.states) == 8
            for state in tree.states[1:]:
                assert tree.bases[state.base].token_ids[: state.position].tolist() == state.prefix_ids.tolist()
    # Not in every tree: a trajectory may have no token above the threshold
    assert any(len(tree.states) > 1 for _, trees in trainer.batches for tree in trees)


# Whatever the policy writes after a 1 is a call of a tool
CALLING_TEMPLATE = (
    "{% for message in messages %}{{ message.get('content') or '' }}"
    "{% for call in message.get('tool_calls') or [] %}1"
    "{% if call['function']['name'] != 'measure' %}{{ call['function']['name'] }}{% endif %}"
    "{% for key, value in call['function']['arguments'].items() %}"
    "{% if key != 'text' %}{{ key }}{% endif %}{{ value }}{% endfor %}{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %} ={% endif %}"
)
CALL = {"type": "function", "function": {"name": "measure", "arguments": {"text": "{content}"}}}
CALLING_RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "=",
    "fields": {
        "tool_calls": {"open": "1", "close_pattern": "<eos>", "content": "text", "repeats": True, "transform": CALL},
        "content": {"close_pattern": "<eos>", "content": "text"},
    },
}


def test_tools(server):
    """Turn after turn, each continued from its tokens; no call of a prefix is made again; log-probs are in place."""
    measured = []

    def measure(text: str) -> str:
        """
        Measure a text.

        Args:
            text: The text.
        """
        measured.append(text)
        return str(10 + len(text))

    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    tokenizer.chat_template, tokenizer.response_template = CALLING_TEMPLATE, CALLING_RESPONSES
    prompts = [[{"role": "user", "content": prompt}] for prompt in make_dataset(num_terms=5)["prompt"]]
    trainer = make_trainer(
        server,
        dataset=Dataset.from_dict({"prompt": prompts}),
        tokenizer=tokenizer,
        tools=[measure],
        reward_funcs=lambda completions, **kwargs: letters([completion[-1]["content"] for completion in completions]),
    )
    trainer.train()
    num_calls = 0
    for batch, trees in trainer.batches:
        assert ratios(batch).sub(1).abs().max() < 1e-2
        for _, state, rollout in rollouts_of(trees):
            if rollout.copy_of is not None:
                continue
            turns = rollout.dialogue.turns
            calls = [message.get("tool_calls") or [] for message in rollout.dialogue.messages]
            own = sum(end > state.position for _, end in turns)
            num_calls += sum(map(len, [of_turn for of_turn in calls if of_turn][len(turns) - own :]))
            told = zip(rollout.logprobs, rollout.mask, strict=True)
            assert all(logprob < 0 if mine else logprob == 0 for logprob, mine in told)
    assert any(len(rollout.dialogue.turns) > 1 for _, _, rollout in rollouts_of(trees))
    assert len(measured) == num_calls > 0


def test_log_probs_that_are_not_those_of_the_draw_tell_no_entropies(server, monkeypatch, caplog):
    """As of a server without `--logprobs-mode processed_logprobs`."""
    read = VLLMServer._read_config

    def read_raw(self):
        read(self)
        self.config["model_config"]["logprobs_mode"] = "raw_logprobs"

    monkeypatch.setattr(VLLMServer, "_read_config", read_raw)
    trainer = make_trainer(server)
    assert "has logprobs_mode=raw_logprobs" in caplog.text
    assert not trainer.sampler.gives_entropies
    trainer.train()
    # As it is for some other distributions: there are two rounds
    monkeypatch.setattr(VLLMServer, "_read_config", read)
    trainer = make_trainer(server, top_p=0.9, max_steps=1)
    calls, sample = [], trainer.sampler.sample
    trainer.sampler.sample = lambda requests: calls.append(len(requests)) or sample(requests)
    trainer.train()
    assert calls[0] == 2 and calls[1] >= 2


def test_nothing_stale_comes_from_the_prefix_cache(server):
    trainer = make_trainer(server)
    request = SamplingRequest(tokenized(trainer, list(make_dataset(1)["prompt"]))[0], 1, 4, 1.0)
    for _ in range(2):
        with_adapter(trainer.model, scale=0.1)
        trainer.vllm_generation.sync_weights()
        trainer.sampler.sample([request])
        assert trainer.sampler.hit_rate == 0
        trainer.sampler.sample([request])
        assert trainer.sampler.hit_rate > 0.5


def test_anchors_are_served_from_the_prefix_cache(server):
    trainer = make_trainer(server, max_steps=2)
    trainer.train()
    for (_, trees), (hit_rate,) in zip(trainer.batches, logged(trainer, "fr3e/prefix_cache/hit_rate"), strict=True):
        branches = [(tree, state) for tree, state, _ in rollouts_of(trees) if state.parent is not None]
        lengths = [len(tree.prompt_ids) + len(state.prefix_ids) for tree, state in branches]
        # What a cache of whole blocks can have: the last token's logits are computed anew. So it is for the second of
        # a prompt's base trajectories, if the first is not just being computed
        most = sum((length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in lengths)
        prompts = [len(tree.prompt_ids) for tree in trees]
        assert 0.9 * most < hit_rate * (sum(lengths) + 2 * sum(prompts)) <= most + sum(prompts)


def test_samples_have_the_distribution_of_transformers(server):
    """
    The two backends draw the same from the same prefixes.

    Chi-squared tests of whether 600 continuations of three tokens each come from one distribution, for 3 prefixes:
    a right sampler fails with a probability of 1e-6 in all. That they would tell a temperature of 1.5 from 1 is tested
    with them.
    """
    trainer = make_trainer(server)
    with_adapter(trainer.model, scale=0.05)
    trainer.vllm_generation.sync_weights()
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    prompt_ids = tokenizer(make_dataset(1, num_terms=5)["prompt"][0])["input_ids"]
    (base,) = trainer.sampler.sample([SamplingRequest(prompt_ids, 1, 30, 1.0)])[0]
    prefixes = [[*prompt_ids, *base.token_ids[:cut]] for cut in (0, 3, 6)]

    def draw(sampler, temperature):
        samples = [sampler.sample([SamplingRequest(prefix, 600, 3, temperature)])[0] for prefix in prefixes]
        return [[tuple(sample.token_ids) for sample in of_prefix] for of_prefix in samples]

    config = FR3EConfig("unused", bf16=False, use_cpu=True)
    local = FR3ETrainer(trainer.model, letters, config, make_dataset(8), processing_class=tokenizer).sampler
    assert isinstance(local, GenerateSampler)
    ours, hotter, theirs = draw(trainer.sampler, 1.0), draw(trainer.sampler, 1.5), draw(local, 1.0)
    p_values = [p_value_of_one_distribution(*pair) for pair in zip(ours, theirs, strict=True)]
    assert min(p_values) > 1e-6 / len(prefixes)
    assert min(p_value_of_one_distribution(*pair) for pair in zip(hotter, theirs, strict=True)) < 1e-6 / len(prefixes)


def p_value_of_one_distribution(x: list, y: list) -> float:
    """Chi-squared test of homogeneity. Outcomes that are expected less than 5 times are counted as one."""
    outcomes = set(x) | set(y)
    counts = torch.tensor([[draws.count(outcome) for outcome in outcomes] for draws in (x, y)], dtype=torch.float64)
    rare = counts.sum(0) < 10
    counts = torch.cat([counts[:, ~rare], counts[:, rare].sum(1, keepdim=True)], dim=1)
    counts = counts[:, counts.sum(0) > 0]
    expected = counts.sum(1, keepdim=True) * counts.sum(0, keepdim=True) / counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((counts.shape[1] - 1) / 2).double(), statistic / 2).item()


def test_a_quantized_policy_trains(server):
    """4 bits here, all of them there: the ratio tells of the difference. The adapter alone is sent, not merged."""
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    settings = {"quantization_config": config, "vllm_importance_sampling_mode": "token_truncate", "max_steps": 2}
    with pytest.raises(VLLMServerError, match="quantized model cannot be merged"):
        make_trainer(server, **settings, vllm_adapter_sync=False)
    trainer = make_trainer(server, **settings)
    trainer.train()
    assert trainer.vllm_generation.syncs_adapter
    for batch, _ in trainer.batches:
        of_tokens = batch["importance_sampling_ratio"][loss_mask(batch)]
        assert (of_tokens - 1).abs().max() > 1e-3
        assert of_tokens.median() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("num_anchors", [None, 0])
def test_evaluation_and_grpo_go_through_the_server(server, num_anchors):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2, "per_device_eval_batch_size": 4}
    trainer = make_trainer(server, num_anchors=num_anchors, eval_dataset=make_dataset(4), max_steps=2, **settings)
    trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert len(evaluations) == 2
    assert all(entry["eval_sampling/sampling_logp_difference/max"] < 1e-4 for entry in evaluations)
    for (difference,) in logged(trainer, "sampling/sampling_logp_difference/max"):
        assert difference < 1e-4


def test_another_adapter_than_the_default_one(server, caplog):
    with caplog.at_level(logging.INFO, logger="fr3e_trl"):
        trainer = make_trainer(server, model=with_adapter(load_policy(), name="mine"), max_steps=2)
    assert f"Only the adapter is sent to the vLLM server at {server.url}" in caplog.text
    trainer.train()
    for batch, _ in trainer.batches:
        assert (ratios(batch) - 1).abs().max() < 1e-3


def test_adapter_directories_are_removed(server, tmp_path):
    """All but the last two, what a killed run left, and in the end all; but nothing else that is there."""
    shared = tmp_path / "shared"
    (shared / "fr3e-0123abcd-7").mkdir(parents=True)
    (shared / "mine").write_text("kept")
    trainer = make_trainer(server, vllm_adapter_dir=str(shared), max_steps=3)
    trainer.train()
    run = trainer.vllm_generation.server.adapter_name.removesuffix("-3")
    assert {path.name for path in shared.iterdir()} == {"mine", f"{run}-2", f"{run}-3"}
    assert served(server, run) == {f"{run}-3": str(shared / f"{run}-3")}
    trainer.vllm_generation.forget_adapter()
    assert {path.name for path in shared.iterdir()} == {"mine"}
    assert served(server, run) == {}


def served(server, run):
    cards = requests.get(f"{server.url}/v1/models").json()["data"]
    return {card["id"]: card["root"] for card in cards if card["id"].startswith(run)}


def train_recipe(server, name, launch, num_processes, settings, directory):
    """What a recipe logs, with a tiny model and a small dataset in place of its own."""
    rows = [{"question": f"{i} + {i} =", "answer": f"#### {2 * i}"} for i in range(8)]
    Dataset.from_list(rows).to_json(directory / "data.jsonl")
    shutil.copytree(POLICY, directory / "policy", dirs_exist_ok=True)
    (directory / "policy" / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    overrides = {
        "model_name_or_path": directory / "policy",
        "dataset_name": directory / "data.jsonl",
        "output_dir": directory / "output",
        "vllm_server_base_url": server.url,
        "max_steps": 2,
        "per_device_train_batch_size": 32 // num_processes,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "max_completion_length": 8,
        "dtype": "float32",
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
    }
    overrides |= settings
    arguments = ["--config", f"recipes/{name}.yaml", *(f"--{key}={value}" for key, value in overrides.items())]
    subprocess.run([*launch, *arguments], cwd=ROOT, check=True, timeout=300)
    last = directory / "output" / f"checkpoint-{overrides['max_steps']}"
    steps = [entry for entry in json.loads((last / "trainer_state.json").read_text())["log_history"] if "loss" in entry]
    assert len(steps) == overrides["max_steps"]
    for entry in steps:
        assert entry["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)
    assert list((directory / "output" / "_vllm_adapter").iterdir()) == []
    return steps


@pytest.mark.parametrize(
    ("name", "num_processes", "settings"),
    [
        ("gsm8k_lora_vllm", 1, {"max_refills": 2, "reject_degenerate_states": True}),
        ("gsm8k_lora_vllm", 2, {}),
        ("gsm8k_lora_vllm_grpo", 1, {}),
    ],
)
def test_recipe_trains(server, name, num_processes, settings, tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    steps = train_recipe(server, name, [*launch, "examples/train.py"], num_processes, settings, tmp_path)
    if "max_refills" in settings:  # hardly any answer is right
        assert all(entry["fr3e/refill/prompts"] > 0 for entry in steps)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("recipe", ["fsdp2", "zero3"])
def test_sharded_weights(server, recipe, tmp_path):
    """The adapter is gathered from two processes after each step, with FSDP2 in a run that is resumed too."""
    python, backend = {"fsdp2": (Path(sys.executable), "FSDP"), "zero3": (DEEPSPEED, "DEEPSPEED")}[recipe]
    if recipe == "zero3" and not (ROOT / ".venv" / "deepspeed").exists():
        pytest.skip("there is no .venv with DeepSpeed, which `make test` makes")
    (tmp_path / "reward.py").write_text(
        "def score(completion_ids, **kwargs):\n    return [float(sum(ids) % 7) for ids in completion_ids]\n"
    )
    settings = {"reward_funcs": tmp_path / "reward.py:score", "learning_rate": 0.002}
    settings["anchor_threshold"] = 0.0  # there are branches, however sure the policy has become
    launch = [python, "-m", "accelerate.commands.launch", "--config_file", f"recipes/accelerate/{recipe}.yaml"]
    launch += ["--num_processes", "2", "--mixed_precision", "no", "--main_process_port", "0", SHARDED, backend]
    steps = train_recipe(server, "gsm8k_lora_vllm", launch, 2, settings, tmp_path)
    if recipe == "fsdp2":
        settings |= {"max_steps": 3, "resume_from_checkpoint": True}
        steps = train_recipe(server, "gsm8k_lora_vllm", launch, 2, settings, tmp_path)
    for entry in steps:
        assert entry["grad_norm"] > 0
        # In nats. By the adapter of the step before they would be .8 and 9
        assert entry["sampling/sampling_logp_difference/mean"] < 1e-4
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3  # rounding, of the least likely tokens


# The choice of the sync


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"vllm_adapter_sync": False}, "vllm_adapter_sync=False"),
        ({"peft_config": lora(rank=2 * MAX_LORA_RANK)}, "rank is 32, but the vLLM server at .* allows at most 16"),
        (
            {"peft_config": LoraConfig(target_modules="all-linear", modules_to_save=["norm"])},
            r"also trains weights that are not part of a LoRA adapter, such as .*norm",
        ),
        ({"peft_config": LoraConfig(target_modules="all-linear", use_dora=True)}, "cannot load the adapter .*DoRA"),
    ],
    ids=["off", "rank", "modules_to_save", "dora"],
)
def test_where_the_adapter_alone_will_not_do_trl_merges_it(server, caplog, settings, reason):
    """TRL's own sync is called, unchanged. It needs CUDA, and says so."""
    with pytest.raises(Exception, match="weight-transfer") as trls:
        make_trainer(server, **settings)
    assert "trl/generation/vllm_client.py" in str(trls.traceback[-1].path)
    (warning,) = [r.getMessage() for r in caplog.records if "whole model" in r.getMessage()]
    assert re.search(reason, warning)
    if settings != {"vllm_adapter_sync": False}:
        with pytest.raises(VLLMServerError, match=f"vllm_adapter_sync=True is not possible: .*{reason}"):
            make_trainer(server, **settings, vllm_adapter_sync=True)


def copied(named_params):
    return {name: param.clone() for name, param in named_params}


def test_merged_weights_are_sent_by_trl(server, monkeypatch):
    """All of TRL's own way but the transfer itself, which needs CUDA: what it would send is the policy, merged."""
    sent = []
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda self, device: None)
    monkeypatch.setattr(VLLMClient, "update_named_params", lambda self, metadata, named: sent.append(copied(named)))
    trainer = make_trainer(server, vllm_adapter_sync=False, max_steps=2, learning_rate=1e-4)
    trainer.train()
    assert not trainer.vllm_generation.syncs_adapter
    assert len(sent) == len(trainer.batches) == 2
    check_budgets(trainer.batches[0][1], trainer.max_completion_length)
    assert (ratios(trainer.batches[0][0]) - 1).abs().max() < 1e-3  # the adapter begins without an effect
    trainer.vllm_generation.sync_weights()
    policy = trainer.model.merge_and_unload()
    assert sent[-1].keys() == dict(policy.named_parameters()).keys()
    torch.testing.assert_close(sent[-1], {name: param.detach() for name, param in policy.named_parameters()})
    assert any(not param.equal(sent[0][name]) for name, param in sent[-1].items())


# The wrong server


def test_no_server(tmp_path):
    with pytest.raises(VLLMServerError) as error:
        make_trainer(None, vllm_server_base_url="http://127.0.0.1:9", vllm_server_timeout=2)
    assert "http://127.0.0.1:9 cannot be reached" in str(error.value)
    assert f"vllm serve {POLICY} --port 9" in str(error.value)
    assert "--enable-lora --max-lora-rank 8" in str(error.value)
    message = r"'localhost:8000' is not a URL. It must be like 'http://localhost:8000'"
    with pytest.raises(VLLMServerError, match=message):
        make_trainer(None, vllm_server_base_url="localhost:8000")


def test_another_tokenizer_and_too_small_a_context(server):
    with pytest.raises(VLLMServerError, match="tokenizer is not that of the policy"):
        make_trainer(server, tokenizer=make_tokenizer())
    message = r"context of 256 tokens, too few for the \d+ of the first prompt"
    with pytest.raises(ValueError, match=message):
        make_trainer(server, model=load_policy(max_position_embeddings=1024), max_completion_length=250)


def test_another_model(server):
    """One of the same shape, with the same tokenizer: told by its samples, before the first update."""
    model = load_policy()
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    trainer = make_trainer(server, model=model)
    with pytest.raises(RuntimeError, match=r"vLLM does not sample from the policy.*nats per token away"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_sampling_that_is_not_scored_is_warned_of(server, caplog):
    make_trainer(server, repetition_penalty=1.1, generation_kwargs={"logit_bias": {"5": 1.0}})
    (warning,) = [r.getMessage() for r in caplog.records if "does not account for" in r.getMessage()]
    assert "logit_bias and repetition_penalty" in warning
