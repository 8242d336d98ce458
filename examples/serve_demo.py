"""
A vLLM server of the demo's policy on this machine's CPU, that takes LoRA adapters:

    python examples/serve_demo.py --port 8000

Further arguments are vLLM's, for example `--max-num-seqs 16`. It is what `make serve` and the tests run. For a GPU, and
a model of more than toy size, see `recipes/gsm8k_lora_vllm.yaml`.
"""

import argparse
import os
import sys
from pathlib import Path

POLICY = Path(__file__).parent / "demo_policy"
BLOCK_SIZE = 32  # tokens of a block of the prefix cache; the CPU's default of 128 is more than the demo's prompts have
MAX_LORA_RANK = 16

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # tells the trainer its configuration
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    # For the CPU
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def server_command(port: int) -> list[str]:
    """Command that starts the server, to be run with `ENVIRONMENT`."""
    # Not `vllm serve`: it looks for a distribution of the name vllm, and the CPU's is vllm-cpu
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={POLICY}"]
    command += ["--host=127.0.0.1", f"--port={port}", "--dtype=float32", "--enforce-eager"]
    command += [f"--block-size={BLOCK_SIZE}", "--logprobs-mode=processed_logprobs"]
    command += ["--enable-lora", f"--max-lora-rank={MAX_LORA_RANK}"]
    return command


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    options, of_vllm = parser.parse_known_args()
    command = server_command(options.port) + of_vllm
    os.execvpe(command[0], command, os.environ | ENVIRONMENT)
