"""Images of prompts and tools, in the form that TRL and the model need."""

from typing import Any

import torch
from torch import nn
from trl.data_utils import apply_chat_template, prepare_multimodal_messages
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from .compat import TypedTrainer
from .method.sampling import images_of
from .method.tree import TokenIds

# Whether each token is text
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")

# Keys for images in TRL's batches, which its scoring of log-probs takes as arguments
IMAGE_KEYS = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "image_position_ids", *TOKEN_TYPES),
)

# For TRL's logs, where the prompt comes from the environment alone
NO_PROMPT = {"prompt": [{"role": "user", "content": ""}]}


def take_no_empty_images(trainer: TypedTrainer) -> None:
    """Let a trainer's models forward rows without images in batches where other rows have some."""
    for model in (trainer.model, trainer.ref_model):
        if model is not None and trainer._is_vlm:
            model.register_forward_pre_hook(_without_empty_images, with_kwargs=True)


def _without_empty_images(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pass a model no images where TRL passes empty tensors."""
    grid = kwargs.get("image_grid_thw")
    if grid is not None and len(grid) == 0:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("pixel_values", "image_grid_thw")}
    return args, kwargs


def prompt_of(trainer: TypedTrainer, example: dict[str, Any]) -> Any:
    """The prompt of an example as TRL prepares it, with the images of the other columns in its messages."""
    prompt, images = example["prompt"], example.get("images", [])
    if "images" not in example and "image" in example:
        images = [example["image"]]
    if not trainer._is_vlm or not images or images_of(prompt):
        return prompt
    return prepare_multimodal_messages(prompt, images=images)


def multimodal_of(trainer: TypedTrainer, example: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The messages of an example's prompt, if they contain images."""
    prompt = prompt_of(trainer, NO_PROMPT | example)
    return prompt if images_of(prompt) else None


def image_inputs(
    trainer: TypedTrainer,
    prompts: list[Any],
    tool_images: list[list[Any]],
    input_ids: torch.Tensor,
    prompt_ends: list[int],
) -> dict[str, Any]:
    """
    The model's inputs for the images of rows, in addition to tokens.

    Args:
        trainer (`GRPOTrainer`):
            Has the processor.
        prompts (`list[list[dict]]`):
            Messages of R prompts: either all contain images, or none, where only tools returned some.
        tool_images (`list[list]`):
            For each prompt, the images that tools returned since. As in TRL, only for models with `image_grid_thw`.
        input_ids (`torch.Tensor` of shape (R, T)):
            The rows that contain the prompts.
        prompt_ends (`list[int]`):
            For each prompt, the column after its last token.

    Returns:
        `dict[str, torch.Tensor]`: Tensors of the model's own shapes, and types of tokens, of shape (R, T).
    """
    if any(tool_images):
        images = [
            image
            for prompt, returned in zip(prompts, tool_images, strict=True)
            for image in (*images_of(prompt), *returned)
        ]
        inputs = trainer.processing_class.image_processor(images=images, return_tensors="pt").to(input_ids.device)
        return {**inputs, "mm_token_type_ids": torch.where(input_ids == trainer._image_pad_token_id, 1, 0)}
    texts = [
        apply_chat_template(
            {"prompt": prompt}, trainer.processing_class, tools=trainer.tools, **trainer.chat_template_kwargs
        )["prompt"]
        for prompt in prompts
    ]
    images = [images_of(prompt) for prompt in prompts]
    inputs = trainer.processing_class(images=images, text=texts, padding=True, return_tensors="pt")
    inputs = {
        name: value.to(trainer.accelerator.device)
        for name, value in inputs.items()
        if name not in ("input_ids", "attention_mask")
    }
    for name in inputs.keys() & set(TOKEN_TYPES):
        prompt_types = inputs[name]  # padded on the left
        inputs[name] = prompt_types.new_zeros(input_ids.shape)
        for types, row, end in zip(prompt_types, inputs[name], prompt_ends, strict=True):
            length = min(end, len(types))
            row[end - length : end] = types[-length:]
    return inputs


def image_kwargs(
    trainer: TypedTrainer, multimodal: list[Any], input_ids: torch.Tensor, completions: list[TokenIds]
) -> dict[str, Any]:
    """TRL's arguments for scoring log-probs of rows with images, which go through the model in one call."""
    prompts = [prompt for prompt in multimodal if prompt is not None]
    if not prompts:
        return {}
    prompt_ends = [input_ids.size(1) - max(map(len, completions))] * len(prompts)
    inputs = image_inputs(trainer, prompts, [[] for _ in prompts], input_ids, prompt_ends)
    # TRL may slice the images by tiles: the first row takes all of them
    num_tiles = [len(inputs["pixel_values"])] + [0] * (len(prompts) - 1)
    num_images = [len(images_of(prompt)) for prompt in prompts]
    return {**images_in(inputs), "num_images": num_images, "num_tiles": num_tiles}


def images_in(batch: dict[str, Any]) -> dict[str, Any]:
    """The entries for images in a batch, or in the arguments for scoring log-probs."""
    return {name: value for name, value in batch.items() if name in IMAGE_KEYS and value is not None}


def select_rows(batch: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """Select rows of a batch or a part of one, with their images, which TRL concatenates."""

    def selected(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[rows] if value.dim() > 0 else value
        return [value[row] for row in rows]

    return unsplit_pixel_values_by_grid(
        {name: selected(value) for name, value in split_pixel_values_by_grid(batch).items()}
    )
