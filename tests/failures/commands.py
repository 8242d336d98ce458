"""Commands, their arguments, and recipes."""

from .case import EVAL, TRAIN, Case

CPU = "--output_dir=out --bf16=false --use_cpu=true"

CASES = [
    Case("misspelt command", "trian", ("trian", "train")),
    Case("capital command", "Train", ("Train", "train")),
    *[
        Case(name, f"{name} --help", (f"clone of the repository: run `python -m benchmarks {name}`",))
        for name in ("compare", "pooled", "cost", "make-policy")
    ],
    # train
    Case("train nothing", "train", ("model_name_or_path is not set", "--config")),
    Case("train no dataset", f"train {CPU} --model_name_or_path=model", ("dataset_name is not set",)),
    Case("train unknown argument", f"{TRAIN} --learnign_rate=1", ("--learnign_rate=1",)),
    Case("train argument without a value", f"{TRAIN} --max_steps", ("--max_steps", "expected one argument")),
    Case("train text for a number", f"{TRAIN} --learning_rate=fast", ("--learning_rate", "fast")),
    Case("train fraction for a count", f"{TRAIN} --max_steps=1.5", ("--max_steps", "1.5")),
    Case("train text for a truth", f"{TRAIN} --bf16=perhaps", ("--bf16", "perhaps", "insensitive). See")),
    Case("train ambiguous argument", f"{TRAIN} --max=3", ("--max",)),
    Case(
        "train where a run has been",
        TRAIN,
        ("output_dir='out'", "model.safetensors", "another output_dir"),
        after=TRAIN,
    ),
    Case(
        "train where a run was cut",
        f"{TRAIN} --save_strategy=steps --save_steps=1",
        ("output_dir='out'", "checkpoint-2", "--resume_from_checkpoint true"),
        after=f"{TRAIN} --save_strategy=steps --save_steps=1",
    ),
    Case(
        "train an adapter",
        f"{TRAIN} --model_name_or_path=out --output_dir=other",
        ("model_name_or_path='out'", "LoRA adapter", "merge"),
        after=f"{TRAIN} --use_peft=true --lora_target_modules all-linear",
    ),
    Case(
        "train by grpo with a learning rate below zero",
        f"{TRAIN} --learning_rate=-1 --num_anchors=0",
        ("learning rate: -1", "Raised by torch"),
    ),
    Case("train without the name", "train model data.jsonl", ("model",)),
    # eval
    Case("eval nothing", "eval", ("model_name_or_path is not set", "recipes/eval")),
    Case("eval no dataset", "eval --model_name_or_path=model", ("dataset_name is not set",)),
    Case("eval unknown argument", f"{EVAL} --samples=3", ("--samples=3",)),
    Case("eval text for a count", f"{EVAL} --num_samples=many", ("--num_samples", "many")),
    # tree
    Case("tree of nothing", "tree", ("RUN_DIR",)),
    Case("tree of no directory", "tree nowhere", ("nowhere has no folder 'trees'", "log_trees=10")),
    Case("tree of a file", "tree data.jsonl", ("data.jsonl has no folder 'trees'",)),
    Case("tree of no run", "tree .", ("has no folder 'trees'",)),
    Case("tree unknown argument", "tree nowhere --stages 1", ("--stages",)),
    Case("tree steps no number", "tree nowhere --steps one", ("--steps", "one")),
    Case("tree of two", "tree one two", ("two",)),
    Case(
        "tree of a step that is not there",
        "tree run --steps 3",
        ("step 3 were not logged", "none"),
        files={"run/trees/metrics.jsonl": ""},
    ),
    # Recipes
    Case("no recipe", "train --config", ("--config", "recipe")),
    Case("recipe without --config", "eval r.yaml", ("--config r.yaml. See",)),
    Case("two recipes", "train --config r.yaml --config=s.yaml", ("--config is given twice", "extends")),
    Case("no recipe before others", "train --config --output_dir=out", ("--output_dir=out",)),
    Case("recipe that is missing", "train --config missing.yaml", ("missing.yaml", "No such file")),
    Case("recipe that is missing after =", "train --config=missing.yaml", ("missing.yaml", "No such file")),
    Case("recipe that is a directory", "train --config model", ("model", "Is a directory")),
    Case("recipe that is empty", "train --config r.yaml", ("r.yaml", "mapping"), files={"r.yaml": ""}),
    Case("recipe that is a list", "train --config r.yaml", ("r.yaml", "mapping"), files={"r.yaml": "- 1\n- 2\n"}),
    Case("recipe that is a text", "eval --config r.yaml", ("r.yaml", "mapping"), files={"r.yaml": "hello"}),
    Case(
        "recipe that is no YAML",
        "train --config r.yaml",
        ('"r.yaml"', "line 2", "mapping values are not allowed"),
        files={"r.yaml": "beta: 0\nlearning_rate: 1: 2"},
    ),
    Case("recipe with a tab", "train --config r.yaml", ('"r.yaml"', "\\t"), files={"r.yaml": "env:\n\ta: 1"}),
    Case("recipe of bytes", "train --config r.yaml", ("r.yaml",), files={"r.yaml": b"\xff\xfe\x00\x01"}),
    Case("recipe with a typo", "train --config r.yaml", ("learnign_rate",), files={"r.yaml": "learnign_rate: 1"}),
    Case("recipe of eval with a typo", "eval --config r.yaml", ("sampels",), files={"r.yaml": "sampels: 1"}),
    Case("recipe with env of text", "train --config r.yaml", ("`env`",), files={"r.yaml": "env: A=1"}),
    Case("unknown preset", "train --config r.yaml", ("preset='mine'", "'paper'"), files={"r.yaml": "preset: mine"}),
    Case("preset that is a list", "train --config r.yaml", ("preset=",), files={"r.yaml": "preset: [paper]"}),
    Case(
        "recipe that extends none",
        "train --config r.yaml",
        ("other.yaml", "No such file"),
        files={"r.yaml": "extends: other.yaml"},
    ),
    Case(
        "recipe that extends a list",
        "train --config r.yaml",
        ("other.yaml", "mapping"),
        files={"r.yaml": "extends: other.yaml", "other.yaml": "[1]"},
    ),
    Case(
        "recipe that extends no YAML",
        "train --config r.yaml",
        ('other.yaml"', "line 1"),
        files={"r.yaml": "extends: other.yaml", "other.yaml": "beta: 1: 2"},
    ),
    Case(
        "recipe that extends itself",
        "train --config r.yaml",
        ("extends='r.yaml'", "circle"),
        files={"r.yaml": "extends: r.yaml"},
    ),
    Case("recipe that extends a number", "train --config r.yaml", ("extends=3",), files={"r.yaml": "extends: 3"}),
    # As a shell sees it
    Case("a process of train", f"{TRAIN} --num_anchors=9", ("fr3e train: error:", "num_anchors=9"), is_process=True),
    Case("a process of nothing", "treee", ("fr3e: error:", "treee"), is_process=True),
]
