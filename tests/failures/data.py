"""Datasets and reward functions by name."""

import json

from .case import EVAL, TRAIN, Case, case


def lines(*examples) -> str:
    return "".join(json.dumps(example) + "\n" for example in examples)


def message(content) -> list:
    return [{"role": "user", "content": content}]


GOOD = [{"prompt": f"{i}=", "solution": str(i)} for i in range(8)]
QUESTIONS = [{"question": f"{i}=", "answer": str(i)} for i in range(8)]
ANSWERS = [{"prompt": f"{i}=", "answer": str(i)} for i in range(16)]


def of_file(name: str, content, *says: str, command: str = TRAIN, arguments: str = "") -> Case:
    file = f"{name.replace(' ', '_')}.jsonl"
    return case(name, f"{command} --dataset_name={file} {arguments}", *says, files={file: content})


def of_questions(name: str, examples, *says: str, command: str = TRAIN) -> Case:
    columns = "--prompt_column=question --answer_column=answer"
    return of_file(name, lines(*examples), *says, command=command, arguments=columns)


def of_reward(name: str, *says: str, command: str = TRAIN, **files: str) -> Case:
    return case(f"reward {name} of {command.split()[0]}", f"{command} --reward_funcs={name}", *says, files=files)


def lacking(column: str, examples, reward: str, *says: str, command: str = TRAIN) -> Case:
    name, arguments = f"no {column} of {command.split()[0]}", f"--reward_funcs={reward}"
    return of_file(name, lines(*examples), reward, f"'{column}'", *says, command=command, arguments=arguments)


STREAMED = "--dataset_streaming=true"
EVALUATED = f"{TRAIN} --eval_strategy=steps --eval_dataset_name=empty.jsonl"
NO_EXAMPLE = ("max_prompt_length=1", "no example is left")

CASES = [
    of_file("empty file", "", "empty_file.jsonl", "it is empty"),
    of_file("broken line", lines(*GOOD) + '{"prompt": "1+1=", \n', "broken_line.jsonl': line 9 is not JSON", "Fix it"),
    of_file("blank lines", "\n\n", "blank_lines.jsonl"),
    of_file("cut line", '{"prompt": "1+1="', "cut_line.jsonl", "JSON"),
    of_file("latin-1", (lines(*GOOD) + '{"prompt": "é"}').encode("latin-1"), "line 9 is not UTF-8", "Save the file"),
    of_file("a number among objects", lines(*GOOD, 3), "line 9 is not a JSON object: '3'"),
    of_file("broken line streamed", '{"prompt": \n', "line 1 is not JSON", arguments=STREAMED),
    case("empty to evaluate on", EVALUATED, "'empty.jsonl', split 'train': it is empty", files={"empty.jsonl": ""}),
    of_file("bytes", b"\xff\xfe\x00\x01" * 10, "bytes.jsonl"),
    of_file("no prompt", lines({"question": "1"}), "no column 'prompt'", "question", "prompt_column"),
    case("no dataset", f"{TRAIN} --dataset_name=nowhere.jsonl", "nowhere.jsonl", "Unable to find"),
    case("no directory", f"{TRAIN} --dataset_name=nowhere", "dataset_name='nowhere'"),
    case("XML", f"{TRAIN} --dataset_name=data.xml", "data.xml", ".jsonl", files={"data.xml": "<a/>"}),
    case("no split", f"{TRAIN} --dataset_train_split=dev", "dev", "data.jsonl"),
    case("no split of a directory", f"{TRAIN} --dataset_name=d", 'Unknown split "train"', files={"d/test.jsonl": "{}"}),
    case("no short prompt streamed", f"{TRAIN} --max_prompt_length=1 {STREAMED}", *NO_EXAMPLE),
    case("header alone", f"{TRAIN} --dataset_name=h.csv", "h.csv", files={"h.csv": "prompt,solution\n"}),
    case("cut parquet", f"{TRAIN} --dataset_name=d.parquet", "d.parquet", files={"d.parquet": b"PAR1"}),
    case("no question column", f"{TRAIN} --prompt_column=query", "'query'", "prompt, solution"),
    case("no answer column", f"{TRAIN} --answer_column=reply", "'reply'", "prompt, solution"),
    case("no short prompt", f"{TRAIN} --max_prompt_length=1", *NO_EXAMPLE),
    case("no separator", f"{TRAIN} --answer_column=solution --answer_separator=##", "'##'", "not in the answer"),
    # A null somewhere
    of_file("null prompt", lines(*GOOD, {"prompt": None, "solution": "1"}), "row 8", "None"),
    of_file("empty prompt", lines(*GOOD[:3], {"prompt": "", "solution": "1"}, *GOOD), "row 3", "''"),
    of_questions("null question", [*QUESTIONS, {"question": None, "answer": "1"}], "row 8", "'question'"),
    of_questions("empty question", [{"question": "", "answer": "1"}, *QUESTIONS], "row 0", "'question'"),
    of_questions("null answer", [*QUESTIONS, {"question": "1", "answer": None}], "row 8", "'answer'"),
    of_questions("null of eval", [*QUESTIONS[:1], {"question": None, "answer": "1"}], "row 1", command=EVAL),
    of_file("null content", lines({"prompt": message("1")}, {"prompt": message(None)}), "row 1", "no content"),
    of_file("no messages", lines({"prompt": message("1")}, {"prompt": []}), "row 1", "[]"),
    of_file("null streamed", lines({"prompt": message(None)}), "row 0", "no content", arguments=STREAMED),
    of_file("null content of eval", lines({"prompt": message(None)}), "row 0", "no content", command=EVAL),
    of_file("two examples", lines(*GOOD[:2]), "2 examples", "8", arguments="--per_device_train_batch_size=32"),
    of_file("prompt that is a number", lines(*[{"prompt": 3}] * 8), "prompt", "3"),
    of_file("message without a role", lines(*[{"prompt": [{"content": "1"}]}] * 8), "role"),
    # Rewards
    *[of_reward("accuracy", "'accuracy'", "math_reward", command=command) for command in (TRAIN, EVAL)],
    of_reward("rewards.py:scores", "rewards.py", "no function 'scores'"),
    of_reward("rewards.py:limit", "no function 'limit'"),
    of_reward("rewards.py", "name the function", "rewards.py:score"),
    of_reward("missing.py:score", "missing.py:score"),
    of_reward("missing.module.score", "No module named 'missing'"),
    of_reward("broken.py:score", "broken.py:score", **{"broken.py": "def score(completions, **kwargs:\n"}),
    of_reward("fails.py:score", "fails.py:score", "division by zero", **{"fails.py": "1 / 0\n"}),
    *[lacking("solution", ANSWERS, "math_reward", "answer_column", command=command) for command in (TRAIN, EVAL)],
    lacking("level", GOOD, "rewards.py:needs_level", "prompt, solution"),
]
