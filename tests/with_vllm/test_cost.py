"""`fr3e cost vllm` and `fr3e cost engine`, for one turn."""

import re

from servers import POLICY

from fr3e_trl.commands import cli


def test_cost_of_a_server(server, capsys):
    cli.main(["cost", "vllm", f"--url={server.url}", f"--policy={POLICY}", "--num_turns=1"])
    output = capsys.readouterr().out
    assert re.search(r"all in flight / one after\nanother: [\d.]+ \(.* in 1 turns\)", output)
    of_branch = re.findall(r"([\d.]+) requests, .*, ([\d.]+) draws of first tokens; (\d+)% differ", output)
    (requests, draws, _), (more_requests, more_draws, differ) = of_branch
    assert (float(requests), float(draws)) == (1, 0)
    assert 1.5 < float(more_requests) <= 2 and float(more_draws) <= 1 and int(differ) > 90
    share = float(re.search(r"sync of the adapter takes: ([\d.]+)%", output)[1])
    assert 0 < share < 100
    # 7.62 billion weights of 2 bytes, and 40 million of the adapter of 4
    assert "15.23 GB of weights in bfloat16, 0.161 GB of adapter in float32: 94 times as much" in output


def test_model_of_an_engine_beside_a_server(server, capsys):
    """Five ways at four loads, of which the first is what the others are compared with."""
    sizes = ["--max_running=8", "--num_rows=4", "--mean_length=10", "--longest=40", "--num_steps=1", "--gap=4"]
    cli.main(["cost", "engine", f"--url={server.url}", *sizes])
    output = capsys.readouterr().out
    assert re.search(r"A step takes \d+\.\d+ ms \+ \d+\.\d+ ms for each running sequence", output)
    shown = r"([\d.]+) \(([\d.]+) to ([\d.]+) in 1 turns\)"
    rows = re.findall(rf"│ (two rounds|by prompt|by rule|mixed), ([\d.]+) +│ +{shown} │ +([\d.]+) │", output)
    assert [(way, load) for way, load, *_ in rows] == [
        (way, load) for load in ("0.5", "1", "2", "4") for way in ("two rounds", "by prompt", "by rule", "mixed")
    ]
    # On a machine that does other things too, all that can be said
    assert all(0.05 < float(ratio) < 20 for _, _, *ratios in rows for ratio in ratios)
