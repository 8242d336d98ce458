"""Sends the policy's weights to vLLM: only the LoRA adapter if the server accepts it, and otherwise as TRL does."""

import inspect
import logging
import shutil
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from accelerate.utils import broadcast_object_list, is_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import ProcessorMixin
from trl.extras.profiling import profiling_context
from trl.generation.vllm_generation import VLLMGeneration

from ..compat import TypedTrainer
from ..fr3e_config import FR3EConfig
from ..processes import on_main_process, portable
from .vllm_server import VLLMServer, VLLMServerError

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

logger = logging.getLogger(__name__)

SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's --max-lora-rank may be
TOKENIZER_PROBE = "Solve for x: 12.5 + 3x = \\frac{1}{2}.\n\n  The answer is \\boxed{-4}. Ünïcödé, 数学, `code()`"


@contextmanager
def without_vllm(args: FR3EConfig) -> Iterator[None]:
    """
    Keep `GRPOTrainer`'s constructor from setting up vLLM, which [`set_up_vllm`] does afterwards.

    The constructor does not accept another engine or client.
    """
    use_vllm, args.use_vllm = args.use_vllm, False
    try:
        yield
    finally:
        args.use_vllm = use_vllm


def set_up_vllm(trainer: TypedTrainer, args: FR3EConfig) -> None:
    """
    Set up vLLM as the constructor of `GRPOTrainer` does, but with [`FR3EVLLMGeneration`].

    Like TRL, passes each parameter of `VLLMGeneration` the setting of the same name, with or without the prefix
    `vllm_`, including parameters that later versions may add.

    Raises:
        ValueError: `vllm_importance_sampling_mode` is not compatible with the loss.
        VLLMServerError: The server cannot be used.
    """
    corrects_rows = args.vllm_importance_sampling_mode not in ("token_truncate", "token_mask")
    if args.loss_type == "vespo" and args.vllm_importance_sampling_correction and corrects_rows:
        raise ValueError(  # as TRL's constructor does when it sets up vLLM
            f"vllm_importance_sampling_mode={args.vllm_importance_sampling_mode!r} must be 'token_truncate' or "
            "'token_mask' with loss_type='vespo'."
        )
    settings: dict[str, Any] = {}
    for name in inspect.signature(VLLMGeneration).parameters:
        for setting in (f"vllm_{name}", name):
            if hasattr(args, setting):
                settings[name] = getattr(args, setting)
                break
    settings |= {
        "model": trainer.model,
        "accelerator": trainer.accelerator,
        "processing_class": trainer.processing_class,
        "max_num_seqs": args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation,
        "logprobs": 0,  # only that of the sampled token
    }
    trainer.use_vllm = True
    trainer.vllm_generation = FR3EVLLMGeneration(**settings, fr3e_args=args)
    trainer._last_loaded_step = -1
    del trainer.generation_config, trainer.generation_kwargs  # for `generate`


@contextmanager
def awake_engine(trainer: TypedTrainer, timed: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """
    Send vLLM the policy's weights, and keep an engine that may sleep awake for this context. Does nothing without vLLM.

    Args:
        trainer (`GRPOTrainer`):
            Has the engine, if there is one.
        timed (`Callable`):
            Returns a context manager that measures the time of a part of the step, given the part's name.
    """
    if not trainer.use_vllm:
        yield
        return
    generation = trainer.vllm_generation
    may_sleep = trainer.vllm_mode == "colocate" and generation.enable_sleep_mode
    send_weights(trainer, timed, is_needed=may_sleep and generation._llm_weights_sleeping)
    if may_sleep:
        generation.llm.wake_up(tags=["kv_cache"])
    try:
        yield
    finally:
        if may_sleep:
            generation.llm.sleep(level=2)
            generation._llm_weights_sleeping = True


def send_weights(
    trainer: TypedTrainer, timed: Callable[[str], AbstractContextManager[None]], is_needed: bool = False
) -> None:
    """Send vLLM the policy's weights if they have changed, or if `is_needed`."""
    if trainer.state.global_step == trainer._last_loaded_step and not is_needed:
        return
    with profiling_context(trainer, "sync_weights"), timed("weights to vLLM"):
        trainer.vllm_generation.sync_weights()  # wakes up the engine's weights
    trainer._last_loaded_step = trainer.state.global_step


def end_engine(trainer: TypedTrainer) -> None:
    """Shut down an engine in this process while its process groups still exist."""
    if trainer.use_vllm and trainer.vllm_mode == "colocate":
        trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()


@dataclass(frozen=True)
class _Failure:
    """Broadcast by the main process instead of completions: raises `error` in every process that unpacks it."""

    error: Exception

    def __iter__(self) -> NoReturn:
        raise self.error


class FR3EVLLMGeneration(VLLMGeneration):
    """
    [`~trl.generation.vllm_generation.VLLMGeneration`] that can send a server only the LoRA adapter.

    Args:
        fr3e_args ([`FR3EConfig`]):
            Has the settings `vllm_adapter_sync` and `vllm_adapter_dir`.

        All others are those of `VLLMGeneration`.

    Attributes:
        server ([`VLLMServer`], *optional*):
            The server, in the main process in server mode.
        syncs_adapter (`bool`):
            Whether only the adapter is sent.
    """

    model: Any  # of transformers or PEFT, whose attributes `nn.Module` hides from type checkers

    def __init__(self, *args: Any, fr3e_args: FR3EConfig, **kwargs: Any):
        self.fr3e_args = fr3e_args
        self.server: VLLMServer | None = None
        self.syncs_adapter = False
        self._num_syncs = 0
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        if self.mode != "server":
            if is_quantized(self.model):
                raise ValueError(
                    "vllm_mode='colocate' is not possible with a quantized model, because merging rounds most of the "
                    "adapter away and changes the model at each step. Use vllm_mode='server', which gets only the "
                    "adapter, or use_vllm=False."
                )
            super()._init_vllm()
            return
        obstacle = on_main_process(self.accelerator, self._connect)
        if obstacle is None:
            self.syncs_adapter = True
            try:
                self._sync_adapter()
            except VLLMServerError as error:
                self.syncs_adapter, obstacle = False, str(error)
        if obstacle is None:
            self.vllm_client = self.server  # for TRL's own generation in evaluation
            return
        if self.fr3e_args.vllm_adapter_sync:
            raise VLLMServerError(f"vllm_adapter_sync=True is not possible: {obstacle}")
        if is_quantized(self.model):
            raise VLLMServerError(
                f"A quantized model cannot be merged with its adapter, and the adapter alone cannot be sent: {obstacle}"
            )
        if is_peft_model(self.model):
            logger.warning("The adapter is merged and the whole model sent at each sync: %s", obstacle)
        super()._init_vllm()

    def sync_weights(self) -> None:
        if self.syncs_adapter:
            self._sync_adapter()
            return
        super().sync_weights()
        if self.mode == "server":
            server: Any = self.server  # in the main process
            on_main_process(self.accelerator, lambda: server.expect_no_restart())

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The only change is that an error in the main process, which calls the server, is raised in all processes."""
        try:
            return super().generate(*args, **kwargs)
        except Exception as error:
            if self.mode == "server" and self.accelerator.is_main_process:
                broadcast_object_list([_Failure(portable(error))])  # the others wait for completions
            raise

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """
        The only change is that an adapter is merged into one layer at a time, whose weights are then restored from a
        copy. PEFT would subtract the adapter again, which accumulates rounding errors in half precision.
        """
        layers = {} if self._dist.is_fsdp or self._dist.is_zero3 else mergeable_layers(self.model)
        if not layers:
            yield from super()._iter_named_params()
            return
        for name, param in self.model.named_parameters():
            if self.model.prefix in name or "original_module" in name:  # adapter weights, or replaced modules
                continue
            for part in ("base_model.model.", ".base_layer", "modules_to_save.default.", "_checkpoint_wrapped_module."):
                name = name.replace(part, "")
            layer = layers.get(param.data_ptr())
            yield name, param.data if layer is None else _merged(layer)

    def max_context(self) -> int:
        """vLLM's maximum length of prompt and completion together, in tokens."""
        if self.mode == "colocate":
            return self.llm.llm_engine.model_config.max_model_len
        config: Any = None if self.server is None else self.server.config  # in the main process
        return on_main_process(self.accelerator, lambda: config["model_config"]["max_model_len"])

    def checked_context(self, model_context: int | None, prompt_length: int, max_completion_length: int) -> int | None:
        """
        The maximum length of prompt and completion together, in tokens, for both the model and vLLM.

        Raises:
            ValueError: vLLM's limit is lower than the model's and too low for `prompt_length` and
                `max_completion_length`.
        """
        available = self.max_context()
        if model_context is not None and available >= model_context:
            return model_context
        needed = prompt_length + max_completion_length
        if available < needed:
            raise ValueError(
                f"vLLM has a context of {available} tokens, too few for the {prompt_length} of the first prompt and "
                f"max_completion_length={max_completion_length}. Start it with --max-model-len {needed} or more "
                "(vllm_max_model_length in colocate mode), or lower max_completion_length."
            )
        return available

    # At the start

    def _connect(self) -> str | None:
        """Connect to the server, check its tokenizer, and return why it cannot get only the adapter, if it cannot."""
        url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        self.server = VLLMServer(url, self._start_command(), self.server_timeout, self.fr3e_args.vllm_request_timeout)
        self._check_tokenizer(self.server)
        self._check_logprobs_mode(self.server)
        obstacle = self._obstacle_to_adapter_sync(self.server)
        if obstacle is None:
            self._make_adapter_dir()
            logger.info("Only the adapter is sent to the vLLM server at %s, through %s", url, self.adapter_dir)
        return obstacle

    def _start_command(self) -> str:
        name = self.model.name_or_path or "MODEL"
        port = (self.server_base_url or f":{self.server_port}").rpartition(":")[2]
        command = f"VLLM_SERVER_DEV_MODE=1 vllm serve {name} --port {port} --logprobs-mode processed_logprobs"
        if not is_peft_model(self.model) or self.fr3e_args.vllm_adapter_sync is False:
            return f"""{command} --weight-transfer-config '{{"backend": "nccl"}}'"""
        served_rank = next((rank for rank in SERVED_RANKS if rank >= self._adapter_rank()), SERVED_RANKS[-1])
        return f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 {command} --enable-lora --max-lora-rank {served_rank}"

    def _check_logprobs_mode(self, server: VLLMServer) -> None:
        mode = server.config["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            logger.warning(
                "The vLLM server at %s has logprobs_mode=%s: its log-probs are those of temperature 1 and the whole "
                "vocabulary, whatever it samples with. So the trainer computes entropies in an extra forward pass, and "
                "branches wait for all base trajectories. Start it with --logprobs-mode processed_logprobs.",
                server.base_url,
                mode,
            )

    def _check_tokenizer(self, server: VLLMServer) -> None:
        if isinstance(self.processing_class, ProcessorMixin):
            return
        ours = self.processing_class(TOKENIZER_PROBE, add_special_tokens=False)["input_ids"]
        theirs = server.tokenize(TOKENIZER_PROBE)
        if ours != theirs:
            raise VLLMServerError(
                f"The vLLM server at {server.base_url} serves {server.base_model!r}, whose tokenizer is not that of "
                f"the policy {self.model.name_or_path!r}: it tokenizes {TOKENIZER_PROBE!r} differently. Start the "
                f"server with:\n{server.start_command}"
            )

    def _obstacle_to_adapter_sync(self, server: VLLMServer) -> str | None:
        if self.fr3e_args.vllm_adapter_sync is False:
            return "vllm_adapter_sync=False."
        if not is_peft_model(self.model):
            return "the policy is not a PEFT model."
        if isinstance(self.processing_class, ProcessorMixin):
            return "the policy is multimodal."
        trained = [name for name, param in self.model.named_parameters() if param.requires_grad]
        others = [name for name in trained if self.model.prefix not in name]
        if others:
            return f"the policy also trains weights that are not part of a LoRA adapter, such as {others[0]}."
        config = self.model.peft_config[self.model.active_adapter]
        if getattr(config, "rank_pattern", None) or getattr(config, "alpha_pattern", None):
            return "vLLM does not support rank_pattern or alpha_pattern."
        initialization = str(getattr(config, "init_lora_weights", True)).lower()
        if initialization.startswith(("pissa", "olora", "corda", "loftq", "lora_ga")):
            return f"init_lora_weights={initialization!r} changes the base weights, which the server does not get."
        lora = server.config["lora_config"]
        if lora is None or not server.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]:
            return (
                f"the vLLM server at {server.base_url} does not load adapters. Start it with:\n{server.start_command}"
            )
        if lora["max_lora_rank"] < self._adapter_rank():
            return (
                f"the adapter's rank is {self._adapter_rank()}, but the vLLM server at {server.base_url} allows at "
                f"most {lora['max_lora_rank']}. Start it with:\n{server.start_command}"
            )
        if server.config["parallel_config"]["data_parallel_size"] > 1:
            return (
                f"the vLLM server at {server.base_url} is data-parallel, and would load the adapter into only one of "
                "its replicas. Use --tensor-parallel-size instead of --data-parallel-size."
            )
        return None

    def _adapter_rank(self) -> int:
        config = self.model.peft_config[self.model.active_adapter]
        return getattr(config, "r", 0)

    # The adapter

    def _make_adapter_dir(self) -> None:
        """Choose the directory for adapters, and remove those that a killed run left there."""
        path = self.fr3e_args.vllm_adapter_dir or Path(self.fr3e_args.output_dir) / "_vllm_adapter"
        self.adapter_dir = Path(path).absolute()
        _remove(sorted(self.adapter_dir.glob("fr3e-????????-*")))
        self._run = f"fr3e-{uuid.uuid4().hex[:8]}"  # unique among the runs that use this server
        self._adapters: list[Path] = []
        assert self.server is not None
        # Called when the interpreter exits at the latest
        self.forget_adapter = weakref.finalize(self, _forget, self.server, self._adapters)

    def _sync_adapter(self) -> None:
        state_dict = self._gather_adapter()
        on_main_process(self.accelerator, lambda: self._send_adapter(state_dict))

    def _gather_adapter(self) -> dict[str, torch.Tensor]:
        """The adapter's weights on the CPU, gathered one by one if they are sharded."""
        state_dict = {}
        for name, param in self.model.named_parameters():
            if self.model.prefix in name:
                with self._dist.gather_params([param]):
                    tensor = param.full_tensor() if isinstance(param, DTensor) else param
                    state_dict[name] = tensor.detach().to("cpu", copy=True)
        return state_dict

    def _send_adapter(self, state_dict: dict[str, torch.Tensor]) -> None:
        assert self.server is not None
        path = self.adapter_dir / f"{self._run}-{self._num_syncs}"
        self._num_syncs += 1
        self._adapters.append(path)
        adapter = self.model.active_adapter
        self.model.save_pretrained(
            path, state_dict=state_dict, selected_adapters=[adapter], save_embedding_layers=False
        )
        # PEFT saves any adapter but the default one to a subdirectory of its name
        self.server.load_adapter(path.name, path if adapter == "default" else path / adapter)
        # The previous one stays until the next sync, because the server may still work on an aborted request
        _remove(self._adapters[:-2])
        del self._adapters[:-2]


def _forget(server: VLLMServer, adapters: list[Path]) -> None:
    """Remove a run's adapters from the disk, and from the server if that still responds."""
    server.unload_adapter()
    _remove(adapters)


def _remove(directories: list[Path]) -> None:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def _merged(layer: "LoraLayer") -> torch.Tensor:
    """A layer's weights merged with its adapter, without changing the layer."""
    base: Any = layer.get_base_layer().weight
    before = base.detach().clone()
    layer.merge()
    merged = base.detach().clone()  # vLLM may take it later
    layer.unmerge()
    base.data.copy_(before)
    return merged


def mergeable_layers(model: nn.Module) -> dict[int, "LoraLayer"]:
    """Layers with an adapter by the address of their weights, or none if an adapter changes more than the weights."""
    if not is_peft_model(model):
        return {}
    from peft.tuners.lora import LoraLayer, ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        is_plain = isinstance(layer, LoraLayer) and not isinstance(layer, ParamWrapper)
        if not is_plain or any(layer.lora_bias.values()) or not hasattr(layer.get_base_layer(), "weight"):
            return {}
    by_address = {layer.get_base_layer().weight.data_ptr(): layer for layer in layers}
    return by_address if len(by_address) == len(layers) else {}


def is_quantized(model: nn.Module) -> bool:
    return getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
