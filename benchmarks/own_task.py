"""A task of the user's own, by the names that `fr3e train` takes: a model, a dataset and reward functions."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import get_peft_config, get_quantization_config

from fr3e_trl.commands.data import (
    FORMATS,
    call_reward,
    data_files,
    digests,
    get_reward,
    load_examples,
    load_held_out,
    load_tokenizer,
)
from fr3e_trl.commands.usage import UsageError

from .tasks import HELDOUT_SEED

HELDOUT_SHARE = 5  # of one file of examples, at most every fifth is held out


class OwnTask:
    """
    What the bench asks of a [`Task`], of a dataset and reward functions. Loaded when first needed, in each process.

    Held out are the examples of `eval_dataset_name`; or else those of the dataset's test split; or, of a file, which
    has one split, `num_heldout` at most, at random, with all that have the same prompt.
    """

    name = "own"
    tools = ()
    max_tool_calling_iterations = None

    def __init__(self, args: Any, num_heldout: int):
        self.args = args
        self.num_heldout = num_heldout

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnTask, (self.args, self.num_heldout)  # without what was loaded

    def __repr__(self) -> str:
        names = ("model_name_or_path", "model_revision", "dataset_name", "dataset_config", "reward_funcs", "use_peft")
        return f"OwnTask({', '.join(f'{name}={getattr(self.args, name)!r}' for name in names)})"

    def digests(self, output_dir: Path) -> dict[str, str]:
        """What is in the files of its data and its rewards, in short, see [`~fr3e_trl.commands.data.digests`]."""
        files = [*data_files(self.args.dataset_name), *data_files(self.args.eval_dataset_name)]
        return digests(files, dict(zip(self.args.reward_funcs, self.rewards, strict=True)), output_dir)

    @property
    def max_completion_length(self) -> int:
        """That of the base, for the evaluations of all arms."""
        assert isinstance(self.args.base, dict)
        return self.args.base["max_completion_length"]

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.args, self.args.trust_remote_code)

    @cached_property
    def rewards(self) -> list[Any]:
        return [get_reward(name) for name in self.args.reward_funcs]

    @cached_property
    def splits(self) -> dict[str, Any]:  # `Dataset`: there is no streaming
        """All examples for training, and all that are held out."""
        args = self.args
        assert isinstance(args.base, dict)
        template = args.base.get("chat_template_kwargs")
        train: Any = load_examples(args, args.dataset_train_split, self.tokenizer, template)
        if not self.num_heldout:
            return {"train": train}
        if args.eval_dataset_name is not None or Path(args.dataset_name or "").suffix not in FORMATS:
            return {"train": train, "heldout": load_held_out(args, self.tokenizer, template)}
        order = train.shuffle(seed=HELDOUT_SEED)
        heldout = order.select(range(min(self.num_heldout, len(train) // HELDOUT_SHARE)))
        prompts = {json.dumps(prompt) for prompt in heldout["prompt"]}
        kept = [i for i, prompt in enumerate(order["prompt"]) if json.dumps(prompt) not in prompts]
        if not prompts or not kept:
            raise UsageError(
                f"dataset_name={args.dataset_name!r} has {len(train)} example(s), too few to hold some out. Set "
                "eval_dataset_name."
            )
        return {"train": order.select(kept), "heldout": heldout}

    def examples(self, split: str, seed: int, size: int) -> Dataset:
        """`size` examples of `"train"` or `"heldout"`, in an order by the seed; some come again if there are fewer."""
        dataset = self.splits[split].shuffle(seed=seed)
        return dataset.select([i % len(dataset) for i in range(size)])

    def reward(self, completions: list[Any], **columns: Any) -> list[float | None]:
        """The sum of the reward functions' scores, as TRL's with weights of 1. `None` where none gives a score."""
        scores = [
            call_reward(name, reward, completions=completions, **columns)
            for name, reward in zip(self.args.reward_funcs, self.rewards, strict=True)
        ]
        given = [[score for score in row if score is not None] for row in zip(*scores, strict=True)]
        return [sum(row) if row else None for row in given]

    def trainer_arguments(self) -> dict[str, Any]:
        """What a trainer starts from, in the place of a task's policy."""
        return {
            "model": self.args.model_name_or_path,
            "processing_class": self.tokenizer,
            "peft_config": get_peft_config(self.args),
            "quantization_config": get_quantization_config(self.args),
        }
