"""What a vLLM engine in the tests' own process takes on a CPU."""


def keep_weights_plain() -> None:
    """
    Have vLLM keep weights as they are loaded.

    On a CPU it packs them for its own products (of oneDNN, or of AMX where the processor has it), after which none can
    be loaded.
    """
    import torch
    import vllm.model_executor.layers.utils

    def product_by_torch(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm = product_by_torch
