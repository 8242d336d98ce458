"""Tiny models that see, of five families, with their processors and a dataset of images: nothing is downloaded."""

import functools

import transformers
from datasets import Dataset, IterableDataset
from models import TINY, make_model, make_tokenizer, on_disk
from PIL import Image
from transformers import PreTrainedModel, ProcessorMixin
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig

# What a chat template writes for an image, which the processor makes the image's tokens of
PLACEHOLDERS = {
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "smolvlm": "<image>",
    "llava": "<image>",
    "internvl": "<IMG_CONTEXT>",
}

# The tokens beside those of text
SPECIAL_TOKENS = {
    "qwen2_5_vl": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"],
    "gemma3": ["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
    "smolvlm": ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"],
    "llava": ["<image>"],
    "internvl": ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
}

FAMILIES = list(PLACEHOLDERS)

# Of the text models, whose heads have the size of most families' defaults, and of those of images
TEXT = {name: value for name, value in TINY.items() if name not in ("vocab_size", "head_dim")}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


class InternVLImageProcessor(transformers.InternVLProcessor):
    """InternVL's processor without that of videos, which takes torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, image_seq_length=256, chat_template=None):
        super().__init__(image_processor, tokenizer, image_seq_length=image_seq_length, chat_template=chat_template)


class QwenImageProcessor(transformers.Qwen2_5_VLProcessor):
    """Qwen2.5-VL's processor without that of videos, which takes torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


def make_vision_tokenizer(family: str, tokenizer=None):
    """A tokenizer of single characters, or another, and a family's special tokens."""
    tokenizer = make_tokenizer() if tokenizer is None else tokenizer
    special_tokens = SPECIAL_TOKENS[family]
    tokenizer.add_tokens(special_tokens, special_tokens=True)
    names = {
        "gemma3": ["boi_token", "image_token", "eoi_token"],
        "internvl": ["start_image_token", "end_image_token", "context_image_token", "video_token"],
    }
    for name, token in zip(names.get(family, []), special_tokens, strict=False):
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    parts = (
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
        + PLACEHOLDERS[family]
        + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    )
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ message['content'] }}", parts)
    return tokenizer


def make_processor(family: str, tokenizer=None) -> ProcessorMixin:
    """A family's processor, whose images have 4 tokens each; of Qwen's, as many as they are large."""
    tokenizer = make_vision_tokenizer(family, tokenizer)
    template = {"chat_template": tokenizer.chat_template}
    if family == "qwen2_5_vl":
        size = {"shortest_edge": 4 * 4, "longest_edge": 64 * 64}
        return QwenImageProcessor(Qwen2VLImageProcessorPil(patch_size=4, size=size), tokenizer, **template)
    if family == "gemma3":
        image_processor = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        return transformers.Gemma3Processor(image_processor, tokenizer, image_seq_length=4, **template)
    if family == "smolvlm":
        edge = {"longest_edge": 16}
        image_processor = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
        return transformers.Idefics3Processor(image_processor, tokenizer, image_seq_len=4, **template)
    if family == "internvl":
        tiles = {"crop_to_patches": True, "min_patches": 1, "max_patches": 2}
        image_processor = GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, **tiles)
        return InternVLImageProcessor(image_processor, tokenizer, image_seq_length=4, **template)
    image_processor = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    tokens = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return transformers.LlavaProcessor(image_processor, tokenizer, **tokens, **template)


def make_vision_model(family: str, seed: int = 0, tokenizer=None) -> PreTrainedModel:
    """A family's model, with sharpened logits: its entropies differ from one position to the next."""
    tokenizer = make_vision_tokenizer(family, tokenizer)
    text = {**TEXT, "vocab_size": len(tokenizer)}
    ids = dict(zip(SPECIAL_TOKENS[family], tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS[family]), strict=True))
    transformers.set_seed(seed)
    if family == "qwen2_5_vl":
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
        vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
        vision |= {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]}
        tokens = {f"vision_{end}_token_id": ids[f"<|vision_{end}|>"] for end in ("start", "end")}
        tokens |= {f"{kind}_token_id": ids[f"<|{kind}_pad|>"] for kind in ("image", "video")}
        text |= {"rope_parameters": rope}
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    elif family == "gemma3":
        names = {"boi": "start_of_image", "eoi": "end_of_image", "image": "image_soft_token"}
        tokens = {f"{name}_token_index": ids[f"<{token}>"] for name, token in names.items()}
        text |= {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 64}
        parts = {"text_config": transformers.Gemma3TextConfig(**text)}
        parts |= {"vision_config": transformers.SiglipVisionConfig(**VISION, image_size=16, patch_size=4)}
        config = transformers.Gemma3Config(**parts, **tokens, mm_tokens_per_image=4, tie_word_embeddings=False)
    elif family == "smolvlm":
        text = transformers.LlamaConfig(**text)
        vision = SmolVLMVisionConfig(**VISION, image_size=16, patch_size=4)
        tokens = {"scale_factor": 2, "image_token_id": ids["<image>"]}
        config = transformers.SmolVLMConfig(text_config=text, vision_config=vision, **tokens)
    elif family == "internvl":
        text = transformers.Qwen2Config(**text)
        vision = transformers.InternVLVisionConfig(**VISION, image_size=16, patch_size=4)
        tokens = {"image_token_id": ids["<IMG_CONTEXT>"], "image_seq_length": 4, "tie_word_embeddings": False}
        config = transformers.InternVLConfig(text_config=text, vision_config=vision, **tokens)
    else:
        vision = VISION | {"num_hidden_layers": 2, "image_size": 16, "patch_size": 8}
        text = make_model(vocab_size=len(tokenizer)).config
        vision = transformers.CLIPVisionConfig(**vision)
        config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_id=ids["<image>"])
    model = transformers.AutoModelForImageTextToText.from_config(config)
    if family == "gemma3":
        model.model.multi_modal_projector.mm_input_projection_weight.data.normal_()  # zero at first: blind
    model.lm_head.weight.data.mul_(20)
    return model


@functools.cache
def vision_model_on_disk(family: str) -> str:
    """Directory of a `make_vision_model(family)`: a reference model is loaded from where the policy came from."""
    return on_disk(make_vision_model(family))


def make_image(i: int, size: tuple[int, int] = (16, 16)) -> Image.Image:
    """A pattern that differs from one image to the next."""
    pixels = [((37 * i + 60 * x) % 256, 90 * i % 256, 80 * y % 256) for y in range(size[1]) for x in range(size[0])]
    image = Image.new("RGB", size)
    image.putdata(pixels)
    return image


def make_image_dataset(num_prompts: int = 8, form: str = "image") -> Dataset | IterableDataset:
    """Questions with images of any size: one in a column "image", one or two in "images", or one among its "parts"."""
    images = [make_image(i, (16 + 8 * (i % 3), 16)) for i in range(num_prompts)]
    texts = [f"{3 * i}+{i}=" for i in range(num_prompts)]
    prompts = [[{"role": "user", "content": text}] for text in texts]
    if form == "image":
        return Dataset.from_dict({"prompt": prompts, "image": images})
    if form == "images":
        several = [[image] * (1 + i % 2) for i, image in enumerate(images)]
        return Dataset.from_dict({"prompt": prompts, "images": several})
    parts = [[{"type": "image", "image": i}, {"type": "text", "text": t}] for i, t in zip(images, texts, strict=True)]
    examples = [{"prompt": [{"role": "user", "content": content}]} for content in parts]
    return IterableDataset.from_generator(lambda: iter(examples))
