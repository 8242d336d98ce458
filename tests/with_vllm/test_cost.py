"""`fr3e cost vllm`, for one turn."""

import re

from servers import POLICY

from fr3e_trl import cli


def test_cost_of_a_server(server, capsys):
    cli.main(["cost", "vllm", f"--url={server.url}", f"--policy={POLICY}", "--num_turns=1"])
    output = capsys.readouterr().out
    assert re.search(r"all in flight / one after\nanother: [\d.]+ \(.* in 1 turns\)", output)
    share = float(re.search(r"sync of the adapter takes: ([\d.]+)%", output)[1])
    assert 0 < share < 100
    # 7.62 billion weights of 2 bytes, and 40 million of the adapter of 4
    assert "15.23 GB of weights in bfloat16, 0.161 GB of adapter in float32: 94 times as much" in output
