"""
What FR3E relies on in TRL, transformers and PyTorch, by name: the table in `trl_adapter/names.py`.

When a new version of TRL is tried, this fails first and says what moved. What a name cannot say, how TRL behaves, is
tested after the table.
"""

import ast
import functools
import importlib
import inspect
import textwrap
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trl
from datasets import Dataset
from fr3e_trl.trl_adapter.names import METHODS, NAMES
from models import make_model, make_tokenizer
from packaging.version import Version
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer
from trl.trainer.utils import add_fused_lm_head, split_pixel_values_by_grid, unsplit_pixel_values_by_grid

import fr3e_trl
from fr3e_trl import FR3EConfig, FR3ETrainer
from fr3e_trl.images import OF_IMAGES

PACKAGE = Path(fr3e_trl.__file__).parent
ADAPTER = PACKAGE / "trl_adapter"
SHARING = PACKAGE / "prefix_sharing"

# The permanent overrides, which no file but the trainer's has
OVERRIDES = {
    *("_generate_and_score_completions", "_prepare_inputs"),
    *("_compute_loss", "_get_per_token_logps_and_entropies"),
}
# Private by their names, and documented: of named tuples, of the standard library, of users' environments
PUBLIC = {"_replace", "_asdict", "_fields", "_exit", "_fork", "_actions", "_option_string_actions"}
# Modules that may be imported anywhere: what their libraries document
DOCUMENTED = {"trl", "trl.rewards", "accelerate", "accelerate.utils", "transformers", "transformers.utils"}


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def resolved(path):
    """What a dotted path leads to: an attribute of a module, or of a class in one."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return found
    raise AssertionError(f"{path} does not begin with a module")


@functools.cache
def assigned(cls) -> set[str]:
    """Attributes that methods of a class and its bases give to `self`."""
    names = set()
    for base in cls.__mro__[:-1]:
        names |= set(vars(base))
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                names.add(node.attr)
            # As `nn.Module` does it
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                names |= {
                    arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
                }
    return names


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_a_name_is_there_and_takes_what_it_took(name):
    if name.of_instances:
        owner, _, attribute = name.path.rpartition(".")
        assert attribute in assigned(resolved(owner))
        return
    found = resolved(name.path)
    if name.takes is None:
        return
    wanted = name.takes.split()
    assert parameters(found) == wanted if name.exactly else set(wanted) <= set(parameters(found))


def test_what_trl_scores_images_by_is_what_a_batch_has_of_them():
    assert set(OF_IMAGES) <= set(parameters(GRPOTrainer._get_per_token_logps_and_entropies))


# No name is missing


IN_TABLE = {name.name for name in NAMES}
# Methods of trainers and of TRL's vLLM: a class that defines one may override it
OF_TRAINERS = {name.name for name in METHODS if not name.path.startswith("transformers.GenerationMixin")}


@functools.cache
def own_names() -> set[str]:
    """Private names that the package defines."""
    return set().union(*(defined(ast.parse(path.read_text())) for path in PACKAGE.rglob("*.py")))


def defined(tree) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def is_self(node) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_private(name) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def touched(tree) -> set[str]:
    """Private attributes that a module touches, those that it overrides, and what it overrides for a call."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            names |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "overridden":
            names |= {keyword.arg for keyword in node.keywords if keyword.arg}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
        elif isinstance(node, ast.Constant) and node.value in IN_TABLE:
            names.add(node.value)
    return {name for name in names if is_private(name) and name.isidentifier()} - PUBLIC


def overridden_names(tree) -> set[str]:
    """What is overridden for a call, private or not."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "overridden"]
    return {keyword.arg for call in calls for keyword in call.keywords if keyword.arg}


def imported(tree) -> set[str]:
    """Dotted paths that a module imports from undocumented modules of TRL, transformers and accelerate."""
    paths = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module.split(".")[0] in ("trl", "transformers", "accelerate") and node.module not in DOCUMENTED:
                paths |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            paths |= {alias.name for alias in node.names if alias.name.split(".")[0] == "trl" and "." in alias.name}
    return paths


# Where a module of the package that is not the adapter's may import from, beside what is documented
ELSEWHERE: set[str] = set()


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_name_is_missing(path):
    tree = ast.parse(path.read_text())
    own = own_names() - IN_TABLE
    if path.parent not in (ADAPTER, SHARING):
        own |= defined(tree) - OF_TRAINERS
    foreign = touched(tree) - own
    if path.parent not in (ADAPTER, SHARING):
        of_trainer = OVERRIDES | {"_buffered_inputs"}
        assert foreign <= (of_trainer if path == PACKAGE / "trainer.py" else set())
        assert imported(tree) <= ELSEWHERE and not overridden_names(tree)
    elif path.name != "names.py":
        file = path.name if path.parent == ADAPTER else f"../prefix_sharing/{path.name}"
        of_file = {name.name for name in NAMES if file in name.used_in.split()}
        assert foreign | overridden_names(tree) <= of_file | {"VLLMGeneration"}
        assert imported(tree) <= {name.path for name in NAMES if file in name.used_in.split()}


def test_files_that_the_table_names_use_what_it_says():
    for name in NAMES:
        for file in name.used_in.split():
            if file.endswith(".py"):
                assert name.name in (ADAPTER / file).read_text(), (name.path, file)


def test_four_methods_are_overridden_for_good():
    """The others are public, and documented, or those of this package."""
    overridden = {
        name for name in vars(FR3ETrainer) if callable(vars(FR3ETrainer)[name]) and hasattr(GRPOTrainer, name)
    }
    assert overridden - {"__init__"} == OVERRIDES | {"train", "create_model_card"}
    for name in OVERRIDES:
        assert inspect.getdoc(vars(FR3ETrainer)[name]).startswith("The only change is ")
    assert FR3ETrainer.__bases__ == (GRPOTrainer,)


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
    trainer._metrics = {mode: {name: [] for name in CLIP_METRICS} for mode in ("train", "eval")}
    input_ids = torch.tensor([[5, 6, 7, 8]])
    logprobs, entropies, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, input_ids, torch.ones_like(input_ids), 2, compute_entropy=True
    )
    assert logprobs.shape == entropies.shape == (1, 2)
    halves = {"prompt_ids": input_ids[:, :2], "completion_ids": input_ids[:, 2:]}
    masks = {name.replace("ids", "mask"): torch.ones_like(ids) for name, ids in halves.items()}
    loss = trainer._compute_loss(trainer.model, {**halves, **masks, "advantages": torch.tensor([2.0])})
    assert loss.item() == pytest.approx(-2)


CLIP_METRICS = [
    "entropy",
    *(f"clip_ratio/{name}" for name in "low_mean high_mean region_mean low_min high_max".split()),
]


def test_nothing_is_left_on_a_trainer_that_has_trained():
    trainer = train(FR3ETrainer, per_device_train_batch_size=8, num_iterations=2, beta=0, max_steps=3)
    private = {name.name for name in METHODS}
    assert not private & vars(trainer).keys()
    assert not [name for name, value in vars(trainer).items() if inspect.ismethod(value) and value.__self__ is trainer]


# The version, the constructor, and how TRL behaves


def test_the_version_is_one_that_was_tried():
    assert Version("1.16") <= Version(trl.__version__) < Version("1.17")


def test_the_constructor_takes_what_grpo_trainer_takes():
    ours, theirs = (inspect.signature(cls.__init__).parameters for cls in (FR3ETrainer, GRPOTrainer))
    own = inspect.Parameter("sampler", inspect.Parameter.KEYWORD_ONLY, default=None)
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in (*theirs.values(), own)
    ]


def test_the_hooks_that_are_removed_have_a_name():
    """transformers adds one each time that gradient checkpointing is enabled."""
    model: PreTrainedModel = make_model()
    model.enable_input_require_grads()
    hooks = [hook.__name__ for module in model.modules() for hook in module._forward_hooks.values()]
    assert "make_inputs_require_grads" in hooks


def test_what_the_trainer_makes_for_vllm(monkeypatch):
    """It looks its class up in its own module, and the names of what it passes are attributes that are read."""
    made = {}

    def make(**arguments):
        made.update(arguments)
        raise StopIteration

    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", make)
    with pytest.raises(StopIteration):
        train(GRPOTrainer, use_vllm=True, vllm_mode="server", per_device_train_batch_size=8)
    assert made.keys() <= set(parameters(VLLMGeneration.__init__))
    assert {
        *("model", "accelerator", "processing_class", "mode", "server_base_url", "server_host", "server_port"),
        *("server_timeout", "enable_sleep_mode", "top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs"),
    } <= made.keys()


def test_rewards_are_gathered_by_a_name_of_trls_module(monkeypatch):
    """The last step of `_calculate_rewards`, left out where each process scores as many completions as it has."""
    gathered = []
    monkeypatch.setattr(grpo_trainer, "gather", lambda tensor: gathered.append(tensor.shape) or tensor)
    train(GRPOTrainer, per_device_train_batch_size=8, max_steps=1)
    assert gathered == [(8, 1)]


def test_images_that_are_end_to_end_are_split_by_rows_and_joined():
    """Of Qwen, of which pixels have a row for each patch, and of models with a row for each image."""
    by_patch = {"image_grid_thw": torch.tensor([[1, 2, 2], [1, 1, 1]]), "pixel_values": torch.arange(5.0)[:, None]}
    for images in (by_patch, {"pixel_values": torch.zeros(2, 3, 4, 4)}):
        batch = {"prompt_ids": torch.zeros(2, 1), "num_images": [1, 1], **images}
        split = split_pixel_values_by_grid(batch)
        assert all(len(value) == 2 for value in split.values())
        joined = unsplit_pixel_values_by_grid(split)
        assert joined.keys() == batch.keys() and all(joined[name].equal(images[name]) for name in images)


def test_groups_are_consecutive_and_each_is_generated_once():
    """`inputs[::num_generations]` are the prompts of a batch."""
    seen = []

    class Spy(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            seen.append([example["prompt"] for example in inputs])
            return super()._generate_and_score_completions(inputs)

    train(Spy, per_device_train_batch_size=4, gradient_accumulation_steps=4, max_steps=2)
    assert len(seen) == 2
    for prompts in seen:
        assert len(prompts) == 16
        assert [prompt for prompt in prompts[::8] for _ in range(8)] == prompts


def test_what_a_batch_consists_of():
    """The shapes and keys that are read, replaced or added, at the seam where each is."""
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
    assert trainer.reward_func_names == ["reward"] and trainer.reward_weights.tolist() == [1.0]
    assert not trainer.use_transformers_continuous_batching and trainer._tokenizer is trainer.processing_class
    assert {"beta", "loss_type", "continuous_batching_config", "generation_kwargs", "_dist"} <= vars(trainer).keys()
    assert {"_step", "_tr_loss", "_globalstep_last_logged", "_buffered_inputs", "_metrics"} <= vars(trainer).keys()
    assert {"_image_pad_token_id", "_video_pad_token_id", "log_multimodal", "ref_model"} <= vars(trainer).keys()
    assert not trainer._pending_extra_logs and trainer._logs["advantages"].maxlen == 8
    assert "reward" in trainer.state.log_history[0]


def test_the_methods_that_rows_take_the_place_of():
    """What `_tokenize_prompts` and `_generate_single_turn` return is what a batch consists of."""

    class Given(GRPOTrainer):
        def _tokenize_prompts(self, prompts):
            return [[5, 6]] * len(prompts), None, {}

        def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations):
            return [[7, 8, 1]] * len(prompt_ids), None

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            assert batch["prompt_ids"].tolist() == [[5, 6]] * 8
            assert batch["completion_ids"].tolist() == [[7, 8, 1]] * 8
            return batch

    train(Given, per_device_train_batch_size=8, max_steps=1)


def test_the_turns_of_a_dialogue_are_asked_for_by_its_prompts_list(monkeypatch):
    """A prompt's list, plus others: so each says whose it is, whatever is left out."""

    class Prompt(list):
        def __add__(self, other):
            return Prompt([*self, *other])

    trainer = train(GRPOTrainer, per_device_train_batch_size=8, max_steps=1)
    trainer._sync_tool_dicts, trainer._async_tool_dicts = [{"look": lambda: "7"}], [{}]
    asked = []
    monkeypatch.setattr(trainer, "_get_tool_suffix_ids", lambda messages: [9])

    def write(prompt_ids, images, fields, num_generations, has_tool_images):
        asked.extend(prompt_ids)
        return [[] for _ in prompt_ids], None

    monkeypatch.setattr(trainer, "_generate_single_turn", write)
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {}}}]}
    arguments = [[]], [Prompt([5])], [[6]], [[call]], None, None, {}
    _, (messages,), (ids,), _, num_calls, num_failures, _ = trainer._tool_call_loop(*arguments)
    assert isinstance(asked[0], Prompt) and asked[0] == [5, 6, 9] and ids == [6, 9]
    assert messages[1]["content"] == "7" and (num_calls, num_failures) == (1, 0)


def test_a_batch_is_shuffled_by_one_permutation_and_buffered_in_micro_batches():
    """Whatever else is in it: rows are put together by a column that numbers them."""

    class Numbered(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            torch.manual_seed(7)
            return batch | {"row": torch.arange(len(inputs))}

        def _prepare_inputs(self, generation_batch):
            inputs = super()._prepare_inputs(generation_batch)
            assert any(inputs is batch for batch in self._buffered_inputs)
            return inputs

    trainer = train(Numbered, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=1)
    torch.manual_seed(7)
    assert torch.cat([batch["row"] for batch in trainer._buffered_inputs]).equal(torch.randperm(8))
    assert not trainer.aux_loss_enabled


def reward(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def train(cls: type[GRPOTrainer], **settings) -> GRPOTrainer:
    defaults = {"bf16": False, "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    sizes = {"num_generations": 8, "max_completion_length": 6, "logging_steps": 1}
    trainer = cls(
        make_model(),
        reward,
        (FR3EConfig if issubclass(cls, FR3ETrainer) else GRPOConfig)("unused", **defaults | sizes | settings),
        train_dataset=Dataset.from_dict({"prompt": [f"{a}+{a}=" for a in range(8)]}),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    return trainer
