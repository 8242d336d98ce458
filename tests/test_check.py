"""`fr3e check`: the whole of it once on the CPU, and each line with something broken."""

import functools
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from test_failures import limited
from transformers import MptConfig
from trl import GRPOTrainer

from fr3e_trl import FR3ETrainer, Sample
from fr3e_trl.commands import check, check_lines, cli
from fr3e_trl.commands.check import FAILED, LINES, NOT_RUN, PASSED, Line, read_setup
from fr3e_trl.prefix_sharing import forward as shared_forward

# What takes what a CPU, or this environment, has not
NOT_RUN_HERE = {"vLLM server", "vLLM colocate"}


def test_on_a_cpu_all_lines_that_can_pass_do(tmp_path):
    command = [sys.executable, "-m", "fr3e_trl.commands.cli", "check", "--num_processes=2", "--time_limit=280"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    text = (tmp_path / "fr3e_check.md").read_text()
    printed = " ".join(done.stdout.split())
    for line in LINES:
        outcome = NOT_RUN if line.name in NOT_RUN_HERE else PASSED
        assert f"{outcome} {line.name} " in printed and f"] {line.name} ..." in done.stderr, text
    assert f"{len(LINES) - 2} passed, 0 failed, 2 not run." in printed and done.returncode == 0
    assert "equal to the last bit" in printed and f"torch {torch.__version__}" in printed
    assert done.stdout.rpartition("\n\n")[0] in text


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return made_in(tmp_path_factory.mktemp("setup"))


def made_in(directory, *arguments):
    setup = read_setup([*arguments], str(directory))
    check_lines.make_policy(setup)
    return setup


def changed(setup, **settings):
    return Namespace(**vars(setup) | settings)


def outcome_of(name, setup, *said):
    (line,) = [line for line in LINES if line.name == name]
    result = check.run_line(line, setup)
    assert all(re.search(part, result.message) for part in said), result.message
    if result.outcome == FAILED:
        assert result.message.endswith(f". {line.remedy}.") and "Traceback" in result.log
    return result.outcome


def fails(name, setup, *said):
    assert outcome_of(name, setup, *said) == FAILED


def test_a_torch_that_does_not_see_the_gpu_and_a_model_that_is_none(setup, tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    fails("versions and devices", setup, re.escape(torch.__version__))
    assert outcome_of("versions and devices", changed(setup, gpus=[])) == PASSED  # as --use_cpu has it
    # A model that is none
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    broken = read_setup([f"--model_name_or_path={tmp_path}"], str(tmp_path / "made"))
    fails("model", broken, "abacus")
    assert outcome_of("trees by generate", broken, "^the model was not made$") == NOT_RUN


def test_losses_that_are_not_grpos(setup, monkeypatch):
    """Those of FR3E fail, and nothing can be said where GRPO's own differ from run to run."""
    line = "losses without exploration equal GRPO's"
    with monkeypatch.context() as patched:
        of_fr3e = FR3ETrainer._compute_loss
        patched.setattr(FR3ETrainer, "_compute_loss", lambda *args: 1.001 * of_fr3e(*args))
        fails(line, setup, "gradient norm")
    of_grpo, factor = GRPOTrainer._compute_loss, iter(range(1, 100))
    differing = functools.wraps(of_grpo)(lambda *args: of_grpo(*args) * next(factor))  # with TRL's signature
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", differing)
    assert outcome_of(line, setup) == NOT_RUN


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_prefixes_that_are_wrong(dtype, setup, monkeypatch):
    fold = shared_forward.fold

    def at_wrong_positions(*rows):
        trie = fold(*rows)
        return replace(trie, position_ids=trie.position_ids // 2)

    monkeypatch.setattr(shared_forward, "fold", at_wrong_positions)
    differ = rf"in torch.{dtype}, log-probs differ by [\d.]+, and [\d.]+ is allowed"
    fails("shared prefixes equal rows apart", changed(setup, dtype=dtype), differ)


def test_prefixes_that_cannot_be_shared(tmp_path):
    """Of a model whose attention has biases by position (ALiBi), as rows apart have them."""
    MptConfig(d_model=32, n_layers=2, n_heads=4).save_pretrained(tmp_path)
    setup = made_in(tmp_path, f"--model_name_or_path={tmp_path}")
    fails("shared prefixes equal rows apart", setup, "share_prefixes is off: it changes log-probs")


def test_shared_prefixes_are_compared_without_cudnn(setup, monkeypatch):
    seen = []
    token_statistics = FR3ETrainer.token_statistics

    def watched(self, *args):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return token_statistics(self, *args)

    assert torch.backends.cuda.cudnn_sdp_enabled()
    trainer = check_lines.trained(setup, max_steps=1)
    monkeypatch.setattr(FR3ETrainer, "token_statistics", watched)
    check_lines.logps_and_gradient(trainer, share=True)
    assert seen == [False] and torch.backends.cuda.cudnn_sdp_enabled()


class Overconfident:
    """Draws tokens that the policy would not, and says that they were likely."""

    def __init__(self, trainer):
        self.vocab_size = trainer.model.config.vocab_size

    def sample(self, requests):
        return [
            [
                Sample(torch.randint(2, self.vocab_size, (r.max_new_tokens,)).tolist(), [-0.1] * r.max_new_tokens)
                for _ in range(r.num_samples)
            ]
            for r in requests
        ]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"make_trainer": functools.partial(FR3ETrainer, sampler=Overconfident)}, "log-probs of what was sampled"),
        ({"num_anchors": 0}, "no branch"),
        ({"use_vllm": True, "vllm_mode": "colocate"}, "vLLM"),
    ],
)
def test_a_sampler_that_breaks(settings, said, setup):
    with pytest.raises((check.CheckFailed, ImportError), match=said):
        check_lines.grow(setup, **settings)


def test_an_adapter_that_stays_and_a_save_that_cannot_write(setup, monkeypatch):
    with limited(20_000):
        fails("save and resume", setup, "too large")
    monkeypatch.setattr(check_lines, "variety", lambda completions, **kwargs: [1.0] * len(completions))
    fails("LoRA", setup, "training moved no weight")


def test_weights_that_were_cut_and_a_kernel_that_is_not_there(setup, tmp_path):
    fails("trees by generate", changed(setup, attn_implementation="flash_attention_2"), "(?i)flash")
    shutil.copytree(setup.policy, tmp_path / "policy")
    weights = tmp_path / "policy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    for name in ("QLoRA", "save and resume"):
        fails(name, read_setup([], str(tmp_path)), "Safetensor")


def test_a_server_and_processes_that_do_not_start(setup, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    fails("several processes", changed(setup, num_processes=2), "exit code")
    assert "No module named 'encodings'" in capfd.readouterr().err
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    fails("vLLM server", changed(setup, vllm_server_base_url=url), "cannot be reached")


def run_here(tmp_path, *names, time_limit=200.0):
    made = [Line(name, name, "Do something", "lines_of_check") for name in names]
    return [*check.run_lines(made, Namespace(directory=str(tmp_path), time_limit=time_limit))]


def test_no_failure_stops_the_lines_that_follow(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "LINE_SECONDS", 3.0)
    results = run_here(tmp_path, "passes", "passes", "fails", "dies", "hangs", "passes", "passes")
    first, same, failed, died, hung, after, last = results
    assert [first.outcome, same.outcome, after.outcome, last.outcome] == [PASSED] * 4
    assert first.message == same.message != after.message == last.message  # processes
    assert [failed.outcome, died.outcome, hung.outcome] == [FAILED] * 3
    assert failed.message == "ValueError: too bad. Do something."
    assert "Traceback" in failed.log and "what was printed before" in failed.log
    assert "crashed its process" in died.message and "its last words" in died.log and "Segmentation fault" in died.log
    assert "still ran after 3 s" in hung.message
    grandchild = int(hung.log.split()[-1])
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # until its new parent has noticed
            os.kill(grandchild, 0)
            time.sleep(0.1)


def test_the_time_limit(tmp_path):
    results = run_here(tmp_path, "hangs", "passes", time_limit=1.0)
    assert [result.outcome for result in results] == [NOT_RUN] * 2
    assert all("--time_limit" in result.message for result in results)


def test_wrong_arguments(tmp_path, capsys):
    for arguments, said in (
        (["--with_weights"], "--model_name_or_path"),
        (["--dtype=int8"], "int8"),
        (["--num_processes=0"], "--num_processes 0 must be at least 1"),
        (["--time_limit=0"], "--time_limit 0 must be above 0"),
        ([f"--output={tmp_path}"], str(tmp_path)),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["check", *arguments])
        assert end.value.code == 2 and said in capsys.readouterr().err
