"""
Evaluate a model on a dataset with answers: pass@1, pass@k and maj@k.

    fr3e eval --config recipes/eval/gsm8k.yaml --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct

The model is loaded in this process, or served by vLLM (`--vllm_server_base_url`). Completions are written to
`output_dir/completions.jsonl` as they are sampled, with their rewards. The same command goes on from there after an
interruption, and samples only what is missing when it is asked for more samples or examples.
"""

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase
from trl import ModelConfig, is_conversational, maybe_apply_chat_template

from .answers import measures
from .completions import reward_arguments, texts_of
from .data import (
    call_reward,
    check_reward_columns,
    data_files,
    digests,
    get_reward,
    load_examples,
    load_tokenizer,
    test_split,
    without_bars_in_logs,
)
from .eval_arguments import EvalArguments
from .eval_samplers import Key, local_sampler, server_sampler
from .outputs import check_same, resumable, weight_files
from .recipe import RecipeParser, parse_arguments
from .usage import UsageError, require_argument

RECIPE = "recipes/eval/gsm8k.yaml"

# Arguments that may change between one call and the next, because no completion or reward depends on them
FREE = "output_dir num_samples limit batch_size pass_at answer_regex".split()
FREE += "vllm_server_base_url vllm_server_timeout vllm_request_timeout".split()


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
    there = {(line["problem"], line["sample"]) for line in lines}
    assert args.num_samples is not None
    wanted = [(problem, sample) for problem in range(len(examples)) for sample in range(args.num_samples)]
    missing = [key for key in wanted if key not in there]
    if missing:
        bar = tqdm(total=len(wanted), initial=len(there & {*wanted}), unit="completion", disable=None)
        with path.open("a") as file, bar:
            for batch in sampled_lines(args, model_args, tokenizer, examples, rewards, missing):
                lines += batch
                file.writelines(json.dumps(line) + "\n" for line in batch)
                file.flush()
                bar.update(len(batch))
    of_problems: list[list[dict[str, Any]]] = [[] for _ in examples]
    for line in sorted(lines, key=lambda line: (line["problem"], line["sample"])):
        if line["problem"] < len(examples) and line["sample"] < args.num_samples:
            of_problems[line["problem"]].append(line)
    results: dict[str, Any] = {
        "command": command,
        "arguments": settings,
        "num_problems": len(examples),
        "mean_completion_length": fmean(line["num_tokens"] for lines in of_problems for line in lines),
        "share_finished": fmean(line["is_finished"] for lines in of_problems for line in lines),
        "rewards": measures(of_problems, args.reward_funcs, args.pass_at or [], args.answer_regex),
    }
    for name, of_reward in results["rewards"].items():
        if of_reward["num_scored"] == 0:
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
                "rewards": {name: of_reward[i] for name, of_reward in scores.items()},
            }
            for i, ((problem, sample_number), completion, text) in enumerate(zip(keys, completions, texts, strict=True))
        ]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of earlier calls. An unfinished last line, from a process that was killed, is removed."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    lines = []
    for number, line in enumerate(whole.splitlines(), 1):
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
    for name, of_reward in results["rewards"].items():
        lines += ["", f"| {name} | mean of {of_reward['num_scored']} problems | 95% interval |", "|---|---|---|"]
        for measure, value in of_reward.items():
            if isinstance(value, dict):
                is_huge = max(map(abs, value.values())) >= 1e6
                form = ".1%" if of_reward["are_shares"] else ".4g" if is_huge else ".3f"
                interval = f"{value['low']:{form}} to {value['high']:{form}}" if "low" in value else ""
                lines.append(f"| {measure} | {value['mean']:{form}} | {interval} |")
        if of_reward["num_unscored"]:
            num_out = results["num_problems"] - of_reward["num_scored"]
            told = f"{of_reward['num_unscored']} completions had no score (None or NaN)."
            lines += ["", f"{told} Their {num_out} problem(s) are left out."]
    if any("low" in value for of in results["rewards"].values() for value in of.values() if isinstance(value, dict)):
        lines += [
            "",
            "95% intervals show how much the results may vary with another sample of such problems. They are Wilson's "
            "for rewards between 0 and 1, and Student's t for others.",
        ]
    return "\n".join([*lines, "", f"`{results['command']}`", ""])
