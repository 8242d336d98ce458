"""
A language model trained with FR3E on a dataset of prompts, as a recipe says.

    fr3e train --config recipes/gsm8k_lora.yaml
    fr3e train --config recipes/gsm8k_lora.yaml --num_processes 4    # on four GPUs

Any setting of the recipe can be overridden after it (`--learning_rate 2e-6`); `--help` lists them all: the dataset and
the rewards, then those of `FR3EConfig` and of TRL's `ModelConfig` (PEFT and quantization).
"""

import json
import logging
import os
import shlex
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import safetensors
import torch
import yaml
from safetensors import SafetensorError
from transformers import TrainerCallback
from trl import GRPOConfig, ModelConfig, get_peft_config, get_quantization_config

from ..fr3e_config import FR3EConfig
from ..page.callback import ends_no_run
from ..page.record import METRICS, append_log, write_logs
from ..trainer import FR3ETrainer
from ..trl_adapter import console
from ..trl_adapter.card import concealed
from ..trl_adapter.checks import check_dataset
from ..trl_adapter.resume import TRAINER_STATE_FILE, checkpoints, is_complete, last_complete_checkpoint
from ..trl_adapter.vllm_weights import end_engine
from .data import (
    FR3EScriptArguments,
    check_reward_columns,
    get_reward,
    load_examples,
    load_held_out,
    load_tokenizer,
    model_argument,
    without_bars_in_logs,
)
from .outputs import as_json, check_directory, read_object, weight_files
from .recipe import RecipeParser, parse_arguments
from .usage import UsageError, require_argument, usage_errors

# What `resume_from_checkpoint` may be beside a directory. On the command line it is always text
RESUME_WORDS = {"true": True, "yes": True, "false": False, "no": False, "none": False, "null": False, "": False}

logger = logging.getLogger(__name__)

RECIPE = "recipes/smoke.yaml"

RESOLVED = "resolved.yaml"  # the run's settings, as a recipe that runs again


@dataclass
class TrainArguments(FR3EScriptArguments):
    """Arguments of `fr3e train`."""

    dry_run: bool = field(
        default=False,
        metadata={
            "help": "Say what the run will do, and train nothing: its settings, rows, tokens and updates, and an "
            "estimate of its memory. No weights are loaded."
        },
    )
    eval_dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Dataset or file to evaluate on while training, with the same columns, by `eval_strategy`. If "
            "`None`, the test split of the dataset (`dataset_test_split`)."
        },
    )
    num_processes: int | None = field(
        default=None,
        metadata={
            "help": "How many processes to start, one for each GPU. What is sharded takes `accelerate launch` and its "
            "configuration instead. If `None`, one is started, or a launcher has started several."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_processes is not None and self.num_processes < 1:
            raise ValueError(f"num_processes={self.num_processes} must be at least 1, one for each GPU.")


class RunFiles(TrainerCallback):
    """
    Writes what the output directory tells of a run once it has begun: its settings, and a line for each log.

    A run that is resumed goes on after the metrics of its checkpoint. One that cannot begin leaves the files as they
    are.

    Args:
        directory (`Path`):
            The output directory.
        given (`dict[str, Any]`, *optional*):
            The arguments that differ from their defaults.
    """

    def __init__(self, directory: Path, given: dict[str, Any] | None):
        self.directory = directory
        self.given = given
        self.has_begun = False
        self.what = f"{directory}: {RESOLVED} or {METRICS}"
        self.has_failed = False

    @ends_no_run
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.has_begun or not state.is_world_process_zero:
            return
        self.has_begun = True
        write_logs(self.directory / METRICS, state.log_history)
        if self.given is not None:
            write_recipe(self.directory / RESOLVED, self.given)

    @ends_no_run
    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.has_begun:
            append_log(self.directory / METRICS, state.log_history[-1])


def main(argv: list[str]) -> None:
    """Train a model as the arguments say, or say what that will be."""
    parser = make_parser()
    script_args, training_args, model_args = parse_arguments(parser, argv)
    if script_args.num_processes and "WORLD_SIZE" not in os.environ:
        launcher = ["-m", "fr3e_trl.commands.launcher", str(script_args.num_processes)]
        os.execv(sys.executable, [sys.executable, *launcher, *argv])
    train(script_args, training_args, model_args, parser.given)


def make_parser() -> RecipeParser:
    """Parser of the arguments, from a recipe (`--config`) and the command line."""
    return RecipeParser([TrainArguments, FR3EConfig, ModelConfig], recipe_with_model=RECIPE)


def train(
    script_args: TrainArguments,
    training_args: FR3EConfig,
    model_args: ModelConfig,
    given: dict[str, Any] | None = None,
) -> None:
    """
    Train, save the model, and push it to the hub if asked.

    Args:
        script_args ([`TrainArguments`]), training_args ([`FR3EConfig`]), model_args (`ModelConfig`):
            What to train, and how.
        given (`dict[str, Any]`, *optional*):
            The arguments that differ from their defaults, for `resolved.yaml` in the output directory.
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
    warn_of_idle(script_args, training_args, model_args, given or {})
    if script_args.dry_run:
        from .dry_run import print_plan

        print_plan(training_args, model_args, train_dataset, tokenizer)
        return
    if checkpoint is False:
        refuse_used(training_args.output_dir)
    Path(training_args.output_dir).mkdir(parents=True, exist_ok=True)  # an error of this is none of the model
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
    told = console.console_of(trainer)
    if told is not None:
        told.tells_next = False  # where the model is, and what to do next, is told when it is saved
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except Exception as error:
        if checkpoint is not False:
            name_damaged_file(checkpoint, training_args.output_dir, error)
        raise
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(how_to_go_on(training_args.output_dir))
        raise
    with console.without_bars():
        trainer.save_model(training_args.output_dir)
    if not training_args.is_plain_grpo:
        trainer.create_model_card(Path(training_args.output_dir).name, script_args.dataset_name)
    saved = [("model", training_args.output_dir)]
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
        saved.append(("on the hub", f"https://huggingface.co/{trainer.hub_model_id}"))
    if trainer.accelerator.is_main_process:
        console.show([*saved, ("next", evaluation_command(script_args, training_args, model_args))])
    trainer.accelerator.wait_for_everyone()
    end_engine(trainer)
    trainer.accelerator.end_training()  # a process that leaves with its connections open may abort


def write_recipe(path: Path, given: dict[str, Any]) -> None:
    """Write the arguments as a recipe that begins anew, without secrets such as `hub_token`."""
    settings = concealed(as_json(given))
    settings.pop("resume_from_checkpoint", None)
    path.parent.mkdir(parents=True, exist_ok=True)
    again = f"fr3e train --config {shlex.quote(str(path))} --output_dir OTHER"
    head = f"# What this run was given, recipes and options together: {again}\n"
    path.write_text(head + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))


def evaluation_command(script_args: FR3EScriptArguments, training_args: FR3EConfig, model_args: ModelConfig) -> str:
    """The command that evaluates what was trained on the same dataset, with the same prompts and rewards."""
    default = FR3EScriptArguments(dataset_name=None)
    given = {"model_name_or_path": training_args.output_dir}
    given |= {f.name: getattr(script_args, f.name) for f in fields(FR3EScriptArguments)}
    if isinstance(script_args, TrainArguments) and script_args.eval_dataset_name is not None:
        given |= {"dataset_name": script_args.eval_dataset_name, "dataset_config": None}
    given = {name: value for name, value in given.items() if value != getattr(default, name, None)}
    plain = ModelConfig()
    names = ["dtype", *(f.name for f in fields(ModelConfig) if "bit" in f.name or "bnb" in f.name)]
    loading = {name: getattr(model_args, name) for name in names}
    given |= {name: value for name, value in loading.items() if value != getattr(plain, name)}
    if training_args.trust_remote_code:
        given["trust_remote_code"] = True
    if training_args.chat_template_kwargs:
        given["chat_template_kwargs"] = json.dumps(training_args.chat_template_kwargs)
    given["max_completion_length"] = training_args.max_completion_length
    given["output_dir"] = str(Path(str(training_args.output_dir)) / "eval")
    words = ["fr3e", "eval"]
    for name, value in given.items():
        values = [str(item) for item in (value if isinstance(value, list) else [value])]
        if len(values) == 1 and values[0].startswith("-"):  # else it is taken for an option
            words.append(f"--{name}={values[0]}")
        else:
            words += [f"--{name}", *values]
    return shlex.join(words)


def set_model_init(training_args: GRPOConfig, model_args: ModelConfig) -> None:
    """Have the trainer load the model as `model_args` says, where `model_init_kwargs` does not say otherwise."""
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }


def checkpoint_to_resume(args: FR3EConfig) -> str | bool:
    """What `train()` goes on from: a checkpoint's directory, `True` for the last of `output_dir`, `False` for none."""
    asked = str(args.resume_from_checkpoint)
    checkpoint: str | bool = RESUME_WORDS.get(asked.lower(), asked)
    if checkpoint is True and not checkpoints(args.output_dir):
        raise UsageError(
            f"resume_from_checkpoint=True: there is no checkpoint in output_dir={args.output_dir!r}. Leave it out to "
            "start anew."
        )
    if isinstance(checkpoint, str) and not Path(checkpoint).is_dir():
        raise UsageError(
            f"resume_from_checkpoint={checkpoint!r} must be the directory of a checkpoint, or true for the last one of "
            f"output_dir={args.output_dir!r}."
        )
    if isinstance(checkpoint, str) and not is_complete(checkpoint):
        raise UsageError(
            f"resume_from_checkpoint={checkpoint!r} has no whole {TRAINER_STATE_FILE}, as if it had been cut while it "
            "was written. Use the checkpoint before it."
        )
    return checkpoint


def how_to_go_on(output_dir: str) -> str:
    """What to tell of a run that was cut."""
    complete = {step: path for step, path in checkpoints(output_dir).items() if is_complete(path)}
    if not complete:
        return "No checkpoint was saved yet."
    return f"--resume_from_checkpoint true goes on from {complete[max(complete)]}."


def refuse_used(output_dir: str) -> None:
    """Raise a `UsageError` if a directory has what an earlier run has learned: this one would overwrite it in part."""
    steps = checkpoints(output_dir)
    remedy = "Name another output_dir, or remove this one."
    if any(map(is_complete, steps.values())):
        remedy = "Name another output_dir, remove this one, or go on with that run by --resume_from_checkpoint true."
    saved = [steps[max(steps)].name] if steps else [*weight_files(output_dir)]
    if saved:
        raise UsageError(
            f"output_dir={output_dir!r} has {saved[0]} of an earlier run, which this one would overwrite. {remedy}"
        )


def refuse_adapter(model_args: ModelConfig) -> None:
    """Raise a `UsageError` if the model is a LoRA adapter, which is none to begin from."""
    path = Path(str(model_args.model_name_or_path), "adapter_config.json")
    if path.is_file():
        base = read_object(path).get("base_model_name_or_path")
        raise UsageError(
            f"{model_argument(model_args)} is a LoRA adapter of {base!r}. Go on with its run by "
            "--resume_from_checkpoint, or merge it into its model (PEFT's merge_and_unload), save that, and name it."
        )


def warn_of_idle(
    script_args: TrainArguments, training_args: FR3EConfig, model_args: ModelConfig, given: dict[str, Any]
) -> None:
    """Tell of arguments that have no effect, once."""
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
    """Raise a `UsageError` if a file of the checkpoint cannot be read: a likely reason that a run does not go on."""
    directory = Path(last_complete_checkpoint(output_dir) if isinstance(checkpoint, bool) else checkpoint)
    for path in sorted(directory.glob("*")):  # none, if later steps have taken its place
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
        except Exception:  # of what it holds, not of the file
            continue
