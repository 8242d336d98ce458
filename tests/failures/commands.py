"""Commands, their arguments, recipes, and settings of training that cannot be."""

from .case import EVAL, TRAIN, Case, case

CPU = "--output_dir=out --bf16=false --use_cpu=true"
SAVED = f"{TRAIN} --save_strategy=steps --save_steps=1"
ADAPTER = f"{TRAIN} --use_peft=true --lora_target_modules all-linear"
OF_ADAPTER = ("model_name_or_path='out'", "LoRA adapter", "merge")
NO_STEPS = {"run/trees/metrics.jsonl": ""}


def recipe(name: str, content: str | bytes, *says: str, command: str = "train", other: str | None = None) -> Case:
    """A recipe with this content, beside another."""
    files = {"r.yaml": content} | ({} if other is None else {"other.yaml": other})
    return case(f"recipe {name}", f"{command} --config r.yaml", *says, files=files)


def refused(setting: str, *says: str) -> Case:
    return case(setting, f"{TRAIN} --{setting}", *says)


CASES = [
    case("misspelt command", "trian", "fr3e: error:", "trian", "train"),
    *[
        case(name, f"{name} --help", f"clone of the repository: run `python -m benchmarks {name}`")
        for name in ("compare", "pooled", "cost", "make-policy")
    ],
    # train
    case("train nothing", "train", "model_name_or_path is not set", "--config"),
    case("train no dataset", f"train {CPU} --model_name_or_path=model", "dataset_name is not set"),
    case("train argument without a value", f"{TRAIN} --max_steps", "--max_steps", "expected one argument"),
    case("train text for a number", f"{TRAIN} --learning_rate=fast", "--learning_rate", "fast"),
    case("train text for a truth", f"{TRAIN} --bf16=perhaps", "--bf16", "perhaps", "insensitive). See"),
    case("train ambiguous argument", f"{TRAIN} --max=3", "--max"),
    case("train over a run", TRAIN, "output_dir='out'", "model.safetensors", "another output_dir", after=TRAIN),
    case("train over a cut run", SAVED, "'out'", "checkpoint-2", "--resume_from_checkpoint true", after=SAVED),
    case("train an adapter", f"{TRAIN} --model_name_or_path=out --output_dir=other", *OF_ADAPTER, after=ADAPTER),
    case("train by grpo at -1", f"{TRAIN} --learning_rate=-1 --num_anchors=0", "learning rate: -1", "Raised by torch"),
    case("train without the name", "train model data.jsonl", "model"),
    # eval
    case("eval nothing", "eval", "model_name_or_path is not set", "recipes/eval"),
    case("eval no dataset", "eval --model_name_or_path=model", "dataset_name is not set"),
    case("eval text for a count", f"{EVAL} --num_samples=many", "--num_samples", "many"),
    # tree
    case("tree of nothing", "tree", "RUN_DIR"),
    case("tree of no directory", "tree nowhere", "nowhere has no folder 'trees'", "log_trees=10"),
    case("tree of a file", "tree data.jsonl", "data.jsonl has no folder 'trees'"),
    case("tree steps no number", "tree nowhere --steps one", "--steps", "one"),
    case("tree of two", "tree one two", "two"),
    case("tree of no such step", "tree run --steps 3", "step 3 were not logged", "none", files=NO_STEPS),
    # Recipes
    case("no recipe", "train --config", "--config", "recipe"),
    case("recipe without --config", "eval r.yaml", "--config r.yaml. See"),
    case("two recipes", "train --config r.yaml --config=s.yaml", "--config is given twice", "extends"),
    case("no recipe before others", "train --config --output_dir=out", "--output_dir=out"),
    case("recipe that is missing", "train --config missing.yaml", "missing.yaml", "No such file"),
    case("recipe that is missing after =", "train --config=missing.yaml", "missing.yaml", "No such file"),
    case("recipe that is a directory", "train --config model", "model", "Is a directory"),
    recipe("that is empty", "", "r.yaml", "mapping"),
    recipe("that is a text", "hello", "r.yaml", "mapping", command="eval"),
    recipe("that is no YAML", "a: 0\nb: 1: 2", '"r.yaml"', "line 2", "mapping values are not allowed"),
    recipe("with a tab", "env:\n\ta: 1", '"r.yaml"', "\\t"),
    recipe("of bytes", b"\xff\xfe\x00\x01", "r.yaml"),
    recipe("with env of text", "env: A=1", "`env`"),
    recipe("with an unknown preset", "preset: mine", "preset='mine'", "'paper'"),
    recipe("with a list for a preset", "preset: [paper]", "preset="),
    recipe("that extends none", "extends: other.yaml", "other.yaml", "No such file"),
    recipe("that extends a list", "extends: other.yaml", "other.yaml", "mapping", other="[1]"),
    recipe("that extends no YAML", "extends: other.yaml", 'other.yaml"', "line 1", other="beta: 1: 2"),
    recipe("that extends itself", "extends: r.yaml", "extends='r.yaml'", "circle"),
    recipe("that extends a number", "extends: 3", "extends=3"),
    # Settings of training. Those of FR3E are in test_config.py
    refused("num_anchors=some", "--num_anchors", "some"),
    refused("num_generations=3", "num_generations"),
    refused("anchor_score=mood", "--anchor_score", "mood", "entropy"),
    refused("scale_rewards=twice", "twice"),
    refused("optim=best", "best"),
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
    refused("per_device_train_batch_size=128", "16 examples", "32"),
    refused("per_device_train_batch_size=128 --dry_run=true", "16 examples", "32"),
    refused("model_name_or_path=nowhere", "model_name_or_path='nowhere'"),
    refused("model_name_or_path=data.jsonl", "model_name_or_path='data.jsonl'"),
    refused("system_prompt=Hello", "system_prompt='Hello'", "prompt_column"),
    refused("answer_separator=x", "answer_separator='x'", "answer_column"),
]
