"""`python -m benchmarks compare` with a real server on the CPU, which has the weights of one run after the other."""

import json
from pathlib import Path

from servers import POLICY

import benchmarks.__main__ as cli

ROOT = Path(__file__).parents[2]


def test_runs_generate_with_a_server(server, tmp_path):
    base = {
        "trainer": "fr3e",
        "num_prompts": 4,
        "num_generations": 4,
        "max_completion_length": 80,
        "learning_rate": 1e-3,
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": server.url,
        "vllm_adapter_sync": True,
    }
    arguments = {
        "model_name_or_path": POLICY,
        "dataset_name": ROOT / "recipes" / "smoke.jsonl",
        "reward_funcs": f"{ROOT / 'recipes' / 'smoke_reward.py'}:answer_reward",
        "use_peft": True,
        "lora_target_modules": "all-linear",
        "base": json.dumps(base),
        "arms": json.dumps({"grpo": {"num_anchors": 0}, "fr3e": {"num_anchors": 1}}),
        "training_rows": 32,
        "seeds": 0,
        "num_evals": 1,
        "num_heldout": 4,
        "output_dir": tmp_path,
    }
    cli.main(["compare", *(f"--{name}={value}" for name, value in arguments.items())])
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [run["arm"] for run in runs] == ["grpo", "fr3e"]
    for run in runs:
        assert len(run["batches"]) == 2 and run["evaluations"][-1]["training_rows"] == 32
