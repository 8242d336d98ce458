"""Images of prompts and of tools, as TRL and the model take them."""

from typing import Any

import torch
from torch import nn
from trl.data_utils import apply_chat_template, prepare_multimodal_messages
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from .compat import TypedTrainer
from .method.sampling import images_of
from .method.tree import TokenIds

# What says of each token whether it is text
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")

# What TRL's batches have of images, by the names of what it scores log-probs with
OF_IMAGES = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "image_position_ids", *TOKEN_TYPES),
)

# In the place of a prompt that the environment alone gives, for TRL's logs
NO_PROMPT = {"prompt": [{"role": "user", "content": ""}]}


def take_no_empty_images(trainer: TypedTrainer) -> None:
    """Have a trainer's models take rows without images, where other rows of the batch have some."""
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
    """The prompt of an example, with the images of its other columns in its messages: what TRL makes of it."""
    prompt, images = example["prompt"], example.get("images", [])
    if "images" not in example and "image" in example:
        images = [example["image"]]
    if not trainer._is_vlm or not images or images_of(prompt):
        return prompt
    return prepare_multimodal_messages(prompt, images=images)


def multimodal_of(trainer: TypedTrainer, example: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The messages of an example's prompt, if there are images in them."""
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
    What the model is called with for the images of rows, beside tokens.

    Args:
        trainer (`GRPOTrainer`):
            Knows the processor.
        prompts (`list[list[dict]]`):
            Messages of R prompts, with images in each; or none for each, where only tools returned some.
        tool_images (`list[list]`):
            Of each, the images that tools returned since. As TRL has it, only for models with `image_grid_thw`.
        input_ids (`torch.Tensor` of shape (R, T)):
            The rows that the prompts are in.
        prompt_ends (`list[int]`):
            Of each prompt, the column after its last token.

    Returns:
        `dict[str, torch.Tensor]`: Tensors of the model's own shapes, and types of tokens, of shape (R, T).
    """
    if any(tool_images):
        of_rows = zip(map(images_of, prompts), tool_images, strict=True)
        flat = [image for of_prompt, of_tools in of_rows for image in (*of_prompt, *of_tools)]
        inputs = trainer.processing_class.image_processor(images=flat, return_tensors="pt").to(input_ids.device)
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
        of_prompts = inputs[name]  # padded on the left
        inputs[name] = of_prompts.new_zeros(input_ids.shape)
        for of_row, of_prompt, end in zip(inputs[name], of_prompts, prompt_ends, strict=True):
            length = min(end, len(of_prompt))
            of_row[end - length : end] = of_prompt[-length:]
    return inputs


def image_kwargs(
    trainer: TypedTrainer, multimodal: list[Any], input_ids: torch.Tensor, completions: list[TokenIds]
) -> dict[str, Any]:
    """What TRL scores log-probs with for the images of rows, which are passed to the model in one call."""
    prompts = [prompt for prompt in multimodal if prompt is not None]
    if not prompts:
        return {}
    prompt_ends = [input_ids.size(1) - max(map(len, completions))] * len(prompts)
    inputs = image_inputs(trainer, prompts, [[] for _ in prompts], input_ids, prompt_ends)
    num_tiles = [len(inputs["pixel_values"])] + [0] * (len(prompts) - 1)  # as a whole, where TRL slices by tiles
    num_images = [len(images_of(prompt)) for prompt in prompts]
    return {**images_in(inputs), "num_images": num_images, "num_tiles": num_tiles}


def images_in(batch: dict[str, Any]) -> dict[str, Any]:
    """What a batch of TRL's, or what it scores log-probs with, has of images."""
    return {name: value for name, value in batch.items() if name in OF_IMAGES and value is not None}


def select_rows(batch: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """These rows of a batch, or of a part of it, with their images, which TRL has end to end."""

    def selected(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[rows] if value.dim() > 0 else value
        return [value[row] for row in rows]

    return unsplit_pixel_values_by_grid(
        {name: selected(value) for name, value in split_pixel_values_by_grid(batch).items()}
    )
