"""Several processes, of which one fails; each writes what it raised: `failing_together.py OUTPUT SETTINGS`."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from accelerate import Accelerator
from models import make_model

from fr3e_trl.generation.vllm_server import VLLMServerError
from fr3e_trl.generation.vllm_weights import FR3EVLLMGeneration
from fr3e_trl.processes import Lockstep, in_every_process, through_main_process


def fail(*args, **kwargs):
    raise VLLMServerError("the server is gone")


class WithoutServer(FR3EVLLMGeneration):
    """Its client is there in the main process alone, as TRL's, and its server is gone."""

    def _init_vllm(self):
        if self.accelerator.is_main_process:
            self.vllm_client = SimpleNamespace(generate=fail)


def generate(accelerator):
    """As TRL does in evaluation."""
    generation = WithoutServer(make_model(), accelerator, None, mode="server", fr3e_args=None)
    generation.generate([[1, 2], [1, 2]], None, num_generations=2)


def take_turns(accelerator):
    """As with tools: the first process makes one call more than the second, and both need the main process."""

    def ask():
        return through_main_process(accelerator, fail if len(asked) > 1 else list, [0])

    asked = []

    def call():
        with Lockstep(accelerator, ask) as lockstep:
            for _ in range(2 - accelerator.process_index):
                asked.append(0)
                lockstep.call(ask)
            if accelerator.process_index:
                asked.append(0)

    in_every_process(call)


def main(output: Path) -> None:
    accelerator = Accelerator(cpu=True)
    raised = {}
    for part in (generate, take_turns):
        try:
            part(accelerator)
        except Exception as error:
            raised[part.__name__] = repr(error)
        accelerator.wait_for_everyone()
    (output / f"{os.environ['RANK']}.json").write_text(json.dumps(raised))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
