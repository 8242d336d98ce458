"""What is checked, and the lines of it. Nothing that takes seconds is imported."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .runner import Line


@dataclass(frozen=True)
class Setup:
    """
    What is checked.

    Args:
        directory (`str`):
            Holds the model, if one is made, and what the runs write.
        devices (`str`, *optional*):
            `CUDA_VISIBLE_DEVICES` as it was given. All lines but that of several processes have the first of them: with
            several in one process, transformers would spread each batch over them.

        All others are options of the command.
    """

    directory: str
    model_name_or_path: str | None = None
    with_weights: bool = False
    dtype: str = "float32"
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    vllm_server_base_url: str | None = None
    num_processes: int | None = None
    devices: str | None = None

    @property
    def policy(self) -> str:
        """Directory or hub id of the model that is trained."""
        made = str(Path(self.directory) / "policy")
        return self.model_name_or_path if self.with_weights and self.model_name_or_path else made

    @property
    def source(self) -> dict[str, Any]:
        return {"trust_remote_code": self.trust_remote_code}


MINE = "Attach this file to an issue of fr3e_trl"

SHARING = f"docs/models.md says which families cannot. Of others: train with share_prefixes=False. {MINE}"

# What to do about a failure, by what is checked
LINES = [
    Line("versions and devices", ".lines:machine", "Install a torch for this GPU and its driver, or use --use_cpu"),
    Line("model", ".model:make_policy", "Name a model that transformers knows by --model_name_or_path, or none"),
    Line("losses without exploration equal GRPO's", ".lines:losses", MINE),
    Line("shared prefixes equal rows apart", ".lines:sharing", SHARING),
    Line("kernels of attention", ".lines:kernels", "Use --attn_implementation sdpa, or install what it names"),
    Line("trees by generate", ".lines:grow", MINE),
    Line("trees by continuous batching", ".lines:continuous", "Train without use_transformers_continuous_batching"),
    Line("LoRA", ".lines:lora", f"Update peft. {MINE}"),
    Line("QLoRA", ".lines:qlora", f"Update bitsandbytes, or train without load_in_4bit. {MINE}"),
    Line("save and resume", ".lines:resume", f"Look at the room on the disk of TMPDIR. {MINE}"),
    Line("time and memory of a step", ".lines:cost", MINE),
    Line("several processes", ".lines:processes", f"Set NCCL_DEBUG=INFO to see more. {MINE}"),
    Line("vLLM server", ".lines:vllm_server", "Start the server as docs/vllm.md says, and look at its log"),
    Line("vLLM colocate", ".lines:vllm_colocate", f"Use a vLLM server. {MINE}", seconds=120),
]
