"""Training goes on after the server's faults, or ends with an error that says what to do and loses nothing."""

import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from faulty_proxy import faulty_proxy
from peft import PeftModel
from policies import load_policy, make_trainer, ratios
from transformers import TrainerCallback

import fr3e_trl.generation.vllm_server
from fr3e_trl.generation.vllm_server import VLLMServer, VLLMServerError
from fr3e_trl.method.sampling import SamplingRequest


def after_step(step, function):
    """Calls a function when a step is done."""

    class Callback(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == step:
                function()

    return Callback()


def check_on_policy(trainer, num_steps):
    assert trainer.state.global_step == len(trainer.batches) == num_steps
    for batch, _ in trainer.batches:
        assert (ratios(batch) - 1).abs().max() < 1e-3


@pytest.mark.parametrize("settings", [{}, {"anchor_threshold": 0.3}], ids=["whole", "streamed"])
def test_requests_that_fail_are_sent_again(server, settings):
    """Answers that are streamed go on from where they were cut off."""
    faults = ["503", "", "drop", "hang", "nonsense"]
    with faulty_proxy(server.url, faults) as url:
        trainer = make_trainer(SimpleNamespace(url=url), vllm_request_timeout=15, **settings)
        trainer.train()
    assert faults == []
    check_on_policy(trainer, 3)


def test_requests_that_fail_again_and_again_end_the_run(server, monkeypatch):
    monkeypatch.setattr(fr3e_trl.generation.vllm_server, "MAX_FAULTS", 2)
    with faulty_proxy(server.url, ["503"] * 1000) as url:
        trainer = make_trainer(SimpleNamespace(url=url))
        message = r"failed 2 times in a row, the last time with: 503 at /v1/completions"
        with pytest.raises(VLLMServerError, match=message):
            trainer.train()
    # One that is refused is not sent again
    trainer = make_trainer(server)
    with pytest.raises(VLLMServerError, match=r"refused a request: 400 .*max_model_len"):
        trainer.sampler.sample([SamplingRequest([5] * 10, 1, 1000, 1.0)])


def test_requests_are_in_flight_together(server):
    """All of them are with the server before it has answered one."""
    arrived, all_there = [], threading.Event()

    class Counting(VLLMServer):
        def _request(self, method, path, *args, **kwargs):
            if path == "/v1/completions":
                arrived.append(kwargs["json"]["max_tokens"])
                if len(arrived) == 40:
                    all_there.set()
                assert all_there.wait(30)
            return super()._request(method, path, *args, **kwargs)

    client = Counting(server.url, "", 10, 60)
    payloads = [{"prompt": [5, 6], "n": 2, "max_tokens": i, "logprobs": 0} for i in range(1, 41)]
    responses = client.complete(payloads)
    assert sorted(arrived) == list(range(1, 41))
    for i, response in enumerate(responses, start=1):
        assert [choice["index"] for choice in response["choices"]] == [0, 1]
        assert all(len(choice["token_ids"]) <= i for choice in response["choices"])


def test_a_streamed_response_comes_in_parts(server):
    """Its tokens and log-probs are those of one that is not, and what follows a part is answered before the last."""
    client = VLLMServer(server.url, "", 10, 60)
    payload = {"prompt": [5, 6], "max_tokens": 200, "ignore_eos": True, "seed": 7, "logprobs": 3, "min_tokens": 5}
    (whole,) = client.complete([payload])
    parts, order, has_answered = [], [], threading.Event()

    def read(i, response):
        if i == 0 and parts:  # the second part, and those behind it, once what follows the first is answered
            assert has_answered.wait(timeout=60)
        return response

    def follow(i, response):
        order.append(i)
        if i == 0:
            parts.append(response["choices"][0])
        else:
            has_answered.set()
        return [{"prompt": [5], "max_tokens": 1, "logprobs": 0}] if len(order) == 1 else []

    client.complete([payload | {"stream": True, "stream_interval": 8}], follow, read)
    assert order[0] == order[-1] == 0 and order.count(1) == 1
    assert len(parts) == 1 + math.ceil(199 / 8)  # the first token comes at once
    (choice,) = whole["choices"]
    assert [t for part in parts for t in part["token_ids"]] == choice["token_ids"]
    logprobs = [x for part in parts for x in part["logprobs"]["token_logprobs"]]
    assert logprobs == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)


def test_a_stream_that_breaks_goes_on_from_there(server):
    """What was told before is not told again, and the rest is of what is left of the budget."""
    payload = {"prompt": [5, 6], "max_tokens": 64, "ignore_eos": True, "stream": True, "stream_interval": 8}
    faults, parts = ["nonsense", "nonsense"], []
    with faulty_proxy(server.url, faults) as url:
        client = VLLMServer(url, "", 10, 60)
        client.complete([payload], lambda i, response: parts.append(response["choices"][0]) or [])
    assert faults == [] and len(parts) > math.ceil(64 / 8)
    assert sum(len(part["token_ids"]) for part in parts) == 64
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]


def test_kill_9_and_a_restart_in_the_middle(server):
    """While it generates for the second step; the adapter is loaded again, and training goes on."""

    def kill_soon():
        time.sleep(0.7)
        server.kill()
        server.start()

    killer = threading.Thread(target=kill_soon)
    # A client that has given the server merged weights: they cannot be loaded again from there
    merged = VLLMServer(server.url, "", 300, 60)
    merged.expect_no_restart()
    payload = {"prompt": [5, 6], "max_tokens": 2, "logprobs": 0}
    assert len(merged.complete([payload])) == 1

    sizes = {"num_generations": 64, "per_device_train_batch_size": 128, "max_completion_length": 100}
    trainer = make_trainer(server, callbacks=[after_step(1, killer.start)], **sizes)
    trainer.train()
    killer.join()
    check_on_policy(trainer, 3)
    with pytest.raises(VLLMServerError, match="was restarted, and has lost the trained weights"):
        merged.complete([payload])


def test_a_server_that_is_gone_for_good_costs_no_step(server):
    """The promised error, and a checkpoint of the last step, from which training goes on once there is a server."""
    trainer = make_trainer(server, vllm_server_timeout=3, callbacks=[after_step(2, server.kill)], max_steps=4)
    with pytest.raises(VLLMServerError) as error:
        trainer.train()
    assert f"{server.url} cannot be reached" in str(error.value)
    assert "Start one with:\nVLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_SERVER_DEV_MODE=1 vllm serve" in str(error.value)
    assert any("resume_from_checkpoint=True" in note for note in error.value.__notes__)
    saved = PeftModel.from_pretrained(load_policy(), "output/checkpoint-2").state_dict()
    for name, param in trainer.model.state_dict().items():
        assert param.equal(saved[name])

    server.start()
    server.wait()
    resumed = make_trainer(server, max_steps=4)
    resumed.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in resumed.state.log_history if "loss" in entry] == [1, 2, 3, 4]
    assert Path("output/_vllm_adapter").exists()
