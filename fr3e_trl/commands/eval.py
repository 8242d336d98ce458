"""
Evaluate a model on a dataset with answers: pass@1, pass@k and maj@k.

    fr3e eval --config recipes/eval/gsm8k.yaml --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct

The model is loaded in this process, or served by vLLM (`--vllm_server_base_url`). Completions are written to
`output_dir/completions.jsonl` as they are sampled, with their rewards. After an interruption, or with more samples or
examples, the same command samples only what is missing.
"""

# ruff: noqa: RUF009 (`option` makes a field)

import json
import logging
import math
import queue
import re
import shlex
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from trl import ModelConfig, get_quantization_config, is_conversational, maybe_apply_chat_template

from ..generation.vllm_server import VLLMServer, VLLMServerError
from .answers import measures
from .completions import Completion, complete, reward_arguments, sampling_config, texts_of
from .data import (
    FR3EScriptArguments,
    call_reward,
    check_reward_columns,
    data_files,
    digests,
    get_reward,
    load_examples,
    load_tokenizer,
    model_argument,
    option,
    test_split,
    without_bars_in_logs,
)
from .outputs import check_same, read_object, resumable, weight_files
from .recipe import RecipeParser, parse_arguments
from .usage import UsageError, require_argument, usage_errors

logger = logging.getLogger(__name__)

RECIPE = "recipes/eval/gsm8k.yaml"

# Arguments that may change between calls, because no completion or reward depends on them
FREE = "output_dir num_samples limit batch_size pass_at answer_regex".split()
FREE += "vllm_server_base_url vllm_server_timeout vllm_request_timeout".split()

# A completion's problem, and its number among the completions of that problem
Key = tuple[int, int]

# Samples the given completions, from the tokens of all prompts, and yields them as they arrive
Batch = tuple[list[Key], list[Completion]]
EvalSampler = Callable[[list[Key], list[list[int]]], Iterator[Batch]]


@dataclass(kw_only=True)
class EvalArguments(FR3EScriptArguments):
    """Arguments of `fr3e eval`."""

    output_dir: str = option("outputs/eval", "Directory of the results.")
    num_samples: int | None = option(None, "Completions per prompt. If `None`, 8, or 1 at temperature 0.")
    pass_at: list[int] | None = option(
        None,
        "Values of k in pass@k and maj@k, up to `num_samples`. If `None`, 1, 2, 4 and so on, and `num_samples`.",
    )
    temperature: float = option(1.0, "Sampling temperature. 0 takes the most likely token.")
    top_p: float = option(1.0, "Probability mass of the most likely tokens to sample from.")
    max_completion_length: int = option(1024, "Maximum number of tokens of a completion.")
    answer_regex: str | None = option(
        None,
        "Regular expression for the answers that vote in maj@k. Its last match in a completion, or the first group of "
        "that, is the answer. If `None`, answers are those that math-verify reads if a reward function is math_reward, "
        "accuracy_reward or reasoning_accuracy_reward, and else the whole completions.",
    )
    chat_template_kwargs: dict[str, Any] | str | None = option(
        None,
        "Further arguments of the chat template, for example {'enable_thinking': false}. On the command line, as JSON.",
    )
    limit: int | None = option(None, "Number of examples to evaluate on, from the first. If `None`, all of the split.")
    seed: int = option(0, "Seed of sampling.")
    batch_size: int = option(64, "Completions generated at once, without a server.")
    trust_remote_code: bool = option(False, "Whether code from the model's repository may run.")
    vllm_server_base_url: str | None = option(
        None,
        "Address of a vLLM server with the model, for example 'http://localhost:8000'. If `model_name_or_path` is the "
        "directory of a LoRA adapter, the server loads it. If `None`, the model is loaded in this process.",
    )
    vllm_server_timeout: float = option(240.0, "Seconds to wait for the server to be up.")
    vllm_request_timeout: float = option(1800.0, "Seconds that the server may take to answer a request.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_samples", "max_completion_length", "limit", "seed", "batch_size"):
            value, least = getattr(self, name), int(name != "seed")
            is_optional = name in ("num_samples", "limit")
            if not (type(value) is int and value >= least) and not (is_optional and value is None):
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}.")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature} must be 0 or more, for example 1.0.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1, for example 0.95.")
        if self.num_samples is None:
            self.num_samples = 8 if self.temperature else 1
        if self.temperature == 0 and self.num_samples > 1:
            raise ValueError(
                f"temperature=0 would give the same completion num_samples={self.num_samples} times. Set "
                "num_samples=1, or a temperature, for example 0.6."
            )
        if self.pass_at is None:
            self.pass_at = sorted({*(2**i for i in range(self.num_samples.bit_length())), self.num_samples})
        if not self.pass_at or not 1 <= min(self.pass_at) <= max(self.pass_at) <= self.num_samples:
            raise ValueError(f"pass_at={self.pass_at} must be from 1 to num_samples={self.num_samples}.")
        if isinstance(self.chat_template_kwargs, str):
            try:
                self.chat_template_kwargs = json.loads(self.chat_template_kwargs)
            except ValueError as error:
                raise ValueError(f"chat_template_kwargs={self.chat_template_kwargs!r} is not JSON: {error}.") from None
        if not isinstance(self.chat_template_kwargs, dict | None):
            raise ValueError(
                f"chat_template_kwargs={self.chat_template_kwargs!r} must be a mapping, for example "
                '{"enable_thinking": false}.'
            )
        try:
            re.compile(self.answer_regex or "")
        except re.error as error:
            raise ValueError(f"answer_regex={self.answer_regex!r} is not a regular expression: {error}.") from None


def main(argv: list[str]) -> None:
    """Evaluate a model as the arguments say, and print the results."""
    parser = RecipeParser([EvalArguments, ModelConfig])
    args, model_args = parse_arguments(parser, argv)
    with resumable(args.output_dir):
        evaluate(args, model_args, f"fr3e eval {shlex.join(argv)}")


def evaluate(args: EvalArguments, model_args: ModelConfig, command: str) -> dict[str, Any]:
    """Sample the completions that are missing, write the results, and return the content of `results.json`."""
    without_bars_in_logs()
    require_argument(model_args, "model_name_or_path", RECIPE)
    require_argument(args, "dataset_name", RECIPE)
    tokenizer = load_tokenizer(model_args, args.trust_remote_code)
    rewards = {name: get_reward(name) for name in args.reward_funcs}
    template: Any = args.chat_template_kwargs
    dataset = load_examples(args, test_split(args), tokenizer, template)
    check_reward_columns(rewards, dataset)
    examples = list(islice(dataset, args.limit))
    output_dir = Path(args.output_dir)
    path = output_dir / "completions.jsonl"
    lines = read_lines(path)
    settings = {**asdict(args), **asdict(model_args)}
    fixed = {name: value for name, value in settings.items() if name not in FREE}
    fixed["weights"] = weight_files(str(model_args.model_name_or_path))
    fixed["files"] = digests(data_files(args.dataset_name), rewards, output_dir)
    check_same(output_dir, fixed, has_results=bool(lines))
    existing = {(line["problem"], line["sample"]) for line in lines}
    assert args.num_samples is not None
    wanted = [(problem, sample) for problem in range(len(examples)) for sample in range(args.num_samples)]
    missing = [key for key in wanted if key not in existing]
    if missing:
        bar = tqdm(total=len(wanted), initial=len(existing & {*wanted}), unit="completion", disable=None)
        with path.open("a") as file, bar:
            for batch in sampled_lines(args, model_args, tokenizer, examples, rewards, missing):
                lines += batch
                file.writelines(json.dumps(line) + "\n" for line in batch)
                file.flush()
                bar.update(len(batch))
    problem_lines: list[list[dict[str, Any]]] = [[] for _ in examples]
    for line in sorted(lines, key=lambda line: (line["problem"], line["sample"])):
        if line["problem"] < len(examples) and line["sample"] < args.num_samples:
            problem_lines[line["problem"]].append(line)
    results: dict[str, Any] = {
        "command": command,
        "arguments": settings,
        "num_problems": len(examples),
        "mean_completion_length": fmean(line["num_tokens"] for lines in problem_lines for line in lines),
        "share_finished": fmean(line["is_finished"] for lines in problem_lines for line in lines),
        "rewards": measures(problem_lines, args.reward_funcs, args.pass_at or [], args.answer_regex),
    }
    for name, reward_results in results["rewards"].items():
        if reward_results["num_scored"] == 0:
            raise UsageError(
                f"reward_funcs={name!r} gave no score (None or NaN) to a completion of each of the {len(examples)} "
                f"problems, so there is nothing to report. The completions are in {path}. Fix the reward function, and "
                "use another output_dir."
            )
    (output_dir / "results.json").write_text(json.dumps(results, indent=2))
    report = as_markdown(results)
    (output_dir / "results.md").write_text(report)
    print(report)
    return results


def sampled_lines(
    args: EvalArguments,
    model_args: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[dict[str, Any]],
    rewards: dict[str, Callable[..., Any]],
    missing: list[Key],
) -> Iterator[list[dict[str, Any]]]:
    """Sample the missing completions, and yield their lines of `completions.jsonl` as they come, with their rewards."""
    template: Any = args.chat_template_kwargs or {}
    prompts = [
        maybe_apply_chat_template({"prompt": example["prompt"]}, tokenizer, **template)["prompt"]
        for example in examples
    ]
    # A chat template has the special tokens already
    prompt_ids = tokenizer(prompts, add_special_tokens=not is_conversational(examples[0])).input_ids
    if args.vllm_server_base_url:
        sample = server_sampler(args, model_args)
    else:
        sample = local_sampler(args, model_args, tokenizer)
    for keys, completions in sample(missing, prompt_ids):
        texts = texts_of(completions, tokenizer)
        arguments = reward_arguments([examples[problem] for problem, _ in keys], completions, texts)
        scores = {name: call_reward(name, reward, **arguments) for name, reward in rewards.items()}
        yield [
            {
                "problem": problem,
                "sample": sample_number,
                "prompt": prompts[problem],
                "completion": text,
                "num_tokens": len(completion.token_ids),
                "is_finished": completion.is_finished,
                "rewards": {name: reward_scores[i] for name, reward_scores in scores.items()},
            }
            for i, ((problem, sample_number), completion, text) in enumerate(zip(keys, completions, texts, strict=True))
        ]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of earlier calls. If a process was killed while writing, its unfinished last line is removed."""
    if not path.exists():
        return []
    text = path.read_text()
    complete_lines = text[: text.rfind("\n") + 1]
    if complete_lines != text:
        path.write_text(complete_lines)
    lines = []
    for number, line in enumerate(complete_lines.splitlines(), 1):
        try:
            lines.append(json.loads(line))
            _ = {name: lines[-1][name] for name in ("problem", "sample", "completion", "num_tokens", "rewards")}
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{path}, line {number}, is damaged: {error}. Remove that line, and its completion is sampled again."
            ) from error
    return lines


def as_markdown(results: dict[str, Any]) -> str:
    """The results as a page."""
    arguments = results["arguments"]
    lines = [
        f"# {arguments['model_name_or_path']} on {arguments['dataset_name']}",
        "",
        f"{results['num_problems']} problems, {arguments['num_samples']} completions each at temperature "
        f"{arguments['temperature']} and top_p {arguments['top_p']}: {results['mean_completion_length']:.1f} tokens on "
        f"average, {results['share_finished']:.1%} of them finished within {arguments['max_completion_length']}.",
    ]
    for name, reward_results in results["rewards"].items():
        lines += ["", f"| {name} | mean of {reward_results['num_scored']} problems | 95% interval |", "|---|---|---|"]
        for measure, value in reward_results.items():
            if isinstance(value, dict):
                is_huge = max(map(abs, value.values())) >= 1e6
                form = ".1%" if reward_results["are_shares"] else ".4g" if is_huge else ".3f"
                interval = f"{value['low']:{form}} to {value['high']:{form}}" if "low" in value else ""
                lines.append(f"| {measure} | {value['mean']:{form}} | {interval} |")
        if reward_results["num_unscored"]:
            num_out = results["num_problems"] - reward_results["num_scored"]
            unscored = f"{reward_results['num_unscored']} completions had no score (None or NaN)."
            lines += ["", f"{unscored} Their {num_out} problem(s) are left out."]
    if any("low" in value for r in results["rewards"].values() for value in r.values() if isinstance(value, dict)):
        lines += [
            "",
            "95% intervals show how much the results may vary with another sample of such problems. They are Wilson's "
            "for rewards between 0 and 1, and Student's t for others.",
        ]
    return "\n".join([*lines, "", f"`{results['command']}`", ""])


def local_sampler(args: EvalArguments, model_args: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> EvalSampler:
    """Completions from a model that is loaded here, using transformers' `generate`."""
    with usage_errors(model_argument(model_args), "Use the directory or the id of a model or an adapter.", OSError):
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(model_args.model_name_or_path),
            revision=model_args.model_revision,
            attn_implementation=model_args.attn_implementation,
            dtype=model_args.dtype,
            quantization_config=get_quantization_config(model_args),
            trust_remote_code=args.trust_remote_code,
        )
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model = model.eval() if get_quantization_config(model_args) else model.to(device).eval()
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    config = sampling_config(model, tokenizer, args.max_completion_length, args.temperature, args.top_p)

    def sample(missing: list[Key], prompt_ids: list[list[int]]) -> Iterator[Batch]:
        seeds = [seed_of(args.seed, *key) for key in missing]
        missing_ids = [prompt_ids[problem] for problem, _ in missing]
        done = 0
        for batch in complete(model, tokenizer, missing_ids, config, args.batch_size, seeds):
            yield missing[done : done + len(batch)], batch
            done += len(batch)

    return sample


def seed_of(seed: int, problem: int, sample: int) -> int:
    """The seed of a completion, independent of what was sampled before it."""
    return (seed * 1_000_003 + problem) * 1009 + sample


class _AnyServer(VLLMServer):
    """A server whose configuration is not read, so that it needs no development endpoints."""

    def _read_config(self) -> None:
        self.config = self.environment = {}


def server_sampler(args: EvalArguments, model_args: ModelConfig) -> EvalSampler:
    """Completions from a vLLM server, using its OpenAI-compatible API. All requests are sent at once."""
    directory = Path(str(model_args.model_name_or_path)).resolve()
    adapter = directory / "adapter_config.json"
    argument = f"vllm_server_base_url={args.vllm_server_base_url!r}"
    model = str(model_args.model_name_or_path)
    with usage_errors(argument, "Leave it out to load the model here.", VLLMServerError):
        url, timeouts = args.vllm_server_base_url or "", (args.vllm_server_timeout, args.vllm_request_timeout)
        server = _AnyServer(url, f"vllm serve {model}", *timeouts)
        if adapter.is_file():
            server.load_adapter(f"fr3e-eval-{uuid.uuid4().hex[:8]}", directory)
    name = read_object(adapter).get("base_model_name_or_path", model) if adapter.is_file() else model
    if Path(name).resolve() not in {Path(served).resolve() for served in (server.base_model, server.base_root)}:
        logger.warning(
            "The vLLM server at %s serves %r instead of %r, the model to evaluate. Unless these are two names of one "
            "model, start the server with the latter.",
            server.base_url,
            server.base_model,
            name,
        )
    sampling = {
        "max_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        # Otherwise the server uses those of the model's generation config, such as Qwen's
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }

    def sample(missing: list[Key], prompt_ids: list[list[int]]) -> Iterator[Batch]:
        payloads = [{**sampling, "prompt": prompt_ids[key[0]], "seed": seed_of(args.seed, *key)} for key in missing]
        arrived: queue.SimpleQueue[Batch | Exception | None] = queue.SimpleQueue()

        def take(i: int, response: dict[str, Any]) -> list[dict[str, Any]]:
            (choice,) = response["choices"]
            arrived.put(([missing[i]], [Completion(choice["token_ids"], choice["finish_reason"] == "stop")]))
            return []

        def send() -> None:
            try:
                server.complete(payloads, take)
                arrived.put(None)
            except Exception as error:
                arrived.put(error)

        threading.Thread(target=send, daemon=True, name="fr3e-eval").start()
        try:
            while (batch := arrived.get()) is not None:
                if isinstance(batch, Exception):
                    with usage_errors(argument, "Run the same command again to sample the rest.", VLLMServerError):
                        raise batch
                yield batch
        finally:
            if adapter.is_file():
                server.unload_adapter()

    return sample
