"""`fr3e compare` and `fr3e pooled`: arguments, and results of other arguments."""

import fcntl
import json
from pathlib import Path

from .case import BASE, COMPARE, EVAL, OWN, Case, change, remove


def refused(setting: str, *says: str) -> Case:
    return Case(setting, f"{COMPARE} --{setting}", says)


def arms(arms: str, *says: str) -> Case:
    return Case(f"arms {arms}", f"{COMPARE} --arms '{arms}'", says)


def based(name: str, settings: dict, *says: str) -> Case:
    return Case(f"base with {name}", f"{COMPARE} --base '{json.dumps(BASE | settings)}'", says)


_held = []


def hold() -> None:
    """As another process that works in the directory."""
    Path("out").mkdir(exist_ok=True)
    file = Path("out/.lock").open("a+")  # noqa: SIM115
    file.write("process 7 on there (fr3e compare)\n")
    file.flush()
    fcntl.flock(file, fcntl.LOCK_EX)
    _held.append(file)


def results(**arms) -> str:
    runs = [
        {
            "arm": arm,
            "seed": seed,
            "cost": "generated_tokens",
            "amount": 10,
            "evaluations": [{"generated_tokens": spent, "rewards": [[0.5]]} for spent in (0, 10)],
        }
        for arm, seeds in arms.items()
        for seed in seeds
    ]
    return json.dumps({"runs": runs})


LONGER = COMPARE.replace("--generated_tokens=50", "--generated_tokens=99")
NO_RUNS = '{"runs": [{}]}'

CASES = [
    Case("nothing", "compare --output_dir=out", ("model_name_or_path is not set", "chain")),
    Case("no dataset", "compare --model_name_or_path=model", ("dataset_name is not set",)),
    refused("task=chess", "task='chess'", "chain"),
    refused("policy=nowhere", "policy='nowhere'", "config.json"),
    refused("model_name_or_path=model", "task='ones'", "model"),
    refused("output_dir=data.jsonl", "output_dir='data.jsonl'", "is a file"),
    refused("output_dir=data.jsonl/out", "'data.jsonl' is a file"),
    refused("generated_tokens=0", "generated_tokens=0"),
    refused("generated_tokens=-5", "generated_tokens=-5"),
    refused("training_rows=5", "generated_tokens", "training_rows", "2 are set"),
    refused("num_evals=0", "num_evals=0"),
    refused("num_heldout=0", "num_heldout=0"),
    refused("num_samples=0", "num_samples=0"),
    refused("num_workers=0", "num_workers=0"),
    refused("eval_batch_size=0", "eval_batch_size=0"),
    refused("pass_at 2", "pass_at=[2]", "num_samples=1"),
    refused("pass_at 0", "pass_at=0"),
    refused("seeds 0 0", "seeds=[0, 0]", "twice"),
    refused("seeds one", "--seeds", "one"),
    refused("seeds -1", "-1"),
    refused("tuning_seeds 0", "tuning_seeds=[0]", "seeds=[0]"),
    refused("only nobody", "only=['nobody']", "grpo"),
    refused("reference=nobody", "reference='nobody'", "grpo"),
    refused("learning_rates 1e-3", "learning_rates", "base"),
    refused("tokens_per_batch 100", "tokens_per_batch", "base"),
    refused("tuning_finalists=0", "tuning_finalists=0"),
    refused("base={a", "base='{a'"),
    refused("base=[1]", "base=", "mapping"),
    arms("[1]", "arms=", "mapping"),
    arms("{}", "arms is empty"),
    arms('{"grpo": 3}', "arms.grpo=3", "mapping"),
    arms('{"grpo": {}}', "'grpo'", "trainer=None"),
    arms('{"grpo": {"trainer": "ppo"}}', "'grpo'", "trainer='ppo'", "fr3e"),
    arms('{"a/b": {"trainer": "grpo"}}', "'a/b'", "letters"),
    arms('{"grpo": {"trainer": "grpo", "num_anchors": 2}}', "'num_anchors'", "trainer='fr3e'"),
    arms('{"grpo": {"trainer": "grpo", "learnign_rate": 1}}', "learnign_rate", "Did you mean learning_rate"),
    arms('{"fr3e": {"trainer": "fr3e", "num_anchors": 9}}', "'fr3e'", "num_anchors=9"),
    based("rate", {"learning_rate": "fast"}, "learning_rate='fast'"),
    based("prompts", {"num_prompts": 0}, "num_prompts=0"),
    based("more prompts than examples", {"num_prompts": 9}, "num_prompts=9", "num_train_examples=8"),
    based("parts", {"steps_per_generation": 3}, "steps_per_generation=3", "8 rows"),
    based("vllm", {"use_vllm": True}, "vllm_mode='server'"),
    based("a schedule", {"lr_scheduler_type": "polynomial"}, "lr_scheduler_type='polynomial'", "linear"),
    Case("own policy", f"{OWN} --policy=model", ("policy='model'", "model_name_or_path")),
    Case("own streamed", f"{OWN} --dataset_streaming=true", ("dataset_streaming",)),
    Case("own without a score", f"{OWN} --reward_funcs=rewards.py:none", ("2 held-out prompts", "None")),
    Case("own with NaN", f"{OWN} --reward_funcs=rewards.py:nan", ("2 held-out prompts", "NaN")),
    Case("own with texts", f"{OWN} --reward_funcs=rewards.py:text", ("'rewards.py:text'", "'good'")),
    # Results of something else
    Case("another budget", LONGER, ("generated_tokens was 50 and is 99", "Use another output_dir"), after=COMPARE),
    Case(
        "another budget without arguments",
        LONGER,
        ("out/runs/grpo", "amount was 50 and is 99"),
        after=COMPARE,
        setup=remove("out/arguments.json"),
    ),
    Case(
        "other samples without arguments",
        f"{COMPARE} --num_samples=2",
        ("out/runs/grpo", "num_samples was 1 and is 2"),
        after=COMPARE,
        setup=remove("out/arguments.json"),
    ),
    Case(
        "a run of another budget",
        COMPARE,
        ("out/runs/grpo", "amount was 49 and is 50"),
        after=COMPARE,
        setup=change("out/runs/*.json", lambda content: json.dumps(json.loads(content) | {"amount": 49}).encode()),
    ),
    Case(
        "a run of another arm",
        COMPARE,
        ("out/runs/grpo", "num_generations"),
        after=COMPARE,
        setup=change("out/runs/*.json", lambda content: content.replace(b'_generations": 4', b'_generations": 8')),
    ),
    Case("two at once", COMPARE, ("output_dir='out'", "in use by process 7", "another output_dir"), setup=hold),
    Case("two evaluations at once", EVAL, ("output_dir='out'", "in use by process 7"), setup=hold),
    # Pooled
    Case("pooled cut", "pooled one", ("one/results.json is damaged",), files={"one/results.json": '{"runs": ['}),
    Case("pooled list", "pooled one", ("one/results.json is damaged", "[]"), files={"one/results.json": "[]"}),
    Case(
        "pooled without runs", "pooled one", ("one/results.json is damaged", "runs"), files={"one/results.json": "{}"}
    ),
    Case(
        "pooled empty run", "pooled one", ("one/results.json is damaged", "cost"), files={"one/results.json": NO_RUNS}
    ),
    Case("pooled file", "pooled data.jsonl", ("data.jsonl is damaged",)),
    Case(
        "pooled without the reference",
        "pooled one --reference prior_4",
        ("--reference prior_4", "grpo_4"),
        files={"one/results.json": results(grpo_4=[0])},
    ),
    Case(
        "pooled without a seed in common",
        "pooled one",
        ("tree and grpo_4 have no seed in common",),
        files={"one/results.json": results(grpo_4=[0], tree=[1])},
    ),
]
