"""
Train a language model with FR3E on a dataset of prompts.

    fr3e train --config recipes/gsm8k_lora.yaml
    fr3e train --config recipes/gsm8k_lora.yaml --num_processes 4    # on four GPUs

Options after a recipe override its settings (`--learning_rate 2e-6`). They are the fields of `TrainArguments`,
`FR3EConfig` and TRL's `ModelConfig` (PEFT and quantization).
"""

import json
import logging
import os
import re
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import safetensors
import torch
import yaml
from datasets import Dataset
from safetensors import SafetensorError
from transformers import TrainerCallback, TrainerState, TrainingArguments
from trl import GRPOConfig, ModelConfig, get_peft_config, get_quantization_config

from ..callbacks import show
from ..checks import check_dataset
from ..fr3e_config import FR3EConfig
from ..fr3e_trainer import FR3ETrainer
from ..generation.vllm_weights import end_engine
from ..resume import TRAINER_STATE_FILE, checkpoints, is_complete, last_complete_checkpoint
from ..tree_log.callback import never_raises
from ..tree_log.record import METRICS, append_log, write_logs
from .data import (
    FR3EScriptArguments,
    check_reward_columns,
    get_reward,
    load_examples,
    load_held_out,
    load_tokenizer,
    model_argument,
    option,
    without_bars_in_logs,
)
from .dry_run import print_plan
from .outputs import as_json, check_directory, concealed, read_object, weight_files
from .recipe import RecipeParser, parse_arguments
from .usage import UsageError, require_argument, usage_errors

# Values of `resume_from_checkpoint` other than a directory, which the command line gives as text
RESUME_WORDS = {"true": True, "yes": True, **dict.fromkeys(["false", "no", "none", "null", ""], False)}

logger = logging.getLogger(__name__)

RECIPE = "recipes/smoke.yaml"

RESOLVED = "resolved.yaml"  # the run's settings, as a recipe that runs again


@dataclass
class TrainArguments(FR3EScriptArguments):
    """Arguments of `fr3e train`."""

    dry_run: bool = option(
        False,
        "Print what the run will do, and train nothing: its settings, completions, tokens and updates. No weights are "
        "loaded.",
    )
    eval_dataset_name: str | None = option(
        None,
        "Dataset or file to evaluate on during training, with the same columns; see `eval_strategy`. If `None`, the "
        "test split of the dataset (`dataset_test_split`).",
    )
    num_processes: int | None = option(
        None,
        "Number of processes to start, one per GPU. For FSDP and ZeRO, use `accelerate launch` with its configuration "
        "instead. If `None`, no further process is started.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_processes is not None and self.num_processes < 1:
            raise ValueError(f"num_processes={self.num_processes} must be at least 1, one for each GPU.")


class RunFiles(TrainerCallback):
    """
    Writes the settings and the metrics of a run to its output directory, from its first step on.

    A resumed run continues the metrics of its checkpoint, and a run that fails before its first step changes no file.
    `given` has the settings, those arguments that differ from their defaults.
    """

    def __init__(self, directory: Path, given: dict[str, Any] | None):
        self.directory, self.given = directory, given
        self.what = f"{directory}: {RESOLVED} or {METRICS}"
        self.has_begun = self.has_failed = False

    @never_raises
    def on_step_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if not self.has_begun and state.is_world_process_zero:
            self.has_begun = True
            write_logs(self.directory / METRICS, state.log_history)
            if self.given is not None:
                write_recipe(self.directory / RESOLVED, self.given)

    @never_raises
    def on_log(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if self.has_begun:
            append_log(self.directory / METRICS, state.log_history[-1])


def main(argv: list[str]) -> None:
    """The command `fr3e train`."""
    parser = make_parser()
    script_args, training_args, model_args = parse_arguments(parser, argv)
    train(script_args, training_args, model_args, parser.given)


def make_parser() -> RecipeParser:
    """Parser of the options and of recipes."""
    return RecipeParser([TrainArguments, FR3EConfig, ModelConfig], recipe_with_model=RECIPE)


def train(
    script_args: TrainArguments,
    training_args: FR3EConfig,
    model_args: ModelConfig,
    given: dict[str, Any] | None = None,
) -> None:
    """
    Train, save the model, and push it to the hub if `push_to_hub`. `given`, the arguments that differ from their
    defaults, is saved as `resolved.yaml` in the output directory.
    """
    without_bars_in_logs()
    require_argument(script_args, "dataset_name", RECIPE)
    check_directory(training_args.output_dir)
    checkpoint = checkpoint_to_resume(training_args)
    set_model_init(training_args, model_args)
    tokenizer = load_tokenizer(model_args, training_args.trust_remote_code)
    rewards = [get_reward(name) for name in script_args.reward_funcs]
    refuse_adapter(model_args)
    template = training_args.chat_template_kwargs
    train_dataset = load_examples(script_args, script_args.dataset_train_split, tokenizer, template)
    check_reward_columns(dict(zip(script_args.reward_funcs, rewards, strict=True)), train_dataset)
    if not training_args.is_plain_grpo:
        check_dataset(train_dataset, training_args)
    evaluates = training_args.eval_strategy != "no"
    eval_dataset = load_held_out(script_args, tokenizer, template) if evaluates else None
    warn_of_unused(script_args, training_args, model_args, given or {})
    if script_args.dry_run:
        return print_plan(training_args, len(train_dataset) if isinstance(train_dataset, Dataset) else None)
    if checkpoint is False:
        refuse_used(training_args.output_dir)
    Path(training_args.output_dir).mkdir(parents=True, exist_ok=True)  # here, so that its errors do not name the model
    assert model_args.model_name_or_path is not None
    with usage_errors(
        model_argument(model_args), "Use a directory with a model's weights, or a model on the hub.", OSError
    ):
        trainer = FR3ETrainer(
            model=model_args.model_name_or_path,
            reward_funcs=rewards,
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
            callbacks=[RunFiles(Path(training_args.output_dir), given)],
        )
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except Exception as error:
        if checkpoint is not False:
            name_damaged_file(checkpoint, training_args.output_dir, error)
        raise
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(how_to_resume(training_args.output_dir))
        raise
    trainer.save_model(training_args.output_dir)
    if not training_args.is_plain_grpo:
        trainer.create_model_card(Path(training_args.output_dir).name, script_args.dataset_name)
    saved = [("model", training_args.output_dir)]
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
        saved.append(("on the hub", f"https://huggingface.co/{trainer.hub_model_id}"))
    if trainer.accelerator.is_main_process:
        show([*saved, ("next", evaluation_command(script_args, training_args, model_args))])
    trainer.accelerator.wait_for_everyone()
    end_engine(trainer)
    trainer.accelerator.end_training()  # a process that exits with open connections may abort


def write_recipe(path: Path, given: dict[str, Any]) -> None:
    """Write the arguments as a recipe that repeats the run, without secrets such as `hub_token`."""
    settings = concealed(as_json(given))
    settings.pop("resume_from_checkpoint", None)
    path.parent.mkdir(parents=True, exist_ok=True)
    command = f"fr3e train --config {shlex.quote(str(path))} --output_dir OTHER"
    head = f"# The settings of this run, recipes and options together: {command}\n"
    path.write_text(head + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))


def evaluation_command(script_args: FR3EScriptArguments, training_args: FR3EConfig, model_args: ModelConfig) -> str:
    """The command that evaluates the trained model on the same dataset, with the same prompts and rewards."""
    given = {f.name: getattr(script_args, f.name) for f in fields(FR3EScriptArguments)}
    if isinstance(script_args, TrainArguments) and script_args.eval_dataset_name is not None:
        given |= {"dataset_name": script_args.eval_dataset_name, "dataset_config": None}
    given |= {name: value for name, value in vars(model_args).items() if name == "dtype" or re.search("bit|bnb", name)}
    default = vars(FR3EScriptArguments()) | vars(ModelConfig())
    given = {name: value for name, value in given.items() if value != default[name]}
    if training_args.trust_remote_code:
        given["trust_remote_code"] = True
    if training_args.chat_template_kwargs:
        given["chat_template_kwargs"] = json.dumps(training_args.chat_template_kwargs)
    given["max_completion_length"] = training_args.max_completion_length
    given["output_dir"] = str(Path(str(training_args.output_dir)) / "eval")
    words = ["fr3e", "eval", "--model_name_or_path", str(training_args.output_dir)]
    for name, value in given.items():
        values = [str(item) for item in (value if isinstance(value, list) else [value])]
        if len(values) == 1 and values[0].startswith("-"):  # otherwise it is taken for an option
            words.append(f"--{name}={values[0]}")
        else:
            words += [f"--{name}", *values]
    return shlex.join(words)


def set_model_init(training_args: GRPOConfig, model_args: ModelConfig) -> None:
    """Set `model_init_kwargs` from `model_args`, except for what it already has."""
    given: Any = training_args.model_init_kwargs or {}
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **given,
    }


def checkpoint_to_resume(args: FR3EConfig) -> str | bool:
    """What `train()` takes: the directory of a checkpoint, `True` for the last in `output_dir`, or `False` for none."""
    value = str(args.resume_from_checkpoint)
    checkpoint: str | bool = RESUME_WORDS.get(value.lower(), value)
    if checkpoint is True and not checkpoints(args.output_dir):
        raise UsageError(
            f"resume_from_checkpoint=True: there is no checkpoint in output_dir={args.output_dir!r}. Leave the option "
            "out to start from the beginning."
        )
    if isinstance(checkpoint, str) and not Path(checkpoint).is_dir():
        raise UsageError(
            f"resume_from_checkpoint={checkpoint!r} must be the directory of a checkpoint, or true for the last one of "
            f"output_dir={args.output_dir!r}."
        )
    if isinstance(checkpoint, str) and not is_complete(checkpoint):
        raise UsageError(
            f"resume_from_checkpoint={checkpoint!r} has no complete {TRAINER_STATE_FILE}, probably because the run "
            "ended while saving it. Use the checkpoint before it."
        )
    return checkpoint


def how_to_resume(output_dir: str) -> str:
    """How to resume an interrupted run."""
    complete = [path for _, path in sorted(checkpoints(output_dir).items()) if is_complete(path)]
    return f"--resume_from_checkpoint true resumes from {complete[-1]}." if complete else "No checkpoint was saved yet."


def refuse_used(output_dir: str) -> None:
    """Raise a `UsageError` if a directory has weights of an earlier run, which this run would overwrite."""
    steps = checkpoints(output_dir)
    saved = [steps[max(steps)].name] if steps else [*weight_files(output_dir)]
    if saved:
        can_resume = any(map(is_complete, steps.values()))
        resuming = ", or resume that run with --resume_from_checkpoint true" if can_resume else ""
        raise UsageError(
            f"output_dir={output_dir!r} has {saved[0]} from an earlier run, which this run would overwrite. Use "
            f"another output_dir, or remove this one{resuming}."
        )


def refuse_adapter(model_args: ModelConfig) -> None:
    """Raise a `UsageError` if the model is a LoRA adapter, from which a run cannot start."""
    path = Path(str(model_args.model_name_or_path), "adapter_config.json")
    if path.is_file():
        base = read_object(path).get("base_model_name_or_path")
        raise UsageError(
            f"{model_argument(model_args)} is a LoRA adapter of {base!r}. Resume its run with "
            "--resume_from_checkpoint, or merge it into its model (PEFT's merge_and_unload), and train that."
        )


def warn_of_unused(
    script_args: TrainArguments, training_args: FR3EConfig, model_args: ModelConfig, given: dict[str, Any]
) -> None:
    """Warn about arguments that have no effect."""
    if os.environ.get("RANK", "0") != "0":
        return
    for name, value in given.items():
        if not model_args.use_peft and (name.startswith("lora_") or name in ("use_rslora", "use_dora")):
            logger.warning("%s=%s has no effect without use_peft=True: all weights are trained.", name, value)
    if script_args.eval_dataset_name is not None and training_args.eval_strategy == "no":
        logger.warning(
            "eval_dataset_name=%s has no effect with eval_strategy='no'. Use 'epoch', or 'steps' with eval_steps.",
            script_args.eval_dataset_name,
        )


def name_damaged_file(checkpoint: str | bool, output_dir: str, error: Exception) -> None:
    """Raise a `UsageError` if a file of the checkpoint is damaged, which is then why the run did not resume."""
    directory = Path(last_complete_checkpoint(output_dir) if isinstance(checkpoint, bool) else checkpoint)
    for path in sorted(directory.glob("*")):  # empty if a later checkpoint has replaced it
        try:
            if path.suffix in (".pt", ".pth"):
                torch.load(path, map_location="meta", weights_only=True)
            elif path.suffix == ".safetensors":
                with safetensors.safe_open(path, "pt") as file:
                    file.keys()
        except (EOFError, OSError, RuntimeError, SafetensorError) as reason:
            raise UsageError(
                f"{path} is damaged: {' '.join(str(reason).split())}. Use the checkpoint before it."
            ) from error
        except Exception:  # about its content, so the file can be read
            continue
