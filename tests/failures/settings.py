"""Settings of training that cannot be, by the command. Those of FR3E are in test_config.py."""

from .case import TRAIN, Case


def refused(setting: str, *says: str) -> Case:
    return Case(setting, f"{TRAIN} --{setting}", says)


CASES = [
    refused("num_anchors=9", "num_anchors=9", "num_generations=4"),
    refused("num_anchors=some", "--num_anchors", "some"),
    refused("num_generations=3", "num_generations"),
    refused("anchor_threshold=inf", "anchor_threshold=inf", "'auto'"),
    refused("anchor_threshold=high", "anchor_threshold='high'", "'auto'"),
    refused("anchor_score=mood", "--anchor_score", "mood", "entropy"),
    refused("credit=all", "--credit", "all", "tree"),
    refused("scale_rewards=twice", "twice"),
    refused("optim=best", "best"),
    refused("lr_scheduler_type=wave", "wave"),
    refused("save_strategy=sometimes", "sometimes"),
    refused("report_to=paper", "paper"),
    refused("generation_batch_size=6", "6"),
    refused("per_device_train_batch_size=0", "per_device_train_batch_size=0"),
    refused("gradient_accumulation_steps=0", "gradient_accumulation_steps=0"),
    refused("reward_weights 1 2 3", "reward"),
    refused("use_vllm=true", "vLLM", "pip install"),
    refused("use_peft=true --lora_r=0", "`r`", "0"),
    refused("use_peft=true --lora_target_modules=nothing", "nothing"),
    refused("load_in_4bit=true", "quantized", "adapters"),
    refused("attn_implementation=slow", "slow"),
    refused("dtype=float99", "float99"),
    refused("output_dir=data.jsonl", "output_dir='data.jsonl'", "is a file"),
    refused("output_dir=data.jsonl/out", "'data.jsonl' is a file"),
    refused("output_dir=model/config.json", "'model/config.json' is a file"),
    refused("per_device_train_batch_size=128", "16 examples", "32"),
    refused("per_device_train_batch_size=128 --dry_run=true", "16 examples", "32"),
    refused("model_name_or_path=nowhere", "model_name_or_path='nowhere'"),
    refused("model_name_or_path=data.jsonl", "model_name_or_path='data.jsonl'"),
    refused("system_prompt=Hello", "system_prompt='Hello'", "prompt_column"),
    refused("answer_separator=x", "answer_separator='x'", "answer_column"),
]
