"""
What FR3E relies on in TRL, transformers and accelerate: the names, and how TRL behaves.

    python tests/test_trl_contract.py    # prints every private or undocumented name, and the files that use it

When a new version of TRL is tried, this fails first and says what moved.
"""

import ast
import inspect
import logging
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from factory import make_trainer
from models import make_model
from transformers import Trainer
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import add_fused_lm_head

import fr3e_trl
from fr3e_trl import FR3ETrainer
from fr3e_trl.compat import OPTIONAL, OVERRIDDEN, check_trl
from fr3e_trl.images import IMAGE_KEYS
from fr3e_trl.resume import ExactResume

PACKAGE = Path(fr3e_trl.__file__).parent

# Modules that may be imported anywhere: what their libraries document
DOCUMENTED = {"trl", "trl.rewards", "trl.data_utils", "accelerate", "accelerate.utils", "transformers"}


def relied_on() -> dict[str, set[str]]:
    """Names that other libraries do not document, and the files that use them."""
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    own |= {getattr(node, "attr", getattr(node, "id", None)) for node in stored}
    of_instances = private_attributes(GRPOTrainer, Trainer)
    theirs = {*dir(GRPOTrainer), *dir(VLLMGeneration), *of_instances, *private_attributes(VLLMGeneration)}
    private = {name for name in theirs if name.startswith("_") and not name.startswith("__")} - (own - of_instances)
    found = defaultdict(set)
    for path, tree in trees.items():
        file = str(path.relative_to(PACKAGE))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module not in DOCUMENTED:
                if node.module.split(".")[0] in ("trl", "accelerate"):
                    for name in node.names:
                        found[f"{node.module}.{name.name}"].add(file)
            elif isinstance(node, ast.Attribute) and node.attr in private:
                found[node.attr].add(file)
    for name in (*OVERRIDDEN, *OPTIONAL):
        if name.startswith("_"):
            found[name].add("compat.py")
    return dict(found)


def private_attributes(*classes) -> set[str]:
    """Private attributes that methods of classes give to `self`."""
    return {
        node.attr
        for cls in classes
        for node in ast.walk(ast.parse(Path(inspect.getfile(cls)).read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr.startswith("_")
    }


def test_every_override_is_checked(caplog):
    """And says what it changes. This TRL fits."""
    overridden = {
        name: method
        for cls in (FR3ETrainer, ExactResume)
        for name, method in vars(cls).items()
        if inspect.isfunction(method) and hasattr(GRPOTrainer, name)
    }
    assert overridden.keys() - {"__init__", "train"} == OVERRIDDEN.keys() | OPTIONAL.keys()
    for name, method in overridden.items():
        if name.startswith("_") and name != "__init__":
            assert inspect.getdoc(method).startswith("The only change")
    check_trl()
    assert not caplog.records
    assert FR3ETrainer.__bases__ == (ExactResume,) and ExactResume.__bases__ == (GRPOTrainer,)
    # Few names are relied on
    assert len(relied_on()) <= 60, "\n".join(sorted(relied_on()))


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_a_method_that_has_moved_is_named(name):
    """In a copy of TRL's trainer in which one overridden method takes something else, or is gone."""

    class Moved(GRPOTrainer):
        pass

    setattr(Moved, name, lambda self, something_else: None)
    with pytest.raises(ImportError, match=rf"GRPOTrainer.{name} takes \(something_else\).*pip install 'trl<"):
        check_trl(Moved)
    setattr(Moved, name, None)
    with pytest.raises(ImportError, match=f"GRPOTrainer.{name} is gone"):
        check_trl(Moved)


@pytest.mark.parametrize("name", OPTIONAL)
def test_without_an_optional_name_a_line_says_what_is_off(name, monkeypatch, caplog):
    others = {other: getattr(GRPOTrainer, other) for other in {*OVERRIDDEN, *OPTIONAL} - {name}}
    with caplog.at_level(logging.WARNING):
        check_trl(type("Without", (), others))
    (record,) = caplog.records
    assert record.getMessage().startswith(OPTIONAL[name][1]) and f"GRPOTrainer.{name}" in record.getMessage()


def test_a_trainer_made_without_its_constructor_computes_a_loss():
    """As TRL's own tests make one."""
    trainer = FR3ETrainer.__new__(FR3ETrainer)
    trainer.model = make_model()
    add_fused_lm_head(trainer.model, outputs=("log_probs", "entropy"))
    trainer.args = SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1)
    trainer.accelerator = SimpleNamespace(
        autocast=nullcontext, is_main_process=True, gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1
    )
    trainer.aux_loss_enabled = trainer.use_vllm = trainer.vllm_importance_sampling_correction = False
    trainer.beta, trainer.loss_type, trainer.importance_sampling_level = 0.0, "grpo", "token"
    trainer.epsilon_low = trainer.epsilon_high = 0.2
    trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = 1.0, None
    trainer.current_gradient_accumulation_steps = 1
    trainer._entropy_bonus_enabled = False
    trainer._metrics = {mode: defaultdict(list) for mode in ("train", "eval")}
    input_ids = torch.tensor([[5, 6, 7, 8]])
    logprobs, entropies, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, input_ids, torch.ones_like(input_ids), 2, compute_entropy=True
    )
    assert logprobs.shape == entropies.shape == (1, 2)
    halves = {"prompt_ids": input_ids[:, :2], "completion_ids": input_ids[:, 2:]}
    masks = {name.replace("ids", "mask"): torch.ones_like(ids) for name, ids in halves.items()}
    loss = trainer._compute_loss(trainer.model, {**halves, **masks, "advantages": torch.tensor([2.0])})
    assert loss.item() == pytest.approx(-2)


def test_the_constructor_takes_what_grpo_trainer_takes(monkeypatch):
    ours, theirs = (inspect.signature(cls.__init__).parameters for cls in (FR3ETrainer, GRPOTrainer))
    own = inspect.Parameter("sampler", inspect.Parameter.KEYWORD_ONLY, default=None)
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in (*theirs.values(), own)
    ]
    # Training leaves no method on the trainer
    trainer = train(FR3ETrainer, per_device_train_batch_size=8, num_iterations=2, beta=0, max_steps=3)
    assert not {*OVERRIDDEN, *OPTIONAL} & vars(trainer).keys()
    assert not [name for name, value in vars(trainer).items() if inspect.ismethod(value) and value.__self__ is trainer]
    # It is not made with another TRL
    monkeypatch.setattr(GRPOTrainer, "_generate", lambda self, batch: None)
    with pytest.raises(ImportError, match=r"_generate takes \(batch\), and must take \(prompts\) first"):
        train(FR3ETrainer, per_device_train_batch_size=8)


def test_what_a_batch_consists_of():
    """The shapes and keys that are read, replaced or added, at the seam where each is; of images as TRL scores them."""
    assert set(IMAGE_KEYS) <= set(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    seen = {}

    class Spy(GRPOTrainer):
        def _generate(self, prompts):
            seen["generated"] = super()._generate(prompts)
            return seen["generated"]

        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            seen["rewards"] = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            return seen["rewards"]

        def _generate_and_score_completions(self, inputs):
            seen["batch"] = super()._generate_and_score_completions(inputs)
            seen["logged advantages"] = list(self._logs["advantages"])
            return seen["batch"]

        def _compute_loss(self, model, inputs):
            seen["in loss"] = inputs
            return super()._compute_loss(model, inputs)

    trainer = train(Spy, per_device_train_batch_size=8, num_iterations=2, max_steps=1)
    prompt_ids, completion_ids, tool_mask, completions, logprobs, *_ = seen["generated"]
    assert len(prompt_ids) == len(completion_ids) == len(completions) == 8 and tool_mask is None and logprobs is None
    assert len(seen["generated"]) == 8
    assert seen["rewards"].shape == (8, 1)
    batch = seen["batch"]
    tokens = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask"}
    assert {*tokens, "advantages", "num_items_in_batch", "old_per_token_logps"} == batch.keys()
    assert batch["num_items_in_batch"].dim() == 0 and batch["advantages"].shape == (8,)
    assert batch["prompt_mask"][0, -1] == 1 and batch["completion_mask"][0, 0] == 1  # padded on the outside
    assert seen["logged advantages"][-8:] == batch["advantages"].tolist()
    assert batch.keys() == seen["in loss"].keys()
    # Attributes
    assert trainer.rollout_func is None and trainer.tools == [] and not trainer._is_vlm
    assert trainer.num_generations == 8 and trainer.max_completion_length == 6 and trainer.temperature == 1.0
    assert trainer.generation_config.eos_token_id == [1] and trainer.generation_config.pad_token_id == 0
    assert trainer.reward_func_names == ["digits"] and trainer.reward_weights.tolist() == [1.0]
    assert not trainer.use_transformers_continuous_batching and trainer._tokenizer is trainer.processing_class
    assert {"beta", "loss_type", "continuous_batching_config", "generation_kwargs", "_dist"} <= vars(trainer).keys()
    assert {"_step", "_tr_loss", "_globalstep_last_logged", "_buffered_inputs", "_metrics"} <= vars(trainer).keys()
    assert {"_image_pad_token_id", "_video_pad_token_id", "log_multimodal", "ref_model"} <= vars(trainer).keys()
    assert not trainer._pending_extra_logs and trainer._logs["advantages"].maxlen == 8
    assert "reward" in trainer.state.log_history[0]


def test_groups_are_consecutive_shuffled_by_one_permutation_and_buffered_in_micro_batches():
    """`inputs[::num_generations]` are a batch's prompts, and rows are put together by a column that numbers them."""
    seen = []

    class Numbered(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            seen.append([example["prompt"] for example in inputs])
            batch = super()._generate_and_score_completions(inputs)
            torch.manual_seed(7)
            return batch | {"row": torch.arange(len(inputs))}

        def _prepare_inputs(self, generation_batch):
            inputs = super()._prepare_inputs(generation_batch)
            assert any(inputs is batch for batch in self._buffered_inputs)
            return inputs

    trainer = train(Numbered, per_device_train_batch_size=4, gradient_accumulation_steps=4, max_steps=2)
    assert len(seen) == 2
    for prompts in seen:
        assert len(prompts) == 16
        assert [prompt for prompt in prompts[::8] for _ in range(8)] == prompts
    torch.manual_seed(7)
    assert torch.cat([batch["row"] for batch in trainer._buffered_inputs]).equal(torch.randperm(16))
    assert not trainer.aux_loss_enabled


def train(cls: type[GRPOTrainer], **settings) -> GRPOTrainer:
    trainer = make_trainer(cls, max_completion_length=6, **settings)
    trainer.train()
    return trainer


if __name__ == "__main__":
    names = relied_on()
    for name in sorted(names):
        print(f"{name:60} {' '.join(sorted(names[name]))}")
    print(f"{len(names)} names")
