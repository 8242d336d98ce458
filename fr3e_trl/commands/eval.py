"""
A model evaluated on a dataset with answers: pass@1, pass@k and maj@k.

    fr3e eval --config recipes/eval/gsm8k.yaml --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct

The model is loaded here, or served by vLLM (`--vllm_server_base_url`). Any setting of the recipe can be overridden
after it; `--help` lists them all.

Completions are written to `output_dir/completions.jsonl` as they are sampled, with their rewards. An evaluation that
was cut goes on from there by the same command. With more samples or examples than before, those that are missing are
sampled.
"""

import json
import math
import queue
import re
import shlex
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase
from trl import ModelConfig, TrlParser, get_quantization_config, is_conversational, maybe_apply_chat_template

from ..generation.vllm_server import VLLMServer, VLLMServerError
from ..rewards import math_answers, math_reward
from .counts import check_counts
from .data import (
    FR3EScriptArguments,
    call_reward,
    get_reward,
    load_examples,
    load_tokenizer,
    model_argument,
    test_split,
)
from .statistics import best_of_k, bootstrap_interval, majority_of_k
from .usage import UsageError, require_argument, usage_errors

RECIPE = "recipes/eval/gsm8k.yaml"

# Rewards whose answers are those of math-verify
MATH_REWARDS = ("math_reward", "accuracy_reward", "reasoning_accuracy_reward")

# Arguments that may change between one call and the next: no completion, and no reward of one, depends on them
FREE = (
    "output_dir",
    "num_samples",
    "limit",
    "batch_size",
    "pass_at",
    "answer_regex",
    "vllm_server_base_url",
    "vllm_server_timeout",
    "vllm_request_timeout",
)


@dataclass(kw_only=True)
class EvalArguments(FR3EScriptArguments):
    """
    Arguments of `fr3e eval`.

    Parameters, beside those of [`FR3EScriptArguments`]:
        output_dir (`str`):
            Directory of the results.
        num_samples (`int`, *optional*, defaults to `8`):
            n, completions of each prompt.
        pass_at (`list[int]`, *optional*):
            Values of k in pass@k and maj@k. If `None`, 1, 2, 4 and so on up to `num_samples`, and that.
        temperature (`float`, *optional*, defaults to `1.0`):
            Temperature of sampling. 0 takes the most likely token.
        top_p (`float`, *optional*, defaults to `1.0`):
            Share of the most likely tokens that is sampled from.
        max_completion_length (`int`, *optional*, defaults to `1024`):
            Tokens of the longest completion.
        answer_regex (`str`, *optional*):
            Pattern whose last match, or the group in it, is the answer by which completions vote in maj@k.
        chat_template_kwargs (`dict[str, Any]`, *optional*):
            What the chat template is told beside the messages.
        limit (`int`, *optional*):
            Examples to evaluate on, the first of the split. If `None`, all.
        seed (`int`, *optional*, defaults to `0`):
            Seed of sampling.
        batch_size (`int`, *optional*, defaults to `64`):
            Completions that are generated at once, without a server.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether code of the model's repository may be run.
        vllm_server_base_url (`str`, *optional*):
            Address of a vLLM server.
        vllm_server_timeout (`float`, *optional*, defaults to `240.0`):
            Seconds to wait for it to be up.
        vllm_request_timeout (`float`, *optional*, defaults to `1800.0`):
            Seconds that it may take to answer a request.
    """

    output_dir: str = field(default="outputs/eval", metadata={"help": "Directory of the results."})
    num_samples: int = field(default=8, metadata={"help": "Completions of each prompt."})
    pass_at: list[int] | None = field(
        default=None,
        metadata={
            "help": "Values of k in pass@k and maj@k, up to `num_samples`. If `None`, 1, 2, 4 and so on, and "
            "`num_samples`."
        },
    )
    temperature: float = field(
        default=1.0, metadata={"help": "Temperature of sampling. 0 takes the most likely token."}
    )
    top_p: float = field(default=1.0, metadata={"help": "Share of the most likely tokens that is sampled from."})
    max_completion_length: int = field(default=1024, metadata={"help": "Tokens of the longest completion."})
    answer_regex: str | None = field(
        default=None,
        metadata={
            "help": "Pattern whose last match in a completion, or its first group if it has one, is the answer by "
            "which completions vote in maj@k, equal by their text. If `None`, what math-verify reads, equal by "
            "`verify`, if a reward function is math_reward, accuracy_reward or reasoning_accuracy_reward; else the "
            "whole text."
        },
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "What the chat template is told beside the messages, for example {'enable_thinking': false}. On "
            "the command line, in JSON."
        },
    )
    limit: int | None = field(
        default=None, metadata={"help": "Examples to evaluate on, the first of the split. If `None`, all of them."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of sampling."})
    batch_size: int = field(default=64, metadata={"help": "Completions that are generated at once, without a server."})
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Whether code of the model's repository may be run."}
    )
    vllm_server_base_url: str | None = field(
        default=None,
        metadata={
            "help": "Address of a vLLM server that serves the model, for example 'http://localhost:8000'. If "
            "`model_name_or_path` is the directory of a LoRA adapter, the server is asked to load it. If `None`, the "
            "model is loaded here."
        },
    )
    vllm_server_timeout: float = field(default=240.0, metadata={"help": "Seconds to wait for the server to be up."})
    vllm_request_timeout: float = field(
        default=1800.0, metadata={"help": "Seconds that the server may take to answer a request."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, num_samples=1, max_completion_length=1, limit=1, seed=0, batch_size=1)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature} must be 0 or more, for example 1.0.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1, for example 0.95.")
        if self.temperature == 0 and self.num_samples > 1:
            raise ValueError(
                f"temperature=0 samples the same completion num_samples={self.num_samples} times: set num_samples=1, "
                "or a temperature, for example 0.6."
            )
        if self.pass_at is None:
            powers = [2**i for i in range(self.num_samples.bit_length())]
            self.pass_at = sorted({*powers, self.num_samples})
        if not self.pass_at or not 1 <= min(self.pass_at) <= max(self.pass_at) <= self.num_samples:
            raise ValueError(f"pass_at={self.pass_at} must be from 1 to num_samples={self.num_samples}.")
        if isinstance(self.chat_template_kwargs, str):
            self.chat_template_kwargs = json.loads(self.chat_template_kwargs)
        if self.answer_regex is not None:
            try:
                re.compile(self.answer_regex)
            except re.error as error:
                raise ValueError(f"answer_regex={self.answer_regex!r} is no regular expression: {error}.") from None


@dataclass(frozen=True)
class Sampled:
    """
    A completion as it was sampled.

    Args:
        problem, sample (`int`):
            Which example it is of, and which of its completions.
        token_ids (`list[int]`):
            Its tokens.
        is_finished (`bool`):
            Whether it came to its end, by a token that ends it, before `max_completion_length`.
    """

    problem: int
    sample: int
    token_ids: list[int]
    is_finished: bool


# The problems and samples that are wanted, with the prompts' tokens: completions, as they come
Sampler = Callable[[list[tuple[int, int]], list[list[int]]], Iterator[list[Sampled]]]


def main(argv: list[str] | None = None) -> None:
    """Evaluate a model as the arguments say, and print the results."""
    with usage_errors("wrong arguments", "See --help.", OSError, ValueError, yaml.YAMLError):
        args, model_args = TrlParser([EvalArguments, ModelConfig]).parse_args_and_config(argv)
    try:
        evaluate(args, model_args, f"fr3e eval {shlex.join(argv or [])}")
    except KeyboardInterrupt:
        print(f"\nCut. The same command goes on from what is in {args.output_dir}.", file=sys.stderr)
        sys.exit(130)


def evaluate(args: EvalArguments, model_args: ModelConfig, command: str) -> dict[str, Any]:
    """
    Sample what is not there yet, and write the results.

    Args:
        args ([`EvalArguments`]), model_args (`ModelConfig`):
            What to evaluate, and how.
        command (`str`):
            The command that the report names.

    Returns:
        `dict`: What `results.json` holds.
    """
    require_argument(model_args, "model_name_or_path", RECIPE)
    require_argument(args, "dataset_name", RECIPE)
    tokenizer = load_tokenizer(model_args, args.trust_remote_code)
    rewards = {name: get_reward(name) for name in args.reward_funcs}
    examples = list(islice(load_examples(args, test_split(args), tokenizer), args.limit))
    output_dir = Path(args.output_dir)
    check_same(args, model_args, output_dir)
    path = output_dir / "completions.jsonl"
    lines = read_lines(path)
    there = {(line["problem"], line["sample"]) for line in lines}
    wanted = [(problem, sample) for problem in range(len(examples)) for sample in range(args.num_samples)]
    missing = [key for key in wanted if key not in there]
    if missing:
        template: Any = args.chat_template_kwargs or {}
        prompts = [
            maybe_apply_chat_template({"prompt": example["prompt"]}, tokenizer, **template)["prompt"]
            for example in examples
        ]
        # A chat template has the special tokens already
        prompt_ids = tokenizer(prompts, add_special_tokens=not is_conversational(examples[0])).input_ids
        sample = (
            server_sampler(args, model_args)
            if args.vllm_server_base_url
            else local_sampler(args, model_args, tokenizer)
        )
        with (
            path.open("a") as file,
            tqdm(total=len(wanted), initial=len(wanted) - len(missing), unit="completion") as bar,
        ):
            for batch in sample(missing, prompt_ids):
                for line in scored(batch, examples, prompts, rewards, tokenizer):
                    lines.append(line)
                    file.write(json.dumps(line) + "\n")
                file.flush()
                bar.update(len(batch))
    of_problems: list[list[dict[str, Any]]] = [[] for _ in examples]
    for line in sorted(lines, key=lambda line: (line["problem"], line["sample"])):
        if line["problem"] < len(examples) and line["sample"] < args.num_samples:
            of_problems[line["problem"]].append(line)
    results = {
        "command": command,
        "arguments": {**asdict(args), **asdict(model_args)},
        "num_problems": len(examples),
        "mean_completion_length": mean(line["num_tokens"] for lines in of_problems for line in lines),
        "share_finished": mean(line["is_finished"] for lines in of_problems for line in lines),
        "rewards": measures(args, of_problems),
    }
    (output_dir / "results.json").write_text(json.dumps(results, indent=2))
    report = as_markdown(results)
    (output_dir / "results.md").write_text(report)
    print(report)
    return results


def mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


# Sampling


def local_sampler(args: EvalArguments, model_args: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Sampler:
    """Completions of a model that is loaded here, by transformers' `generate`."""
    with usage_errors(model_argument(model_args), "Use the directory or the id of a model or an adapter.", OSError):
        model = AutoModelForCausalLM.from_pretrained(
            model_args.model_name_or_path,
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
    ends = model.generation_config.eos_token_id or []
    eos_token_ids = sorted({*([ends] if isinstance(ends, int) else ends), tokenizer.eos_token_id})
    sampling = {"temperature": args.temperature, "top_k": 0, "top_p": args.top_p} if args.temperature else {}
    config = GenerationConfig(
        max_new_tokens=args.max_completion_length,
        do_sample=args.temperature > 0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=eos_token_ids,
        **sampling,
    )

    def sample(missing: list[tuple[int, int]], prompt_ids: list[list[int]]) -> Iterator[list[Sampled]]:
        for start in range(0, len(missing), args.batch_size):
            rows = missing[start : start + args.batch_size]
            torch.manual_seed(seed_of(args.seed, *rows[0]))
            inputs = tokenizer.pad({"input_ids": [prompt_ids[problem] for problem, _ in rows]}, return_tensors="pt")
            with torch.no_grad():
                sequences = model.generate(**inputs.to(model.device), generation_config=config)
            completions = sequences[:, inputs["input_ids"].shape[1] :].tolist()
            yield [
                Sampled(problem, sample, *until_end(token_ids, eos_token_ids))
                for (problem, sample), token_ids in zip(rows, completions, strict=True)
            ]

    return sample


def until_end(token_ids: list[int], eos_token_ids: list[int]) -> tuple[list[int], bool]:
    """Tokens up to the first that ends them, and whether there is one: what follows is padding."""
    end = next((i for i, token_id in enumerate(token_ids) if token_id in eos_token_ids), None)
    return (token_ids, False) if end is None else (token_ids[: end + 1], True)


def seed_of(seed: int, problem: int, sample: int) -> int:
    """A seed of its own for each completion, whatever was sampled before it."""
    return (seed * 1_000_003 + problem) * 1009 + sample


class _AnyServer(VLLMServer):
    """A server that need not tell its configuration: nothing but completions is asked of it."""

    def _read_config(self) -> None:
        self.config = self.environment = {}


def server_sampler(args: EvalArguments, model_args: ModelConfig) -> Sampler:
    """Completions of a vLLM server, by its OpenAI-compatible API. All requests are in flight together."""
    directory = Path(model_args.model_name_or_path).resolve()
    is_adapter = (directory / "adapter_config.json").is_file()
    argument = f"vllm_server_base_url={args.vllm_server_base_url!r}"
    with usage_errors(argument, "Leave it out to load the model here.", VLLMServerError):
        server = _AnyServer(
            args.vllm_server_base_url or "",
            f"vllm serve {model_args.model_name_or_path}",
            args.vllm_server_timeout,
            args.vllm_request_timeout,
        )
        if is_adapter:
            server.load_adapter(f"fr3e-eval-{uuid.uuid4().hex[:8]}", directory)

    def sample(missing: list[tuple[int, int]], prompt_ids: list[list[int]]) -> Iterator[list[Sampled]]:
        payloads = [
            {
                "prompt": prompt_ids[problem],
                "max_tokens": args.max_completion_length,
                "temperature": args.temperature,
                "top_p": args.top_p,
                "seed": seed_of(args.seed, problem, sample),
            }
            for problem, sample in missing
        ]
        arrived: queue.SimpleQueue[list[Sampled] | Exception | None] = queue.SimpleQueue()

        def take(i: int, response: dict[str, Any]) -> list[dict[str, Any]]:
            (choice,) = response["choices"]
            arrived.put([Sampled(*missing[i], choice["token_ids"], choice["finish_reason"] == "stop")])
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
                    with usage_errors(argument, "The same command goes on from what was sampled.", VLLMServerError):
                        raise batch
                yield batch
        finally:
            if is_adapter:
                server.unload_adapter()

    return sample


# What was sampled


def scored(
    batch: list[Sampled],
    examples: list[dict[str, Any]],
    prompts: list[str],
    rewards: dict[str, Callable[..., Any]],
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[dict[str, Any]]:
    """A line of `completions.jsonl` for each completion, with what each reward function says of it."""
    texts = tokenizer.batch_decode([sampled.token_ids for sampled in batch], skip_special_tokens=True)
    of_batch = [examples[sampled.problem] for sampled in batch]
    conversational = is_conversational(of_batch[0])
    arguments = {
        **{name: [example[name] for example in of_batch] for name in of_batch[0] if name != "prompt"},
        "prompts": [example["prompt"] for example in of_batch],
        "completions": [[{"role": "assistant", "content": text}] if conversational else text for text in texts],
        "completion_ids": [sampled.token_ids for sampled in batch],
    }
    values = {name: call_reward(reward, **arguments) for name, reward in rewards.items()}
    for i, (sampled, text) in enumerate(zip(batch, texts, strict=True)):
        yield {
            "problem": sampled.problem,
            "sample": sampled.sample,
            "prompt": prompts[sampled.problem],
            "completion": text,
            "num_tokens": len(sampled.token_ids),
            "is_finished": sampled.is_finished,
            "rewards": {name: None if of[i] is None else float(of[i]) for name, of in values.items()},  # type: ignore[arg-type]
        }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines that are there. The last is cut off if it is not whole: a process was killed while it wrote."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def check_same(args: EvalArguments, model_args: ModelConfig, output_dir: Path) -> None:
    """Refuse to add completions to those of another evaluation, and say which this one is."""
    # As JSON has them: a tuple is a list
    settings = json.loads(json.dumps({**asdict(args), **asdict(model_args)}, default=str))
    settings = {name: value for name, value in settings.items() if name not in FREE}
    path = output_dir / "arguments.json"
    if path.exists():
        before = json.loads(path.read_text())
        changed = [name for name, value in settings.items() if before.get(name, value) != value]
        if changed:
            name = changed[0]
            raise UsageError(
                f"output_dir={args.output_dir!r} has completions sampled with {name}={before[name]!r}, not "
                f"{settings[name]!r}. Give this evaluation an output_dir of its own."
            )
    output_dir.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=2))


# What it says of the model


def measures(args: EvalArguments, of_problems: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """pass@k and maj@k of each reward function, and their intervals over problems."""
    by_maths = votes_by_maths(args)
    groups = [group_answers(answers, by_maths) for answers in answers_of(args, of_problems)]
    result = {}
    for name in args.reward_funcs:
        values: dict[str, list[float]] = {}
        num_unscored = 0
        for lines, answers in zip(of_problems, groups, strict=True):
            rewards = [line["rewards"][name] for line in lines]
            if None in rewards:  # the solution cannot be read, for one
                num_unscored += 1
                continue
            votes = [(len(members), mean(rewards[i] for i in members)) for members in answers]
            num_without = len(lines) - sum(count for count, _ in votes)
            for k in args.pass_at or []:
                values.setdefault(f"pass@{k}", []).append(best_of_k(rewards, k))
            for k in args.pass_at or []:
                if k > 1:
                    values.setdefault(f"maj@{k}", []).append(majority_of_k(votes, num_without, k))
        result[name] = {
            "num_scored": len(of_problems) - num_unscored,
            **{measure: with_interval(of_measure) for measure, of_measure in values.items()},
        }
    return result


def with_interval(values: list[float]) -> dict[str, float]:
    """Mean over problems, and its interval, which a single problem has not."""
    if len(values) == 1:
        return {"mean": values[0]}
    low, high = bootstrap_interval(values)
    return {"mean": mean(values), "low": low, "high": high}


def answers_of(args: EvalArguments, of_problems: list[list[dict[str, Any]]]) -> list[list[str | None]]:
    """The answer of each completion of each problem, `None` where it has none."""
    texts = [line["completion"] for lines in of_problems for line in lines]
    answers: list[str | None]
    if args.answer_regex is not None:
        answers = [last_match(args.answer_regex, text) for text in texts]
    elif votes_by_maths(args):
        answers = math_answers(texts)
    else:
        answers = [text.strip() for text in texts]
    left = iter(answers)
    return [[next(left) for _ in lines] for lines in of_problems]


def last_match(regex: str, text: str) -> str | None:
    """The last match of a pattern, or the first group in it, without what surrounds it."""
    matches = list(re.finditer(regex, text, re.DOTALL))
    return matches[-1][1 if matches[-1].re.groups else 0].strip() if matches else None


def votes_by_maths(args: EvalArguments) -> bool:
    """Whether answers are read and compared by math-verify."""
    names = [name.rpartition(".")[2] for name in args.reward_funcs]
    return args.answer_regex is None and any(name in MATH_REWARDS for name in names)


def group_answers(answers: list[str | None], by_maths: bool) -> list[list[int]]:
    r"""
    Which of a problem's answers are the same: by math-verify's `verify`, or by their text.

    Args:
        answers (`list[str | None]`):
            Of each completion; `None` is in no group.
        by_maths (`bool`):
            Whether `\frac{1}{2}` is the same as `0.5`.

    Returns:
        `list[list[int]]`: Indices of each group, in the order in which their answers first come.
    """
    groups: dict[str, list[int]] = {}  # by the first answer of each
    same: dict[str, str] = {}  # of each text, that first answer
    for i, answer in enumerate(answers):
        if answer is None:
            continue
        if answer not in same:
            others = [rf"\boxed{{{other}}}" for other in groups] if by_maths else []
            verdicts = math_reward([rf"\boxed{{{answer}}}"] * len(others), others) if others else []
            same[answer] = next((other for other, equal in zip(groups, verdicts, strict=False) if equal), answer)
        groups.setdefault(same[answer], []).append(i)
    return list(groups.values())


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
    for name, of_reward in results["rewards"].items():
        lines += ["", f"| {name} | mean of {of_reward['num_scored']} problems | 95% interval |", "|---|---|---|"]
        for measure, value in of_reward.items():
            if measure != "num_scored":
                interval = f"{value['low']:.1%} to {value['high']:.1%}" if "low" in value else ""
                lines.append(f"| {measure} | {value['mean']:.1%} | {interval} |")
    lines += [
        "",
        "Intervals are of problems drawn anew (bootstrap): they say how far another set of such problems might be off, "
        "not how far another sampling of the same would.",
        "",
        f"`{results['command']}`",
        "",
    ]
    return "\n".join(lines)
